"""The samples of WebDataset archives.

A member of a tar archive is a header of 512 bytes and its data, padded to a multiple of 512 bytes. The formats ustar
and pax (POSIX.1-1988 and -2001) and GNU's differ in the position of long names and large sizes: in a prefix in the
header, in a pax member before it, in a member of type L before it, or as a number in base 256. Blocks of zeros end the
archive.
"""

import array
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.spans import Scan, SpanFormat, SpanRecords, SpanRequest, refuse_compressed

_SAMPLES_AT_ONCE = 4096

_BLOCK_BYTES = 512

_ZEROS = bytes(_BLOCK_BYTES)
# Sets of numbers: `in` takes a tenth of the time that it takes in bytes.
_REGULAR_TYPES = frozenset(b"0\x007")
_SPARSE_TYPE = ord("S")
_PAX_TYPE = ord("x")
_LONG_NAME_TYPE = ord("L")
_EXTENSION_TYPES = frozenset(b"xgLK")
_MAX_EXTENSION_BYTES = 1 << 20
"""Limit of the size of an extension, which is read into memory: a sparse file may have one of any size."""

_PAX_SIZE = re.compile(rb"\d{1,18}")
_PAX_RECORD = re.compile(rb"(\d{1,18}) ")


_SKIPPED_FOLDER = re.compile(r"__[^/]*__/")
"""Folders at the top of an archive that `webdataset` skips."""

_Extended = tuple[str | None, int | None]
"""The name and the size that extensions give a member; None for those in its header."""
_NOT_EXTENDED: _Extended = None, None
_TarFile = tuple[str, int, int, int, int, int]
"""A regular file in an archive. A plain tuple, because each record that is read has several.

The full name; the offset of its headers, including that of a long name; the offset and the size of its data; the offset
of the next member; the number of archives before its own, if several are concatenated.
"""


@final
class WebDatasetDataSource(SpanRecords[dict[str, Any]]):
    """The samples of WebDataset archives (.tar), in any order, each by one read.

    A sample is the adjacent files of an archive whose names are equal up to the first dot: `000/17.jpg` and
    `000/17.cls` are the dict `{"__key__": "000/17", "jpg": b"…", "cls": b"…"}`. Extensions are in lower case, as in the
    library `webdataset`. Files without an extension, hidden files, folders such as `__meta__` at the top, and members
    that are not files are skipped. The archives are ustar, pax or GNU tar, with names and sizes of any length, and
    several may be concatenated. Unlike in `webdataset`, archives without the zeros at their end, as if cut short, and
    with other bytes after them are refused, and so are sparse files.

    Args:
        paths: one path or a sequence of paths, in the order of the records: files, patterns such as `data/train-*.tar`,
            ranges such as `file.tar[100:200]`, and URLs.
        cache: a `FileCache` for local copies of whole remote files.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: a file is not a tar archive, is compressed, is damaged, or was cut short, or the files of a
            sample are not adjacent.

    Reading raises DataSourceError, with the file and the sample, for a sample that has two files of one extension, and
    for a file that has changed, see "All sources of files" in docs/formats.md.

    Examples:
        >>> source = millstream.WebDatasetDataSource("train-*.tar")
        >>> len(source), source[1]
        (2, {'__key__': '000/18', 'txt': b'a dog'})
    """

    kind = "WebDataset"

    def __init__(self, paths: Any, *, cache: FileCache | None = None) -> None:
        super().__init__(paths, _WebDatasetFormat(), cache)


@final
@dataclasses.dataclass(frozen=True)
class _WebDatasetFormat(SpanFormat[dict[str, Any]]):
    """A span is the members of a sample with their headers, and the skipped members after it."""

    index_kind: ClassVar[str] = "webdataset"
    index_version: ClassVar[int] = 2

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        refuse_compressed(scan)
        starts: list[int] = []
        hashes = array.array("q")
        last, stop = None, 0
        for key, _, (_, start, _, _, file_stop, number) in _files_of_samples(scan):
            if (key, number) != last:
                if len(starts) == _SAMPLES_AT_ONCE:
                    yield np.array(starts)
                    scan.report(start)
                    starts.clear()
                starts.append(start)
                last = (key, number)
                hashes.append(hash(last))
            stop = file_stop
        _check_adjacent(scan, np.frombuffer(hashes, np.int64))
        yield np.array([*starts, min(stop, scan.size)])

    def decode(self, spans: list[bytes], request: SpanRequest) -> list[dict[str, Any]]:
        return [_sample(span, row, request) for row, span in enumerate(spans)]


