"""Samples of WebDataset archives, found by number."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.files.scan import Scan, refuse_compressed
from millstream.sources.files.span_files import SpanFormat, SpanPlaces
from millstream.sources.files.spans import SpanRecords
from millstream.sources.storage.file_cache import FileCache
from millstream.sources.tar_members import TarError, tar_files

_SAMPLES_AT_ONCE = 4096


@final
class WebDatasetDataSource(SpanRecords[dict[str, Any]]):
    """The samples of WebDataset archives (.tar) laid end to end, in any order, each by one read.

    A sample is the files of an archive, one after the other, whose names are alike up to the first dot: `000/17.jpg`
    and `000/17.cls` are the dict `{"__key__": "000/17", "jpg": b"…", "cls": b"…"}`. Extensions are in lower case, as
    in the library `webdataset`; files without one, and members that are not files, are passed over. The archives are
    ustar, pax or GNU tar, with names and sizes of any length.

    To read a sample at random, its offset in the archive must be known: the headers of each archive are scanned once,
    and the offsets are kept in the user's cache (`$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else
    `~/.cache/millstream`), 8 bytes a sample; `millstream index` keeps them beside the file. A file that has changed is
    scanned again.

    Args:
        paths: one path or a sequence of paths, made absolute at once. A path is a file (`~` is expanded), a pattern
            such as `data/train-*.tar` (its matches sorted by name), or a file with a range of its samples
            `file.tar[100:200]`. The order of the paths is that of the records. A `str` may be a URL of
            `gs://`, `s3://`, `http://` or `https://`.
        cache: a `FileCache`, to copy whole files of URLs to a local disk before they are read; None to read just the
            records.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read, or a pattern has no match.
        IsADirectoryError: a directory in place of a file.
        DataSourceError: a file is not a tar archive, is compressed as a whole, is damaged, or was cut short.
        TypeError: paths that are not paths, or a set of paths, which has no order.
        ValueError: a range that ends before it starts, or no records at all.

    Each reading member raises DataSourceError, with the file and the sample, for a sample that has two files of one
    extension, and for a file that was truncated, removed or written to since the source was constructed. Files stay
    open, at most 512.

    Examples:
        >>> source = millstream.WebDatasetDataSource("train-*.tar")
        >>> len(source), source[1]
        (2, {'__key__': '000/18', 'txt': b'a dog'})
    """

    kind: ClassVar[str] = "WebDataset"

    def __init__(self, paths: Any, *, cache: FileCache | None = None) -> None:
        super().__init__(paths, _WebDatasetFormat(), cache)


@final
@dataclasses.dataclass(frozen=True)
class _WebDatasetFormat(SpanFormat[dict[str, Any]]):
    """A span is the members of a sample, with their headers, and those after it that are passed over."""

    index_kind: ClassVar[str] = "webdataset"

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        refuse_compressed(scan)
        starts: list[int] = []
        last_key, stop = None, 0
        try:
            for name, start, _, _, file_stop in tar_files(scan.read, scan.size, checks_headers=True):
                if (named := _key_and_extension(name)) is None:
                    continue
                if named[0] != last_key:
                    if len(starts) == _SAMPLES_AT_ONCE:
                        yield np.array(starts)
                        scan.report(start)
                        starts.clear()
                    starts.append(start)
                    last_key = named[0]
                stop = file_stop
        except TarError as error:
            raise DataSourceError(
                f"{scan.path!r} is not a tar archive, is damaged, or was cut short: {error}. Restore the file."
            ) from error
        yield np.array([*starts, min(stop, scan.size)])

    def decode(self, spans: list[bytes], places: SpanPlaces) -> list[dict[str, Any]]:
        return [_sample(span, place, places) for place, span in enumerate(spans)]


def _sample(span: bytes, place: int, places: SpanPlaces) -> dict[str, Any]:
    """Returns the files of a sample by their extensions."""
    sample: dict[str, Any] = {"__key__": ""}
    key = ""
    try:
        files = tar_files(lambda start, length: span[start : start + length], len(span), checks_headers=False)
        for name, _, data, size, _ in files:
            if (named := _key_and_extension(name)) is None:
                continue
            key, extension = named
            if extension in sample:
                raise places.error(place, f"its key {key!r} has two files with the extension {extension!r}.")
            sample[extension] = span[data : data + size]
    except TarError as error:
        raise places.error(place, f"it is damaged: {error}. Restore the file.") from error
    sample["__key__"] = key
    return sample


def _key_and_extension(name: str) -> tuple[str, str] | None:
    """Returns what a file's name says, or None for one that is part of no sample.

    The first dot parts the two; those of folders do not count, and a name that begins with a dot has no key.
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    return (name[:dot], name[dot + 1 :].lower()) if dot > base else None
