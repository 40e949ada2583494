"""Encoding of dicts as serialised `tf.train.Example`s; the inverse of `decode_examples`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import find_loss
from millstream.tf_example.features import KINDS
from millstream.tf_example.wire import BYTES

_VARINT_BYTES = 10

_KINDS_OF_DTYPES = {"b": "int64", "i": "int64", "u": "int64", "f": "float32"}


def encode_example(features: Mapping[str, Any]) -> bytes:
    """Returns a serialised `tf.train.Example`, for TensorFlow or `decode_examples`.

    Args:
        features: the values by name. Integers, booleans and arrays or lists of them are stored as int64; floats of any
            width as float32; `bytes` and `str` (in UTF-8), or lists of them, as bytes. Arrays are flattened;
            `FixedLengthFeature(shape, ...)` restores their shape. An empty list can be decoded as any of these.
            Features that are None are omitted.

    Raises:
        TypeError: a value has another type, such as a dict, or a name is not a str.
        ValueError: an integer is not in -2**63 … 2**63 - 1.

    Examples:
        >>> record = millstream.encode_example({"image": b"png", "label": 3, "tokens": np.arange(5)})
        >>> type(record), len(record)
        (<class 'bytes'>, 57)
    """
    entries = [
        _field(1, _field(1, _encoded_name(name)) + _field(2, _feature(name, value)))
        for name, value in features.items()
        if value is not None
    ]
    return _field(1, b"".join(entries))


def _encoded_name(name: Any) -> bytes:
    if not isinstance(name, str):
        raise TypeError(f"The name of a feature must be a str, got {name!r} of type {type(name).__name__}.")
    return name.encode()


def _feature(name: str, value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | str):
        kind, content = "bytes", _field(1, _as_bytes(value))
    else:
        kind, content = _list(name, value)
    return _field(KINDS[kind][0], content)


def _list(name: str, value: Any) -> tuple[str, bytes]:
    """Returns the kind of a value that is not text or bytes, and the list message of its values."""
    items = value.reshape(-1).tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "SUO" else value
    if find_loss([value]):
        items = None
    is_list = isinstance(items, list | tuple) and (items or items is not value)  # An empty array has a dtype.
    if is_list and all(isinstance(item, bytes | bytearray | str) for item in items):
        return "bytes", b"".join(_field(1, _as_bytes(item)) for item in items)
    try:
        array = np.asarray(items)
    except ValueError:  # Lists of different lengths.
        array, items = np.array(None), None
    if array.size == 0 and isinstance(value, list | tuple):
        return "int64", b""
    kind = _KINDS_OF_DTYPES.get(array.dtype.kind)
    if array.dtype.kind in "fO" and _has_integers_only(items):
        # NumPy makes floats of integers that no dtype has.
        raise ValueError(f"Cannot encode feature {name!r}: its integers need more than 64 bits, signed.")
    if kind is None:
        raise TypeError(
            f"Feature {name!r} must be bytes, str, a number, or an array or list of these, got {type(value).__name__}."
        )
    if kind == "float32":
        packed = array.astype("<f4").tobytes()
    else:
        if array.dtype.kind == "u" and array.size and int(array.max()) >= 1 << 63:
            raise ValueError(f"Feature {name!r} must be below 2**63, as integers in an Example are, got {array.max()}.")
        packed = _varints(array.reshape(-1).astype(np.int64))
    return kind, _field(1, packed) if packed else b""


def _has_integers_only(items: Any) -> bool:
    """Returns True if a number, or all numbers of nested lists, of which there is one, are integers."""
    if isinstance(items, list | tuple):
        return all(map(_has_integers_only, items))
    return isinstance(items, int | np.integer)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | BYTES]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _varints(values: NDArray[np.int64]) -> bytes:
    """Returns the concatenated varints of integers; a negative integer has ten bytes."""
    rest = values.view(np.uint64)
    if not values.size or int(rest.max()) < 0x80:
        return rest.astype(np.uint8).tobytes()
    # One row per integer, seven bits per column, the lowest first.
    shifts = np.arange(0, 7 * _VARINT_BYTES, 7, dtype=np.uint64)
    bits = rest[:, np.newaxis] >> shifts
    is_there = bits != 0
    is_there[:, 0] = True
    goes_on = np.zeros_like(is_there)
    goes_on[:, :-1] = is_there[:, 1:]
    table = (bits & np.uint64(0x7F)).astype(np.uint8) | (goes_on.astype(np.uint8) << np.uint8(7))
    encoded: bytes = table[is_there].tobytes()
    return encoded


def _as_bytes(item: bytes | bytearray | str) -> bytes:
    return item.encode() if isinstance(item, str) else bytes(item)