def _files_of_samples(scan: Scan) -> Iterator[tuple[str, str, _TarFile]]:
    """Yields the files of an archive that belong to samples, each with its key and extension."""
    try:
        for file in _tar_files(scan.read, scan.size, checks_headers=True):
            if (named := _key_and_extension(file[0])) is not None:
                yield *named, file
    except _TarError as error:
        raise DataSourceError(
            f"{scan.path!r} is not a tar archive, is damaged, or was cut short: {error}. Restore the file."
        ) from error


def _check_adjacent(scan: Scan, hashes: NDArray[np.int64]) -> None:
    """Raises DataSourceError if a sample is cut into several, given a hash of the key of each sample.

    A sample that is there several times, with the same extensions, is not.
    """
    ordered = np.sort(hashes)
    repeated = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not repeated:
        return
    # Read again, because the keys of all samples would take much memory.
    extensions: dict[tuple[str, int], set[str]] = {}
    samples = itertools.groupby(_files_of_samples(scan), lambda file: (file[0], file[2][-1]))
    for sample, files in samples:
        found = {extension for _, extension, _ in files}
        if hash(sample) in repeated and extensions.setdefault(sample, found) != found:
            raise DataSourceError(
                f"{scan.path!r} has the files of the sample {sample[0]!r} in several places: "
                f"{', '.join(sorted(extensions[sample]))} in one, {', '.join(sorted(found))} in another. Write the "
                "archive again with the files of each sample side by side, as `tar --sort=name` does."
            )


def _sample(span: bytes, row: int, request: SpanRequest) -> dict[str, Any]:
    sample: dict[str, Any] = {"__key__": ""}
    key = ""
    try:
        files = _tar_files(lambda start, length: span[start : start + length], len(span), checks_headers=False)
        for name, _, data, size, *_ in files:
            if (named := _key_and_extension(name)) is None:
                continue
            key, extension = named
            if extension in sample:
                raise request.error(row, f"its key {key!r} has two files with the extension {extension!r}.")
            sample[extension] = span[data : data + size]
    except _TarError as error:
        raise request.error(row, f"it is damaged: {error}. Restore the file.") from error
    sample["__key__"] = key
    return sample


def _key_and_extension(name: str) -> tuple[str, str] | None:
    """Returns the key and the extension in a file's name, or None if the file belongs to no sample.

    The first dot separates them; dots in folders do not count, and a name that begins with a dot has no key.
    """
    if name.startswith("__") and _SKIPPED_FOLDER.match(name):
        return None
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    return (name[:dot], name[dot + 1 :].lower()) if dot > base else None


class _TarError(ValueError):
    """There is no valid member at an offset."""


def _tar_files(read: Callable[[int, int], bytes], stop: int, *, checks_headers: bool) -> Iterator[_TarFile]:
    """Yields the regular files of an archive, or of a slice of one that ends at `stop`; other members are skipped.

    `read` returns the bytes from an offset on, fewer than requested only at the end. If the checksums of headers are
    compared (data have none), the archive must also end with zeros, as one that was not cut short does.
    """
    # The member at `offset` begins at `start`, with its extensions, which have the name and the size of it.
    offset, start, extended = 0, 0, _NOT_EXTENDED
    archive, is_ended = 0, False
    while offset < stop:
        header = read(offset, _BLOCK_BYTES)
        if header == _ZEROS:
            is_ended, offset = True, offset + _BLOCK_BYTES
            start = offset
            continue
        # Whatever follows the zeros at the end of an archive is another one.
        archive += is_ended
        is_ended = False
        if len(header) < _BLOCK_BYTES or (checks_headers and not _is_header(header)):
            raise _TarError(f"there is no header of a member at byte {offset:,}")
        kind, name, size, is_file = _member(header, offset, extended)
        data = offset + _BLOCK_BYTES
        if data + size > stop:
            raise _TarError(f"{name!r}, at byte {start:,}, ends beyond it")
        offset = data + size + -size % _BLOCK_BYTES
        if kind in _EXTENSION_TYPES:
            extended = _extended(kind, read(data, min(size, _MAX_EXTENSION_BYTES + 1)), *extended)
            continue
        if is_file:
            yield name, start, data, size, offset, archive
        start, extended = offset, _NOT_EXTENDED
    if checks_headers and not is_ended:
        raise _TarError("the zeros at its end are missing")


