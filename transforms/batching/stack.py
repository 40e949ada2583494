"""Stacks elements into one batch. Each leaf becomes an array with a new first axis.

    in each element                              in the batch
    None                                         None
    bool, int, float, complex                    array of bool, int64 (or uint64), float64, complex128
    int and float in one leaf                    array of float64; ints beyond 2**53 are refused
    numpy scalar                                 array of its dtype
    numpy array, of any dtype and shape          array of its dtype; strings as wide as the widest
    Arrow table                                  Arrow table of the rows of all elements
    object with `__array__` (JAX, PyTorch, …)    array that `np.asarray` returns for it
    str                                          array of dtype `<U` as long as the longest, or of objects
    bytes                                        array of objects, because an `S` array would drop trailing zero bytes
    dict or other mapping                        dict
    list, tuple, named tuple, dataclass          the same; subclasses of list and tuple become list and tuple

Structures are those of `millstream.core.tree`. All elements are traversed together, which is 2 to 10 times as fast.

Nothing is lost silently. A leaf has the same type, shape and dtype in all elements, a mapping the same keys, a list the
same length. NumPy strips NUL characters from the ends of strings, so if any string ends in one, all become
objects. An array of strings takes 4 bytes per string times the length of the longest. If that exceeds both 1 MB and 8
times the bytes of the characters, all become objects, too. Only the strings of the batch decide. A masked array, an
image with a palette and an array with a unit are refused, because stacking would lose mask, palette and unit; other
array subclasses become plain arrays. The batch of dataclass instances is built without calling the class, and has its
fields only.
"""

import dataclasses
import reprlib
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, NoReturn, TypeAlias

import numpy as np

from millstream.core import tree
from millstream.core.columnar import (
    Allocate,
    ColumnarRecords,
    any_flipped,
    copy_images,
    find_loss,
    stack_objects,
    stack_texts,
)
from millstream.core.direct_copies import DirectCopies
from millstream.errors import StackError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_BOOL, _FLOAT = np.dtype(np.bool_), np.dtype(np.float64)

_INTEGERS = (("q", np.dtype(np.int64)), ("Q", np.dtype(np.uint64)))
"""Ints become the first of these dtypes that all values fit."""

_MAX_EXACT = 1 << 53
"""Floats hold all ints up to this one."""

_WIDE = 8
"""Number of keys from which all values of a dict are read in one call; with fewer, key by key is as fast."""

_ADVICE = "in a Map before Batch, or give Batch a batch_fn that builds the batch."


def stack(elements: Sequence[Any], allocate: Allocate = np.empty) -> Any:
    """Returns the batch of the elements: their structure, each leaf stacked along a new axis 0.

    Writing into the batch never changes an element, except through the objects that arrays of objects refer to.

    Args:
        elements: at least one element, all of the same structure. They are not changed.
        allocate: allocates each array of the batch; arrays of objects have their own memory.

    Raises:
        StackError: elements differ or contain a value that does not stack. The message names its path.
    """
    if not elements:
        raise StackError("A batch needs at least one element, got none.")
    if type(elements) is list:
        return _stack(elements, "", allocate)
    if isinstance(elements, ColumnarRecords) and (batch := elements.stack(allocate)) is not None:
        return batch
    return _stack(list(elements), "", allocate)


_Stacker: TypeAlias = Callable[[list[Any], str, Allocate], Any]


def _stack(column: list[Any], path: str, allocate: Allocate) -> Any:
    """Returns the batch of the values of all elements at `path`. Every `_stack_…` has this contract.

    The column must be a list, because NumPy treats a tuple as one structured value.
    """
    kind = type(column[0])
    if list(map(type, column)).count(kind) != len(column):
        if set(map(type, column)) == {int, float}:
            return _stack_numbers(column, path, allocate)
        _refuse_difference(column, path, "type", map(type, column))
    return _stacker(kind)(column, path, allocate)


def _stacker(kind: type) -> _Stacker:
    if (known := _KNOWN.get(kind)) is not None:
        return known
    for base, stacker in _STACKERS:
        if issubclass(kind, base):
            return stacker
    if dataclasses.is_dataclass(kind):
        return _stack_dataclasses
    if kind.__name__ == "Table" and kind.__module__.partition(".")[0] == "pyarrow":
        return _stack_tables
    if hasattr(kind, "__array__") or hasattr(kind, "__array_interface__"):
        return _stack_array_likes
    return _refuse_type


