"""Decoded row groups in memory, concatenated, because a random batch takes rows from many of them.

Guarantees, in addition to those of `UnitCache`:
    - Concatenation keeps no row in memory twice, once no thread reads the original row groups.
    - If several threads need the same row groups, one of them concatenates them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.tables.arrow_memory import Column, Rows
from millstream.sources.tables.arrow_tables import ArrowTable, concatenate_chunks
from millstream.sources.tables.decoded_cache import UnitCache

_MAX_CONCATENATIONS = 2
"""Limit of concatenations in memory: some threads may read the next window while others read the last one."""


@final
@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RowGroup:
    """A decoded row group.

    Attributes:
        number: its number among all row groups of the source.
        path: its file.
        chunks: its record batches, nearly always one.
        num_records: the number of rows.
        num_bytes: the size in memory.
        is_valid: True if all texts are UTF-8.
    """

    number: int
    path: str
    chunks: Sequence[Any]
    num_records: int
    num_bytes: int
    is_valid: bool


@final
class ConcatenatedGroups:
    """Row groups whose rows are found together by NumPy.

    The rows of several groups are copied once into one chunk, because each batch that took rows from separate chunks
    would cost more than the copy.

    Attributes:
        groups: the row groups, sorted by number, in this memory.
        num_records: the number of rows.
        num_bytes: the size in memory.
        is_valid: True if all texts are UTF-8.
    """

    def __init__(self, columns: Mapping[str, Column], groups: Sequence[RowGroup]) -> None:
        groups = sorted(groups, key=lambda group: group.number)
        chunks = [chunk for group in groups for chunk in group.chunks]
        self._numbers = np.array([group.number for group in groups], np.int64)
        self._starts = np.cumsum([0, *(group.num_records for group in groups[:-1])])
        if len(groups) > 1:
            chunks = concatenate_chunks(chunks)
            if len(chunks) == 1:
                # Slices, so that no row is in memory twice.
                groups = [
                    dataclasses.replace(group, chunks=[chunks[0].slice(start, group.num_records)])
                    for group, start in zip(groups, self._starts.tolist(), strict=True)
                ]
        self._table = ArrowTable(columns, chunks)
        self.groups = groups
        self.num_records = sum(group.num_records for group in groups)
        self.num_bytes = sum(group.num_bytes for group in groups)
        self.is_valid = all(group.is_valid for group in groups)

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.intp] | None:
        """Returns the indices in `groups` of the groups with the given numbers, or None if one is missing."""
        indices = self._numbers.searchsorted(numbers)
        # An index beyond the last group is clipped to it, and its number differs.
        return None if (self._numbers.take(indices, mode="clip") != numbers).any() else indices

    def rows(self, indices: NDArray[np.intp], within: NDArray[np.int64]) -> Rows:
        """Returns rows, given the index in `groups` of the group of each row, and its position in the group."""
        return self._table.rows(self._starts[indices] + within)


@final
class RowGroups:
    """A cache of decoded row groups.

    Attributes:
        units: the row groups by number.
    """

    def __init__(self, columns: Mapping[str, Column], max_bytes: int, max_threads: int) -> None:
        self.units = UnitCache[RowGroup](max_bytes)
        self._columns = columns
        self._max_bytes = max_bytes
        self._max_threads = max_threads
        self._concatenated = UnitCache[ConcatenatedGroups](0)
        self._recent: tuple[ConcatenatedGroups, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroups, (self._columns, self._max_bytes, self._max_threads)

    def clear(self) -> None:
        """Drops all row groups."""
        self.units.clear()
        self._concatenated.clear()
        self._recent = ()

    def concatenated(
        self, numbers: NDArray[np.int64], decode: Callable[[int], RowGroup]
    ) -> tuple[ConcatenatedGroups, NDArray[np.intp]]:
        """Returns concatenated row groups, and the index in them of the row group of each record.

        Args:
            numbers: the number of the row group of each record, at least one.
            decode: decodes a row group.
        """
        for recent in self._recent:
            if (indices := recent.find(numbers)) is not None:
                counts = np.bincount(indices).tolist()
                self.units.touch((group.number, count) for group, count in zip(recent.groups, counts, strict=False))
                return recent, indices
        needed, counts = np.unique(numbers, return_counts=True)
        wanted = dict(zip(needed.tolist(), counts.tolist(), strict=True))
        groups = self.units.get_all(wanted, decode, self._max_threads)
        groups += self._others_in_use(groups)
        concatenated = self._concatenated.get(
            tuple(sorted(group.number for group in groups)), lambda _: ConcatenatedGroups(self._columns, groups)
        )
        for group in concatenated.groups:
            self.units.replace(group.number, group)
        self._recent = (concatenated, *self._recent[: _MAX_CONCATENATIONS - 1])
        indices = concatenated.find(numbers)
        if indices is None:
            raise AssertionError("The concatenation lacks one of its row groups.")
        return concatenated, indices

    def _others_in_use(self, groups: Sequence[RowGroup]) -> list[RowGroup]:
        """Returns the other row groups of the last concatenation that are not used up, if it has any of these.

        They belong to the same window, of which a small batch needs only a few groups.
        """
        wanted = {group.number for group in groups}
        last = self._recent[0].groups if self._recent else ()
        others = [group for group in last if group.number not in wanted and not self.units.is_used_up(group.number)]
        if all(group.number not in wanted for group in last):
            return []
        return others if sum(group.num_bytes for group in [*groups, *others]) <= self._max_bytes else []
