"""Which values are plain: any pickler writes them alike, so the fastest one may.

Batches are plain as a rule: a dict of a few arrays. cloudpickle would find nothing to do in one of them, and to find
that takes it longer than pickle takes for the whole.
"""

from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_LEVELS = 8
"""Structure below so many levels is not looked at, as it may contain itself."""

MOST_CHILDREN = 64
"""Nor is structure of more parts than this, unless all are leaves: to look would cost as much as it can save."""

_LEAVES = frozenset({bool, bytes, complex, float, int, str, NoneType})


def is_plain(value: Any, levels: int = MOST_LEVELS) -> bool:
    """Returns whether a value is of dicts, lists, tuples, leaves of Python's own and contiguous arrays of numbers.

    False says nothing: it may only be too large to look.

    Args:
        value: any.
        levels: how many levels of structure to look at.
    """
    kind = type(value)
    if kind is np.ndarray:
        return _is_plain_array(value)
    if kind in _LEAVES:
        return True
    if kind is dict:
        children = (*value, *value.values())
    elif kind is list or kind is tuple:
        children = value
    else:
        return False
    if not levels or len(children) > MOST_CHILDREN:
        return _LEAVES.issuperset(map(type, children))
    return all(is_plain(child, levels - 1) for child in children)


def _is_plain_array(array: NDArray[Any]) -> bool:
    """Returns whether NumPy itself hands out the memory of an array as it is: see `reduce_array`."""
    dtype = array.dtype
    return bool(array.flags.forc and dtype.isbuiltin == 1 and dtype.kind not in "OmM" and dtype.itemsize)
