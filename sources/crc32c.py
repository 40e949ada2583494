"""CRC-32C of many pieces of bytes at once: the checksum of TFRecord files, as they mask it.

CRC-32C (Castagnoli, RFC 3720, appendix B.4) is the remainder of the message as a polynomial over GF(2). `google-crc32c`
uses the processor's instruction for it, where it is installed. Without it, NumPy does: the remainder is linear, so that
of a block is the exclusive or of one table look-up for each byte, and that of two blocks in a row follows from those of
each.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
"""Reflected: the coefficient of x^31 is the lowest bit."""

_BLOCK_BYTES = 64
"""How many bytes are looked up in tables of their own: 64 tables are 64 KiB, which stay in the processor's cache."""

_ONES = 0xFFFFFFFF
"""What the register holds at the start, and what it is inverted by at the end."""

_MASK = 0xA282EAD8


def masked_crc32c(pieces: Sequence[bytes]) -> NDArray[np.uint32]:
    """Returns the masked CRC-32C of each piece: shape (n,).

    Masked is rotated right by 15 bits, plus a constant, modulo 2^32: TFRecord's way to keep a checksum apart from the
    data that it is stored in (tensorflow/core/lib/hash/crc32c.h).
    """
    value = _library()
    return _masked(
        crc32c_by_tables(pieces) if value is None else np.fromiter(map(value, pieces), np.uint32, len(pieces))
    )


def masked_crc32c_of_rows(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Returns the masked CRC-32C of each row of a table of at most 60 columns: shape (n,)."""
    start = np.frombuffer(_start_bytes(), np.uint8)
    tables = _byte_tables()[_BLOCK_BYTES - len(start) - rows.shape[1] :]
    crcs = np.full(len(rows), np.bitwise_xor.reduce(tables[range(len(start)), start]), np.uint32)
    for table, column in zip(tables[len(start) :], rows.T, strict=True):
        crcs ^= table.take(column)
    return _masked(~crcs)


def _masked(crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(_MASK)


@functools.cache
def _library() -> Callable[[bytes], int] | None:
    """Returns the function of the library, or None where it is not installed, or has no compiled part."""
    try:
        from google_crc32c import implementation, value  # noqa: PLC0415
    except ImportError:
        return None
    function: Callable[[bytes], int] | None = value if implementation == "c" else None
    return function


def crc32c_by_tables(pieces: Sequence[bytes]) -> NDArray[np.uint32]:
    """Returns the CRC-32C of each piece by NumPy alone, some 150 to 500 MB/s: shape (n,)."""
    # Zeros in front of a message change no remainder that begins at 0. So each piece is filled up to whole blocks,
    # with a start after them that brings the register to where it should begin.
    start = _start_bytes()
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces)) + len(start)
    counts = -(-lengths // _BLOCK_BYTES)
    fillings = (counts * _BLOCK_BYTES - lengths).tolist()
    parts: list[bytes] = []
    for piece, filling in zip(pieces, fillings, strict=True):
        parts += (bytes(filling) + start, piece)
    blocks = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, _BLOCK_BYTES)
    columns = np.ascontiguousarray(blocks.T)
    crcs = np.zeros(len(blocks), np.uint32)
    for table, column in zip(_byte_tables(), columns, strict=True):
        crcs ^= table.take(column)  # (half the time of table[column])
    distance = _BLOCK_BYTES
    while len(crcs) > len(pieces):
        crcs, counts = _joined_in_pairs(crcs, counts, distance)
        distance *= 2
    return ~crcs


def _joined_in_pairs(
    crcs: NDArray[np.uint32], counts: NDArray[np.int64], distance: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Returns the remainders of each piece's blocks, joined two by two from its end, and how many it now has."""
    ends = np.cumsum(counts)
    halves = (counts + 1) // 2
    half_ends = np.cumsum(halves)
    # The second block of the pair that is `back` pairs before its piece's last one.
    piece = np.repeat(np.arange(len(counts)), halves)
    back = half_ends[piece] - 1 - np.arange(int(half_ends[-1]))
    second = ends[piece] - 1 - 2 * back
    # The first pair of a piece has no first block where the number of blocks is odd: there is 0 then.
    has_first = 2 * back + 1 < counts[piece]
    first = np.where(has_first, crcs[second - 1], 0)
    return crcs[second] ^ _shifted(first, distance), halves


def _shifted(crcs: NDArray[Any], distance: int) -> NDArray[np.uint32]:
    """Returns the registers after this many bytes of zeros."""
    tables = _shift_tables(distance)
    shifted: NDArray[np.uint32] = tables[0][crcs & 0xFF]
    for place in (1, 2, 3):
        shifted ^= tables[place][(crcs >> (8 * place)) & 0xFF]
    return shifted


@functools.cache
def _byte_table() -> NDArray[np.uint32]:
    """Returns the remainder of each byte: shape (256,)."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


@functools.cache
def _byte_tables() -> NDArray[np.uint32]:
    """Returns the remainder of each byte at each place of a block, the first place first: shape (block, 256)."""
    table = _byte_table()
    tables = [table]
    for _ in range(_BLOCK_BYTES - 1):
        tables.append((tables[-1] >> np.uint32(8)) ^ table[tables[-1] & 0xFF])
    return np.array(tables[::-1])


@functools.cache
def _shift_tables(distance: int) -> NDArray[np.uint32]:
    """Returns what each byte of the register becomes after `distance` bytes of zeros, a block times a power of two."""
    registers = np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], np.uint32)
    if distance > _BLOCK_BYTES:
        return _shifted(_shifted(registers, distance // 2), distance // 2)
    table = _byte_table()
    for _ in range(distance):
        registers = (registers >> np.uint32(8)) ^ table[registers & 0xFF]
    return registers


@functools.cache
def _start_bytes() -> bytes:
    """Returns the four bytes that bring a register of zeros to ones: the steps of four bytes, taken backwards."""
    table = _byte_table()
    highest = (table >> np.uint32(24)).tolist()
    register = _ONES
    for _ in range(4):
        byte = highest.index(register >> 24)
        register = ((register ^ int(table[byte])) << 8) & _ONES | byte
    return register.to_bytes(4, "little")
