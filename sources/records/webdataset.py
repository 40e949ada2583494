"""The samples of WebDataset archives."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.files.span_files import Scan, SpanFormat, SpanRequest, refuse_compressed
from millstream.sources.files.spans import SpanRecords
from millstream.sources.records.tar_members import TarError, tar_files
from millstream.sources.storage.file_cache import FileCache

_SAMPLES_AT_ONCE = 4096


@final
class WebDatasetDataSource(SpanRecords[dict[str, Any]]):
    """The samples of WebDataset archives (.tar), in any order, each by one read.

    A sample is the adjacent files of an archive whose names are equal up to the first dot: `000/17.jpg` and
    `000/17.cls` are the dict `{"__key__": "000/17", "jpg": b"…", "cls": b"…"}`. Extensions are in lower case, as in the
    library `webdataset`. Files without an extension, and members that are not files, are skipped. The archives are
    ustar, pax or GNU tar, with names and sizes of any length.

    Each file is scanned once for the offsets of its samples, 8 bytes each. They are cached in `$MILLSTREAM_CACHE`
    (default: `~/.cache/millstream`), or stored beside the file by `millstream index`. A changed file is scanned again.

    Args:
        paths: one path or a sequence of paths, in the order of the records. A path is a file (`~` is expanded), a
            pattern such as `data/train-*.tar` (its matches are sorted), a file with a range of its samples, such as
            `file.tar[100:200]`, or, as a `str`, a URL of `gs://`, `s3://`, `http://` or `https://`.
        cache: a `FileCache` for local copies of whole remote files; None to read only the records.

    Raises:
        FileNotFoundError, IsADirectoryError, …: a file cannot be found or read, or a pattern has no match.
        DataSourceError: a file is not a tar archive, is compressed, is damaged, or was cut short.
        TypeError: paths that are not paths, or a set of paths, which has no order.
        ValueError: a range that ends before it starts.

    Reading raises DataSourceError, with the file and the sample, for a sample that has two files of one
    extension, and for a file that was truncated, removed or changed since the source was constructed. At most 512
    files stay open.

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
    """A span is the members of a sample with their headers, and the skipped members after it."""

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

    def decode(self, spans: list[bytes], request: SpanRequest) -> list[dict[str, Any]]:
        return [_sample(span, row, request) for row, span in enumerate(spans)]


def _sample(span: bytes, row: int, request: SpanRequest) -> dict[str, Any]:
    sample: dict[str, Any] = {"__key__": ""}
    key = ""
    try:
        files = tar_files(lambda start, length: span[start : start + length], len(span), checks_headers=False)
        for name, _, data, size, _ in files:
            if (named := _key_and_extension(name)) is None:
                continue
            key, extension = named
            if extension in sample:
                raise request.error(row, f"its key {key!r} has two files with the extension {extension!r}.")
            sample[extension] = span[data : data + size]
    except TarError as error:
        raise request.error(row, f"it is damaged: {error}. Restore the file.") from error
    sample["__key__"] = key
    return sample


def _key_and_extension(name: str) -> tuple[str, str] | None:
    """Returns the key and the extension in a file's name, or None if the file belongs to no sample.

    The first dot separates them; dots in folders do not count, and a name that begins with a dot has no key.
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    return (name[:dot], name[dot + 1 :].lower()) if dot > base else None
