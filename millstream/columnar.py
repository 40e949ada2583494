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
        """Returns what stacking the records gives, its arrays in memory from `allocate`."""
