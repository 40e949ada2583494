"""Records as bytes, without their structure, which the records of a source have in common.

A pickle has 130 bytes for each array beside its numbers. A *layout* describes the structure of a record: the keys of
dicts, the dtypes and numbers of dimensions of arrays, the types of other values. What is left are lengths and contents.

Guarantees:
    - A decoded record has the types, dtypes, shapes and bytes of the one that was encoded, and memory of its own.
    - Records that have anything else, such as objects, subclasses and arrays in another order, have no layout.
"""

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np

Layout: TypeAlias = tuple[Any, ...]
"""A kind, one of the names below, and what it needs: the keys and layouts of a dict, the layouts of a sequence, or the
dtype and the number of dimensions of an array."""

_DICT, _TUPLE, _LIST, _ARRAY, _SCALAR, _INT, _FLOAT, _BOOL, _BYTES, _TEXT, _NONE = (
    *("dict", "tuple", "list", "array", "scalar", "int", "float", "bool", "bytes", "str", "none"),
)
_PLAIN: dict[type, Layout] = {
    float: (_FLOAT,),
    bool: (_BOOL,),
    bytes: (_BYTES,),
    str: (_TEXT,),
    type(None): (_NONE,),
}
_SEQUENCES: dict[type, str] = {tuple: _TUPLE, list: _LIST}

MAX_ITEMS = 64
"""The largest number of items of a dict or sequence. Longer ones are data, not a structure."""

MAX_DEPTH = 8

_INTEGERS = range(-(1 << 63), 1 << 63)
_LIMIT = 1 << 32


def layout_of(value: Any, depth: int = MAX_DEPTH) -> Layout | None:  # noqa: PLR0911  (a kind each)
    """Returns the layout of a record; None if it has none."""
    kind = type(value)
    if (plain := _PLAIN.get(kind)) is not None:
        return plain
    if kind is int:
        return (_INT,) if value in _INTEGERS else None
    if kind is np.ndarray:
        is_plain = value.dtype.isbuiltin == 1 and value.dtype.kind in "biufc" and value.flags.c_contiguous
        return (_ARRAY, value.dtype.str, value.ndim) if is_plain and max(value.shape, default=0) < _LIMIT else None
    if isinstance(value, np.generic):
        return (_SCALAR, value.dtype.str) if value.dtype.isbuiltin == 1 and value.dtype.kind in "biufc" else None
    if depth and kind in _SEQUENCES and len(value) <= MAX_ITEMS:
        items = tuple(layout_of(item, depth - 1) for item in value)
        return None if None in items else (_SEQUENCES[kind], items)
    if depth and kind is dict and len(value) <= MAX_ITEMS and all(type(key) is str for key in value):
        items = tuple(layout_of(item, depth - 1) for item in value.values())
        return None if None in items else (_DICT, tuple(value), items)
    return None


@functools.lru_cache(maxsize=1024)
def codec_of(layout: Layout) -> "Codec":
    return Codec(layout)


@final
class Codec:
    """Encodes and decodes the records of one layout."""

    def __init__(self, layout: Layout) -> None:
        self._write = _writer(layout)
        self._read = _reader(layout)

    def encode(self, record: Any) -> bytes:
        chunks: list[bytes] = []
        self._write(record, chunks)
        return b"".join(chunks)

    def decode(self, content: memoryview) -> Any:
        return self._read(content, 0)[0]


_Write: TypeAlias = Callable[[Any, list[bytes]], None]
_Read: TypeAlias = Callable[[memoryview, int], tuple[Any, int]]


def _writer(layout: Layout) -> _Write:
    kind = layout[0]
    if kind in {_DICT, _TUPLE, _LIST}:
        writers = [_writer(item) for item in layout[-1]]
        return functools.partial(_write_items, kind == _DICT, writers)
    if kind == _ARRAY:
        return functools.partial(_write_array, struct.Struct(f"<{layout[2]}I"))
    if kind == _SCALAR:
        return lambda value, chunks: chunks.append(value.tobytes())
    return _WRITERS[kind]


def _write_items(is_dict: bool, writers: Sequence[_Write], value: Any, chunks: list[bytes]) -> None:
    for write, item in zip(writers, value.values() if is_dict else value, strict=True):
        write(item, chunks)


def _write_array(shape: struct.Struct, value: Any, chunks: list[bytes]) -> None:
    chunks += shape.pack(*value.shape), value.tobytes()


def _write_bytes(value: bytes, chunks: list[bytes]) -> None:
    chunks += struct.pack("<I", len(value)), value


_WRITERS: dict[str, _Write] = {
    _INT: lambda value, chunks: chunks.append(struct.pack("<q", value)),
    _FLOAT: lambda value, chunks: chunks.append(struct.pack("<d", value)),
    _BOOL: lambda value, chunks: chunks.append(b"\1" if value else b"\0"),
    _BYTES: _write_bytes,
    _TEXT: lambda value, chunks: _write_bytes(value.encode("utf-8", "surrogatepass"), chunks),
    _NONE: lambda _, __: None,
}


def _reader(layout: Layout) -> _Read:
    kind = layout[0]
    if kind in {_DICT, _TUPLE, _LIST}:
        readers = [_reader(item) for item in layout[-1]]
        if kind == _DICT:
            return functools.partial(_read_dict, layout[1], readers)
        return functools.partial(_read_items, tuple if kind == _TUPLE else list, readers)
    if kind == _ARRAY:
        return functools.partial(_read_array, np.dtype(layout[1]), struct.Struct(f"<{layout[2]}I"))
    if kind == _SCALAR:
        return functools.partial(_read_scalar, np.dtype(layout[1]))
    return _READERS[kind]


def _read_dict(keys: Sequence[str], readers: Sequence[_Read], content: memoryview, start: int) -> tuple[Any, int]:
    found = {}
    for key, read in zip(keys, readers, strict=True):
        found[key], start = read(content, start)
    return found, start


def _read_items(kind: Any, readers: Sequence[_Read], content: memoryview, start: int) -> tuple[Any, int]:
    found = []
    for read in readers:
        item, start = read(content, start)
        found.append(item)
    return kind(found), start


def _read_array(dtype: np.dtype[Any], lengths: struct.Struct, content: memoryview, start: int) -> tuple[Any, int]:
    shape = lengths.unpack_from(content, start)
    start += lengths.size
    stop = start + math.prod(shape) * dtype.itemsize
    return np.ndarray(shape, dtype, bytearray(content[start:stop])), stop


def _read_scalar(dtype: np.dtype[Any], content: memoryview, start: int) -> tuple[Any, int]:
    return np.frombuffer(content, dtype, 1, start)[0], start + dtype.itemsize


def _read_bytes(content: memoryview, start: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<I", content, start)
    return bytes(content[start + 4 : start + 4 + length]), start + 4 + length


def _read_text(content: memoryview, start: int) -> tuple[str, int]:
    encoded, stop = _read_bytes(content, start)
    return encoded.decode("utf-8", "surrogatepass"), stop


_READERS: dict[str, _Read] = {
    _INT: lambda content, start: (struct.unpack_from("<q", content, start)[0], start + 8),
    _FLOAT: lambda content, start: (struct.unpack_from("<d", content, start)[0], start + 8),
    _BOOL: lambda content, start: (content[start] == 1, start + 1),
    _BYTES: _read_bytes,
    _TEXT: _read_text,
    _NONE: lambda _, start: (None, start),
}
