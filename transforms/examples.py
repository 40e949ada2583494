"""Batches of `tf.train.Example` turned into arrays, without TensorFlow.

An Example is a protocol buffer (tensorflow/core/example/example.proto and feature.proto):

    message Example   { Features features = 1; }
    message Features  { map<string, Feature> feature = 1; }
    message Feature   { oneof kind { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }
    message BytesList { repeated bytes value = 1; }                 // the other two alike, packed or not

All Examples of a batch are decoded together, level by level.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer
from millstream.transforms.base import Map
from millstream.transforms.protobuf_wire import (
    BYTES,
    FOUR_BYTES,
    VARINT,
    Fields,
    Places,
    WireData,
    WireError,
    fields_of,
    varints_in,
)

_KINDS: dict[str, tuple[int, int]] = {"bytes": (1, BYTES), "float32": (2, FOUR_BYTES), "int64": (3, VARINT)}
"""By dtype: the number of its list in a Feature, and the wire type of a value that is not packed."""


class RaggedColumn(NamedTuple):
    """A feature that has another number of values in each element of a batch; a pytree, as any tuple.

    Attributes:
        values: the values of all elements, one after the other: shape (sum of lengths,).
        lengths: how many values each element has: int64, shape (n,).
    """

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    def rows(self) -> list[NDArray[Any]]:
        """Returns the values of each element: views of `values`."""
        return np.split(self.values, np.cumsum(self.lengths)[:-1])

    def padded(self, length: int, padding: Any = 0) -> NDArray[Any]:
        """Returns an array of shape (n, length): longer rows are cut, shorter ones filled with `padding`."""
        length = as_integer(length, "length", minimum=0)
        table = np.full((len(self.lengths), length), padding, self.values.dtype)
        kept = np.minimum(self.lengths, length)
        starts = np.cumsum(self.lengths) - self.lengths
        within = np.arange(int(kept.sum())) - np.repeat(np.cumsum(kept) - kept, kept)
        table[np.repeat(np.arange(len(kept)), kept), within] = self.values[np.repeat(starts, kept) + within]
        return table


@final
@dataclasses.dataclass(frozen=True)
class FixedLengthFeature:
    """A feature that has the same number of values in each Example: an array of shape (n, *shape) in the batch.

    Attributes:
        shape: the shape of one element's values; `()` for one value.
        dtype: `np.int64`, `np.float32` or `bytes`, as the Examples hold it. Bytes come as an array of objects.
        default: what an Example without the feature has: one value, or an array of that shape. With None, such an
            Example is an error.
    """

    shape: Any
    dtype: Any
    default: Any = None

    def __post_init__(self) -> None:
        sizes = (self.shape,) if np.ndim(self.shape) == 0 else tuple(self.shape)
        object.__setattr__(self, "shape", tuple(as_integer(size, "A size in shape", minimum=0) for size in sizes))
        object.__setattr__(self, "dtype", _kind(self.dtype))
        if self.default is not None:
            self.default_values()

    def default_values(self) -> NDArray[Any]:
        """Returns the default as an array of the feature's shape."""
        if self.dtype != "bytes":
            return np.broadcast_to(np.array(self.default, self.dtype), self.shape)
        # Not by way of NumPy's own bytes, which would lose zeros at their end.
        values = np.empty(self.shape, np.object_)
        if isinstance(self.default, bytes):
            values.fill(self.default)
        else:
            values[...] = np.array(self.default, np.object_)
        return values


@final
@dataclasses.dataclass(frozen=True)
class VariableLengthFeature:
    """A feature that has any number of values in each Example: a `RaggedColumn` in the batch.

    An Example without the feature has none.

    Attributes:
        dtype: `np.int64`, `np.float32` or `bytes`, as the Examples hold it. Bytes come as an array of objects.
    """

    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _kind(self.dtype))


