"""Digests and checksums for fingerprints, the same in every process, and the records that they depend on."""

import zlib
from typing import Any

import numpy as np

try:
    # The function of hashlib, which imports OpenSSL as well: that takes 3 ms, in each worker.
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

FINGERPRINT_RECORDS = 16
"""The number of records, evenly spread, that a fingerprint depends on."""


def spread_keys(count: int, limit: int) -> list[int]:
    """Returns up to `limit` of the numbers below `count`, evenly spread and ascending, with the first and the last."""
    # Not np.unique, which imports np.ma, in 6 ms. From 2**53 on, the last number may be rounded up.
    keys = np.linspace(0, count - 1, limit).tolist() if count else []
    return sorted({min(int(key), count - 1) for key in keys})


def digest(num_bytes: int, *contents: Any) -> bytes:
    """Returns a digest of bytes, or of several buffers one after another."""
    state = blake2b(digest_size=num_bytes)
    for content in contents:
        state.update(content)
    return state.digest()


def digest_of(described: Any, num_bytes: int) -> str:
    """Returns a digest of a value, by its `repr`: hexadecimal, of the given number of bytes."""
    return digest(num_bytes, repr(described).encode("utf-8", "surrogatepass")).hex()


def updated_crc(crc: int, value: Any) -> int:
    """Returns the CRC-32 continued over a value, the same in every process (no ids, no hashes, no pickle memo)."""
    crc = zlib.crc32(type(value).__qualname__.encode(), crc)
    if isinstance(value, dict):
        for name, member in value.items():
            crc = updated_crc(updated_crc(crc, name), member)
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        crc = zlib.crc32(f"{len(value)} members".encode(), crc)
        for member in value:
            crc = updated_crc(crc, member)
    elif isinstance(value, np.ndarray | np.generic):
        crc = zlib.crc32(f"{value.dtype} {value.shape}".encode(), crc)
        crc = zlib.crc32(value.tobytes(), crc)
    elif isinstance(value, bytes | bytearray | memoryview):
        crc = zlib.crc32(value, crc)
    elif isinstance(value, bool | int | float | complex | str):
        crc = zlib.crc32(repr(value).encode(), crc)
    return crc
