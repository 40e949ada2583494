"""Elements as columns, for the way between two processes: small arrays of many elements become one array.

To pickle an array costs some microseconds, however small it is. Elements that are not batched yet are often alike and
have small arrays, whose rows in one common array are all that has to cross. Documents differ in length: theirs are laid
end to end.

Guarantees:
    * Elements come back with the structure, keys, dtypes, shapes, bytes and writability that they had.
    * What is not alike crosses as it is: a list of elements is columns, too.
    * Arrays share the memory that they come in. So only small ones do, which cost little to keep for another's sake.

Of the structures of `millstream.tree`, only plain dicts and tuples are taken apart: any other may hold more than its
parts, in attributes or in the way in which it makes up a value, and has to come back whole.
"""

import math
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate
from millstream.loader.pipeline.recycled_memory import ALIGNMENT

LARGE_BYTES = 1 << 14
"""Arrays from this size on are sent one by one."""

UNALIGNED_BYTES = 1 << 12
"""Smaller arrays may begin anywhere; others begin at a multiple of ALIGNMENT."""

MOST_LEVELS = 8
"""Structure below this many levels crosses as it is."""

_IS_WRITEABLE = attrgetter("flags.writeable")


@final
class Rows(NamedTuple):
    """Arrays that are alike: the rows of one."""

    array: NDArray[Any]


@final
class Parts(NamedTuple):
    """Dicts or tuples that are alike: the columns of their parts.

    Attributes:
        names: the keys of the dicts; None for tuples.
        columns: one for each part.
    """

    names: Sequence[str] | None
    columns: Sequence["Columns"]


@final
class Ragged(NamedTuple):
    """Arrays that are alike but for their lengths, such as documents: laid end to end in one.

    Attributes:
        array: all of them.
        lengths: how many entries each has, along the first axis; an int64 array as bytes, which pickle quicker.
        step: each begins at a multiple of this many entries.
    """

    array: NDArray[Any]
    lengths: bytes
    step: int


Columns: TypeAlias = Rows | Ragged | Parts | list[Any]


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
    if isinstance(columns, Ragged):
        lengths = np.frombuffer(columns.lengths, dtype=np.int64)
        starts = _starts(lengths, columns.step)[:-1]
        return [
            columns.array[start : start + length]
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
    if isinstance(columns, Parts):
        rows = zip(*map(to_elements, columns.columns), strict=True)
        return list(rows) if columns.names is None else [dict(zip(columns.names, row, strict=True)) for row in rows]
    return columns


def _rows(arrays: list[NDArray[Any]], allocate: Allocate) -> Columns:
    first = arrays[0]
    is_shared = list(map(_IS_WRITEABLE, arrays)).count(first.flags.writeable) == len(arrays)
    if first.ndim == 0 or first.dtype.hasobject or not is_shared:
        return arrays
    try:
        lengths = list(map(len, arrays))
        is_even = lengths.count(len(first)) == len(arrays)
        return _even(arrays, allocate) if is_even else _ragged(arrays, lengths, allocate)
    except (TypeError, ValueError):
        # Other shapes or dtypes: NumPy looks at them anyway.
        return arrays


def _even(arrays: list[NDArray[Any]], allocate: Allocate) -> Columns:
    count, first = len(arrays), arrays[0]
    if not 0 < first.nbytes < LARGE_BYTES or (first.nbytes >= UNALIGNED_BYTES and first.nbytes % ALIGNMENT):
        return arrays
    rows = allocate((count, *first.shape), first.dtype)
    np.concatenate(arrays, axis=0, out=rows.reshape(-1, *first.shape[1:]), casting="no")
    rows.flags.writeable = first.flags.writeable
    return Rows(rows)


def _ragged(arrays: list[NDArray[Any]], lengths: list[int], allocate: Allocate) -> Columns:
    first, shape = arrays[0], arrays[0].shape[1:]
    entry_bytes = math.prod(shape) * first.dtype.itemsize
    if not 0 < sum(lengths) * entry_bytes < LARGE_BYTES * len(arrays):
        return arrays
    step = 1
    if max(lengths) * entry_bytes >= UNALIGNED_BYTES:
        step, rest = divmod(ALIGNMENT, entry_bytes)
        if rest:
            return arrays
    sizes = np.array(lengths, dtype=np.int64)
    starts = _starts(sizes, step)
    whole = allocate((int(starts[-1]), *shape), first.dtype)
    gap = np.zeros((step - 1, *shape), first.dtype)
    gaps = (np.diff(starts) - sizes).tolist()
    laid = [part for array, missing in zip(arrays, gaps, strict=True) for part in (array, gap[:missing])]
    np.concatenate(laid if any(gaps) else arrays, axis=0, out=whole, casting="no")
    whole.flags.writeable = first.flags.writeable
    return Ragged(whole, sizes.tobytes(), step)


def _starts(lengths: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """Returns where arrays of some lengths begin, and where the next one would, each at a multiple of `step`."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(-(-lengths // step) * step, out=starts[1:])
    return starts