def decode_examples(features: "Mapping[str, FixedLengthFeature | VariableLengthFeature]") -> "Map[Any, Any]":
    """Returns an operation that turns a batch of serialised `tf.train.Example`s into columns, without TensorFlow.

        operations=[
            millstream.Batch(256),
            millstream.decode_examples({
                "image": millstream.FixedLengthFeature((), bytes),
                "label": millstream.FixedLengthFeature((), np.int64, default=-1),
                "tokens": millstream.VariableLengthFeature(np.int64),
            }),
        ]

    It belongs after `Batch`, since a batch is decoded in the time of some of its Examples. It gives a dict with an
    array of shape (n, *shape) for each fixed-length feature, and a `RaggedColumn` for each other one. Other features of
    the Examples are passed over. Where an Example has a feature twice, the last one counts.

    Args:
        features: by name, what to decode.

    Raises:
        TypeError: features that are not a dict of these two classes.
        ValueError: there are none.

    The operation raises ValueError, with the place in the batch, for an element that is not an Example, has not the
    feature or another number of values, or has them of another type.
    """
    return _DecodeExamples(features)


@final
class _DecodeExamples(Map[Any, Any]):
    """What `decode_examples` returns."""

    def __init__(self, features: "Mapping[str, FixedLengthFeature | VariableLengthFeature]") -> None:
        if not isinstance(features, Mapping):
            raise TypeError(f"features must be a dict from names to features, got {type(features).__name__}.")
        for name, feature in features.items():
            if not isinstance(name, str) or not isinstance(feature, FixedLengthFeature | VariableLengthFeature):
                raise TypeError(
                    "features must lead from names to FixedLengthFeature or VariableLengthFeature, "
                    f"got {feature!r} for {name!r}."
                )
        if not features:
            raise ValueError("features must name at least one feature, got none.")
        self.features = dict(features)

    def __repr__(self) -> str:
        return f"decode_examples({', '.join(self.features)})"

    def map(self, batch: Any, /) -> dict[str, Any]:
        """Returns the columns of a batch: a sequence or an array of bytes."""
        examples = _examples(batch)
        data, count = WireData(examples), len(examples)
        pairs, kinds, values = self._lists(data, count)
        columns: dict[str, Any] = {}
        for place, (name, feature) in enumerate(self.features.items()):
            first, last = np.searchsorted(pairs, [place * count, (place + 1) * count])
            elements = pairs[first:last] - place * count
            _check_kinds(name, feature.dtype, elements, kinds[first:last])
            within = slice(*np.searchsorted(values.message, [first, last]))
            column = _DECODERS[feature.dtype](data, values.where(within), pairs[values.message[within]] % count, count)
            if isinstance(feature, FixedLengthFeature):
                columns[name] = _fixed(name, feature, column, elements)
            else:
                columns[name] = column
        return columns

    def _lists(self, data: WireData, count: int) -> tuple[Places, Places, Fields]:
        """Returns which features there are in which elements, and their values.

        These are pairs, feature f of element k being f * count + k, in order; the kind of list that each has; and the
        fields that hold values, whose `message` is a place among the pairs.
        """
        examples = _fields(data, np.arange(count), data.starts, data.stops).of(1)
        entries = _fields(data, examples.message, examples.starts, examples.stops).of(1)
        elements = examples.message[entries.message]
        members = _fields(data, elements, entries.starts, entries.stops)
        key_starts, key_stops = members.of(1).last_of_each(len(elements))
        value_starts, value_stops = members.of(2).last_of_each(len(elements))
        table = np.full(len(self.features) * count, -1, np.int64)
        for place, name in enumerate(self.features):
            chosen = np.flatnonzero(data.are(key_starts, key_stops, name.encode()))
            table[place * count + elements[chosen]] = chosen  # Of several, the last one stays.
        pairs = np.flatnonzero(table >= 0)
        chosen = table[pairs]
        lists = _fields(data, pairs % count, value_starts[chosen], value_stops[chosen])
        lists = lists.where((lists.wire_type == BYTES) & (lists.number >= 1) & (lists.number <= len(_KINDS)))
        # Of a oneof, the last one counts. A feature that has none is as good as absent.
        is_last = np.append(lists.message[1:] != lists.message[:-1], True)[: len(lists.message)]
        lists = lists.where(is_last)
        pairs = pairs[lists.message]
        values = _fields(data, pairs % count, lists.starts, lists.stops)
        return pairs, lists.number, values.where(values.number == 1)


def _examples(batch: Any) -> list[bytes]:
    """Returns the elements of a batch of bytes."""
    examples = batch.tolist() if isinstance(batch, np.ndarray) else batch
    if not isinstance(examples, list | tuple) or not all(isinstance(example, bytes) for example in examples):
        raise TypeError(
            "decode_examples decodes batches of bytes: put it after Batch, and before other operations. "
            f"Got {type(batch).__name__}."
        )
    return list(examples)


