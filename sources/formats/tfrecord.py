"""Records of TFRecord files, found by number, without TensorFlow.

A TFRecord file is a row of records, each of which is (tensorflow.org/tutorials/load_data/tfrecord):

    uint64  length of the data, little-endian
    uint32  masked CRC-32C of these 8 bytes
    byte    data[length]
    uint32  masked CRC-32C of the data

CRC-32C (Castagnoli, RFC 3720, appendix B.4) is the remainder of a message as a polynomial over GF(2). Masked is rotated
right by 15 bits, plus a constant, modulo 2^32 (tensorflow/core/lib/hash/crc32c.h). `google-crc32c` computes those of
records. Those of lengths come from tables: the remainder is linear, so that of eight bytes is the exclusive or of one
table look-up per byte. NumPy does that for thousands of headers together, at a twentieth of the time that one call per
header takes.
"""

import dataclasses
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_flag
from millstream.errors import DataSourceError
from millstream.sources.files.compression import HEAD_BYTES, compressed_error, compression_of, is_zlib
from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.spans import Scan, SpanFormat, SpanRecords, SpanRequest

HEADER_BYTES = 12
TRAILER_BYTES = 4
_FRAME_BYTES = HEADER_BYTES + TRAILER_BYTES

_BLOCK_BYTES = 4 << 20
"""The size of a read to find the headers of small records."""

_LARGE_RECORD_BYTES = 16 << 10
"""The size of a record from which on reading each header alone is faster than reading all bytes."""

_HEADERS_ALONE = 1024
"""The number of headers of large records that are read between two checks."""

_POLYNOMIAL = 0x82F63B78
"""Reflected: the coefficient of x^31 is the lowest bit."""

_LENGTH_BYTES = 8
_REGISTER_BYTES = 4
_MASK = 0xA282EAD8


@final
class TFRecordDataSource(SpanRecords[bytes]):
    """The records of TFRecord files, as bytes, in any order: no TensorFlow is needed.

    `millstream.decode_examples` turns batches of `tf.train.Example` into arrays.

    Args:
        paths: one path or a sequence of paths, in the order of the records: files, patterns such as
            `data/train-*.tfrecord`, ranges such as `file.tfrecord[100:200]`, and URLs.
        check_crc: True to compare the checksum of each record when it is read. It takes a tenth of a microsecond per KB
            and needs `google-crc32c` (`pip install 'millstream[tfrecord]'`).
        cache: a `FileCache` for local copies of whole remote files.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: a file is not a TFRecord file, is compressed, is damaged, or was cut short.
        ImportError: `check_crc` is true, and `google-crc32c` is not installed.

    Reading raises DataSourceError, with the file and the record, for a record that is damaged, and for a file that has
    changed, see "All sources of files" in docs/formats.md.

    Examples:
        >>> source = millstream.TFRecordDataSource("train.tfrecord")
        >>> decode = millstream.decode_examples({"label": millstream.FixedLengthFeature((), np.int64)})
        >>> loader = millstream.load(source, shuffle=True, seed=0, transformations=[millstream.Batch(4), decode])
        >>> next(iter(loader))
        {'label': array([2, 4, 5, 6])}
    """

    kind = "TFRecord"

    def __init__(self, paths: Any, *, check_crc: bool = True, cache: FileCache | None = None) -> None:
        check_crc = as_flag(check_crc, "check_crc")
        if check_crc:
            crc32c_function()  # It raises ImportError here, and not in a worker.
        super().__init__(paths, _TFRecordFormat(check_crc), cache)


@final
@dataclasses.dataclass(frozen=True)
class _TFRecordFormat(SpanFormat[bytes]):
    """A span is a record with its header and its checksum."""

    index_kind: ClassVar[str] = "tfrecord"

    check_crc: bool

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        start = scan.read(0, HEAD_BYTES)
        compression = compression_of(start) or ("zlib" if is_zlib(start) else None)
        if compression is not None and not begins(scan.path, start):
            raise compressed_error(scan.path, compression)
        offset, count, read_headers = 0, 0, _headers_of_block
        while offset < scan.size:
            headers, found, end = read_headers(scan, offset)
            if self.check_crc:
                _check_headers(scan, headers, found, count)
            if end > scan.size:
                raise DataSourceError(
                    f"{scan.path!r} was cut short: record {count + len(found) - 1}, at byte {found[-1]:,}, would end "
                    f"at byte {end:,}, but the file has {scan.size:,} bytes. Restore the file."
                )
            yield found
            count += len(found)
            read_headers = _headers_of_block if end - offset < len(found) * _LARGE_RECORD_BYTES else _headers_alone
            offset = end
            scan.report(offset)
        yield np.array([offset])

    def decode(self, spans: list[bytes], request: SpanRequest) -> list[bytes]:
        records = [span[HEADER_BYTES:-TRAILER_BYTES] for span in spans]
        if self.check_crc:
            stored = np.frombuffer(b"".join([span[-TRAILER_BYTES:] for span in spans]), "<u4")
            wrong = np.flatnonzero(masked_crc32c(records) != stored)
            if wrong.size:
                raise request.error(
                    int(wrong[0]),
                    "its checksum differs from the one stored with it, so the record is damaged. Restore the file, "
                    "or pass check_crc=False to read it as it is.",
                )
        return records


