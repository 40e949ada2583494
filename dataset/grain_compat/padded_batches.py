"""Batches of one size, with padding in the last one."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np

from millstream import tree
from millstream.checks import as_integer
from millstream.transforms.batching.stack import stack


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
