"""Records that a source holds as columns: they need not be taken apart to be stacked again."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""Gives an uninitialised, C-contiguous array of a shape and dtype: `numpy.empty`, or shared memory."""


class ColumnarRecords(Sequence[Any]):
    """A sequence of records that can also be had as one batch.

    A source's `__getitems__` may return one. Operations see the records, made when they are iterated over; a Batch
    that comes first takes the columns as they are.
    """

    @abc.abstractmethod
    def stack(self, allocate: Allocate) -> Any:
        """Returns what stacking the records gives, its arrays in memory from `allocate`.

        None says that this is not known here: then the records themselves are stacked.
        """


def stack_texts(texts: list[str], allocate: Allocate) -> NDArray[Any]:
    """Returns texts as an array: of dtype `<U` as long as the longest, or of objects where there are NUL characters.

    NumPy cuts these off the ends.
    """
    if "\0" in "".join(texts):
        return stack_objects(texts)
    batch = allocate((len(texts),), np.dtype(f"<U{max(1, max(map(len, texts), default=0))}"))
    batch[:] = texts
    return batch


def stack_objects(values: list[Any]) -> NDArray[Any]:
    """Returns values, such as bytes, as an array of objects, in memory of its own."""
    batch = np.empty(len(values), np.object_)
    batch[:] = values
    return batch
