"""A shuffle of neighbouring elements."""

from collections.abc import Sequence
from typing import Any, ClassVar, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer, named_arguments
from millstream.core.columnar import Allocate
from millstream.core.randomness import as_seed
from millstream.core.segments import Segments
from millstream.transforms.grouping import CountingGroup, GroupId, GroupingOperation, Prepared


@final
class WindowShuffle(GroupingOperation):
    """Shuffles elements within windows of `window_size` consecutive elements.

    It is for elements that the pipeline creates, such as the children of a FlatMap or packed rows, whose neighbours
    would otherwise stay neighbours. Shuffle records by the sampler instead: that is global, and costs nothing.

    Args:
        window_size: the number of elements per window, at least 1. They are in memory together.
        seed: selects the orders, 0 … 2**64 - 1. Each window has its own order. None derives the seed from that of the
            pipeline; it is 0 if the pipeline has none.

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
        return Prepared(values, np.empty((0, len(values)), dtype=np.int64))

    def begin(self, skip: int = 0) -> CountingGroup:
        del skip
        return CountingGroup(self.window_size)

    def arrange(self, measures: NDArray[np.int64], group: GroupId) -> Segments:
        """Returns the elements in their new order."""
        return Segments.singletons(group.generator(self.seed).permutation(measures.shape[1]))

    def make(self, values: Sequence[Any], segments: Segments, allocate: Allocate = np.empty) -> list[Any]:
        del allocate
        return [values[element] for element in segments.elements.tolist()]
