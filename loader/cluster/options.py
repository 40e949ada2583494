"""Options for Ray workers. None of them changes what a loader yields."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from millstream.checks import as_integer, named_fields

_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Ray's own resources, and their names as options of an actor."""


@named_fields
@dataclasses.dataclass(frozen=True)
class RayWorkers:
    """Actors of a Ray cluster in place of worker processes: `DataLoader(..., workers=RayWorkers(16))`.

    The trainer must run on a node of the cluster. The loader's `worker_buffer_size`, `stall_timeout` and `read_options`
    apply to each actor. `pip install 'millstream[ray]'` installs Ray.

    Attributes:
        num_workers: the number of actors, at least 1. Actors that the cluster has no room for start later.
        resources_per_worker: the resources that the cluster reserves per actor, by Ray's names: "CPU", "GPU", "memory"
            (bytes), and custom resources of its nodes. Default: one CPU.
        address: the address of the cluster, as for `ray.init`. With None (default), the current connection of this
            process, or without one, the cluster that `ray.init()` finds or starts.

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
                f"address must be that of a cluster of which this machine is a node, got {self.address!r}. Ray Client "
                "would copy each batch through a proxy. Start the trainer on a node, with address='auto'."
            )

    @property
    def num_cores(self) -> int:
        """The number of cores that the cluster reserves for all actors, at least one per actor."""
        return self.num_workers * max(1, math.ceil(self.resources_per_worker.get("CPU", 0)))

    @property
    def actor_options(self) -> dict[str, Any]:
        """The options for `ray.remote`. Ray must not restart an actor, because the restarted one would lose calls."""
        known = {_OPTIONS[name]: amount for name, amount in self.resources_per_worker.items() if name in _OPTIONS}
        custom = {name: amount for name, amount in self.resources_per_worker.items() if name not in _OPTIONS}
        return {"num_cpus": 0, **known, "resources": custom, "max_restarts": 0, "max_task_retries": 0}
