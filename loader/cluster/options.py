"""Options for Ray workers, none of which changes what a loader yields, and the connection to their cluster.

A process has at most one connection to a Ray cluster, and it lasts until `ray.shutdown()`.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from millstream.core.checks import as_integer, named_fields

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


_connections: list[str] = []
"""The ID of this process's Ray job if this module made the current connection, otherwise empty."""


def check_installed() -> None:
    """Raises an ImportError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError("workers: RayWorkers need Ray, which is not installed here: pip install 'millstream[ray]'.")


def connect(address: str | None) -> None:
    """Connects this process to a cluster, unless it is connected.

    Raises:
        ValueError: the process is connected to another cluster.
        ConnectionError: there is no cluster at the address.
    """
    import ray  # noqa: PLC0415  (lazy: slow to import)

    if not ray.is_initialized():
        ray.init(address=address)
        _connections[:] = [ray.get_runtime_context().get_job_id()]
    here = ray.get_runtime_context().gcs_address
    if address not in {None, "auto", "local", here}:
        raise ValueError(
            f"RayWorkers: address is {address!r}, but this process is connected to the cluster {here!r}. Omit the "
            "address, or call ray.shutdown() first."
        )


def is_our_connection(job: str) -> bool:
    """Returns True if this module made the connection of the given job."""
    return _connections == [job]
