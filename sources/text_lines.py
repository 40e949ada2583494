"""Lines of text files, found by number."""

import codecs
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.files.scan import Scan, refuse_compressed
from millstream.sources.files.span_files import SpanFormat, SpanPlaces
from millstream.sources.files.spans import SpanRecords
from millstream.sources.storage.file_cache import FileCache

_NEWLINE = 10

_LOOKED_AT_BYTES = 4096
"""How much is read at once of a line that may be blank."""


@final
class TextLineDataSource(SpanRecords[str]):
    """The lines of text files laid end to end, as `str` without their ends, in any order.

    A line ends with a newline, with or without a carriage return before it, or with its file; empty lines are lines. A
    byte order mark of UTF-8 at the start of a file is passed over.

    To read a line at random, its offset in the file must be known: each file is scanned once, and the offsets are kept
    in the user's cache (`$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else `~/.cache/millstream`), 8 bytes a
    line; `millstream index` keeps them beside the file. A file that has changed is scanned again.

    Args:
        paths: one path or a sequence of paths, made absolute at once. A path is a file (`~` is expanded), a pattern
            such as `data/part-*.txt` (its matches sorted by name), or a file with a range of its lines
            `file.txt[100:200]`. The order of the paths is that of the records. A `str` may be a URL of
            `gs://`, `s3://`, `http://` or `https://`.
        encoding: how the text is encoded; one in which the newline is the byte 10, and nothing else is.
        cache: a `FileCache`, to copy whole files of URLs to a local disk before they are read; None to read just the
            records.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read, or a pattern has no match.
        IsADirectoryError: a directory in place of a file.
        DataSourceError: a file is compressed as a whole.
        TypeError: paths that are not paths, or a set of paths, which has no order.
        ValueError: an encoding that is not known or in which lines cannot be found, such as UTF-16; a range that ends
            before it starts; no records at all.

    Each reading member raises DataSourceError, with the file and the line, for a line that is not in the encoding, and
    for a file that was truncated, removed or written to since the source was constructed. Files stay open, at most 512.

    Examples:
        >>> source = millstream.TextLineDataSource("poem.txt")
        >>> len(source), source[1]
        (2, 'second line')
    """

    kind: ClassVar[str] = "text"

    def __init__(self, paths: Any, *, encoding: str = "utf-8", cache: FileCache | None = None) -> None:
        self._encoding = _checked_encoding(encoding)
        super().__init__(paths, _TextLineFormat(self._encoding), cache)

    def fingerprint(self) -> str:
        """Returns the number of files and records, the encoding, and a digest of names, sizes, counts and ranges."""
        return f"{super().fingerprint()} encoding={self._encoding}"


@final
@dataclasses.dataclass(frozen=True)
class _TextLineFormat(SpanFormat[str]):
    """A span is a line with its end."""

    index_kind: ClassVar[str] = "lines"

    encoding: str

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        refuse_compressed(scan)
        place = text_start(scan)
        yield np.array([place])
        for start, block in scan.blocks():
            ends = np.flatnonzero(block == _NEWLINE) + (start + 1)
            yield ends
            if ends.size:
                place = ends[-1]
        if place < scan.size:  # The last line has no end of its own.
            yield np.array([scan.size])

    def decode(self, spans: list[bytes], places: SpanPlaces) -> list[str]:
        _check_line_ends(spans, places)
        if self.encoding == "utf-8" and (texts := _decoded_together(spans)) is not None:
            return texts
        lines = [span[:-2] if span.endswith(b"\r\n") else span[:-1] if span.endswith(b"\n") else span for span in spans]
        return decode_texts(lines, self.encoding, places)


def _check_line_ends(spans: list[bytes], places: SpanPlaces) -> None:
    """Raises DataSourceError unless each span is one line: its only newline ends it, but in the last line of a file."""
    if all(span.find(b"\n") == len(span) - 1 for span in spans):
        return
    for place, span in enumerate(spans):
        is_last = places.positions[place] == places.num_records - 1
        if b"\n" in span[:-1] or not (span.endswith(b"\n") or is_last):
            raise places.error(
                place,
                "there is not one whole line where its index says. The file was rewritten while it was in use, and its "
                "time set back. Construct the source again.",
            )


def _decoded_together(spans: list[bytes]) -> list[str] | None:
    """Returns the texts of lines with their ends, of UTF-8: decoded as one text, they take a fifth of the time.

    None where one of them has no end, as the last one of a file may, or is not UTF-8.
    """
    try:
        text = b"".join(spans).decode()
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    if len(lines) != len(spans) + 1:
        return None
    lines.pop()
    return [line.removesuffix("\r") for line in lines] if "\r" in text else lines


def text_start(scan: Scan) -> int:
    """Returns where the text of a file begins: after a byte order mark of UTF-8, if there is one."""
    return len(codecs.BOM_UTF8) if scan.read(0, len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0


def decode_texts(texts: list[bytes], encoding: str, places: SpanPlaces) -> list[str]:
    """Returns the texts of some records.

    Raises:
        DataSourceError: one of them is not in the encoding.
    """
    decoded: list[str] = []
    try:
        decoded.extend(text.decode(encoding) for text in texts)
    except UnicodeDecodeError as error:
        raise places.error(
            len(decoded), f"it is not {encoding}: {error.reason} at its byte {error.start}. Pass its encoding."
        ) from error
    return decoded


def record_starts(
    scan: Scan, blanks: bytes, newlines: Callable[[NDArray[np.uint8]], NDArray[np.int64]]
) -> Iterator[NDArray[np.int64]]:
    """Yields where the records begin that line ends part, without blank lines, and at last where the file ends.

    Blank lines are left to the record before them.

    Args:
        scan: the file.
        blanks: the bytes besides the newline that a blank line may consist of.
        newlines: returns where in the next block of the file the newlines are that end a record.
    """
    begin, at_start = text_start(scan), True
    for start, block in scan.blocks():
        ends = newlines(block)
        lines = np.concatenate([[begin], ends + 1]) if at_start else ends + 1
        begin = 0
        at_start = bool(ends.size) and int(ends[-1]) == len(block) - 1
        lines = lines[lines < len(block)]
        first = block[lines]
        for place in np.flatnonzero(np.isin(first, np.frombuffer(blanks, np.uint8))).tolist():
            if _is_blank(scan, start + int(lines[place]), blanks):
                first[place] = _NEWLINE
        yield lines[first != _NEWLINE] + start
    yield np.array([scan.size])


def _is_blank(scan: Scan, place: int, blanks: bytes) -> bool:
    """Returns whether the line that begins at a place has nothing but blanks."""
    while some := scan.read(place, _LOOKED_AT_BYTES):
        if rest := some.lstrip(blanks):
            return rest[0] == _NEWLINE
        place += len(some)
    return True


def _checked_encoding(encoding: Any) -> str:
    """Returns the usual name of an encoding in which lines can be found by their newlines."""
    if not isinstance(encoding, str):
        raise TypeError(f"encoding must be a str, such as 'utf-8', got {type(encoding).__name__}.")
    try:
        name = codecs.lookup(encoding).name
        newline = "\n".encode(encoding)
    except LookupError as error:
        raise ValueError(f"encoding must be the name of an encoding of text, got {encoding!r}: {error}.") from error
    if name == "utf-8-sig":
        return "utf-8"
    if newline != b"\n":
        raise ValueError(
            f"encoding must be one in which a newline is the byte 10, got {encoding!r}: lines cannot be found in it. "
            "Convert the files to UTF-8."
        )
    return name