def begins(path: str, start: bytes) -> bool:  # noqa: ARG001  (as `FileFormat` calls it)
    """Returns True if a file begins with the header of a record: a length with its checksum."""
    header = start[:HEADER_BYTES]
    return len(header) == HEADER_BYTES and not _damaged_headers(header).size


def _headers_of_block(scan: Scan, offset: int) -> tuple[bytes, NDArray[np.int64], int]:
    """Returns the headers in the block that begins at a record, their offsets, and the offset of the next record."""
    block = scan.read(offset, _BLOCK_BYTES)
    found: list[int] = []
    unpack, within, last = struct.Struct("<Q").unpack_from, 0, len(block) - HEADER_BYTES
    while within <= last:
        found.append(within)
        within += unpack(block, within)[0] + _FRAME_BYTES
    if not found:
        raise _cut_short_in_header(scan, offset)
    starts = np.array(found)
    headers = np.frombuffer(block, np.uint8)[starts[:, np.newaxis] + np.arange(HEADER_BYTES)]
    return headers.tobytes(), starts + offset, offset + within


def _headers_alone(scan: Scan, offset: int) -> tuple[bytes, NDArray[np.int64], int]:
    """Returns the same for up to `_HEADERS_ALONE` records without reading their data."""
    headers: list[bytes] = []
    found: list[int] = []
    while len(found) < _HEADERS_ALONE and offset < scan.size:
        header = scan.read(offset, HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise _cut_short_in_header(scan, offset)
        headers.append(header)
        found.append(offset)
        offset += int.from_bytes(header[:8], "little") + _FRAME_BYTES
    return b"".join(headers), np.array(found), offset


def _check_headers(scan: Scan, headers: bytes, found: NDArray[np.int64], count: int) -> None:
    """Raises if the checksum of a length is wrong: the search would continue at a wrong offset."""
    damaged = _damaged_headers(headers)
    if damaged.size:
        number = count + int(damaged[0])
        problem = "is damaged" if number else "is not a TFRecord file, or is damaged"
        raise DataSourceError(
            f"{scan.path!r} {problem}: the length of record {number}, at byte {found[damaged[0]]:,}, has a checksum "
            "that differs from the one stored with it. Restore the file."
        )


def _damaged_headers(headers: bytes) -> NDArray[np.int64]:
    """Returns the numbers of the headers whose length does not have the checksum stored with it."""
    table = np.frombuffer(headers, np.uint8).reshape(-1, HEADER_BYTES)
    stored = np.ascontiguousarray(table[:, 8:]).view("<u4")[:, 0]
    return np.flatnonzero(masked_crc32c_of_lengths(table[:, :8]) != stored)


def _cut_short_in_header(scan: Scan, offset: int) -> DataSourceError:
    return DataSourceError(
        f"{scan.path!r} was cut short: only {scan.size - offset} bytes follow its last complete record, at byte "
        f"{offset:,}. Restore the file."
    )


def masked_crc32c(records: Sequence[bytes]) -> NDArray[np.uint32]:
    """Returns the masked CRC-32C of each record: shape (n,)."""
    return _masked(np.fromiter(map(crc32c_function(), records), np.uint32, len(records)))


def masked_crc32c_of_lengths(lengths: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Returns the masked CRC-32C of each row of 8 bytes: shape (n,)."""
    # A register of ones at the start is the same as the first four bytes inverted.
    inverted = lengths ^ np.array([0xFF] * _REGISTER_BYTES + [0] * (_LENGTH_BYTES - _REGISTER_BYTES), np.uint8)
    crcs = np.zeros(len(lengths), np.uint32)
    for table, column in zip(_byte_tables(), inverted.T, strict=True):
        crcs ^= table.take(column)
    return _masked(~crcs)


@functools.cache
def crc32c_function() -> Callable[[bytes], int]:
    try:
        from google_crc32c import value  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "Cannot check the checksums of TFRecord files without google-crc32c: pip install 'millstream[tfrecord]', "
            "or pass check_crc=False to read records without a check."
        ) from error
    function: Callable[[bytes], int] = value
    return function


def _masked(crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(_MASK)


@functools.cache
def _byte_tables() -> list[NDArray[np.uint32]]:
    """Returns the remainder of each byte value at each of the 8 positions, the first position first."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    tables = [table]
    for _ in range(_LENGTH_BYTES - 1):
        tables.append((tables[-1] >> np.uint32(8)) ^ table[tables[-1] & 0xFF])
    return tables[::-1]
