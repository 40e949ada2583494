"""Fills a batch up with rows that are not elements."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream import tree
from millstream.columnar import Allocate
from millstream.transforms.batch import PaddedBatch


def pad(batch: Any, num_real: int, size: int, allocate: Allocate = np.empty) -> PaddedBatch:
    """Returns the first rows of a batch with padding after them, and the mask that tells them apart.

    Args:
        batch: what `stack` gives: structures, as in `millstream.tree`, of None and of arrays of at least one row.
        num_real: how many rows are elements: those of the batch, or 0 where it is only a template.
        size: how many rows the padded batch has.
        allocate: gives the memory of each array; arrays of objects have their own memory.
    """
    mask = allocate((size,), np.dtype(np.bool_))
    mask[:num_real] = True
    mask[num_real:] = False

    def fill(leaf: Any) -> Any:
        return None if leaf is None else _padded_array(leaf, num_real, size, allocate)

    return PaddedBatch(batch if num_real == size else tree.map_leaves(fill, batch), mask)


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