def _kind(dtype: Any) -> str:
    """Returns the name of a dtype that Examples can hold."""
    name = "bytes" if dtype in (bytes, "bytes") else np.dtype(dtype).name
    if name not in _KINDS:
        raise ValueError(f"dtype must be np.int64, np.float32 or bytes, as Examples hold them, got {dtype!r}.")
    return name


def _fields(data: WireData, elements: Places, starts: Places, stops: Places) -> Fields:
    """Returns the fields of messages that are parts of some elements."""
    try:
        return fields_of(data, starts, stops)
    except WireError as error:
        raise _not_an_example(int(elements[error.message]), str(error)) from error


def _not_an_example(element: int, reason: str) -> ValueError:
    return ValueError(f"Element {element} of the batch is not a tf.train.Example, or is damaged: {reason}.")


def _check_kinds(name: str, dtype: str, elements: Places, kinds: Places) -> None:
    wrong = np.flatnonzero(kinds != _KINDS[dtype][0])
    if wrong.size:
        there = next(other for other, (number, _) in _KINDS.items() if number == kinds[wrong[0]])
        raise ValueError(
            f"Feature {name!r} holds {there} in element {elements[wrong[0]]} of the batch, but {dtype} is asked for."
        )


def _bytes_column(data: WireData, values: Fields, elements: Places, count: int) -> RaggedColumn:
    chosen = values.wire_type == BYTES
    column = np.empty(int(chosen.sum()), np.object_)
    column[:] = data.slices(values.starts[chosen], values.stops[chosen])
    return RaggedColumn(column, np.bincount(elements[chosen], minlength=count))


def _float_column(data: WireData, values: Fields, elements: Places, count: int) -> RaggedColumn:
    chosen = (values.wire_type == BYTES) | (values.wire_type == FOUR_BYTES)
    values, elements = values.where(chosen), elements[chosen]
    sizes = values.stops - values.starts
    if (sizes & 3).any():
        raise _not_an_example(
            int(elements[np.argmax(sizes & 3)]), "a list of float32 in it has no whole number of them"
        )
    column = data.gather(values.starts, values.stops).view("<f4").astype(np.float32, copy=False)
    return RaggedColumn(column, _sums(elements, sizes >> 2, count))


def _int_column(data: WireData, values: Fields, elements: Places, count: int) -> RaggedColumn:
    # One that is not packed is a varint, too: both kinds of fields are varints that fill a span.
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
    return RaggedColumn(column, _sums(elements, sizes, count))


_DECODERS: dict[str, Callable[[WireData, Fields, Places, int], RaggedColumn]] = {
    "bytes": _bytes_column,
    "float32": _float_column,
    "int64": _int_column,
}


def _sums(elements: Places, sizes: Places, count: int) -> NDArray[np.int64]:
    """Returns the sum of the sizes of each element: shape (count,). The elements are in order."""
    if len(elements) == count and (elements == np.arange(count)).all():
        return sizes
    return np.bincount(elements, weights=sizes, minlength=count).astype(np.int64)


def _fixed(name: str, feature: FixedLengthFeature, column: RaggedColumn, present: Places) -> NDArray[Any]:
    """Returns the array of a feature that each element has the same number of values of."""
    size, count = math.prod(feature.shape), len(column.lengths)
    wrong = present[column.lengths[present] != size]
    if wrong.size:
        raise ValueError(
            f"Feature {name!r} has {column.lengths[wrong[0]]} values in element {wrong[0]} of the batch, but its shape "
            f"{feature.shape} has {size}."
        )
    if len(present) == count:
        return column.values.reshape(count, *feature.shape)
    if feature.default is None:
        absent = np.setdiff1d(np.arange(count), present)
        raise ValueError(
            f"Element {absent[0]} of the batch has no feature {name!r}, which has no default. Give it one: "
            "FixedLengthFeature(..., default=...)."
        )
    rows = np.empty((count, *feature.shape), column.values.dtype)
    rows[:] = feature.default_values()
    rows[present] = column.values.reshape(len(present), *feature.shape)
    return rows
