"""An encoder for PNG files, https://www.w3.org/TR/png-3/, with one chunk of data and no filters."""

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""PNG's numbers for grey, grey with alpha, RGB and RGB with alpha, by number of channels."""


def png_of(pixels: NDArray[np.uint8]) -> bytes:
    """Returns a PNG file of pixels of shape (height, width, channels) with 1 to 4 channels."""
    height, width, channels = pixels.shape
    # Each line begins with the number of its filter: 0 is none.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * channels)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def pixels_of(array: NDArray[Any], max_size: int) -> NDArray[np.uint8] | None:
    """Returns an array as pixels of shape (height, width, channels), or None if it is not an image.

    An image is a two-dimensional array of bytes, booleans or floats, or one with 1, 3 or 4 channels last or first.
    If floats leave the range 0 … 1, the smallest becomes black and the largest white.

    Args:
        array: one element.
        max_size: the largest width and height; larger images lose rows and columns at regular intervals.
    """
    if array.dtype != np.uint8 and array.dtype.kind not in "bf":
        return None
    if array.ndim == 2:
        array = array[:, :, None]
    elif array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or min(array.shape[:2]) < 2:
        return None
    step = -(-max(array.shape[:2]) // max_size)
    array = array[::step, ::step]
    if array.dtype == np.uint8:
        return array
    values = array.astype(np.float64)
    known = values[np.isfinite(values)]
    smallest, largest = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if smallest < 0 or largest > 1:
        values = (values - smallest) / ((largest - smallest) or 1.0)
    return (np.nan_to_num(values, nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1) * 255).round().astype(np.uint8)
