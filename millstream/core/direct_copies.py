"""Copies of the large arrays of records, made where the batch of these records will be.

A Batch that gets these very arrays as its elements need not copy them again, which is half of the work on images in
memory that no operation replaces.

Guarantees:
    * A batch shares no memory with anything that user code has kept. After the Batch, when its elements are gone, the
      references to each row and to the memory of all rows are counted. If one was added, the batch is copied.
    * Two arrays of a batch share no memory.
"""

import operator
import sys
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.columnar import Allocate

_layout = operator.attrgetter("shape", "strides", "dtype")


@final
class DirectCopies:
    """The copies for one batch, and the allocator of its other arrays.

    Args:
        allocate: allocates the memory of the batch.

    Attributes:
        count: the number of records of the batch, which is set before the first copy.
    """

    def __init__(self, allocate: Allocate) -> None:
        self.count = 0
        self._allocate = allocate
        self._columns: dict[int, _Rows] = {}

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Allocates an array that no copies are made in."""
        return self._allocate(shape, dtype)

    def copy(self, number: int, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the copy of an array of the next record, given its number among those of the record."""
        rows = self._columns.get(number)
        if rows is None:
            rows = self._columns[number] = _Rows(self.count, array, self._allocate)
        dtype = array.dtype
        # Unpickled arrays have equal dtypes. Metadata is not compared by `==`.
        is_alike = dtype is rows.dtype or (dtype == rows.dtype and dtype.metadata is None)
        if not is_alike or array.shape != rows.shape:
            return array.copy()
        row: NDArray[Any] = rows.next()
        row[...] = array
        return row

    def batch_of(self, column: Sequence[Any]) -> NDArray[Any] | None:
        """Returns the batch whose rows are exactly these arrays in their order, or None."""
        found = (rows.batch for rows in self._columns.values() if rows.are_taken(column))
        return next(found, None)

    def settled(self, batch: Any) -> tuple[Any, bool]:
        """Returns a batch that was built, with copies of the arrays whose rows user code has kept, and if it has any.

        Nothing else may refer to the elements of the batch any more. Code that keeps one row keeps the memory of all,
        so later batches should be copied.
        """
        kept = [rows.batch for rows in self._columns.values() if rows.are_kept]
        if not kept:
            return batch, False
        return tree.map_leaves(lambda leaf: leaf.copy() if any(leaf is array for array in kept) else leaf, batch), True


class _Rows:
    """The rows of a batch, which are filled in order."""

    def __init__(self, count: int, example: NDArray[Any], allocate: Allocate) -> None:
        self.shape, self.dtype = example.shape, example.dtype
        self.batch = allocate((count, *example.shape), example.dtype)[:]
        self._rows = list(self.batch)
        # One object, to which the rows and all views of them refer.
        self._base = self.batch.base
        self.next = iter(self._rows).__next__
        self._layout = _layout(self._rows[0])
        self._is_taken = False
        self._references = self._count_references()

    def are_taken(self, column: Sequence[Any]) -> bool:
        """Returns True once, if the values are the rows in their order, whose shape and dtype user code can set."""
        if self._is_taken or len(column) != len(self._rows) or not all(map(operator.is_, column, self._rows)):
            return False
        self._is_taken = set(map(_layout, self._rows)) == {self._layout}
        return self._is_taken

    @property
    def are_kept(self) -> bool:
        return self._count_references() != self._references

    def _count_references(self) -> tuple[int, int]:
        return sys.getrefcount(self._base), max(map(sys.getrefcount, self._rows))
