"""Writes `tf.train.Example`s: protocol buffer messages, field by field, with other code than the reader's."""

import struct
from typing import Any

KIND_NUMBERS = {"bytes": 1, "float32": 2, "int64": 3}


def varint(value: int) -> bytes:
    """Returns a number as a varint; a negative one has 64 bits."""
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, content: bytes) -> bytes:
    """Returns a field that holds bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def values_message(kind: str, values: list[Any], packed: bool) -> bytes:
    """Returns a BytesList, FloatList or Int64List."""
    if kind == "bytes":
        return b"".join(field(1, value) for value in values)
    encoded = [varint(v) if kind == "int64" else struct.pack("<f", v) for v in values]
    if packed:
        return field(1, b"".join(encoded)) if values else b""
    return b"".join(varint(1 << 3 | (0 if kind == "int64" else 5)) + value for value in encoded)


def feature_message(kind: str, values: list[Any], packed: bool = True) -> bytes:
    """Returns a Feature."""
    return field(KIND_NUMBERS[kind], values_message(kind, values, packed))


def entry_message(name: str, feature: bytes) -> bytes:
    """Returns an entry of the map of features."""
    return field(1, name.encode()) + field(2, feature)


def example_message(features: dict[str, tuple[str, list[Any]]], packed: bool = True) -> bytes:
    """Returns an Example, from (kind, values) by name."""
    entries = [
        entry_message(name, feature_message(feature[0], feature[1], packed)) for name, feature in features.items()
    ]
    return field(1, b"".join(field(1, entry) for entry in entries))
