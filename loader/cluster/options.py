"""How a loader uses a Ray cluster: settings, none of which changes what it yields."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from millstream.checks import as_integer, named_fields

_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Ray's own resources, and what they are called where an actor is made."""


@named_fields
@dataclasses.dataclass(frozen=True)
class RayWorkers:
    """Actors of a Ray cluster that do what worker processes do: `DataLoader(..., workers=RayWorkers(16))`.

    The trainer must run on a node of the cluster, and the loader's `worker_buffer_size`, `stall_timeout` and
    `read_options` hold for each actor. `pip install 'millstream[ray]'` brings Ray.

    Attributes:
        num_workers: how many actors, at least 1. Those that the cluster has no room for start when it has.
        resources_per_worker: what the cluster sets aside for each, by Ray's names: "CPU", "GPU", "memory" (bytes), and
            those that its nodes were given. One CPU by default.
        address: the cluster's, as `ray.init` takes it. With None, the connection that this process has; where it has
            none, what `ray.init()` finds, or starts.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> workers = millstream.RayWorkers(16, resources_per_worker={"CPU": 2})
        >>> loader = millstream.DataLoader(
        ...     data_source=range(1000),
        ...     sampler=millstream.SequentialSampler(1000),
        ...     operations=[millstream.Batch(10)],
        ...     workers=workers,
        ... )
        >>> len(loader)
        100
    """

    num_workers: int
    resources_per_worker: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"CPU": 1})
    address: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_workers", as_integer(self.num_workers, "num_workers", 1))
        resources = self.resources_per_worker
        if not isinstance(resources, Mapping):
            raise TypeError(
                "resources_per_worker must be a mapping from Ray's names of resources to amounts, such as {'CPU': 2}, "
                f"got {type(resources).__name__}."
            )
        for name, amount in resources.items():
            is_amount = isinstance(amount, (int, float)) and not isinstance(amount, bool) and 0 <= amount < math.inf
            if not isinstance(name, str) or not is_amount:
                raise ValueError(
                    f"resources_per_worker must give each name an amount of at least 0, got {name!r}: {amount!r}."
                )
        object.__setattr__(self, "resources_per_worker", dict(resources))
        if self.address is not None and not isinstance(self.address, str):
            raise TypeError(
                f"address must be a string as ray.init takes it, or None, got {type(self.address).__name__}."
            )
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                f"address must be that of a cluster of which this machine is a node, got {self.address!r}: Ray Client "
                "would copy each batch through a proxy. Start the trainer on a node, with address='auto'."
            )

    @property
    def num_cores(self) -> int:
        """How many cores the cluster sets aside for all of them, at least one for each."""
        return self.num_workers * max(1, math.ceil(self.resources_per_worker.get("CPU", 0)))

    @property
    def actor_options(self) -> dict[str, Any]:
        """What to give `ray.remote`: an actor is never restarted by Ray, whose restarts would know no call."""
        known = {_OPTIONS[name]: amount for name, amount in self.resources_per_worker.items() if name in _OPTIONS}
        custom = {name: amount for name, amount in self.resources_per_worker.items() if name not in _OPTIONS}
        return {"num_cpus": 0, **known, "resources": custom, "max_restarts": 0, "max_task_retries": 0}
