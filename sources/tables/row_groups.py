"""Decoded row groups in memory. A random batch takes rows from many of them, as from one table."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.keyed_pool import UnitCache
from millstream.sources.pieces import Pieces
from millstream.sources.tables.arrow_memory import Column, Rows
from millstream.sources.tables.arrow_tables import ArrowTable

_MAX_JOINED = 2
"""Limit of the tables of several row groups: some threads may read the next window while others read the last one."""


@final
@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RowGroup:
    """A decoded row group, with its number in the source and, nearly always, one record batch.

    `is_valid` is True if all texts are UTF-8.
    """

    number: int
    path: str
    chunks: Sequence[Any]
    num_records: int
    num_bytes: int
    is_valid: bool


@final
class JoinedGroups:
    """The rows of several row groups, sorted by number, as one table, without a copy."""

    def __init__(self, columns: Mapping[str, Column], groups: Iterable[RowGroup]) -> None:
        self.groups = sorted(groups, key=lambda group: group.number)
        self.is_valid = all(group.is_valid for group in self.groups)
        self._numbers = np.array([group.number for group in self.groups], np.int64)
        self._starts = Pieces(group.num_records for group in self.groups).starts
        self._table = ArrowTable(columns, [chunk for group in self.groups for chunk in group.chunks])

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.intp] | None:
        """Returns the indices in `groups` of the groups with the given numbers, or None if one is missing."""
        indices = self._numbers.searchsorted(numbers)
        # An index beyond the last group is clipped to it, and its number differs.
        return None if (self._numbers.take(indices, mode="clip") != numbers).any() else indices

    def rows(self, indices: NDArray[np.intp], within: NDArray[np.int64]) -> Rows:
        return self._table.rows(self._starts[indices] + within)


@final
class RowGroups:
    """A cache of decoded row groups."""

    def __init__(self, columns: Mapping[str, Column], max_bytes: int, max_threads: int) -> None:
        self.units = UnitCache[int, RowGroup](max_bytes)
        self._columns = columns
        self._max_bytes = max_bytes
        self._max_threads = max_threads
        self._recent: tuple[JoinedGroups, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroups, (self._columns, self._max_bytes, self._max_threads)

    def clear(self) -> None:
        self.units.clear()
        self._recent = ()

    def joined(
        self, numbers: NDArray[np.int64], decode: Callable[[int], RowGroup]
    ) -> tuple[JoinedGroups, NDArray[np.intp]]:
        """Returns joined row groups, and the index in them of the row group of each record, at least one."""
        for recent in self._recent:
            if (indices := recent.find(numbers)) is not None:
                found = np.bincount(indices).tolist()
                self.units.touch((group.number, count) for group, count in zip(recent.groups, found, strict=False))
                return recent, indices
        needed, counts = np.unique(numbers, return_counts=True)
        wanted = dict(zip(needed.tolist(), counts.tolist(), strict=True))
        groups = self.units.get_all(wanted, decode, self._max_threads)
        joined = JoinedGroups(self._columns, [*groups, *self._others_in_use(groups)])
        # A table keeps its row groups in memory, so it must not outlive them in the cache.
        tables = (joined, *self._recent[: _MAX_JOINED - 1])
        self._recent = tuple(each for each in tables if self._are_cached(each.groups))
        indices = joined.find(numbers)
        if indices is None:
            raise AssertionError("One of the row groups is missing.")
        return joined, indices

    def _are_cached(self, groups: Iterable[RowGroup]) -> bool:
        return self.units.has((group.number, group) for group in groups)

    def _others_in_use(self, groups: Sequence[RowGroup]) -> list[RowGroup]:
        """Returns the other row groups of the last table that are not used up, if it has any of these.

        They belong to the same window, of which a small batch needs only a few groups.
        """
        wanted = {group.number for group in groups}
        last = self._recent[0].groups if self._recent else ()
        if all(group.number not in wanted for group in last):
            return []
        others = [group for group in last if group.number not in wanted and not self.units.is_used_up(group.number)]
        return others if sum(group.num_bytes for group in [*groups, *others]) <= self._max_bytes else []
