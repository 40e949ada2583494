"""Rows of columns in memory that are alike in several sources: a batch of them in one pass over each column."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream import tree
from millstream.columnar import Allocate, ColumnarRecords
from millstream.sources.columnar_parts import alike
from millstream.sources.memory import InMemoryDataSource, can_be_taken_from, copy_rows, rows_of

Keys = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class EndToEndColumns:
    """The columns of several sources, which differ in nothing but their lengths.

    Attributes:
        structure: the columns of the first source, for their structure.
        arrays: for each column, the array of each source.
        are_views: for each column, true if some of these are views that `numpy.take` would copy whole.
    """

    structure: Any
    arrays: Sequence[Sequence[NDArray[Any]]]
    are_views: Sequence[bool]

    @classmethod
    def of(cls, sources: Sequence[Any]) -> Self | None:
        """Returns the columns of some sources, or None where these are anything else than alike columns in memory."""
        columns = [source.stackable_columns for source in sources if type(source) is InMemoryDataSource]
        if len(columns) < len(sources) or not all(each is not None and alike(columns[0], each) for each in columns):
            return None
        arrays = list(zip(*([leaf for _, leaf in tree.leaves(each)] for each in columns), strict=True))
        return cls(columns[0], arrays, [not all(map(can_be_taken_from, of_column)) for of_column in arrays])


@final
class MixedColumns(ColumnarRecords):
    """The records of some keys, taken from the columns on demand: as records, or as one batch.

    Args:
        columns: of all sources.
        parts: for each record, which source it is from, shape (records,).
        keys: its key there.
    """

    def __init__(self, columns: EndToEndColumns, parts: Keys, keys: Keys) -> None:
        self._columns = columns
        self._parts = parts
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return MixedColumns(self._columns, self._parts[index], self._keys[index])
        (record,) = MixedColumns(self._columns, self._parts[index, np.newaxis], self._keys[index, np.newaxis])
        return record

    def __iter__(self) -> Iterator[Any]:
        return iter(rows_of(self.stack(np.empty), len(self)))

    def stack(self, allocate: Allocate) -> Any:
        """Returns the batch: the columns' structure, arrays of shape (n, …)."""
        order = np.argsort(
            self._parts.astype(np.uint16 if len(self._columns.arrays[0]) < 1 << 16 else np.int64), kind="stable"
        )
        keys, places = self._keys[order], np.empty_like(order)
        places[order] = np.arange(len(order))
        counts = np.bincount(self._parts)
        parts = np.flatnonzero(counts)
        stops = np.cumsum(counts[parts]).tolist()
        runs = list(zip(parts.tolist(), [0, *stops[:-1]], stops, strict=True))
        columns = zip(self._columns.arrays, self._columns.are_views, strict=True)
        batches = iter(
            [self._taken(arrays, runs, keys, places, allocate, are_views=are_views) for arrays, are_views in columns]
        )
        return tree.map_leaves(lambda _: next(batches), self._columns.structure)

    def _taken(
        self,
        arrays: Sequence[NDArray[Any]],
        runs: Sequence[tuple[int, int, int]],
        keys: Keys,
        places: NDArray[np.intp],
        allocate: Allocate,
        *,
        are_views: bool,
    ) -> NDArray[Any]:
        """Returns the rows of one column: those of each source together at first, then in their order."""
        first = arrays[0]
        sorted_rows = np.empty((len(keys), *first.shape[1:]), first.dtype)
        for part, start, stop in runs:
            if are_views:
                copy_rows(arrays[part], keys[start:stop], sorted_rows[start:stop])
                continue
            # The keys are checked: with any other mode than "raise", NumPy writes to `out` without a second copy.
            arrays[part].take(keys[start:stop], 0, sorted_rows[start:stop], "clip")
        batch = allocate(sorted_rows.shape, first.dtype)
        return sorted_rows.take(places, 0, batch, "clip")
