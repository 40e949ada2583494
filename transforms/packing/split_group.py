"""Groups of concatenated elements that are cut into outputs of one size, where the next group may continue an element.

A group ends with the element in which its last output ends. If a remainder of that element is left, the next group
begins with the same element, and skips the consumed amount. The position of a stream is therefore two small numbers:
the first element that is not entirely consumed, and the consumed amount of it.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from millstream.transforms.grouping import OpenGroup


@final
class SplitGroup(OpenGroup):
    """Elements up to the one in which the last of a number of outputs ends.

    Args:
        unit: the size of an output.
        outputs: the minimum number of outputs that fill the group.
        skip: the consumed amount of the elements.
    """

    def __init__(self, unit: int, outputs: int, skip: int) -> None:
        self._unit = unit
        self._skip = skip
        self._goal = skip + outputs * unit
        self._total = 0
        self._end: int | None = None
        self._sizes: list[NDArray[np.int64]] = []

    def take(self, sizes: NDArray[np.int64]) -> int:
        """Takes elements up to the one that fills the group."""
        if self.is_full:
            return 0
        totals = self._total + np.cumsum(sizes[0])
        taken = min(len(totals), int(np.searchsorted(totals, self._goal)) + 1)
        self._sizes.append(sizes[0, :taken])
        self._total = int(totals[taken - 1])
        if self._total >= self._goal:
            self.truncate()
        return taken

    @property
    def is_full(self) -> bool:
        """True once the group has enough outputs."""
        return self._total >= self._goal

    @property
    def used(self) -> int:
        """The consumed amount of the last element, if the next group continues it."""
        left = 0 if self._end is None else self._total - self._end
        return int(self._sizes[-1][-1]) - left if left else 0

    def truncate(self) -> int:
        """Ends the group after its last complete output."""
        whole = max(0, self._total - self._skip) // self._unit
        self._end = self._skip + whole * self._unit
        return whole

    def decisions(self) -> NDArray[np.int64]:
        """Returns the start and stop of each element's slice in this group, shape (2, elements)."""
        sizes = np.concatenate(self._sizes)
        lasts = np.cumsum(sizes)
        end = self._total if self._end is None else self._end
        return np.stack([np.clip(bound - lasts + sizes, 0, sizes) for bound in (self._skip, end)])
