"""Elements laid end to end and cut into equal parts: groups whose last element may continue in the next one.

A group ends with the element in which its last part ends; if something of that element is left, the next group begins
with the same element, and skips what is used up. So the position of a stream is the first element that is not used up,
and how much of it is: two small numbers.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from millstream.transforms.grouping import OpenGroup


@final
class ContinuedGroup(OpenGroup):
    """Elements up to the one in which the last of some parts ends.

    Args:
        unit: how long a part is.
        parts: how many of them fill the group, at least.
        skip: how much of the elements is used up.
    """

    def __init__(self, unit: int, parts: int, skip: int) -> None:
        self._unit = unit
        self._skip = skip
        self._goal = skip + parts * unit
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
            self.cut()
        return taken

    @property
    def is_full(self) -> bool:
        """Whether there are as many parts as are wanted."""
        return self._total >= self._goal

    @property
    def used(self) -> int:
        """How much of the last element is used up, if it continues in the next group."""
        left = 0 if self._end is None else self._total - self._end
        return int(self._sizes[-1][-1]) - left if left else 0

    def cut(self) -> int:
        """Ends the group with its last whole part."""
        whole = max(0, self._total - self._skip) // self._unit
        self._end = self._skip + whole * self._unit
        return whole

    def decided(self) -> NDArray[np.int64]:
        """Returns where in each element its part of this group begins and ends, shape (2, elements)."""
        sizes = np.concatenate(self._sizes)
        lasts = np.cumsum(sizes)
        end = self._total if self._end is None else self._end
        return np.stack([np.clip(bound - lasts + sizes, 0, sizes) for bound in (self._skip, end)])
