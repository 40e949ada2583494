"""The number of records in an ArrayRecord file, read from its end without the library.

The library's reader starts 64 threads in a process that opens a file. A process that only needs the number of records,
and leaves reading to its workers, avoids them: three reads of 64 bytes suffice.

An ArrayRecord file is a Riegeli file. It has blocks of 64 KiB, each with a header of 24 bytes, and chunks, each with a
header of 40 bytes that the header of a block may interrupt. The first chunk is the signature of the file. The chunks of
records follow, each with group_size records; then the footer, a chunk with one record for the file and one for each
chunk of records; and last the postscript, a block with three copies of the footer's offset.

Only plausibility is checked here, because the checksums of Riegeli are not in the standard library. The reader that
opens the file later verifies everything, and its count is compared with this one.
"""

import os
import re
from typing import BinaryIO

_BLOCK_BYTES = 1 << 16
_BLOCK_HEADER_BYTES = 24
_CHUNK_HEADER_BYTES = 40
_FIRST_CHUNK = _BLOCK_HEADER_BYTES + _CHUNK_HEADER_BYTES
_RECORD_CHUNK_TYPES = b"rt"

# The protocol buffer {1: footer's offset, 2: magic number}, both as variable-length integers.
_POSTSCRIPT = re.compile(rb"\x08([\x80-\xff]{0,9}[\x00-\x7f])\x10\xde\xc0\xeb\xfe\x84\xce\xc3\xc9\x71", re.DOTALL)
_POSTSCRIPT_COPIES = 3
_POSTSCRIPT_BYTES = 256


def count_records(path: str) -> int | None:
    """Returns the number of records of a file with one record per chunk, or None for any other file.

    For None, only the library's reader can count: the file has groups of several records, or another format.

    Raises:
        OSError: the file cannot be opened or read.
    """
    with open(path, "rb") as file:  # noqa: PTH123  (the path is a string throughout)
        size = os.fstat(file.fileno()).st_size
        if size < 2 * _BLOCK_BYTES or size % _BLOCK_BYTES:
            return None
        footer_offset = _footer_offset(file, size)
        if footer_offset is None or not _FIRST_CHUNK <= footer_offset < size - _BLOCK_BYTES:
            return None
        first_chunk_records = _chunk_records(file, _FIRST_CHUNK)
        footer_records = _chunk_records(file, footer_offset)
    if not first_chunk_records or not footer_records:
        return None
    num_chunks = footer_records - 1
    if num_chunks == 0:
        return 0
    # Every chunk has the number of records of the first one; the last chunk may have fewer.
    if first_chunk_records != 1 or num_chunks * _CHUNK_HEADER_BYTES > size:
        return None
    return num_chunks


def _footer_offset(file: BinaryIO, size: int) -> int | None:
    """Returns the offset of the footer, or None if the postscript does not have three equal copies of it."""
    file.seek(size - _BLOCK_BYTES)
    copies = _POSTSCRIPT.findall(file.read(_POSTSCRIPT_BYTES))
    if len(copies) != _POSTSCRIPT_COPIES or len(set(copies)) != 1:
        return None
    varint: bytes = copies[0]
    return sum((byte & 0x7F) << (7 * number) for number, byte in enumerate(varint))


def _chunk_records(file: BinaryIO, offset: int) -> int | None:
    """Returns the number of records of the chunk that begins at `offset`, or None if its type has no records."""
    file.seek(offset)
    header = file.read(_CHUNK_HEADER_BYTES + _BLOCK_HEADER_BYTES)
    to_boundary = -offset % _BLOCK_BYTES
    if to_boundary < _CHUNK_HEADER_BYTES:
        header = header[:to_boundary] + header[to_boundary + _BLOCK_HEADER_BYTES :]
    # 8 bytes each: hash of the header, size of the data, hash of the data; then 1 byte type, 7 bytes number of records.
    if header[24] not in _RECORD_CHUNK_TYPES:
        return None
    return int.from_bytes(header[25:32], "little")
