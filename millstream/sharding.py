"""Which part of every global batch this process reads."""

import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, final

from millstream.checks import as_flag, as_integer, as_integer_or_none, named_arguments, named_fields
from millstream.warn import warn

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

LAUNCHER_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""What launchers that `jax.distributed.initialize()` knows set in the environment of each of several processes."""


@named_fields
@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """One shard out of several.

    Shuffling comes first, sharding after it: each global batch is dealt to the shards in contiguous runs, so that the
    shards' k-th batches laid end to end are the same for every number of shards.

    Attributes:
        shard_index: which shard, 0 … shard_count - 1.
        shard_count: how many shards there are, at least 1.
        drop_remainder: whether the last, incomplete global batch is trimmed so that every shard gets equally many
            records of it (at most shard_count - 1 records are left out). Without it, the first shards get one more.
        logical_shards: to how many parts a pipeline with a Filter, a FlatMap or packing as documents come is dealt, a
            multiple of shard_count; None for as many as there are shards. Each shard runs logical_shards / shard_count
            of them, and its batch is theirs laid end to end: so the global batches depend on this number alone, and a
            checkpoint can be resumed on every number of shards that divides it. It decides the stream: keep it for the
            whole run. A pipeline that makes one element of each record needs none, and nothing changes there.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or logical_shards is not a multiple of
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "shard_index", as_integer(self.shard_index, "shard_index"))
        object.__setattr__(self, "shard_count", as_integer(self.shard_count, "shard_count", minimum=1))
        object.__setattr__(self, "drop_remainder", as_flag(self.drop_remainder, "drop_remainder"))
        if not 0 <= self.shard_index < self.shard_count:
            raise ValueError(
                f"shard_index must be between 0 and shard_count - 1 = {self.shard_count - 1}, got {self.shard_index}."
            )
        object.__setattr__(self, "logical_shards", as_integer_or_none(self.logical_shards, "logical_shards"))
        if self.logical_shards is not None and self.logical_shards % self.shard_count:
            raise ValueError(
                f"logical_shards must be a multiple of shard_count = {self.shard_count}, got {self.logical_shards}: "
                "each shard runs equally many of them. Use a number of shards that divides it."
            )

    def local_batch_size(self, global_batch_size: int) -> int:
        """Returns how many records of each global batch this shard gets: the `batch_size` of its `Batch`.

        The stream belongs to the global batch size. With that one fixed, and the shards' sizes taken from here, a
        checkpoint can be resumed with any number of shards that divides it; any other is an error before training.

        Args:
            global_batch_size: records per step over all shards, a multiple of shard_count.

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
                f"{global_batch_size}: all shards get equally many records of a whole batch. Use a number of shards "
                "that divides it, or another global batch size, which is another stream."
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

    Asking JAX starts its backends: call `jax.distributed.initialize()` first in a program of several processes.

    Args:
        drop_remainder: as in `ShardOptions`.
        logical_shards: as in `ShardOptions`: a multiple of the number of processes; None for as many as there are.

    Raises:
        RuntimeError: several processes were started, as their environment shows, but JAX was not told so.
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

    Processes whose devices hold the same rows get the same shard: on a mesh of 2 x 2 processes with the axes "data" and
    "model", there are two shards, not four. Where each process has rows of its own, this is `ShardByJaxProcess` in the
    order of the mesh. Give the same sharding to `device_put`.

    Args:
        sharding: a `jax.sharding.NamedSharding` of a batch. The axes of the mesh that split its first dimension decide;
            the others, such as "model" or "context", do not.
        global_batch_size: records per step over all shards, a multiple of the number of parts that the first dimension
            is split into.
        drop_remainder: as in `ShardOptions`.
        logical_shards: as in `ShardOptions`.

    Raises:
        RuntimeError: several processes were started, as their environment shows, but JAX was not told so.
        TypeError: sharding is not a NamedSharding.
        ValueError: an argument is out of range, this process has no device in the mesh, or the rows of two processes
            overlap only in part.

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
    ) -> None:
        _check_initialised("ShardBySharding(sharding, …)")
        group = RowGroup.of(sharding)
        if as_integer(global_batch_size, "global_batch_size", 1) % group.num_parts:
            raise ValueError(
                f"global_batch_size must be a multiple of {group.num_parts}, because the sharding splits the rows into "
                f"{group.num_parts} parts, got {global_batch_size}."
            )
        super().__init__(group.index, group.count, drop_remainder, logical_shards)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of a batch that one JAX process needs, as one of several runs of equal length.

    Attributes:
        index: the position of the run in the batch, 0 … count - 1.
        count: the number of runs.
        num_parts: the number of parts that the sharding splits the rows into, a multiple of `count`.
    """

    index: int
    count: int
    num_parts: int

    @classmethod
    def of(cls, sharding: "NamedSharding") -> "RowGroup":
        """Finds the rows of this process.

        Raises:
            TypeError: sharding is not a NamedSharding.
            ValueError: this process has no device in the mesh, or the rows of two processes overlap only in part.
        """
        import jax  # noqa: PLC0415  (as above)

        if not isinstance(sharding, jax.sharding.NamedSharding):
            raise TypeError(
                "sharding must be a jax.sharding.NamedSharding, for instance NamedSharding(mesh, "
                f"PartitionSpec('data')), got {type(sharding).__name__}."
            )
        axes = (*sharding.spec, None)[0] or ()
        names = axes if isinstance(axes, tuple) else (axes,)
        num_parts = math.prod(sharding.mesh.shape[name] for name in names)
        rows = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(names))
        parts: dict[int, set[int]] = {}
        slices: Mapping[Any, Any] = rows.devices_indices_map((num_parts,))
        for device, (part,) in slices.items():
            parts.setdefault(device.process_index, set()).update(range(*part.indices(num_parts)))
        return cls.among(parts, jax.process_index(), num_parts)

    @classmethod
    def among(cls, parts: Mapping[int, set[int]], process: int, num_parts: int) -> Self:
        """Finds the rows of a process among those of all.

        Args:
            parts: the parts of the rows that each process needs, numbers from 0.
            process: the number of the process.
            num_parts: the number of parts.

        Raises:
            ValueError: the process needs no rows, or the rows of two processes overlap only in part.
        """
        if process not in parts:
            raise ValueError(
                f"sharding must include a device of this process, number {process}, but its mesh has devices of other "
                "processes only: use a mesh of jax.devices()."
            )
        own = parts[process]
        runs = sorted({tuple(sorted(numbers)) for numbers in parts.values()})
        if runs != [tuple(range(start, start + len(own))) for start in range(0, num_parts, len(own))]:
            told = "; ".join(f"process {number}: {sorted(numbers)}" for number, numbers in sorted(parts.items()))
            raise ValueError(
                "sharding must give each process one run of rows, all equally long, and two processes either the same "
                f"rows or none in common. The {num_parts} parts of the rows are on these processes: {told}. Order the "
                "devices of the mesh so that those of one process follow each other along the axes of the rows."
            )
        return cls(min(own) // len(own), len(runs), num_parts)


def shard_by_jax_process(drop_remainder: bool = False, logical_shards: int | None = None) -> ShardOptions:
    """Returns the shard of this JAX process, the same as `ShardByJaxProcess(drop_remainder, logical_shards)`.

    Args:
        drop_remainder: as in `ShardOptions`.
        logical_shards: as in `ShardOptions`: a multiple of the number of processes; None for as many as there are.

    Examples:
        >>> millstream.shard_by_jax_process(drop_remainder=True).shard_count
        1
    """
    return ShardByJaxProcess(drop_remainder, logical_shards)


def jax_process() -> tuple[int, int]:
    """Returns the number of this JAX process and how many there are."""
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
    """Raises if JAX would take this process for the only one, and start its backends that way for good.

    Each of several processes would then read everything: nothing fails, and all of them train on the same records.
    """
    import jax  # noqa: PLC0415  (as above)

    started = [
        f"{name}={os.environ[name]}" for name in LAUNCHER_VARIABLES if os.environ.get(name, "1") not in ("", "1")
    ]
    if started and not jax.distributed.is_initialized():
        raise RuntimeError(
            f"{call} asks JAX which of its processes this is, but JAX knows of only one, while {started[0]} "
            "says that this is one of several. Call jax.distributed.initialize() before anything else "
            "that asks JAX, or use NoSharding() where each process trains on its own."
        )


def warn_if_unsharded() -> None:
    """Warns if JAX runs several processes: without sharding each of them would read the same records.

    Asks only a JAX that is imported and initialised for several processes: asking any other would start its backends.
    """
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    warn(
        f"JAX runs {jax.process_count()} processes, and this DataLoader is not sharded: each of them reads the same "
        "records. Give shard_options=ShardByJaxProcess(), or NoSharding() if that is intended."
    )
