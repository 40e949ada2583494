"""Elements as columns, for the way between two processes: small arrays of many elements become one array.

To pickle an array costs some microseconds, however small it is. Elements that are not batched yet are often alike and
have small arrays, whose rows in one common array are all that has to cross.

Guarantees:
    * Elements come back with the structure, keys, dtypes, shapes, bytes and writability that they had.
    * What is not alike crosses as it is: a list of elements is columns, too.
    * Arrays share the memory that they come in. So only small ones do, which cost little to keep for another's sake.

Of the structures of `millstream.tree`, only plain dicts and tuples are taken apart: any other may hold more than its
parts, in attributes or in the way in which it makes up a value, and has to come back whole.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate
from millstream.loader.pipeline.recycled_memory import ALIGNMENT

LARGE_BYTES = 1 << 14
"""Arrays from this size on are sent one by one."""

UNALIGNED_BYTES = 1 << 10
"""Smaller arrays may begin anywhere; others begin at a multiple of ALIGNMENT."""

MOST_LEVELS = 8
"""Structure below this many levels crosses as it is."""

_IS_WRITEABLE = attrgetter("flags.writeable")


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Arrays that are alike: the rows of one."""

    array: NDArray[Any]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Dicts or tuples that are alike: the columns of their parts.

    Attributes:
        names: the keys of the dicts; None for tuples.
        columns: one for each part.
    """

    names: Sequence[str] | None
    columns: Sequence["Columns"]


Columns: TypeAlias = Rows | Parts | list[Any]


def to_columns(elements: list[Any], allocate: Allocate, depth: int = MOST_LEVELS) -> Columns:
    """Returns the elements as columns.

    Args:
        elements: any.
        allocate: gives the memory of the common arrays.
        depth: how many levels of structure to take apart; an element may contain itself.
    """
    kinds, count = set(map(type, elements)), len(elements)
    kind = kinds.pop() if len(kinds) == 1 and count > 1 and depth else None
    if kind is np.ndarray:
        return _rows(elements, allocate)
    names: list[str] | None = None
    if kind is dict:
        names = list(elements[0])
        # Strings alone: other keys may be equal and yet of another type, or compare as they like.
        are_strings = set(map(type, chain.from_iterable(elements))) == {str}
        are_alike = are_strings and list(map(list, elements)).count(names) == count
        parts = zip(*map(dict.values, elements), strict=True)
    elif kind is tuple:
        are_alike = list(map(len, elements)).count(len(elements[0]) or -1) == count
        parts = zip(*elements, strict=True)
    else:
        return elements
    columns = [to_columns(list(values), allocate, depth - 1) for values in parts] if are_alike else []
    # Without any array, pickle is faster with the elements as they are.
    return Parts(names, columns) if any(not isinstance(column, list) for column in columns) else elements


def to_elements(columns: Columns) -> list[Any]:
    """Returns the elements that `to_columns` was given; small arrays are views of the common ones."""
    if isinstance(columns, Rows):
        return list(columns.array)
    if isinstance(columns, Parts):
        rows = zip(*map(to_elements, columns.columns), strict=True)
        return list(rows) if columns.names is None else [dict(zip(columns.names, row, strict=True)) for row in rows]
    return columns


def _rows(arrays: list[NDArray[Any]], allocate: Allocate) -> Columns:
    count, first = len(arrays), arrays[0]
    if (
        first.ndim == 0
        or first.dtype.hasobject
        or not 0 < first.nbytes < LARGE_BYTES
        or (first.nbytes >= UNALIGNED_BYTES and first.nbytes % ALIGNMENT)
        or list(map(_IS_WRITEABLE, arrays)).count(first.flags.writeable) < count
    ):
        return arrays
    try:
        if list(map(len, arrays)).count(len(first)) < count:
            return arrays
        rows = allocate((count, *first.shape), first.dtype)
        np.concatenate(arrays, axis=0, out=rows.reshape(-1, *first.shape[1:]), casting="no")
    except (TypeError, ValueError):
        # Other shapes or dtypes: NumPy looks at them anyway.
        return arrays
    rows.flags.writeable = first.flags.writeable
    return Rows(rows)
