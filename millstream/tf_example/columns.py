"""Decoding of batches of `tf.train.Example` into columns.

An Example is a protocol buffer (tensorflow/core/example/example.proto and feature.proto):

    message Example   { Features features = 1; }
    message Features  { map<string, Feature> feature = 1; }
    message Feature   { oneof kind { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }
    message BytesList { repeated bytes value = 1; }                 // the other two likewise, packed or not

All Examples of a batch are decoded together, level by level.
"""

import math
from collections.abc import Callable, Mapping
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
