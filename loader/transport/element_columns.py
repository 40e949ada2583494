"""Transfer of elements as columns: small arrays of many elements become one array.

Pickling an array costs microseconds, however small it is. Elements that are not batched yet often have the same
structure and small arrays, so these cross as the rows of one array. Arrays of different lengths, such as documents, are
concatenated.

Guarantees:
    * Elements come back with the same structure, keys, dtypes, shapes, bytes and writability.
    * Elements that are not alike cross as they are: a list of elements is a valid column.
    * Arrays of one column share memory. Only small arrays become columns, so keeping one of them pins little.

Of all structures, only plain dicts and tuples are split. Others may hold more than their children, in attributes or in
their constructor, and have to come back complete.
"""

import math
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate
from millstream.loader.pipeline.recycled_memory import ALIGNMENT

LARGE_BYTES = 1 << 14
"""Arrays of at least this size are sent one by one."""

UNALIGNED_BYTES = 1 << 12
"""Smaller arrays may begin anywhere. Others begin at a multiple of ALIGNMENT."""

MAX_DEPTH = 8
"""Structures nested more deeply cross as they are."""

_IS_WRITEABLE = attrgetter("flags.writeable")


@final
class Rows(NamedTuple):
    """Arrays of one shape and dtype, as the rows of one array."""

    array: NDArray[Any]


@final
class Fields(NamedTuple):
    """Dicts or tuples of one structure, as one column per field."""

    names: Sequence[str] | None  # The keys of the dicts; None for tuples.
    columns: Sequence["Columns"]


@final
class Ragged(NamedTuple):
    """Arrays of one dtype and different lengths, such as documents, concatenated into one."""

    array: NDArray[Any]
    lengths: bytes  # Of each array along the first axis: int64 as bytes, which pickle faster than an array.
    step: int  # The alignment of each array's first entry, in entries.


Columns: TypeAlias = Rows | Ragged | Fields | list[Any]


def to_columns(elements: list[Any], allocate: Allocate, depth: int = MAX_DEPTH) -> Columns:
    """Returns elements of any kind as columns, whose common arrays are in memory of `allocate`.

    `depth` is the number of nested levels to split. It ends the recursion of an element that contains itself.
    """
    kinds, count = set(map(type, elements)), len(elements)
    kind = kinds.pop() if len(kinds) == 1 and count > 1 and depth else None
    if kind is np.ndarray:
        return _rows(elements, allocate)
    names: list[str] | None = None
    if kind is dict:
        names = list(elements[0])
        # Only string keys: others may be equal to a key of another type, or define equality in their own way.
        are_strings = set(map(type, chain.from_iterable(elements))) == {str}
        are_alike = are_strings and list(map(list, elements)).count(names) == count
        fields = zip(*map(dict.values, elements), strict=True)
    elif kind is tuple:
        are_alike = list(map(len, elements)).count(len(elements[0]) or -1) == count
        fields = zip(*elements, strict=True)
    else:
        return elements
    columns = [to_columns(list(values), allocate, depth - 1) for values in fields] if are_alike else []
    # Without arrays, pickle is faster with the elements as they are.
    return Fields(names, columns) if any(not isinstance(column, list) for column in columns) else elements


def to_elements(columns: Columns) -> list[Any]:
    """Inverts `to_columns`. Small arrays are views of the common ones."""
    if isinstance(columns, Rows):
        return list(columns.array)
    if isinstance(columns, Ragged):
        lengths = np.frombuffer(columns.lengths, dtype=np.int64)
        starts = _starts(lengths, columns.step)[:-1]
        return [
            columns.array[start : start + length]
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
    if isinstance(columns, Fields):
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
        # Different shapes or dtypes: NumPy checks them anyway.
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
    joined = allocate((int(starts[-1]), *shape), first.dtype)
    gap = np.zeros((step - 1, *shape), first.dtype)
    gaps = (np.diff(starts) - sizes).tolist()
    padded = [run for array, missing in zip(arrays, gaps, strict=True) for run in (array, gap[:missing])]
    np.concatenate(padded if any(gaps) else arrays, axis=0, out=joined, casting="no")
    joined.flags.writeable = first.flags.writeable
    return Ragged(joined, sizes.tobytes(), step)


def _starts(lengths: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """Returns the start of each array and of the next one, all multiples of `step`."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(-(-lengths // step) * step, out=starts[1:])
    return starts
