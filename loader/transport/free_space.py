"""Which parts of an arena are free."""

import bisect
from typing import final


@final
class FreeSpace:
    """Extents that are free, where neighbours are one: so room that was in small pieces serves large ones again.

    Each operation takes time logarithmic in the number of extents.

    Attributes:
        num_bytes: the bytes of all of them.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._by_size: list[tuple[int, int]] = []
        self._size_of: dict[int, int] = {}
        self._ending_at: dict[int, int] = {}

    def add(self, start: int, num_bytes: int) -> None:
        """Adds bytes that are not free yet."""
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
        """Returns where a piece of this size was, now taken from the smallest extent that has one; None if none has."""
        found = bisect.bisect_left(self._by_size, (num_bytes, 0))
        if found == len(self._by_size):
            return None
        size, start = self._by_size[found]
        self._remove(start)
        if size > num_bytes:
            self.add(start + num_bytes, size - num_bytes)
        return start

    def take_largest(self) -> tuple[int, int]:
        """Returns the start and the size of the largest extent, which is now taken. There must be one."""
        size, start = self._by_size[-1]
        self._remove(start)
        return start, size

    def _remove(self, start: int) -> None:
        size = self._size_of.pop(start)
        del self._ending_at[start + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]
        self.num_bytes -= size
