"""A shuffle of what comes next to each other."""

from collections.abc import Sequence
from typing import Any, ClassVar, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer, named_arguments
from millstream.columnar import Allocate
from millstream.randomness import as_seed
from millstream.transforms.grouping import CountingGroup, GroupingOperation, Identity, Pieces, Prepared


@final
class WindowShuffle(GroupingOperation):
    """Shuffles elements within windows: of every `window_size` elements in a row, each comes once, in a random order.

    For elements that are made on the way, such as the children of a FlatMap or packed rows, whose neighbours would
    otherwise stay neighbours. Records are shuffled better, globally and at no cost, by the sampler.

    Args:
        window_size: how many elements are a window, at least 1; they are in memory together.
        seed: selects the orders, 0 … 2**64 - 1. Each window has an order of its own. None for one that is derived from
            the seed of the pipeline, or 0 if the pipeline has no seed.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> list(millstream.load(range(8), num_epochs=1, transformations=[millstream.WindowShuffle(4, seed=0)]))
        [2, 0, 3, 1, 4, 6, 5, 7]
    """

    keeps_count: ClassVar[bool] = True

    @named_arguments()
    def __init__(self, window_size: SupportsIndex, seed: SupportsIndex | None = None) -> None:
        self.window_size = as_integer(window_size, "window_size", minimum=1)
        self.seed = None if seed is None else as_seed(seed)

    def __repr__(self) -> str:
        return f"WindowShuffle(window_size={self.window_size}, seed={self.seed})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        """Returns the elements as they are."""
        return Prepared(values, np.empty((0, len(values)), dtype=np.int64))

    def begin(self, skip: int = 0) -> CountingGroup:
        """Returns an empty window."""
        del skip
        return CountingGroup(self.window_size)

    def arrange(self, numbers: NDArray[np.int64], identity: Identity) -> Pieces:
        """Returns the elements in their new order."""
        return Pieces.one_of_each(identity.generator(self.seed).permutation(numbers.shape[1]))

    def make(self, values: Sequence[Any], pieces: Pieces, allocate: Allocate = np.empty) -> list[Any]:
        """Returns the elements themselves."""
        del allocate
        return [values[element] for element in pieces.elements.tolist()]
