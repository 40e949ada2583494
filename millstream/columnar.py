"""Records stored as columns, which can be batched without being split into records."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""A function that allocates an uninitialised, C-contiguous array: `numpy.empty`, or one for shared memory."""


UNEVEN_BYTES = 1 << 20
"""Size of the array up to which texts of any lengths are stacked as an array of text."""

UNEVEN_FACTOR = 8
"""Factor by which padding may lengthen the texts of a larger array. Beyond it, they become an array of objects."""


class ColumnarRecords(Sequence[Any]):
    """A sequence of records that also exists as one batch.

    A source's `__getitems__` may return one. Operations get the records, which are built during iteration; a Batch that
    comes first takes the columns unchanged.
    """

    @abc.abstractmethod
    def stack(self, allocate: Allocate) -> Any:
        """Returns the stacked records, in arrays allocated by `allocate`.

        None if the stacked records are not known; they are then stacked one by one.
        """


def stack_texts(texts: list[str], allocate: Allocate) -> NDArray[Any]:
    """Returns texts as an array: of dtype `<U` as long as the longest, or of objects.

    They become objects if any has a NUL character, because NumPy strips these at the ends, or if their lengths differ
    so much that the array would take more than UNEVEN_BYTES and more than UNEVEN_FACTOR times the bytes of their
    characters. Only the texts of the batch decide.
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
    """Returns values, such as bytes, as an array of objects in its own memory."""
    batch = np.empty(len(values), np.object_)
    batch[:] = values
    return batch
