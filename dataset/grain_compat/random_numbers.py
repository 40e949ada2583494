"""The random numbers of datasets, for user-defined datasets."""

from typing import TYPE_CHECKING, SupportsIndex, final

from millstream.checks import as_integer
from millstream.randomness import as_seed, generator
from millstream.samplers.permutation import permute_one

if TYPE_CHECKING:
    import numpy as np


@final
class RngPool:
    """Creates the generator of each index: that of a `random_map` with this seed at this position.

    Args:
        seed: 0 … 2**64 - 1.

    Raises:
        ValueError: the seed is out of range.

    Examples:
        >>> pool = millstream.experimental.RngPool(seed=0)
        >>> pool.acquire_rng(3).integers(100), pool.acquire_rng(3).integers(100)
        (np.int64(12), np.int64(12))
    """

    def __init__(self, seed: SupportsIndex) -> None:
        self.seed = as_seed(seed)

    def acquire_rng(self, index: SupportsIndex, *, op_seed: SupportsIndex = 0) -> "np.random.Generator":
        """Returns a generator at the start of the stream of an index.

        Args:
            index: 0 … 2**64 - 1.
            op_seed: the number of the random operation among several, from 0.

        Raises:
            ValueError: an argument is out of range.
        """
        return generator(self.seed, 0, as_seed(index, "index"), as_seed(op_seed, "op_seed"))

    def release_rng(self, rng: "np.random.Generator") -> None:
        """Does nothing, because each call creates a generator.

        Args:
            rng: a result of `acquire_rng`.
        """


def index_shuffle(index: SupportsIndex, max_index: SupportsIndex, seed: SupportsIndex, rounds: SupportsIndex) -> int:
    """Returns the position of an index in the permutation of [0, max_index] that `shuffle` and `IndexSampler` use.

    Args:
        index: 0 … max_index.
        max_index: the largest index, below 2**63.
        seed: selects the permutation, 0 … 2**64 - 1.
        rounds: an even number, 4 … 1024, as required by Grain; without effect here.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> [millstream.experimental.index_shuffle(index, max_index=4, seed=0, rounds=4) for index in range(5)]
        [2, 4, 1, 3, 0]
    """
    most = as_integer(max_index, "max_index", minimum=0)
    offset = as_integer(index, "index", minimum=0)
    number = as_integer(rounds, "rounds")
    if offset > most or most >= 1 << 63:
        raise ValueError(f"index must be at most max_index, and max_index below 2**63, got {offset} and {most}.")
    if number % 2 or not 4 <= number <= 1024:
        raise ValueError(f"rounds must be an even number from 4 to 1024, got {number}.")
    return permute_one(offset, most + 1, as_seed(seed), 0)
