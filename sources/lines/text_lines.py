"""The lines of text files."""

import codecs
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.files.span_files import Scan, SpanFormat, SpanRequest, refuse_compressed
from millstream.sources.files.spans import SpanRecords
from millstream.sources.storage.file_cache import FileCache

_NEWLINE = 10

_BLANK_READ_BYTES = 4096
"""The size of a read of a line that may be blank."""


@final
class TextLineDataSource(SpanRecords[str]):
    """The lines of text files, as `str` without their ends, in any order.

    A line ends with a newline, with or without a carriage return before it, or with its file; empty lines are lines. A
    byte order mark of UTF-8 at the start of a file is skipped.

    Each file is scanned once for the offsets of its lines, 8 bytes each. They are cached in `$MILLSTREAM_CACHE`
    (default: `~/.cache/millstream`), or stored beside the file by `millstream index`. A changed file is scanned again.

    Args:
        paths: one path or a sequence of paths, in the order of the records. A path is a file (`~` is expanded), a
            pattern such as `data/part-*.txt` (its matches are sorted), a file with a range of its lines, such as
            `file.txt[100:200]`, or, as a `str`, a URL of `gs://`, `s3://`, `http://` or `https://`.
        encoding: the encoding of the text. In it, the newline must be the byte 10, and nothing else.
        cache: a `FileCache` for local copies of whole remote files; None to read only the records.

    Raises:
        FileNotFoundError, IsADirectoryError, …: a file cannot be found or read, or a pattern has no match.
        DataSourceError: a file is compressed.
        TypeError: paths that are not paths, or a set of paths, which has no order.
        ValueError: an unknown encoding or one without lines of bytes, such as UTF-16; a range that ends before it
            starts.

    Reading raises DataSourceError, with the file and the line, for a line that is not in the encoding, and
    for a file that was truncated, removed or changed since the source was constructed. At most 512 files stay open.

    Examples:
        >>> source = millstream.TextLineDataSource("poem.txt")
        >>> len(source), source[1]
        (2, 'second line')
    """

    kind: ClassVar[str] = "text"

    def __init__(self, paths: Any, *, encoding: str = "utf-8", cache: FileCache | None = None) -> None:
        self._encoding = checked_encoding(encoding)
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
        start_of_last = text_start(scan)
        yield np.array([start_of_last])
        for start, block in scan.blocks():
            ends = np.flatnonzero(block == _NEWLINE) + (start + 1)
            yield ends
            if ends.size:
                start_of_last = ends[-1]
        if start_of_last < scan.size:  # The last line has no newline.
            yield np.array([scan.size])

    def decode(self, spans: list[bytes], request: SpanRequest) -> list[str]:
        _check_line_ends(spans, request)
        if self.encoding == "utf-8" and (texts := _decoded_together(spans)) is not None:
            return texts
        lines = [span[:-2] if span.endswith(b"\r\n") else span[:-1] if span.endswith(b"\n") else span for span in spans]
        return decode_texts(lines, self.encoding, request)


def _check_line_ends(spans: list[bytes], request: SpanRequest) -> None:
    """Raises DataSourceError unless each span has one newline, at its end. The last line of a file may have none."""
    if all(span.find(b"\n") == len(span) - 1 for span in spans):
        return
    for row, span in enumerate(spans):
        is_last = request.positions[row] == request.num_records - 1
        if b"\n" in span[:-1] or not (span.endswith(b"\n") or is_last):
            raise request.error(
                row,
                "its index does not point at one line. The file was rewritten while it was in use, and its time set "
                "back. Construct the source again.",
            )


def _decoded_together(spans: list[bytes]) -> list[str] | None:
    """Returns the texts of lines of UTF-8. Decoded as one text, they take a fifth of the time.

    None if a line is not UTF-8, or has no newline, as the last one of a file may.
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
    """Returns the offset of the text of a file: after a byte order mark of UTF-8, if there is one."""
    return len(codecs.BOM_UTF8) if scan.read(0, len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0


def decode_texts(texts: list[bytes], encoding: str, request: SpanRequest) -> list[str]:
    decoded: list[str] = []
    try:
        decoded.extend(text.decode(encoding) for text in texts)
    except UnicodeDecodeError as error:
        raise request.error(
            len(decoded),
            f"it is not {encoding}: {error.reason} at its byte {error.start}. Pass the encoding of the file.",
        ) from error
    return decoded


def record_starts(
    scan: Scan, blanks: bytes, newlines: Callable[[NDArray[np.uint8]], NDArray[np.int64]]
) -> Iterator[NDArray[np.int64]]:
    """Yields the offsets of records that end with a newline, without blank lines, and at last the size of the file.

    A blank line, which may have the bytes `blanks` besides its newline, belongs to the record before it. `newlines`
    returns the offsets, in the next block of the file, of the newlines that end a record.
    """
    begin, at_start = text_start(scan), True
    for start, block in scan.blocks():
        ends = newlines(block)
        lines = np.concatenate([[begin], ends + 1]) if at_start else ends + 1
        begin = 0
        at_start = bool(ends.size) and int(ends[-1]) == len(block) - 1
        lines = lines[lines < len(block)]
        first = block[lines]
        for number in np.flatnonzero(np.isin(first, np.frombuffer(blanks, np.uint8))).tolist():
            if _is_blank(scan, start + int(lines[number]), blanks):
                first[number] = _NEWLINE
        yield lines[first != _NEWLINE] + start
    yield np.array([scan.size])


def _is_blank(scan: Scan, offset: int, blanks: bytes) -> bool:
    """Returns True if the line that begins at an offset has nothing but blanks."""
    while content := scan.read(offset, _BLANK_READ_BYTES):
        if remainder := content.lstrip(blanks):
            return remainder[0] == _NEWLINE
        offset += len(content)
    return True


def checked_encoding(encoding: Any) -> str:
    """Returns the standard name of the encoding; refuses encodings whose lines cannot be found by their newlines."""
    if not isinstance(encoding, str):
        raise TypeError(f"encoding must be a str, such as 'utf-8', got {type(encoding).__name__}.")
    try:
        name = codecs.lookup(encoding).name
        newline = "\n".encode(encoding)
    except LookupError as error:
        raise ValueError(f"encoding must be the name of a text encoding, got {encoding!r}: {error}.") from error
    if name == "utf-8-sig":
        return "utf-8"
    if newline != b"\n":
        raise ValueError(
            f"encoding must have the newline as the byte 10, got {encoding!r}: its lines cannot be found. Convert the "
            "files to UTF-8."
        )
    return name
