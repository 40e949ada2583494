"""Batches padded with rows that are not elements."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.checks import as_integer
from millstream.core.columnar import Allocate
from millstream.transforms.batch import PaddedBatch
from millstream.transforms.batching.stack import stack


def pad(batch: Any, num_real: int, size: int, allocate: Allocate = np.empty) -> PaddedBatch:
    """Returns the first rows of a batch followed by padding, and the mask that tells them apart.

    Args:
        batch: a result of `stack`: a structure of None and of arrays with at least one row.
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


def batch_and_pad(values: Sequence[Any], *, batch_size: SupportsIndex, pad_value: Any = 0) -> Any:
    """Returns a batch of `batch_size` rows: the elements, followed by rows of padding.

    It is meant as a batch function: `.batch(8, batch_fn=functools.partial(batch_and_pad, batch_size=8))`.

    Args:
        values: 1 to `batch_size` elements of the same structure.
        batch_size: the number of rows of the batch.
        pad_value: the padding, which is converted to the dtype of each leaf.

    Raises:
        ValueError: there are no elements, or too many.

    Examples:
        >>> millstream.experimental.batch_and_pad([1, 2], batch_size=4, pad_value=-1)
        array([ 1,  2, -1, -1])
    """
    size = as_integer(batch_size, "batch_size", minimum=1)
    if not 1 <= len(values) <= size:
        raise ValueError(f"batch_and_pad makes a batch of 1 to batch_size={size} elements, got {len(values)}.")
    batch = stack(list(values))
    if len(values) == size:
        return batch

    def fill(rows: Any) -> Any:
        if rows is None:
            return None
        return np.concatenate([rows, np.full((size - len(values), *rows.shape[1:]), pad_value, rows.dtype)])

    return tree.map_leaves(fill, batch)
