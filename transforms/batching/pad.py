"""Padding of a batch with rows that are not elements."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream import tree
from millstream.columnar import Allocate
from millstream.transforms.batch import PaddedBatch


def pad(batch: Any, num_real: int, size: int, allocate: Allocate = np.empty) -> PaddedBatch:
    """Returns the first rows of a batch followed by padding, and the mask that tells them apart.

    Args:
        batch: a result of `stack`: a structure, as in `millstream.tree`, of None and of arrays with at least one row.
        num_real: the number of rows that are elements: all of the batch, or 0 if it is only a template.
        size: the number of rows of the padded batch.
        allocate: allocates each array; arrays of objects have their own memory.
    """
    mask = allocate((size,), np.dtype(np.bool_))
    mask[:num_real] = True
    mask[num_real:] = False

    def fill(leaf: Any) -> Any:
        return None if leaf is None else _padded_array(leaf, num_real, size, allocate)

    return PaddedBatch(batch if num_real == size else tree.map_leaves(fill, batch), mask)


def _padded_array(rows: NDArray[Any], num_real: int, size: int, allocate: Allocate) -> NDArray[Any]:
    """Returns an array of `size` rows: the first `num_real` of the given rows, then zeros."""
    shape = (size, *rows.shape[1:])
    filled = np.empty(shape, rows.dtype) if rows.dtype.hasobject else allocate(shape, rows.dtype)
    filled[:num_real] = rows[:num_real]
    filled[num_real:] = _zero(rows)
    return filled


def _zero(rows: NDArray[Any]) -> Any:
    """Returns the value of padding: the zero of the dtype, or an empty text."""
    if rows.dtype == np.object_:
        first = next(rows.flat, None)
        return first[:0] if isinstance(first, (str, bytes)) else None
    # Not 0, which would be the text "0" in an array of strings.
    return np.zeros((), rows.dtype)
