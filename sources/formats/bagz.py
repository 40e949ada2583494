"""The records of Bagz files.

A Bagz file (github.com/google-deepmind/bagz) is its records without any framing, followed by the end offset of each
record: a uint64, little-endian. The last eight bytes are therefore the offset of the first of these limits. The limits
of NAME may be in another file beside it, `limits.NAME`. In a `.bagz` file, each record that is not empty is a frame of
Zstandard.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.errors import DataSourceError
from millstream.sources.files.byte_files import exists, read_whole
from millstream.sources.files.compression import zstandard_library
from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.spans import BLOCK_BYTES, Scan, SpanFormat, SpanRecords, SpanRequest
from millstream.sources.remote.urls import with_other_name, without_query

_LIMIT_BYTES = 8

_LARGEST_RATIO = 1 << 15
"""The maximum number of bytes that a byte of Zstandard becomes: four of them may be a block of 128 KB."""


@final
class BagzDataSource(SpanRecords[bytes]):
    """The records of Bagz files, as bytes, in any order.

    Records of `.bagz` files are decompressed, which needs `zstandard` (`pip install 'millstream[bagz]'`); those of all
    other files are returned as they are.

    Args:
        paths: one path or a sequence of paths, in the order of the records: files, patterns such as
            `data/train-*.bagz`, ranges such as `file.bagz[100:200]`, and URLs.
        cache: a `FileCache` for local copies of whole remote files.
        max_record_bytes: the maximum size of a decompressed record, in bytes (default: 1 GiB). A small file may have a
            record that would fill the memory.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: a file is not a Bagz file, is damaged, or was cut short.
        ImportError: `zstandard` is not installed, and a file is a `.bagz` file.

    Reading raises DataSourceError, with the file and the record, for a record that cannot be decompressed, and for a
    file that has changed, see "All sources of files" in docs/formats.md.

    Examples:
        >>> source = millstream.BagzDataSource("train.bagz")
        >>> len(source), source[1]
        (3, b'two')
        >>> next(iter(millstream.load(source, shuffle=True, seed=0, transformations=[bytes.decode], batch_size=3)))
        array(['three', 'two', 'one'], dtype='<U5')
    """

    kind = "Bagz"

    def __init__(self, paths: Any, *, cache: FileCache | None = None, max_record_bytes: int = 1 << 30) -> None:
        limit = as_integer(max_record_bytes, "max_record_bytes", minimum=1)
        super().__init__(paths, _BagzFormat(limit), cache)
        if any(map(_is_compressed, self._paths)):
            zstandard_library("read .bagz files")  # It raises ImportError here, and not in a worker.


@final
@dataclasses.dataclass(frozen=True)
class _BagzFormat(SpanFormat[bytes]):
    """A span is a record."""

    index_kind: ClassVar[str] = "bagz"

    max_record_bytes: int

    def companions(self, path: str) -> list[str]:
        return [_limits_path(path)]

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        yield np.array([0])
        if exists(limits_path := _limits_path(scan.path)):
            limits = _separate_limits(limits_path)
            if limits is not None and limits[-1] == scan.size and (np.diff(limits) >= 0).all() and limits[0] >= 0:
                yield limits
                return
            import logging  # noqa: PLC0415  (lazy: takes long to import)

            logging.getLogger("millstream").info(
                "millstream: %r does not have the limits of %r, and is not used.", limits_path, scan.path
            )
        if not scan.size:
            return
        begin = int.from_bytes(scan.read(max(0, scan.size - _LIMIT_BYTES), _LIMIT_BYTES), "little")
        if begin > scan.size - _LIMIT_BYTES or (scan.size - begin) % _LIMIT_BYTES:
            raise _damaged(scan)
        last = 0
        for start in range(begin, scan.size, BLOCK_BYTES // _LIMIT_BYTES * _LIMIT_BYTES):
            limits = np.frombuffer(scan.read(start, BLOCK_BYTES // _LIMIT_BYTES * _LIMIT_BYTES), "<u8")
            if limits.max() > begin or limits[0] < last or (limits[1:] < limits[:-1]).any():
                raise _damaged(scan)
            last = limits[-1]
            yield limits.astype(np.int64)
            scan.report(start)

    def decode(self, spans: list[bytes], request: SpanRequest) -> list[bytes]:
        if not _is_compressed(request.path):
            return spans
        zstandard = zstandard_library("read .bagz files")
        decompressor = zstandard.ZstdDecompressor()  # One per call: it is not safe in threads.
        records: list[bytes] = []
        for row, span in enumerate(spans):
            if not span:
                records.append(span)
                continue
            frame = decompressor.decompressobj()
            try:
                record = _decompressed(frame, span, self.max_record_bytes)
            except zstandard.ZstdError as error:
                raise request.error(row, f"it cannot be decompressed: {error}. Restore the file.") from error
            if record is None:
                advice = "If you trust the file, increase max_record_bytes."
                raise request.error(row, f"it becomes larger than {self.max_record_bytes:,} bytes. {advice}")
            if not frame.eof or frame.unused_data:
                raise request.error(row, "it is not a single frame of Zstandard. Restore the file.")
            records.append(record)
        return records


def _decompressed(frame: Any, span: bytes, limit: int) -> bytes | None:
    """Returns the content of a frame, or None if it is larger than the limit, of which it allocates at most twice."""
    step = max(_LARGEST_RATIO, limit) // _LARGEST_RATIO
    chunks: list[bytes] = []
    size = 0
    for start in range(0, len(span), step):
        chunks.append(frame.decompress(span[start : start + step]))
        size += len(chunks[-1])
        if size > limit:
            return None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _limits_path(path: str) -> str:
    return with_other_name(path, lambda name: re.sub(r"[^/]*$", r"limits.\g<0>", name, count=1))


def _separate_limits(path: str) -> NDArray[np.int64] | None:
    """Returns the limits in a file of their own, or None if its size is not that of limits."""
    content = read_whole(path, "Bagz limits")
    return None if not content or len(content) % _LIMIT_BYTES else np.frombuffer(content, "<u8").view(np.int64)


def _is_compressed(path: str) -> bool:
    return without_query(path).endswith(".bagz")


def _damaged(scan: Scan) -> DataSourceError:
    return DataSourceError(
        f"{scan.path!r} is not a Bagz file, is damaged, or was cut short: it does not end with the "
        "limits of its records. Restore the file."
    )
