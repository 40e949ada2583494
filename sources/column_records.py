"""Records that are columns, of one source or of several: a batch is built without a record in between."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.columnar import Allocate, ColumnarRecords, copy_images
from millstream.sources.memory import InMemoryDataSource, can_be_taken_from, rows_of, stacks
from millstream.sources.pieces import Cut, cut


def records_of_arrays(columns: Mapping[str, Any], count: int) -> Sequence[dict[str, Any]]:
    """Returns the records that arrays of shape (count, …) hold, one array per column.

    The arrays are new ones, which belong to the records. Columns may be nested in dicts. Objects are bytes.
    """
    native = tree.map_leaves(lambda column: column.astype(column.dtype.newbyteorder("="), copy=False), columns)
    can_stack = all(column.dtype.hasobject or stacks(column) for _, column in tree.leaves(native))
    return _ArrayRecords(native, count) if can_stack else rows_of(native, count)


@final
class _ArrayRecords(ColumnarRecords):
    """The rows of arrays, as records or as one batch."""

    def __init__(self, columns: Mapping[str, Any], count: int) -> None:
        self._columns = columns
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        rows = tree.map_leaves(lambda column: column[index], self._columns)
        if isinstance(index, slice):
            return _ArrayRecords(rows, len(range(*index.indices(self._count))))
        return rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(rows_of(self._columns, self._count))

    def stack(self, allocate: Allocate) -> Any:  # noqa: ARG002
        """Returns the arrays themselves, which are as new as those of `allocate`: a copy would double the time."""
        return tree.map_leaves(lambda column: column, self._columns)


Keys = NDArray[np.int64]


@final
class ColumnsInMemory:
    """The columns of several sources in memory that differ in nothing but their lengths."""

    def __init__(self, columns: Sequence[Any]) -> None:
        self.structure = columns[0]
        # For each column, the array of each source.
        self.arrays = list(zip(*([leaf for _, leaf in tree.leaves(each)] for each in columns), strict=True))
        # Some are views, of which `numpy.take` would copy everything.
        self.are_views = [not all(map(can_be_taken_from, of_column)) for of_column in self.arrays]
        self.num_sources = len(columns)

    @classmethod
    def of(cls, sources: Sequence[Any]) -> Self | None:
        """Returns the columns of the sources, or None if a source has none in memory or has other ones."""
        columns = [source.stackable_columns for source in sources if type(source) is InMemoryDataSource]
        if len(columns) < len(sources) or not all(
            each is not None and _are_alike(columns[0], each) for each in columns
        ):
            return None
        return cls(columns)


@final
class RecordsInMemory(ColumnarRecords):
    """Records that are copied from columns in memory when they are needed, in one pass over each column.

    A record has the number of its source, and its key there.
    """

    def __init__(self, columns: ColumnsInMemory, numbers: Keys, keys: Keys) -> None:
        self._columns = columns
        self._numbers = numbers
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return RecordsInMemory(self._columns, self._numbers[index], self._keys[index])
        (record,) = RecordsInMemory(self._columns, self._numbers[index, np.newaxis], self._keys[index, np.newaxis])
        return record

    def __iter__(self) -> Iterator[Any]:
        return iter(rows_of(self.stack(np.empty), len(self)))

    def stack(self, allocate: Allocate) -> Any:
        by_source = cut(self._numbers, self._columns.num_sources)
        keys, rows = self._keys[by_source.order], by_source.rows
        batches = iter(
            [
                self._gathered(arrays, by_source.runs, keys, rows, allocate, are_views=are_views)
                for arrays, are_views in zip(self._columns.arrays, self._columns.are_views, strict=True)
            ]
        )
        return tree.map_leaves(lambda _: next(batches), self._columns.structure)

    def _gathered(
        self,
        arrays: Sequence[NDArray[Any]],
        runs: Sequence[tuple[int, int, int]],
        keys: Keys,
        rows: NDArray[np.intp],
        allocate: Allocate,
        *,
        are_views: bool,
    ) -> NDArray[Any]:
        """Returns the rows of one column: first sorted by source, then in their order."""
        sorted_rows = np.empty((len(keys), *arrays[0].shape[1:]), arrays[0].dtype)
        for number, start, stop in runs:
            if are_views:
                copy_images(arrays[number][keys[start:stop]], sorted_rows[start:stop])
                continue
            # The keys are checked: with any other mode than "raise", NumPy writes to `out` without a second copy.
            arrays[number].take(keys[start:stop], 0, sorted_rows[start:stop], "clip")
        return sorted_rows.take(rows, 0, allocate(sorted_rows.shape, sorted_rows.dtype), "clip")


@final
class RecordsOfSources(ColumnarRecords):
    """Records that several sources returned, each in one read.

    Args:
        read: the records of each source, of at least one source.
        by_source: the batch that was cut by source.
    """

    def __init__(self, read: Sequence[ColumnarRecords], by_source: Cut) -> None:
        self._read = read
        self._by_source = by_source

    def __len__(self) -> int:
        return len(self._by_source.order)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)

    def stack(self, allocate: Allocate) -> Any:
        """Returns the batch, or None if the columns of the sources differ: the records themselves are then stacked."""
        batches = [records.stack(np.empty) for records in self._read]
        if not all(_are_alike(batches[0], batch) for batch in batches):
            return None
        rows = [self._by_source.order[start:stop] for _, start, stop in self._by_source.runs]
        columns = zip(*([leaf for _, leaf in tree.leaves(batch)] for batch in batches), strict=True)
        stacked = (self._joined(column, rows, allocate) for column in columns)
        return tree.map_leaves(lambda _: next(stacked), batches[0])

    def _joined(self, column: Sequence[Any], rows: Sequence[NDArray[np.intp]], allocate: Allocate) -> Any:
        batch = allocate((len(self), *column[0].shape[1:]), column[0].dtype)
        for values, of_source in zip(column, rows, strict=True):
            batch[of_source] = values
        return batch

    @functools.cached_property
    def _records(self) -> list[Any]:
        return self._by_source.put_back([record for records in self._read for record in records])


def _are_alike(one: Any, other: Any) -> bool:
    """Returns True if two batches have the same structure of arrays that differ in nothing but their lengths."""
    if type(one) is not type(other):
        return False
    members = tree.children(one)
    if members is None:
        is_array = isinstance(one, np.ndarray) and not one.dtype.hasobject
        return is_array and one.dtype == other.dtype and one.shape[1:] == other.shape[1:]
    same_names = list(tree.paths(one)) == list(tree.paths(other))
    return same_names and all(itertools.starmap(_are_alike, zip(members, tree.children(other) or (), strict=True)))