def _stack_arrays(column: list[Array], path: str, allocate: Allocate) -> Array:
    if type(allocate) is DirectCopies and (batch := allocate.batch_of(column)) is not None:
        return batch
    count, shape, dtype = len(column), column[0].shape, column[0].dtype
    batch = _memory((count, *shape), dtype, allocate)
    if any_flipped(column):
        _refuse_unlike_arrays(column, path)
        for image, row in zip(column, batch, strict=True):
            copy_images(image, row)
        return batch
    try:
        # Concatenating along the first axis needs no new axis per array: half of np.stack's time for small arrays.
        rows = column if shape else [row[np.newaxis] for row in column]
        length = len(rows[0])
        same_length = list(map(len, rows)).count(length) == count
        if same_length:
            np.concatenate(rows, axis=0, out=batch.reshape(count * length, *shape[1:]), casting="no")
    except (TypeError, ValueError):
        if {(array.shape, array.dtype.kind) for array in column} in ({(shape, "S")}, {(shape, "U")}):
            return _placed(np.stack(column), allocate)
        # NumPy detects every other difference, but does not say which element differs.
        _refuse_unlike_arrays(column, path)
        raise
    if not same_length:
        _refuse_unlike_arrays(column, path)
    return batch


def _refuse_unlike_arrays(column: list[Array], path: str) -> None:
    for what in ("shape", "dtype"):
        properties = list(map(attrgetter(what), column))
        if properties.count(properties[0]) != len(properties):
            _refuse_difference(column, path, what, properties)


def _stack_array_likes(column: list[Any], path: str, allocate: Allocate) -> Array:
    if found := find_loss(column):
        row, loss = found
        kind = type(column[row]).__qualname__
        raise StackError(
            f"Cannot stack the {kind}{_at(path)} of element {row} of a batch: {loss} {_ADVICE}",
            path,
            (row,),
        )
    arrays: list[Array] = []
    try:
        # Arrays converted before an error stay in the list, so its length is the number of the failed element.
        arrays.extend(map(np.asarray, column))
    except (TypeError, ValueError, RuntimeError) as error:
        row = len(arrays)
        raise StackError(
            f"Cannot convert the {type(column[row]).__qualname__}{_at(path)} of element {row} of a batch to a NumPy "
            f"array: {error} Convert it {_ADVICE}",
            path,
            (row,),
        ) from error
    return _stack_arrays(arrays, path, allocate)


def _stack_tables(column: list[Any], path: str, _: Allocate) -> Any:
    if any(table.schema != column[0].schema for table in column):
        _refuse_difference(column, path, "schema", [table.schema for table in column])
    # Copied, because slices of a table would keep the whole table in memory.
    return sys.modules[type(column[0]).__module__].concat_tables(column).combine_chunks()


def _stack_numpy_scalars(column: list[Any], path: str, allocate: Allocate) -> Array:
    # The type alone determines the dtype, except for times with units and for structures.
    if isinstance(column[0], np.datetime64 | np.timedelta64 | np.void):
        dtypes = list(map(attrgetter("dtype"), column))
        if dtypes.count(dtypes[0]) != len(dtypes):
            _refuse_difference(column, path, "dtype", dtypes)
    return _placed(np.array(column, column[0].dtype), allocate)


def _stack_ints(column: list[int], path: str, allocate: Allocate) -> Array:
    for code, dtype in _INTEGERS:
        try:
            return _packed(column, code, dtype, allocate)
        except struct.error:
            continue
    smallest, largest = min(column), max(column)
    raise StackError(
        f"The ints of a batch must all fit int64, or all fit uint64{_at(path)}, got {reprlib.repr(smallest)} to "
        f"{reprlib.repr(largest)}. Convert them {_ADVICE}",
        path,
        tuple(sorted({column.index(smallest), column.index(largest)})),
    )


def _stack_numbers(column: list[float], path: str, allocate: Allocate) -> Array:
    """Stacks ints and floats, as JSON and YAML mix them, because they write 1.0 as 1."""
    for row, value in enumerate(column):
        if type(value) is int and abs(value) > _MAX_EXACT:
            raise StackError(
                f"The ints of a batch that also has floats must be within 2**53, which are exact as floats{_at(path)}, "
                f"got {reprlib.repr(value)} of element {row}. Convert them {_ADVICE}",
                path,
                (row,),
            )
    return _packed(column, "d", _FLOAT, allocate)


def _stack_mappings(column: list[Mapping[Any, Any]], path: str, allocate: Allocate) -> Any:
    # Plain dicts, because other mappings may invent a value for a missing key.
    dicts = column if type(column[0]) is dict else list(map(dict, column))
    keys = list(dicts[0])
    if list(map(len, dicts)).count(len(keys)) != len(dicts):
        _refuse_difference(column, path, "keys", map(set, dicts))
    try:
        if len(keys) < _WIDE:
            columns = [list(map(itemgetter(key), dicts)) for key in keys]
        else:
            # Dict by dict, because they are far apart in memory.
            columns = list(map(list, zip(*map(itemgetter(*keys), dicts), strict=True)))
    except KeyError:
        _refuse_difference(column, path, "keys", map(set, dicts))
    return _stack_children(dicts[0], columns, path, allocate)