def _member(header: bytes, offset: int, extended: _Extended) -> tuple[int, str, int, bool]:
    """Returns the type of the member at an offset, its name, the size of its data, and True if it is a regular file."""
    kind = header[156]
    if kind == _SPARSE_TYPE:
        raise _TarError(
            f"the member at byte {offset:,} is a sparse file, which is not supported. Write it without --sparse"
        )
    # An extension has its own name and size.
    long_name, long_size = _NOT_EXTENDED if kind in _EXTENSION_TYPES else extended
    name = _name(header) if long_name is None else long_name
    size = _number(header[124:136]) if long_size is None else long_size
    is_file = kind in _REGULAR_TYPES and name[-1:] != "/"
    # Links, folders and devices have no data, whatever their size field is.
    has_data = is_file or not ord("1") <= kind <= ord("6")
    return kind, name, size if has_data else 0, is_file


def _is_header(header: bytes) -> bool:
    """Returns True if the checksum of a header is right. Its own eight bytes count as blanks."""
    try:
        stored = _number(header[148:156])
    except _TarError:
        return False
    return sum(header) - sum(header[148:156]) + 8 * ord(" ") == stored


def _name(header: bytes) -> str:
    """Returns the name in a header, with its prefix."""
    name = _text(header[:100])
    # Other formats than POSIX's have other fields there.
    return f"{_text(header[345:500])}/{name}" if header[345] and header[257:263] == b"ustar\x00" else name


def _number(field: bytes) -> int:
    """Returns a number of a header: octal digits, or base 256 after a byte that is 128."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\x00")[0].strip()
    if digits.strip(b"01234567"):
        raise _TarError(f"{digits!r} is not a number in a header")
    return int(digits or b"0", 8)


def _extended(kind: int, content: bytes, name: str | None, size: int | None) -> _Extended:
    """Returns the name and the size of the next member: those of an extension, else the given ones."""
    if len(content) > _MAX_EXTENSION_BYTES:
        raise _TarError(f"an extended header has more than {_MAX_EXTENSION_BYTES:,} bytes")
    if kind == _LONG_NAME_TYPE:
        return _text(content), size
    return _pax(content, name, size) if kind == _PAX_TYPE else (name, size)


def _pax(content: bytes, name: str | None, size: int | None) -> _Extended:
    """Returns the same for a pax member."""
    offset = 0
    while offset < len(content) and content[offset]:
        match = _PAX_RECORD.match(content, offset)
        length = int(match[1]) if match else 0
        record = content[match.end() if match else offset : offset + length]
        key, equals, value = record.rstrip(b"\n").partition(b"=")
        if not (length and equals and offset + length <= len(content)):
            raise _TarError("a pax header is damaged")
        if key == b"path":
            name = _text(value)
        elif key == b"size":
            if not _PAX_SIZE.fullmatch(value):
                raise _TarError("a pax header is damaged")
            size = int(value)
        elif key.startswith(b"GNU.sparse."):
            raise _TarError("a member is a sparse file, which is not supported. Write it without --sparse")
        offset += length
    return name, size


def _text(field: bytes) -> str:
    return field.partition(b"\x00")[0].decode("utf-8", "surrogateescape")
