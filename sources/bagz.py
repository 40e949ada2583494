"""Records of Bagz files, found by number.

A Bagz file (github.com/google-deepmind/bagz) is its records, laid end to end, and after them, for each record, where it
ends: a uint64, little-endian. So the last eight bytes say where these limits begin. Or the limits of NAME are in a file
of their own beside it, `limits.NAME`. In a `.bagz` file, each record that is not empty is a frame of Zstandard.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer
from millstream.errors import DataSourceError
from millstream.sources.files.scan import BLOCK_BYTES, Scan
from millstream.sources.files.span_files import SpanFormat, SpanPlaces
from millstream.sources.files.spans import SpanRecords
from millstream.sources.storage.byte_files import exists, identify, open_stored
from millstream.sources.storage.file_cache import FileCache
from millstream.sources.storage.urls import with_other_name, without_query

_LIMIT_BYTES = 8

_LARGEST_RATIO = 1 << 15
"""How many bytes may come out of each byte of Zstandard: four of them may be a block of 128 KB."""


@final
class BagzDataSource(SpanRecords[bytes]):
    """The records of Bagz files laid end to end, as bytes, in any order.

    Records of `.bagz` files are decompressed, for which `zstandard` must be installed
    (`pip install 'millstream[bagz]'`); those of all other files are taken as they are. The offsets of the records are
    checked and copied to the user's cache (`$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else
    `~/.cache/millstream`); `millstream index` copies them to a file beside the data.

    Args:
        paths: one path or a sequence of paths, made absolute at once. A path is a file (`~` is expanded), a pattern
            such as `data/train-*.bagz` (its matches sorted by name), or a file with a range of its records
            `file.bagz[100:200]`. The order of the paths is that of the records. A `str` may be a URL of
            `gs://`, `s3://`, `http://` or `https://`.
        cache: a `FileCache`, to copy whole files of URLs to a local disk before they are read; None to read just the
            records.
        max_record_bytes: the largest size of a decompressed record, in bytes (1 GiB): a small file may hold a record
            that would fill the memory.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read, or a pattern has no match.
        IsADirectoryError: a directory in place of a file.
        DataSourceError: a file is not a Bagz file, is damaged, or was cut short.
        ImportError: a `.bagz` file, and no `zstandard`.
        TypeError: paths that are not paths, or a set of paths, which has no order.
        ValueError: a range that ends before it starts, or no records at all.

    Each reading member raises DataSourceError, with the file and the record, for a record that cannot be decompressed,
    and for a file that was truncated, removed or written to since the source was constructed. Files stay open, at most
    512.

    Examples:
        >>> source = millstream.BagzDataSource("train.bagz")
        >>> len(source), source[1]
        (3, b'two')
        >>> next(iter(millstream.load(source, shuffle=True, seed=0, transformations=[bytes.decode], batch_size=3)))
        array(['three', 'two', 'one'], dtype='<U5')
    """

    kind: ClassVar[str] = "Bagz"

    def __init__(self, paths: Any, *, cache: FileCache | None = None, max_record_bytes: int = 1 << 30) -> None:
        limit = as_integer(max_record_bytes, "max_record_bytes", minimum=1)
        super().__init__(paths, _BagzFormat(limit), cache)
        if any(map(_is_compressed, self._paths)):
            _zstandard()  # Missing, it is an error now.


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
        if exists(place := _limits_path(scan.path)):
            limits = _separate_limits(place)
            if limits is not None and limits[-1] == scan.size and (np.diff(limits) >= 0).all() and limits[0] >= 0:
                yield limits
                return
            import logging  # noqa: PLC0415  (takes long to import)

            logging.getLogger("millstream").info(
                "millstream: %r does not say where the records of %r end, and is not used.", place, scan.path
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
                record = _decompressed(frame, span, self.max_record_bytes)
            except _TooLargeError:
                raise places.error(
                    place,
                    f"it becomes larger than {self.max_record_bytes:,} bytes. If the file can be trusted, raise "
                    "max_record_bytes.",
                ) from None
            except zstandard.ZstdError as error:
                raise places.error(place, f"it cannot be decompressed: {error}. Restore the file.") from error
            if not frame.eof or frame.unused_data:
                raise places.error(place, "it is not one frame of Zstandard. Restore the file.")
            records.append(record)
        return records


class _TooLargeError(Exception):
    """A record is larger than it may be."""


def _decompressed(frame: Any, span: bytes, limit: int) -> bytes:
    """Returns the content of a frame.

    Raises:
        _TooLargeError: it is larger than the limit. It takes memory for twice the limit at most.
    """
    step = max(_LARGEST_RATIO, limit) // _LARGEST_RATIO
    parts: list[bytes] = []
    size = 0
    for start in range(0, len(span), step):
        parts.append(frame.decompress(span[start : start + step]))
        size += len(parts[-1])
        if size > limit:
            raise _TooLargeError
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _limits_path(path: str) -> str:
    """Returns the path of the file beside a Bagz file that its limits may be in."""
    return with_other_name(path, lambda name: re.sub(r"[^/]*$", r"limits.\g<0>", name, count=1))


def _separate_limits(place: str) -> NDArray[np.int64] | None:
    """Returns the limits in a file of their own, or None if there are none in it."""
    identity = identify(place, "Bagz limits")
    if not identity.size or identity.size % _LIMIT_BYTES:
        return None
    file = open_stored(place, identity)
    try:
        blocks: list[bytes] = []
        done = 0
        while done < identity.size and (block := file.read(done, BLOCK_BYTES)):
            blocks.append(block)
            done += len(block)
    finally:
        file.close()
    return None if done < identity.size else np.frombuffer(b"".join(blocks), "<u8").view(np.int64)


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
        f"{scan.path!r} is not a Bagz file, is damaged, or was cut short: it does not end with the "
        "positions of its records. Restore the file."
    )