def _stack_sequences(column: list[Sequence[Any]], path: str, allocate: Allocate) -> Any:
    lengths = list(map(len, column))
    if lengths.count(lengths[0]) != len(lengths):
        _refuse_difference(column, path, "length", lengths)
    return _stack_children(column[0], map(list, zip(*column, strict=True)), path, allocate)


def _stack_dataclasses(column: list[Any], path: str, allocate: Allocate) -> Any:
    columns = []
    for field in dataclasses.fields(column[0]):
        try:
            columns.append(list(map(attrgetter(field.name), column)))
        except AttributeError:
            held = [hasattr(value, field.name) for value in column]
            raise StackError(
                f"Element {held.index(False)} of a batch has a {type(column[0]).__qualname__}{_at(path)} whose field "
                f"{field.name} is not set. Set it {_ADVICE}",
                path,
                (held.index(False),),
            ) from None
    return _stack_children(column[0], columns, path, allocate)


def _stack_children(first: Any, columns: Iterable[list[Any]], path: str, allocate: Allocate) -> Any:
    steps = tree.paths(first)
    return tree.rebuilt(
        first, [_stack(values, path + step, allocate) for step, values in zip(steps, columns, strict=True)]
    )


# The first base class of a type counts: bool before int, NumPy's str_ and float64 as string and NumPy scalar.
_STACKERS: tuple[tuple[type, _Stacker], ...] = (
    (NoneType, lambda _column, _path, _allocate: None),
    (np.ndarray, _stack_array_likes),
    (str, lambda column, _path, allocate: stack_texts(column, allocate)),
    (bytes, lambda column, _path, _allocate: stack_objects(column)),
    (np.generic, _stack_numpy_scalars),
    (bool, lambda column, _path, allocate: _packed(column, "?", _BOOL, allocate)),
    (int, _stack_ints),
    (float, lambda column, _path, allocate: _packed(column, "d", _FLOAT, allocate)),
    (complex, lambda column, _path, allocate: _placed(np.array(column, np.complex128), allocate)),
    (list, _stack_sequences),
    (tuple, _stack_sequences),
    (Mapping, _stack_mappings),
)

_KNOWN: dict[type, _Stacker] = {**dict(_STACKERS), np.ndarray: _stack_arrays, dict: _stack_mappings}
"""The functions for exactly these types, as nearly all are: one look-up finds them, subclasses need a search."""


def _packed(column: list[Any], code: str, dtype: np.dtype[Any], allocate: Allocate) -> Array:
    batch = allocate((len(column),), dtype)
    struct.pack_into(f"{len(column)}{code}", batch.data, 0, *column)
    return batch


def _memory(shape: tuple[int, ...], dtype: np.dtype[Any], allocate: Allocate) -> Array:
    """Returns uninitialised memory: the allocator's, unless it will hold Python objects."""
    return np.empty(shape, dtype) if dtype.hasobject else allocate(shape, dtype)


def _placed(values: Array, allocate: Allocate) -> Array:
    batch = _memory(values.shape, values.dtype, allocate)
    batch[...] = values
    return batch


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _refuse_type(column: list[Any], path: str, _: Allocate) -> NoReturn:
    raise StackError(
        f"Cannot stack{_at(path)} {_described(column[0])} of element 0 of a batch: only None, numbers, str, bytes, "
        f"arrays, and dicts, lists, tuples and dataclasses of them stack. Convert it {_ADVICE}",
        path,
        (0,),
    )


def _refuse_difference(column: list[Any], path: str, what: str, properties: Iterable[Any]) -> NoReturn:
    """Raises for the first element whose property at `path` differs from element 0's."""
    first, *others = properties
    row = next(row for row, other in enumerate(others, 1) if other != first)
    hint = " (a list is structure; np.asarray turns it into one leaf)" if what == "length" else ""
    advice = f"Make them alike {_ADVICE}"
    if column[0] is None or column[row] is None:
        advice += ' For a record that failed, raise an error instead of returning None, and pass on_error="skip".'
    raise StackError(
        f"The elements of a batch must agree in {what}{_at(path)}{hint}: element 0 holds {_described(column[0])}, "
        f"element {row} holds {_described(column[row])}. {advice}",
        path,
        (0, row),
    )


def _described(value: Any) -> str:
    name = type(value).__qualname__
    if value is None:
        return name
    if isinstance(value, Mapping):
        return f"{name} with keys {reprlib.repr(list(value))}"
    if isinstance(value, list | tuple):
        return f"{name} of length {len(value)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{name} of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"{name} {reprlib.repr(value)}"
