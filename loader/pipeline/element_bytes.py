"""Estimates of the memory of elements, for budgets and call sizes."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream import tree

_SAMPLE = 8
"""The number of evenly spread elements that are measured."""


def num_bytes(values: Sequence[Any]) -> int:
    """Returns the estimated number of bytes of elements, or of the items of a list."""
    count = len(values)
    if count <= _SAMPLE:
        return sum(map(_bytes_of, values))
    # Evenly spread and including the last, because a long document may be anywhere.
    rows = [number * (count - 1) // (_SAMPLE - 1) for number in range(_SAMPLE)]
    return sum([_bytes_of(values[row]) for row in rows]) * count // _SAMPLE


def _bytes_of(value: Any) -> int:
    if isinstance(value, np.ndarray):
        # An array of objects counts the objects, such as the texts of a batch.
        return int(value.nbytes) if not value.dtype.hasobject else num_bytes(value.reshape(-1).tolist())
    if type(value) is dict:
        return sum(map(_bytes_of, value.values()))
    try:
        children = tree.parts(value)
    except Exception:  # noqa: BLE001  (a class of the user may fail to list its fields)
        children = None
    if children is not None:
        return num_bytes(children)
    size = getattr(value, "nbytes", None)
    return size if type(size) is int else sys.getsizeof(value, 0)
