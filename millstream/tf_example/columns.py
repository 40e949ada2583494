"""Decoding of `tf.train.Example`: of batches into columns, and of one record.

An Example is a protocol buffer (tensorflow/core/example/example.proto and feature.proto):

    message Example   { Features features = 1; }
    message Features  { map<string, Feature> feature = 1; }
    message Feature   { oneof kind { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }
    message BytesList { repeated bytes value = 1; }                 // the other two likewise, packed or not

All Examples of a batch are decoded together, level by level. For a single record, the calls of NumPy would take 30
times as long as the rest. Python parses a record of the usual form instead, and any other one is decoded as a batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.tf_example.features import KINDS, FixedLengthFeature, RaggedColumn, VariableLengthFeature
from millstream.tf_example.wire import (
    BYTES,
    FOUR_BYTES,
    VARINT,
    Fields,
    Integers,
    WireData,
    WireError,
    fields_of,
    varints_in,
)

Features = Mapping[str, FixedLengthFeature | VariableLengthFeature]


def decode_columns(features: Features, examples: list[bytes]) -> dict[str, Any]:
    """Returns the columns of a batch of serialised Examples: arrays of shape (n, *shape), and `RaggedColumn`s."""
    data, count = WireData(examples), len(examples)
    pairs, kinds, values = _lists(features, data, count)
    _check_kinds(features, pairs, kinds, np.bincount(values.message, minlength=len(pairs)), count)
    columns: dict[str, Any] = {}
    for dtype in dict.fromkeys(feature.dtype for feature in features.values()):
        # All features of a dtype together, because the calls are half of the cost.
        chosen = values.where(kinds[values.message] == KINDS[dtype][0])
        column, lengths = _DECODERS[dtype](data, chosen, pairs[chosen.message] % count, len(pairs))
        ends = np.concatenate([[0], np.cumsum(lengths)])
        for index, (name, feature) in enumerate(features.items()):
            if feature.dtype != dtype:
                continue
            first, last = np.searchsorted(pairs, [index * count, (index + 1) * count])
            within, elements = column[ends[first] : ends[last]], pairs[first:last] - index * count
            if isinstance(feature, FixedLengthFeature):
                columns[name] = _fixed(name, feature, within, lengths[first:last], present=elements, count=count)
            else:
                row_lengths = np.zeros(count, np.int64)
                row_lengths[elements] = lengths[first:last]
                columns[name] = RaggedColumn(within, row_lengths)
    return {name: columns[name] for name in features}


def _check_kinds(features: Features, pairs: Integers, kinds: Integers, sizes: NDArray[np.intp], count: int) -> None:
    expected = np.array([KINDS[feature.dtype][0] for feature in features.values()])
    # An empty list has no type in Python, so an Example may name any.
    wrong = np.flatnonzero((kinds != expected[pairs // max(1, count)]) & (sizes > 0))
    if wrong.size:
        index, element = divmod(int(pairs[wrong[0]]), count)
        name, feature = list(features.items())[index]
        found = next(other for other, (number, _) in KINDS.items() if number == kinds[wrong[0]])
        raise ValueError(
            f"Feature {name!r} must be {feature.dtype}, but it is {found} in element {element} of the batch."
        )


def _lists(features: Features, data: WireData, count: int) -> tuple[Integers, Integers, Fields]:
    """Returns the features found in each element, and their values.

    The result consists of the sorted pairs f * count + k of a feature f and an element k; the kind of list of each
    pair; and the fields with values, whose `message` is an index into the pairs.
    """
    examples = _fields(data, np.arange(count), data.starts, data.stops).of(1)
    entries = _fields(data, examples.message, examples.starts, examples.stops).of(1)
    elements = examples.message[entries.message]
    members = _fields(data, elements, entries.starts, entries.stops)
    key_starts, key_stops = members.of(1).last_of_each(len(elements))
    value_starts, value_stops = members.of(2).last_of_each(len(elements))
    table = np.full(len(features) * count, -1, np.int64)
    names = data.match(key_starts, key_stops, [name.encode() for name in features])
    known = np.flatnonzero(names >= 0)
    table[names[known] * count + elements[known]] = known  # The last of several stays.
    pairs = np.flatnonzero(table >= 0)
    chosen = table[pairs]
    lists = _fields(data, pairs % count, value_starts[chosen], value_stops[chosen])
    lists = lists.where((lists.wire_type == BYTES) & (lists.number >= 1) & (lists.number <= len(KINDS)))
    # The last member of a oneof counts. A feature without one counts as missing.
    is_last = np.append(lists.message[1:] != lists.message[:-1], True)[: len(lists.message)]
    lists = lists.where(is_last)
    pairs = pairs[lists.message]
    values = _fields(data, pairs % count, lists.starts, lists.stops)
    return pairs, lists.number, values.where(values.number == 1)


def _fields(data: WireData, elements: Integers, starts: Integers, stops: Integers) -> Fields:
    """Returns the fields of messages that are parts of the given elements."""
    try:
        return fields_of(data, starts, stops)
    except WireError as error:
        raise _not_an_example(int(elements[error.message]), str(error)) from error


def _not_an_example(element: int, reason: str) -> ValueError:
    return ValueError(f"Element {element} of the batch is not a tf.train.Example, or is damaged: {reason}.")


Column = tuple[NDArray[Any], NDArray[np.int64]]
"""The concatenated values of many lists, and the number of values of each."""


def _bytes_column(data: WireData, values: Fields, _: Integers, count: int) -> Column:
    values = values.where(values.wire_type == BYTES)
    column = np.empty(len(values.message), np.object_)
    column[:] = data.slices(values.starts, values.stops)
    return column, np.bincount(values.message, minlength=count)


def _float_column(data: WireData, values: Fields, elements: Integers, count: int) -> Column:
    chosen = (values.wire_type == BYTES) | (values.wire_type == FOUR_BYTES)
    values, elements = values.where(chosen), elements[chosen]
    sizes = values.stops - values.starts
    if (sizes & 3).any():
        raise _not_an_example(
            int(elements[np.argmax(sizes & 3)]), "the size of a list of float32 in it is not a multiple of 4 bytes"
        )
    column = data.gather(values.starts, values.stops).view("<f4").astype(np.float32, copy=False)
    return column, _sums(values.message, sizes >> 2, count)


def _int_column(data: WireData, values: Fields, elements: Integers, count: int) -> Column:
    # A value that is not packed is a varint, too, so both kinds of fields are spans filled with varints.
    chosen = (values.wire_type == BYTES) | (values.wire_type == VARINT)
    values, elements = values.where(chosen), elements[chosen]
    sizes = values.stops - values.starts
    ends = np.cumsum(sizes)
    payload = data.gather(values.starts, values.stops)
    try:
        column, is_last = varints_in(payload)
    except WireError as error:
        element = elements[np.searchsorted(ends, error.message, side="right")]
        raise _not_an_example(int(element), str(error)) from error
    whole = is_last[ends[sizes > 0] - 1]
    if not whole.all():
        raise _not_an_example(int(elements[sizes > 0][np.argmin(whole)]), "a list of int64 in it ends within a number")
    if len(column) != len(payload):
        before = np.concatenate([[0], np.cumsum(is_last)])
        sizes = before[ends] - before[ends - sizes]
    return column, _sums(values.message, sizes, count)


_DECODERS: dict[str, Callable[[WireData, Fields, Integers, int], Column]] = {
    "bytes": _bytes_column,
    "float32": _float_column,
    "int64": _int_column,
}


def _sums(messages: Integers, sizes: Integers, count: int) -> NDArray[np.int64]:
    return np.bincount(messages, weights=sizes, minlength=count).astype(np.int64)


def _fixed(
    name: str,
    feature: FixedLengthFeature,
    values: NDArray[Any],
    lengths: NDArray[np.int64],
    *,
    present: Integers,
    count: int,
) -> NDArray[Any]:
    """Returns the array of a feature, given its values and lengths in the elements `present` of `count`."""
    size = math.prod(feature.shape)
    wrong = np.flatnonzero(lengths != size)
    if wrong.size:
        raise ValueError(
            f"Feature {name!r} has {lengths[wrong[0]]} values in element {present[wrong[0]]} of the batch, but its "
            f"shape {feature.shape} has {size}."
        )
    if len(present) == count:
        return values.reshape(count, *feature.shape)
    if feature.default is None:
        missing = np.setdiff1d(np.arange(count), present)
        raise ValueError(
            f"Element {missing[0]} of the batch has no feature {name!r}, which has no default. Give it one: "
            "FixedLengthFeature(..., default=...)."
        )
    rows = np.empty((count, *feature.shape), values.dtype)
    rows[:] = feature.default_values()
    rows[present] = values.reshape(len(present), *feature.shape)
    return rows


def decode_record(features: Features, record: bytes) -> dict[str, Any]:
    """Returns the values of one serialised Example: an array, or a single value for a feature of shape ().

    Raises:
        ValueError: it is not an Example, lacks a feature, or has a wrong number or type of values.
    """
    try:
        found = _walk(features, record)
        return {name: _value(feature, found.get(name)) for name, feature in features.items()}
    except (_UnusualError, IndexError, ValueError):
        pass
    try:
        columns = decode_columns(features, [record])
    except ValueError as error:
        message = str(error).replace("element 0 of the batch", "the record")
        raise ValueError(message.replace("Element 0 of the batch", "The record")) from None
    return {name: column.values if isinstance(column, RaggedColumn) else column[0] for name, column in columns.items()}


class _UnusualError(Exception):
    """The record is damaged, or of a form that only `decode_columns` knows."""


_Values = tuple[int, bytes, int, int]
"""The kind of a list, and the data that has it from a start to a stop."""


def _walk(features: Features, data: bytes) -> dict[str, _Values]:
    """Returns the lists of the named features. The last one of several counts, as in `decode_columns`."""
    names = {name.encode(): name for name in features}
    found: dict[str, _Values] = {}
    for number, start, stop in _members(data, 0, len(data)):
        if number != 1:
            raise _UnusualError
        for _, entry, entry_end in _members(data, start, stop):
            name, values = None, None
            for member, value_start, value_stop in _members(data, entry, entry_end):
                if member == 1:
                    name = names.get(data[value_start:value_stop])
                elif member == 2:
                    values = value_start, value_stop
            if name is None:
                continue
            found.pop(name, None)
            for kind, list_start, list_stop in _members(data, *(values or (0, 0))):
                found[name] = kind, data, list_start, list_stop
    return found


def _members(data: bytes, position: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yields the number, start and stop of the fields of a message, all of which contain bytes."""
    while position < stop:
        tag, position = data[position], position + 1
        if tag & 7 != BYTES or not 8 <= tag < 128:
            raise _UnusualError
        length, position = data[position], position + 1
        if length >= 128:
            length, position = _varint(data, position - 1)
        if position + length > stop:
            raise _UnusualError
        yield tag >> 3, position, position + length
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & ((1 << 64) - 1), position
        shift += 7
    raise _UnusualError


