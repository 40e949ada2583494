"""Records that were read as arrays, one per column."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from millstream import tree
from millstream.columnar import Allocate, ColumnarRecords
from millstream.sources.memory import rows_of, stacks


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
