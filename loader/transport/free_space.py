"""The free extents of an arena."""

import bisect
from typing import final


@final
class FreeSpace:
    """A set of free extents. Adjacent extents are merged, so that small chunks become room for large ones.

    Each operation takes time logarithmic in the number of extents.

    Attributes:
        num_bytes: the total size of the extents.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._by_size: list[tuple[int, int]] = []
        self._size_of: dict[int, int] = {}
        self._ending_at: dict[int, int] = {}

    def add(self, start: int, num_bytes: int) -> None:
        """Adds an extent that is not free yet."""
        stop = start + num_bytes
        before, after = self._ending_at.get(start), self._size_of.get(stop)
        if before is not None:
            self._remove(before)
            start = before
        if after is not None:
            self._remove(stop)
            stop += after
        self._size_of[start] = stop - start
        self._ending_at[stop] = start
        bisect.insort(self._by_size, (stop - start, start))
        self.num_bytes += stop - start

    def take(self, num_bytes: int) -> int | None:
        """Takes `num_bytes` from the smallest extent that is large enough. Returns their start, or None if none is."""
        found = bisect.bisect_left(self._by_size, (num_bytes, 0))
        if found == len(self._by_size):
            return None
        size, start = self._by_size[found]
        self._remove(start)
        if size > num_bytes:
            self.add(start + num_bytes, size - num_bytes)
        return start

    def take_largest(self) -> tuple[int, int]:
        """Takes the largest extent, and returns its start and size. There must be at least one."""
        size, start = self._by_size[-1]
        self._remove(start)
        return start, size

    def _remove(self, start: int) -> None:
        size = self._size_of.pop(start)
        del self._ending_at[start + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]
        self.num_bytes -= size
