"""Which part of every global batch this process reads."""

import dataclasses
import operator
import os
import sys
import warnings
from typing import SupportsIndex, final

LAUNCHER_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""What launchers that `jax.distributed.initialize()` knows leave in the environment of each of several processes."""


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
    """

    shard_index: int
    shard_count: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        for name in ("shard_index", "shard_count"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, SupportsIndex):
                raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}.")
            object.__setattr__(self, name, operator.index(value))
        if not isinstance(self.drop_remainder, bool):
            raise TypeError(f"drop_remainder must be True or False, got {self.drop_remainder!r}.")
        if self.shard_count < 1:
            raise ValueError(f"shard_count must be at least 1, got {self.shard_count}.")
        if not 0 <= self.shard_index < self.shard_count:
            raise ValueError(
                f"shard_index must be between 0 and shard_count - 1 = {self.shard_count - 1}, got {self.shard_index}."
            )

    def local_batch_size(self, global_batch_size: int) -> int:
        """Returns how many records of each global batch this shard gets: the `batch_size` of its `Batch`.

        The stream belongs to the global batch size. Whoever fixes that one, and takes the shards' from here, can go on
        from a checkpoint with any number of shards that divides it, and learns of any other before training starts.

        Args:
            global_batch_size: records per step over all shards, a multiple of shard_count.

        Raises:
            ValueError: it is none.
        """
        share, rest = divmod(operator.index(global_batch_size), self.shard_count)
        if rest or share < 1:
            raise ValueError(
                f"global_batch_size must be a positive multiple of shard_count = {self.shard_count}, got "
                f"{global_batch_size}: all shards get equally many records of a whole batch. Use a number of shards "
                "that divides it, or another global batch size, which is another stream."
            )
        return share


@final
class NoSharding(ShardOptions):
    """The only shard: this process reads everything."""

    def __init__(self) -> None:
        super().__init__(shard_index=0, shard_count=1)


@final
class ShardByJaxProcess(ShardOptions):
    """The shard of this JAX process: `jax.process_index()` of `jax.process_count()`.

    Asking JAX starts its backends: call `jax.distributed.initialize()` first in a program of several processes.

    Args:
        drop_remainder: as in `ShardOptions`.

    Raises:
        RuntimeError: several processes were started, as their environment shows, but JAX was not told so.
    """

    def __init__(self, drop_remainder: bool = False) -> None:
        _check_initialised()
        super().__init__(*jax_process(), drop_remainder)


def shard_by_jax_process(drop_remainder: bool = False) -> ShardOptions:
    """Returns the shard of this JAX process, the same as `ShardByJaxProcess(drop_remainder)`."""
    return ShardByJaxProcess(drop_remainder)


def jax_process() -> tuple[int, int]:
    """Returns the number of this JAX process and how many there are."""
    import jax  # noqa: PLC0415  (jax costs a second to import: only those who ask for it pay)

    return jax.process_index(), jax.process_count()


def _check_initialised() -> None:
    """Raises where JAX would take this process for the only one, and would start its backends as such for good.

    Each of several processes would then read everything: nothing fails, and all of them train on the same records.
    """
    import jax  # noqa: PLC0415  (as above)

    started = [
        f"{name}={os.environ[name]}" for name in LAUNCHER_VARIABLES if os.environ.get(name, "1") not in ("", "1")
    ]
    if started and not jax.distributed.is_initialized():
        raise RuntimeError(
            "ShardByJaxProcess() asks JAX which of its processes this is, but JAX knows of one only, while "
            f"{started[0]} says that this is one of several. Call jax.distributed.initialize() before anything else "
            "that asks JAX, or use NoSharding() where each process trains on its own."
        )


def warn_if_unsharded() -> None:
    """Warns where JAX runs several processes: without sharding each of them would read the same records.

    Asks only a JAX that is imported and initialised for several processes: asking any other would start its backends.
    """
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    warnings.warn(
        f"JAX runs {jax.process_count()} processes, and this DataLoader is not sharded: each of them reads the same "
        "records. Give shard_options=ShardByJaxProcess(), or NoSharding() if it is meant.",
        stacklevel=4,
    )
