"""Records that a source holds as columns: they need not be taken apart to be stacked again."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""Gives an uninitialised, C-contiguous array of a shape and dtype: `numpy.empty`, or shared memory."""


UNEVEN_BYTES = 1 << 20
"""Batches of texts whose array would take no more bytes than this are arrays of text, however uneven."""

UNEVEN_FACTOR = 8
"""Larger ones become arrays of objects if padding would make them more than this many times as long."""


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
    """Returns texts as an array: of dtype `<U` as long as the longest, or of objects.

    They are objects if any has a NUL character, because NumPy cuts these off the ends; and if they differ so much in
    length that the array would take more than UNEVEN_BYTES and UNEVEN_FACTOR times what their characters take. The
    texts of a batch alone decide it.
    """
    characters = "".join(texts)
    longest = max(1, max(map(len, texts), default=0))
    padded = longest * len(texts)
    if "\0" in characters or (4 * padded > UNEVEN_BYTES and padded > UNEVEN_FACTOR * len(characters)):
        return stack_objects(texts)
    batch = allocate((len(texts),), np.dtype(f"<U{longest}"))
    batch[:] = texts
    return batch


def stack_objects(values: list[Any]) -> NDArray[Any]:
    """Returns values, such as bytes, as an array of objects, in memory of its own."""
    batch = np.empty(len(values), np.object_)
    batch[:] = values
    return batch
