"""Sharding: the share of every global batch that this process reads."""

import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, final

from millstream.core.checks import as_flag, as_integer, as_integer_or_none, named_arguments, named_fields
from millstream.core.warn import warn

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

LAUNCHER_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Environment variables by which launchers known to `jax.distributed.initialize()` announce several processes."""


@named_fields
@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """One of several shards.

    Shuffling precedes sharding. Each global batch is split into one contiguous run per shard, so the concatenation of
    the shards' k-th batches is the same for every number of shards.

    Attributes:
        shard_index: the number of this shard, 0 … shard_count - 1.
        shard_count: the number of shards, at least 1.
        drop_remainder: True to truncate the last, incomplete global batch to a multiple of shard_count, which drops at
            most shard_count - 1 records. If False, the first shards get one more record of it.
        logical_shards: the number of logical shards of a pipeline with a Filter, a FlatMap or a packer, a multiple of
            shard_count; None for shard_count. Each shard runs logical_shards / shard_count of them, and concatenates
            their batches. The global batches therefore depend on this number alone, and a checkpoint can resume on
            every number of shards that divides it. It determines the stream, so keep it for the entire run. A 1:1
            pipeline does not need it, and does not change.
        share_on_host: True if other processes of this host need the same shard: one of them reads and computes, and the
            others map its batches. The stream, states and errors are the same.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range, or logical_shards is not a multiple of
            shard_count.

    Examples:
        >>> def part(index):
        ...     shard = millstream.ShardOptions(shard_index=index, shard_count=2, drop_remainder=True)
        ...     size = shard.local_batch_size(8)
        ...     return next(iter(millstream.load(range(100), batch_size=size, shard_options=shard)))
        >>> part(0), part(1)
        (array([0, 1, 2, 3]), array([4, 5, 6, 7]))
    """

    shard_index: int
    shard_count: int
    drop_remainder: bool = False
    logical_shards: int | None = None
    share_on_host: bool = dataclasses.field(default=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shard_index", as_integer(self.shard_index, "shard_index"))
        object.__setattr__(self, "shard_count", as_integer(self.shard_count, "shard_count", minimum=1, maximum=1 << 31))
        object.__setattr__(self, "drop_remainder", as_flag(self.drop_remainder, "drop_remainder"))
        object.__setattr__(self, "share_on_host", as_flag(self.share_on_host, "share_on_host"))
        if not 0 <= self.shard_index < self.shard_count:
            raise ValueError(
                f"shard_index must be between 0 and shard_count - 1 = {self.shard_count - 1}, got {self.shard_index}."
            )
        object.__setattr__(self, "logical_shards", as_integer_or_none(self.logical_shards, "logical_shards"))
        if self.logical_shards is not None and self.logical_shards % self.shard_count:
            raise ValueError(
                f"logical_shards must be a multiple of shard_count = {self.shard_count}, got {self.logical_shards}, "
                "because every shard runs the same number of them. Use a number of shards that divides it."
            )

    def local_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of records of each global batch that this shard gets: the `batch_size` of its `Batch`.

        The stream depends on the global batch size. If that is kept, and each shard's size is computed here, a
        checkpoint can resume with any number of shards that divides it. Other numbers are an error before training.

        Args:
            global_batch_size: the number of records per step over all shards, a multiple of shard_count.

        Raises:
            ValueError: global_batch_size is not a positive multiple of shard_count.

        Examples:
            >>> millstream.ShardOptions(shard_index=0, shard_count=4).local_batch_size(256)
            64
        """
        share, rest = divmod(as_integer(global_batch_size, "global_batch_size"), self.shard_count)
        if rest or share < 1:
            raise ValueError(
                f"global_batch_size must be a positive multiple of shard_count = {self.shard_count}, got "
                f"{global_batch_size}, because all shards get the same number of records. Use a number of shards that "
                "divides it, or another global batch size, which gives another stream."
            )
        return share


@final
class NoSharding(ShardOptions):
    """The only shard: this process reads everything.

    Examples:
        >>> millstream.NoSharding().shard_count
        1
    """

    def __init__(self) -> None:
        super().__init__(shard_index=0, shard_count=1)


