"""Fills a batch up with rows that are not elements."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate
from millstream.transforms.batch import PaddedBatch


def pad(batch: Any, num_real: int, size: int, allocate: Allocate = np.empty) -> PaddedBatch:
    """Returns the first rows of a batch with padding after them, and the mask that tells them apart.

    Args:
        batch: what `stack` gives: dicts, lists, tuples, dataclasses and None around arrays of at least one row.
        num_real: how many rows are elements: those of the batch, or 0 where it is only a template.
        size: how many rows the padded batch has.
        allocate: gives the memory of each array; arrays of objects have memory of their own.
    """
    mask = allocate((size,), np.dtype(np.bool_))
    mask[:num_real] = True
    mask[num_real:] = False
    return PaddedBatch(batch if num_real == size else _padded(batch, num_real, size, allocate), mask)


def _padded(batch: Any, num_real: int, size: int, allocate: Allocate) -> Any:
    """Returns the structure with every array filled up."""
    if batch is None:
        return None
    if isinstance(batch, np.ndarray):
        return _padded_array(batch, num_real, size, allocate)
    if isinstance(batch, dict):
        return {key: _padded(value, num_real, size, allocate) for key, value in batch.items()}
    if isinstance(batch, list):
        return [_padded(value, num_real, size, allocate) for value in batch]
    if isinstance(batch, tuple):
        # Named tuples too: their class is not called, as in `stack`.
        return tuple.__new__(type(batch), (_padded(value, num_real, size, allocate) for value in batch))
    filled = object.__new__(type(batch))
    for field in dataclasses.fields(batch):
        object.__setattr__(filled, field.name, _padded(getattr(batch, field.name), num_real, size, allocate))
    return filled


def _padded_array(rows: NDArray[Any], num_real: int, size: int, allocate: Allocate) -> NDArray[Any]:
    """Returns an array of `size` rows: `num_real` of the given ones, then zeros."""
    shape = (size, *rows.shape[1:])
    filled = np.empty(shape, rows.dtype) if rows.dtype.hasobject else allocate(shape, rows.dtype)
    filled[:num_real] = rows[:num_real]
    filled[num_real:] = _zero(rows)
    return filled


def _zero(rows: NDArray[Any]) -> Any:
    """Returns what a padded row consists of: the zero of the dtype, among texts the empty one."""
    if rows.dtype == np.object_:
        first = next(rows.flat, None)
        return first[:0] if isinstance(first, (str, bytes)) else None
    # Not 0, which would be the text "0" in an array of strings.
    return np.zeros((), rows.dtype)
