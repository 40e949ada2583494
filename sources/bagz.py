"""Records of Bagz files, found by number.

A Bagz file (github.com/google-deepmind/bagz) is its records, laid end to end, and after them, for each record, where it
ends: a uint64, little-endian. So the last eight bytes say where these limits begin. In a `.bagz` file, each record that
is not empty is a frame of Zstandard.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.file_cache import FileCache
from millstream.sources.scan import BLOCK_BYTES, Scan
from millstream.sources.spans import SpanFormat, SpanPlaces, SpanRecords
from millstream.sources.stored_files import exists
from millstream.sources.urls import without_query

_LIMIT_BYTES = 8


@final
class BagzDataSource(SpanRecords[bytes]):
    """The records of Bagz files laid end to end, as bytes, in any order.

    Records of `.bagz` files are decompressed, for which `zstandard` must be installed
    (`pip install 'millstream[bagz]'`); those of all other files are taken as they are. Where records end is copied to
    `.NAME.bagz-index.npy` beside each file NAME, or to the cache folder where that cannot be written to
    (`$MILLSTREAM_CACHE`, `$XDG_CACHE_HOME/millstream`): what a worker maps there cannot be cut short beneath it.

    Args:
        paths: one path or a sequence of paths, made absolute at once. A path is a file (`~` is expanded), a pattern
            such as `data/train-*.bagz` (its matches sorted by name), or a file with a range of its records
            `file.bagz[100:200]`. The order of the paths is that of the records. A `str` may be a URL of
            `gs://`, `s3://`, `http://` or `https://`.
        cache: a `FileCache`, to copy whole files of URLs to a local disk before they are read; None to read just the
            records.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read, or a pattern has no match.
        IsADirectoryError: a directory in place of a file.
        DataSourceError: a file is not a Bagz file, is damaged, was cut short, or has its limits in another file.
        ImportError: a `.bagz` file, and no `zstandard`.
        TypeError: paths that are not paths, or a set of paths, which has no order.
        ValueError: a range that ends before it starts, or no records at all.

    Each reading member raises DataSourceError, with the file and the record, for a record that cannot be decompressed,
    and for a file that was truncated, removed or written to since the source was constructed. Files stay open, at most
    512.
    """

    kind: ClassVar[str] = "Bagz"

    def __init__(self, paths: Any, *, cache: FileCache | None = None) -> None:
        super().__init__(paths, _BagzFormat(), cache)
        if any(map(_is_compressed, self._paths)):
            _zstandard()  # Missing, it is an error now.


@final
@dataclasses.dataclass(frozen=True)
class _BagzFormat(SpanFormat[bytes]):
    """A span is a record."""

    index_kind: ClassVar[str] = "bagz"

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        yield np.array([0])
        if not scan.size:
            return
        folder, name = os.path.split(without_query(scan.path))
        if exists(os.path.join(folder, f"limits.{name}")):  # noqa: PTH118
            raise DataSourceError(
                f"{scan.path!r} has its limits in a file of their own, which cannot be read. Write them into the file."
            )
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

    def decode(self, spans: list[bytes], places: SpanPlaces) -> list[bytes]:
        if not _is_compressed(places.path):
            return spans
        zstandard = _zstandard()
        decompressor = zstandard.ZstdDecompressor()  # It is for one thread only.
        records: list[bytes] = []
        for place, span in enumerate(spans):
            if not span:
                records.append(span)
                continue
            frame = decompressor.decompressobj()
            try:
                record = frame.decompress(span)
            except zstandard.ZstdError as error:
                raise places.error(place, f"it cannot be decompressed: {error}. Restore the file.") from error
            if not frame.eof or frame.unused_data:
                raise places.error(place, "it is not one frame of Zstandard. Restore the file.")
            records.append(record)
        return records


def _is_compressed(path: str) -> bool:
    return without_query(path).endswith(".bagz")


def _zstandard() -> Any:
    """Returns the library that decompresses."""
    try:
        import zstandard  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "Records of .bagz files are compressed by Zstandard: pip install 'millstream[bagz]'."
        ) from error
    return zstandard


def _damaged(scan: Scan) -> DataSourceError:
    return DataSourceError(
        f"{scan.path!r} is not a Bagz file, is damaged, or was cut short: what it ends with is not where its records "
        "end. Restore the file."
    )
