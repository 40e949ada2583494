"""The values of MDS columns, decoded as MosaicML Streaming does."""

import decimal
import functools
import itertools
import json
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZE_BYTES = 4
"""The size of a number of bytes or members."""

_SCALARS = frozenset(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)) - {"float8"}
_ARRAY_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_PIXEL_DTYPES = {"I": "<i4", "F": "<f4", "I;16": "<u2"}
"""The dtypes of the modes of Pillow that do not have a byte per channel."""

_SHAPE_DTYPES = ("uint8", "uint16", "uint32", "uint64")


@functools.cache
def decoder_of(encoding: str) -> Callable[[bytes], Any]:
    """Returns the function that decodes a value. An unknown encoding is a KeyError, ValueError or TypeError."""
    name, _, options = encoding.partition(":")
    if name in _SCALARS:
        return functools.partial(_scalar, np.dtype(name).newbyteorder("<"))
    if name == "ndarray":
        dtype, _, shape = options.partition(":")
        if dtype and dtype not in _ARRAY_DTYPES.values():
            raise ValueError(dtype)
        return functools.partial(_array, dtype or None, tuple(map(int, shape.split(","))) if shape else None)
    return _DECODERS[encoding]


def _scalar(dtype: np.dtype[Any], content: bytes) -> Any:
    (value,) = np.frombuffer(content, dtype)
    return value


def _array(dtype: str | None, shape: Sequence[int] | None, content: bytes) -> NDArray[Any]:
    start = 0
    if dtype is None:
        dtype, start = _ARRAY_DTYPES[content[0]], 1
    if shape is None:
        ndim, size = content[start] >> 2, 1 << (content[start] & 3)
        start += 1
        shape = np.frombuffer(content[start : start + ndim * size], _SHAPE_DTYPES[content[start - 1] & 3]).tolist()
        if len(shape) != ndim:
            raise ValueError("its shape is cut short")
        start += ndim * size
    # Copied: an operation may write to it.
    return np.frombuffer(content, dtype, offset=start).reshape(shape).copy()


def _image(content: bytes) -> NDArray[Any]:
    """Returns the pixels of an uncompressed image: shape (height, width) or (height, width, channels)."""
    width, height, length = struct.unpack_from("<3I", content)
    mode = content[12 : 12 + length].decode()
    if mode == "1":
        raise ValueError("images of one bit per pixel are not supported")
    pixels = np.frombuffer(content, _PIXEL_DTYPES.get(mode, "u1"), offset=12 + length).reshape(height, width, -1)
    return (pixels[..., 0] if pixels.shape[-1] == 1 else pixels).copy()


def _members(start: int, decode: Callable[[bytes], Any], content: bytes) -> list[Any]:
    """Returns the members of a list: from `start` on, a uint32 number, the sizes, and the values."""
    (count,) = struct.unpack_from("<I", content, start)
    sizes = struct.unpack_from(f"<{count}I", content, start + SIZE_BYTES)
    stops = np.cumsum([start + SIZE_BYTES * (count + 1), *sizes]).tolist()
    if stops[-1] != len(content):
        raise ValueError("its members do not fill it")
    return [decode(content[begin:stop]) for begin, stop in itertools.pairwise(stops)]


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda content: int(_scalar(np.dtype("<i8"), content)),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda content: decimal.Decimal(content.decode()),
    "json": json.loads,
    "jpeg": bytes,
    "png": bytes,
    "pil": _image,
    "jpeg_array": functools.partial(_members, 0, bytes),
    "jpegarray": functools.partial(_members, 0, bytes),
    "list[jpeg]": functools.partial(_members, SIZE_BYTES, bytes),
    "list[png]": functools.partial(_members, SIZE_BYTES, bytes),
    "list[pil]": functools.partial(_members, SIZE_BYTES, _image),
    "pkl": pickle.loads,
}
"""The functions that decode values of encodings without options."""