@final
class ShardByJaxProcess(ShardOptions):
    """The shard of this JAX process: `jax.process_index()` of `jax.process_count()`.

    A query of these numbers starts JAX's backends. Call `jax.distributed.initialize()` first in a program
    with several processes.

    Args:
        drop_remainder: as in `ShardOptions`.
        logical_shards: as in `ShardOptions`: a multiple of the number of processes; None for that number.

    Raises:
        RuntimeError: the environment announces several processes, but JAX is not initialised for them.
        ValueError: logical_shards is not such a multiple.

    Examples:
        >>> shard = millstream.ShardByJaxProcess(drop_remainder=True)
        >>> shard.shard_index, shard.shard_count
        (0, 1)
        >>> loader = millstream.load(range(100), batch_size=shard.local_batch_size(64), shard_options=shard)
    """

    @named_arguments()
    def __init__(self, drop_remainder: bool = False, logical_shards: int | None = None) -> None:
        _check_initialised("ShardByJaxProcess()")
        super().__init__(*jax_process(), drop_remainder, logical_shards)


@final
class ShardBySharding(ShardOptions):
    """The rows of each global batch that the devices of this JAX process need under a sharding.

    Processes whose devices hold the same rows get the same shard. On a mesh of 2 x 2 processes with the axes "data" and
    "model", there are two shards, not four. If each process has its own rows, this equals `ShardByJaxProcess` in the
    order of the mesh. Pass the same sharding to `device_put`.

    Args:
        sharding: a `jax.sharding.NamedSharding` of a batch. Only the axes of the mesh that split its first dimension
            matter; others, such as "model" or "context", do not.
        global_batch_size: the number of records per step over all shards, a multiple of the number of parts that the
            first dimension is split into.
        drop_remainder: as in `ShardOptions`.
        logical_shards: as in `ShardOptions`.
        share_on_host: True to read and compute the batches of all processes of one host that need the same rows in one
            of them, as `docs/several-hosts.md` explains. It has no effect on a mesh without such processes.

    Raises:
        RuntimeError: the environment announces several processes, but JAX is not initialised for them.
        TypeError: sharding is not a NamedSharding.
        ValueError: an argument is out of range, the first dimension is unconstrained, this process has no device in
            the mesh, or the rows of two processes overlap only in part.

    Examples:
        >>> import jax
        >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
        >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        >>> shard = millstream.ShardBySharding(rows, global_batch_size=64)
        >>> shard.shard_index, shard.shard_count
        (0, 1)
        >>> loader = millstream.load(range(100), batch_size=shard.local_batch_size(64), shard_options=shard)
        >>> with millstream.device_put(iter(loader), rows) as batches:
        ...     next(batches).shape
        (64,)
    """

    @named_arguments()
    def __init__(
        self,
        sharding: "NamedSharding",
        global_batch_size: int,
        drop_remainder: bool = False,
        logical_shards: int | None = None,
        share_on_host: bool = False,
    ) -> None:
        _check_initialised("ShardBySharding(sharding, …)")
        group = RowGroup.of(sharding)
        if as_integer(global_batch_size, "global_batch_size", 1) % group.num_parts:
            raise ValueError(
                f"global_batch_size must be a multiple of {group.num_parts}, because the sharding splits the rows into "
                f"{group.num_parts} parts, got {global_batch_size}."
            )
        shares = as_flag(share_on_host, "share_on_host") and group.num_processes > 1
        super().__init__(group.index, group.count, drop_remainder, logical_shards, shares)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of a batch that one JAX process needs, as one of several runs of equal length.

    Attributes:
        index: the position of the run in the batch, 0 … count - 1.
        count: the number of runs.
        num_parts: the number of parts that the sharding splits the rows into, a multiple of `count`.
        num_processes: the number of processes that need these rows.
    """

    index: int
    count: int
    num_parts: int
    num_processes: int = 1

    @classmethod
    def of(cls, sharding: "NamedSharding") -> "RowGroup":
        """Finds the rows of this process.

        Raises:
            TypeError: sharding is not a NamedSharding.
            ValueError: the first dimension is unconstrained, this process has no device in the mesh, or the rows of
                two processes overlap only in part.
        """
        import jax  # noqa: PLC0415  (as above)

        if not isinstance(sharding, jax.sharding.NamedSharding):
            raise TypeError(
                "sharding must be a jax.sharding.NamedSharding, for instance NamedSharding(mesh, "
                f"PartitionSpec('data')), got {type(sharding).__name__}."
            )
        axes = (*sharding.spec, None)[0] or ()
        if axes is jax.sharding.PartitionSpec.UNCONSTRAINED:
            raise ValueError(
                f"sharding must specify how the first dimension is split, got {sharding.spec}. Name axes of the mesh, "
                "or None."
            )
        names = axes if isinstance(axes, tuple) else (axes,)
        num_parts = math.prod(sharding.mesh.shape[name] for name in names)
        rows = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(names))
        needed: dict[int, set[int]] = {}
        slices: Mapping[Any, Any] = rows.devices_indices_map((num_parts,))
        for device, (rows_of_device,) in slices.items():
            needed.setdefault(device.process_index, set()).update(range(*rows_of_device.indices(num_parts)))
        return cls.among(needed, jax.process_index(), num_parts)

    @classmethod
    def among(cls, needed: Mapping[int, set[int]], process: int, num_parts: int) -> Self:
        """Finds the rows of a process, given the numbers of the parts of the rows that each process needs."""
        if process not in needed:
            raise ValueError(
                f"sharding must include a device of this process, number {process}, but its mesh has devices of other "
                "processes only. Use a mesh of jax.devices()."
            )
        own = needed[process]
        runs = sorted({tuple(sorted(numbers)) for numbers in needed.values()})
        if runs != [tuple(range(start, start + len(own))) for start in range(0, num_parts, len(own))]:
            listed = "; ".join(f"process {number}: {sorted(numbers)}" for number, numbers in sorted(needed.items()))
            raise ValueError(
                "sharding must give each process one run of rows, all of the same length, and two processes either the "
                f"same rows or none in common. The {num_parts} parts of the rows are on these processes: {listed}. "
                "Order the devices of the mesh so that those of one process are adjacent along the axes of the rows."
            )
        return cls(min(own) // len(own), len(runs), num_parts, sum(numbers == own for numbers in needed.values()))


def jax_process() -> tuple[int, int]:
    """Returns the number of this JAX process and the number of processes."""
    import jax  # noqa: PLC0415  (jax costs a second to import: only those who ask for it pay)

    return jax.process_index(), jax.process_count()


def gathered_by_jax(values: Sequence[float]) -> list[list[float]]:
    """Returns the numbers of each JAX process, which must all call this, in the order of their indices."""
    import numpy as np  # noqa: PLC0415  (as above)
    from jax.experimental import multihost_utils  # noqa: PLC0415  (as above)

    # As pairs of integers, because JAX would round to 32 bits.
    pairs = multihost_utils.process_allgather(np.array(values, np.float64).view(np.uint32))
    own: list[list[float]] = np.ascontiguousarray(pairs).reshape(-1, 2 * len(values)).view(np.float64).tolist()
    return own


def _check_initialised(call: str) -> None:
    """Raises if JAX would permanently treat this process as the only one.

    Each of several processes would then read everything: nothing fails, and all of them train on the same records.
    """
    import jax  # noqa: PLC0415  (as above)

    started = [
        f"{name}={os.environ[name]}" for name in LAUNCHER_VARIABLES if os.environ.get(name, "1") not in ("", "1")
    ]
    if started and not jax.distributed.is_initialized():
        raise RuntimeError(
            f"{call} asks JAX for the number of this process, but JAX knows of only one process, while {started[0]} "
            "announces several. Call jax.distributed.initialize() before anything else that uses JAX, or use "
            "NoSharding() if each process trains on its own."
        )


def warn_if_unsharded() -> None:
    """Warns if JAX runs several processes, because without sharding each of them would read the same records.

    JAX is queried only if it is imported and initialised for several processes; otherwise it would start its backends.
    """
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    warn(
        f"JAX runs {jax.process_count()} processes, and this DataLoader is not sharded: each of them reads the same "
        "records. Pass shard_options=ShardByJaxProcess(), or NoSharding() if that is intended."
    )
