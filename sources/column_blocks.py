"""Records that were read as arrays, one per column."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from numpy.typing import NDArray

from millstream.columnar import Allocate, ColumnarRecords
from millstream.sources.memory import rows_of, stacks


def records_of_arrays(columns: Mapping[str, NDArray[Any]], count: int) -> Sequence[dict[str, Any]]:
    """Returns the records that arrays of shape (count, …) hold, one array per column.

    The arrays are new ones, which belong to the records.
    """
    native = {name: column.astype(column.dtype.newbyteorder("="), copy=False) for name, column in columns.items()}
    return _ArrayRecords(native, count) if all(map(stacks, native.values())) else rows_of(native, count)


@final
class _ArrayRecords(ColumnarRecords):
    """The rows of arrays, as records or as one batch."""

    def __init__(self, columns: Mapping[str, NDArray[Any]], count: int) -> None:
        self._columns = columns
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        rows = {name: column[index] for name, column in self._columns.items()}
        if isinstance(index, slice):
            return _ArrayRecords(rows, len(range(*index.indices(self._count))))
        return rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(rows_of(self._columns, self._count))

    def stack(self, allocate: Allocate) -> dict[str, NDArray[Any]]:  # noqa: ARG002
        """Returns the arrays themselves, which are as new as those of `allocate`: a copy would double the time."""
        return dict(self._columns)
