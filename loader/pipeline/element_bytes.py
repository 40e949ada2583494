"""The size of elements in memory, estimated from a few of them: budgets and call sizes are in bytes."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream import tree

_SAMPLE = 8
"""The number of elements, evenly spread, that are measured."""


def num_bytes(values: Sequence[Any]) -> int:
    """Returns the approximate number of bytes that elements, or the items of a list, take."""
    count = len(values)
    if count <= _SAMPLE:
        return sum(map(_bytes_of, values))
    # Evenly spread, the last one included: a long document may be anywhere.
    rows = [number * (count - 1) // (_SAMPLE - 1) for number in range(_SAMPLE)]
    return sum([_bytes_of(values[row]) for row in rows]) * count // _SAMPLE


def _bytes_of(value: Any) -> int:
    if isinstance(value, np.ndarray):
        # An array of objects counts what it refers to, such as the texts of a batch.
        return int(value.nbytes) if not value.dtype.hasobject else num_bytes(value.reshape(-1).tolist())
    if type(value) is dict:
        return sum(map(_bytes_of, value.values()))
    try:
        parts = tree.parts(value)
    except Exception:  # noqa: BLE001  (a class of the user's may fail to show its fields)
        parts = None
    if parts is not None:
        return num_bytes(parts)
    size = getattr(value, "nbytes", None)
    return size if type(size) is int else sys.getsizeof(value, 0)
