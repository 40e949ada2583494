"""Which part of every global batch this process reads."""

import dataclasses
import operator
import sys
import warnings
from typing import SupportsIndex, final


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
    """

    def __init__(self, drop_remainder: bool = False) -> None:
        super().__init__(*jax_process(), drop_remainder)


def shard_by_jax_process(drop_remainder: bool = False) -> ShardOptions:
    """Returns the shard of this JAX process, the same as `ShardByJaxProcess(drop_remainder)`."""
    return ShardByJaxProcess(drop_remainder)


def jax_process() -> tuple[int, int]:
    """Returns the number of this JAX process and how many there are."""
    import jax  # noqa: PLC0415  (jax costs a second to import: only those who ask for it pay)

    return jax.process_index(), jax.process_count()


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
