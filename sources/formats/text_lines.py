"""The lines of text files."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.lines import checked_encoding, decode_texts, text_start
from millstream.sources.files.spans import Scan, SpanFormat, SpanRecords, SpanRequest, refuse_compressed

_NEWLINE = 10


@final
class TextLineDataSource(SpanRecords[str]):
    """The lines of text files, as `str` without their ends, in any order.

    A line ends with a newline, with or without a carriage return before it, or with its file; empty lines are lines. A
    byte order mark of UTF-8 at the start of a file is skipped.

    Args:
        paths: one path or a sequence of paths, in the order of the records: files, patterns such as `data/part-*.txt`,
            ranges such as `file.txt[100:200]`, and URLs.
        encoding: the encoding of the text. In it, the newline must be the byte 10, and nothing else.
        cache: a `FileCache` for local copies of whole remote files.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: a file is compressed.
        ValueError: an unknown encoding or one without lines of bytes, such as UTF-16.

    Reading raises DataSourceError, with the file and the line, for a line that is not in the encoding, and for a file
    that has changed, see "All sources of files" in docs/formats.md.

    Examples:
        >>> source = millstream.TextLineDataSource("poem.txt")
        >>> len(source), source[1]
        (2, 'second line')
    """

    kind = "text"

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