def _value(feature: FixedLengthFeature | VariableLengthFeature, found: _Values | None) -> Any:
    """Returns the value of a feature, or raises for `decode_columns` to explain."""
    kind = KINDS[feature.dtype][0]
    if found is None and isinstance(feature, FixedLengthFeature):
        if feature.default is None:
            raise _UnusualError
        return feature.default_values().copy()[()]
    number, data, start, stop = found or (kind, b"", 0, 0)
    if number != kind:
        raise _UnusualError
    values: Any
    spans = [(begin, end) for field, begin, end in _members(data, start, stop) if field == 1]
    if feature.dtype == "bytes":
        if isinstance(feature, FixedLengthFeature) and feature.shape == () and len(spans) == 1:
            return data[spans[0][0] : spans[0][1]]
        values = np.empty(len(spans), np.object_)
        values[:] = [data[begin:end] for begin, end in spans]
    elif len(spans) > 1:
        raise _UnusualError
    else:
        begin, end = spans[0] if spans else (0, 0)
        values = _floats(data, begin, end) if feature.dtype == "float32" else _ints(data, begin, end)
    if isinstance(feature, VariableLengthFeature):
        return values
    if len(values) != math.prod(feature.shape):
        raise _UnusualError
    return values.reshape(feature.shape) if feature.shape else values[0]


def _floats(data: bytes, begin: int, end: int) -> NDArray[np.float32]:
    if (end - begin) & 3:
        raise _UnusualError
    return np.frombuffer(data, "<f4", (end - begin) >> 2, begin).astype(np.float32)


_MAX_SCALAR_BYTES = 16
"""Integers of this many bytes are quicker decoded one by one."""


def _ints(data: bytes, begin: int, end: int) -> NDArray[np.int64]:
    if end - begin > _MAX_SCALAR_BYTES:
        values, is_last = varints_in(np.frombuffer(data, np.uint8, end - begin, begin))
        if not is_last[-1]:
            raise _UnusualError
        return values
    numbers: list[int] = []
    while begin < end:
        number, begin = _varint(data, begin)
        numbers.append(number - (1 << 64) if number >> 63 else number)
    if begin > end:
        raise _UnusualError
    return np.array(numbers, np.int64)
