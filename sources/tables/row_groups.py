"""Decoded row groups, kept as long as there is room, and laid end to end: a batch takes rows of many at random.

Guarantees, besides those of `UnitCache`:
    - Laying row groups end to end puts no row into memory twice, once nobody reads the groups as they were.
    - Of several threads that need the same row groups, one lays them out.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.tables.arrow_library import described, laid_end_to_end
from millstream.sources.tables.arrow_memory import Column, Memory, Rows
from millstream.sources.tables.decoded_cache import UnitCache

_LAYOUTS = 2
"""How many are known: threads that read ahead are in the next window while others are in the last one."""


@final
@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RowGroup:
    """A decoded row group.

    Attributes:
        number: which one it is.
        path: the file that it is in.
        chunks: its record batches, nearly always one.
        num_records: how many rows it has.
        num_bytes: how much memory it takes.
        is_valid: whether all texts in it are UTF-8.
    """

    number: int
    path: str
    chunks: Sequence[Any]
    num_records: int
    num_bytes: int
    is_valid: bool


@final
class Layout:
    """Some row groups laid end to end: a row of any of them is found by NumPy, whichever it is in.

    Where they are several, their rows are copied, once, into one chunk: a batch that took some from each group would
    cost more than that.

    Args:
        columns: how the values of each column are read.
        groups: the row groups, by their numbers.

    Attributes:
        groups: the same row groups, in this memory.
        num_records: how many rows there are.
        num_bytes: how much memory they take.
        is_valid: whether all texts are UTF-8.
    """

    def __init__(self, columns: Mapping[str, Column], groups: Sequence[RowGroup]) -> None:
        groups = sorted(groups, key=lambda group: group.number)
        chunks = [chunk for group in groups for chunk in group.chunks]
        self._memory = Memory()
        self._numbers = np.array([group.number for group in groups], np.int64)
        self._starts = np.cumsum([0, *(group.num_records for group in groups[:-1])])
        if len(groups) > 1:
            chunks = laid_end_to_end(chunks)
            if len(chunks) == 1:
                # Slices, so that no row is in memory twice.
                groups = [
                    dataclasses.replace(group, chunks=[chunks[0].slice(start, group.num_records)])
                    for group, start in zip(groups, self._starts.tolist(), strict=True)
                ]
        self._chunks = chunks
        self._table = np.stack([described(columns, chunk, self._memory) for chunk in chunks])
        self.groups = groups
        self.num_records = sum(group.num_records for group in groups)
        self.num_bytes = sum(group.num_bytes for group in groups)
        self.is_valid = all(group.is_valid for group in groups)

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.intp] | None:
        """Returns which of the groups those of some numbers are, or None if one is not among them."""
        places = self._numbers.searchsorted(numbers)
        # What is beyond the last one is compared with the last one, and differs.
        return None if (self._numbers.take(places, mode="clip") != numbers).any() else places

    def rows(self, places: NDArray[np.intp], within: NDArray[np.int64]) -> Rows:
        """Returns rows, given which of the groups each is in, and its number there."""
        rows = self._starts[places] + within
        if len(self._chunks) == 1:
            return Rows(self._memory, self._chunks, self._table, np.zeros(len(rows), np.int64), rows)
        chunk = np.searchsorted(self._chunk_ends, rows, side="right")
        lengths = np.diff(self._chunk_ends, prepend=0)
        return Rows(self._memory, self._chunks, self._table, chunk, rows - (self._chunk_ends - lengths)[chunk])

    @functools.cached_property
    def _chunk_ends(self) -> NDArray[np.int64]:
        return np.cumsum([len(chunk) for chunk in self._chunks])


@final
class RowGroups:
    """Decoded row groups by their numbers.

    Args:
        columns: how the values of each column are read.
        max_bytes: how much memory they may take.
        remembered: how many of those that were dropped are remembered.
        max_threads: how many are decoded at the same time.

    Attributes:
        units: the row groups.
    """

    def __init__(self, columns: Mapping[str, Column], max_bytes: int, remembered: int, max_threads: int) -> None:
        self.units = UnitCache[RowGroup](max_bytes, remembered)
        self._columns = columns
        self._max_bytes = max_bytes
        self._max_threads = max_threads
        self._layouts = UnitCache[Layout](0, 1)
        self._recent: tuple[Layout, ...] = ()

    def clear(self) -> None:
        """Drops all of them."""
        self.units.clear()
        self._layouts.clear()
        self._recent = ()

    def laid_out(
        self, numbers: NDArray[np.int64], decode: Callable[[int], RowGroup]
    ) -> tuple[Layout, NDArray[np.intp]]:
        """Returns row groups laid end to end, and which of these each record is in.

        Args:
            numbers: the number of the row group of each record, at least one.
            decode: decodes a row group.
        """
        for layout in self._recent:
            if (places := layout.places(numbers)) is not None:
                counts = np.bincount(places).tolist()
                self.units.touch((group.number, count) for group, count in zip(layout.groups, counts, strict=False))
                return layout, places
        needed, counts = np.unique(numbers, return_counts=True)
        wanted = dict(zip(needed.tolist(), counts.tolist(), strict=True))
        groups = self.units.get_all(wanted, decode, self._max_threads)
        groups += self._others_in_use(groups)
        layout = self._layouts.get(
            tuple(sorted(group.number for group in groups)), lambda _: Layout(self._columns, groups)
        )
        for group in layout.groups:
            self.units.replace(group.number, group)
        self._recent = (layout, *self._recent[: _LAYOUTS - 1])
        places = layout.places(numbers)
        if places is None:
            raise AssertionError("A layout has not the row groups that it was made of.")
        return layout, places

    def _others_in_use(self, groups: Sequence[RowGroup]) -> list[RowGroup]:
        """Returns the other row groups of the last layout that are not used up, if it has some of these.

        They are of the same window, which a small batch needs a few groups of.
        """
        wanted = {group.number for group in groups}
        last = self._recent[0].groups if self._recent else ()
        others = [group for group in last if group.number not in wanted and not self.units.is_used_up(group.number)]
        if all(group.number not in wanted for group in last):
            return []
        return others if sum(group.num_bytes for group in [*groups, *others]) <= self._max_bytes else []
