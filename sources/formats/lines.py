"""The records of files of text: lines, JSON on lines, and rows of CSV.

A record ends with a newline. It is a span of the file, found once by a scan, and decoded when it is read.
"""

import codecs
import contextlib
import copy
import csv
import dataclasses
import functools
import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.signals import SignalSafeLock
from millstream.errors import DataSourceError
from millstream.sources.digests import digest_of
from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.spans import Scan, SpanFormat, SpanRecords, SpanRequest, refuse_compressed
from millstream.sources.source_checks import check_file_columns, checked_columns

_NEWLINE = 10

_BLANK_READ_BYTES = 4096
"""The size of a read of a line that may be blank."""


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
        are_blank = first == _NEWLINE
        for number in np.flatnonzero(np.isin(first, np.frombuffer(blanks, np.uint8))).tolist():
            are_blank[number] = _is_blank(scan, start + int(lines[number]), blanks)
        yield lines[~are_blank] + start
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
        if self.encoding == "utf-8" and (texts := _decoded_together(spans)) is not None:
            return texts
        _check_line_ends(spans, request)
        lines = [span[:-2] if span.endswith(b"\r\n") else span[:-1] if span.endswith(b"\n") else span for span in spans]
        return decode_texts(lines, self.encoding, request)


def _check_line_ends(spans: list[bytes], request: SpanRequest) -> None:
    """Raises DataSourceError unless each span has one newline, at its end. The last line of a file may have none."""
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

    None unless all are UTF-8, and have one newline each, at the end.
    """
    content = b"".join(spans)
    lengths = np.fromiter(map(len, spans), np.int64, len(spans))
    if not lengths.all() or (np.frombuffer(content, np.uint8)[lengths.cumsum() - 1] != _NEWLINE).any():
        return None
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError:
        return None
    if len(lines) != len(spans) + 1:
        return None
    lines.pop()
    return [line.removesuffix("\r") for line in lines] if b"\r" in content else lines


_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")


@final
class JsonLinesDataSource(SpanRecords[Any]):
    """The values of JSON Lines files (.jsonl, .ndjson), in any order: usually dicts.

    Each line is one JSON value in UTF-8 (jsonlines.org). Blank lines are skipped, and so is a byte order mark at the
    start of a file. If `orjson` is installed (`pip install 'millstream[json]'`), it parses at several times the speed.
    The values are the same: Python's `json` reads those that `orjson` refuses or reads differently, such as NaN and
    integers of more than 64 bits.

    Args:
        paths: one path or a sequence of paths, in the order of the records: files, patterns such as
            `data/part-*.jsonl`, ranges such as `file.jsonl[100:200]`, and URLs.
        cache: a `FileCache` for local copies of whole remote files.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: a file is compressed, or is one JSON array of objects.

    Reading raises DataSourceError, with the file and the record, for a line that is not JSON, and for a file that has
    changed, see "All sources of files" in docs/formats.md.

    Examples:
        >>> source = millstream.JsonLinesDataSource("train*.jsonl")
        >>> len(source), source[1]
        (2, {'text': 'two'})
    """

    kind = "JSONL"

    def __init__(self, paths: Any, *, cache: FileCache | None = None) -> None:
        super().__init__(paths, _JsonLinesFormat(), cache)

    def as_texts(self) -> "SpanRecords[bytes]":
        """Returns the records as their text in the files, in UTF-8, of which each is checked when it is read."""
        texts = copy.copy(self)
        vars(texts)["_format"] = _JsonLinesFormat(is_text=True)
        return texts

    def _count(self, path: str) -> int:
        count = super()._count(path)
        if count == 1 and _ARRAY.match(self.first_bytes(path)):
            plain = f"{path.removesuffix('.json')}.jsonl"
            raise DataSourceError(
                f"{path!r} is one JSON array, not JSON Lines: it would be a single record. Write each value on a line "
                f"of its own, as `jq -c '.[]' {shlex.quote(path)} > {shlex.quote(plain)}` does."
            )
        return count


@final
@dataclasses.dataclass(frozen=True)
class _JsonLinesFormat(SpanFormat[Any]):
    """A span is a line with the blank lines after it, whose record is its value or, if `is_text`, its text."""

    index_kind: ClassVar[str] = "json-lines"

    is_text: bool = False

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        refuse_compressed(scan)
        return record_starts(scan, b" \t\r", lambda block: np.flatnonzero(block == ord("\n")))

    def decode(self, spans: list[bytes], request: SpanRequest) -> list[Any]:
        loads = _loads()
        inexact = _rows_of_long_integers(spans)
        records: list[Any] = []
        if not inexact:
            with contextlib.suppress(ValueError):
                records.extend(map(loads, spans))
        for row in range(len(records), len(spans)):
            exactly = row in inexact
            if not exactly:
                try:
                    records.append(loads(spans[row]))
                except ValueError:
                    exactly = True
            if exactly:
                records.append(_loads_exactly(spans[row], row, request))
        return [span.strip() for span in spans] if self.is_text else records


_LONG_DIGITS = 19
"""An integer beyond 64 bits, for which `orjson` returns a float, has one digit more, or so many after a minus sign."""

_DIGITS_AS_ZEROS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else ord(" ") for byte in range(256))


def _rows_of_long_integers(spans: list[bytes]) -> set[int]:
    """Returns the rows that may hold an integer beyond 64 bits."""
    text = b"".join(spans)
    # Every ninth byte first: a number of that length covers two of these.
    is_digit = np.frombuffer(text, np.uint8)[:: _LONG_DIGITS // 2] - np.uint8(ord("0")) < 10
    if not (is_digit[1:] & is_digit[:-1]).any():
        return set()
    zeros, digits = text.translate(_DIGITS_AS_ZEROS), b"0" * _LONG_DIGITS
    ends = np.cumsum([len(span) for span in spans])
    rows: set[int] = set()
    offset = zeros.find(digits)
    while offset >= 0:
        after = offset + _LONG_DIGITS
        if zeros[after : after + 1] == b"0" or text[offset - 1 : offset] == b"-":
            row = int(np.searchsorted(ends, offset, side="right"))
            rows.add(row)
            after = int(ends[row])
        offset = zeros.find(digits, after)
    return rows


@functools.cache
def _loads() -> Callable[[bytes], Any]:
    """Returns the fastest parser of one value. It may refuse values that `json` reads."""
    try:
        from orjson import loads  # noqa: PLC0415
    except ImportError:
        return json.loads
    return loads


def _loads_exactly(span: bytes, row: int, request: SpanRequest) -> Any:
    """Returns one value, parsed by `json`."""
    try:
        return json.loads(span.decode())
    except (ValueError, RecursionError) as error:
        raise request.error(row, f"it is not a JSON value on one line ({request.line_of(row)}): {error}.") from error


_BYTE_ORDER_MARK = "\ufeff"

_RAISING_LIMIT = SignalSafeLock(threading.Lock())
"""Held while the limit of `csv` on the length of fields is increased."""


@final
class CsvDataSource(SpanRecords[dict[str, str]]):
    """The rows of CSV files, as dicts of `str` by the names in the first row, in any order.

    The files are those of RFC 4180. A field in quotes may have delimiters, newlines, and doubled quotes.
    Lines end with a newline, with or without a carriage return before it. The first row of each file has the names of
    its columns. Blank lines are skipped.

    Args:
        paths: one path or a sequence of paths, in the order of the records: files, patterns such as `data/part-*.csv`,
            ranges such as `file.csv[100:200]`, and URLs.
        columns: the names of the wanted columns, in the order of the dicts; None for all columns, in the order of the
            first file.
        delimiter: the character between fields; None for a tab if the first file is named `.tsv`, else a comma.
        quotechar: `"`, or None if quotes are characters like others, as in most files with tabs: each line is a row.
        encoding: the encoding of the text. In it, newline and quote must be the bytes 10 and 34, and nothing else.
        cache: a `FileCache` for local copies of whole remote files.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: a file is compressed, has no row of names, or ends within a quoted field.
        TypeError: columns that are not names.
        ValueError: a file lacks a wanted column or has it twice, or, if all are wanted, has other columns than the
            first file.

    Reading raises DataSourceError, with the file and the row, for a row with more or fewer fields than there are names,
    or wrong quotes, and for a file that has changed, see "All sources of files" in docs/formats.md.

    Examples:
        >>> source = millstream.CsvDataSource("people.csv")
        >>> len(source), source[1]
        (2, {'name': 'Alan', 'age': '41'})
    """

    kind = "CSV"

    def __init__(
        self,
        paths: Any,
        *,
        columns: Sequence[str] | None = None,
        delimiter: str | None = None,
        quotechar: str | None = '"',
        encoding: str = "utf-8",
        cache: FileCache | None = None,
    ) -> None:
        wanted = checked_columns(columns)
        if delimiter is None:
            first = paths[0] if isinstance(paths, list | tuple) and paths else paths
            delimiter = "\t" if str(first).lower().endswith(".tsv") else ","
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
            raise ValueError(f"delimiter must be one character, and not a quote or line end, got {delimiter!r}.")
        if quotechar not in ('"', None):
            raise ValueError(f"quotechar must be '\"', or None if quotes are no signs, got {quotechar!r}.")
        kind = _CsvFormat if quotechar else _UnquotedFormat
        self._csv = kind(delimiter, checked_encoding(encoding))
        self._headers: dict[str, tuple[str, ...]] = {}
        super().__init__(paths, self._csv, cache)
        self._columns = self._headers[self._paths[0]] if wanted is None else wanted
        for path in self._paths:
            check_file_columns(path, self._headers[path], self._columns, is_all=wanted is None)

    def fingerprint(self) -> str:
        """Returns the number of files and records, columns, delimiter, and a digest of names, sizes, counts, ranges."""
        names = digest_of(self._columns, 4)
        own = f"{super().fingerprint()} columns={len(self._columns)}:{names} delimiter={self._csv.delimiter!r}"
        own += "" if self._csv.has_quotes else " quotechar=None"
        return own if self._csv.encoding == "utf-8" else f"{own} encoding={self._csv.encoding}"

    def _count(self, path: str) -> int:
        self._headers[path] = self._read_header(path, int(self._offsets_between(path, 0, 1)[0]))
        return super()._count(path)

    def _format_of(self, path: str) -> SpanFormat[dict[str, str]]:
        return dataclasses.replace(self._csv, header=self._headers[path], columns=self._columns)

    def _read_header(self, path: str, stop: int) -> tuple[str, ...]:
        """Returns the names in the row that ends at an offset."""
        try:
            text = self.first_bytes(path, stop).decode(self._csv.encoding).removeprefix(_BYTE_ORDER_MARK).strip("\r\n")
            (row,) = self._csv.rows([text])
        except (ValueError, csv.Error) as error:
            raise DataSourceError(
                f"{path!r} must begin with a row of column names in {self._csv.encoding}: {_reason(error)}. Add the "
                "row, or pass another delimiter or encoding."
            ) from error
        return tuple(row)


@dataclasses.dataclass(frozen=True)
class _CsvFormat(SpanFormat[dict[str, str]]):
    """A span is a row with the blank lines after it. The row of names is before the first one."""

    index_kind: ClassVar[str] = "csv"
    has_quotes: ClassVar[bool] = True

    delimiter: str
    encoding: str
    header: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        refuse_compressed(scan)
        quotes_before = 0

        def newlines(block: NDArray[np.uint8]) -> NDArray[np.int64]:
            nonlocal quotes_before
            ends = np.flatnonzero(block == ord("\n"))
            if not self.has_quotes:
                return ends
            quotes = np.flatnonzero(block == ord('"'))
            # In a well-formed file each quote opens or closes: after an even number of them, a newline ends a row.
            outside = ((np.searchsorted(quotes, ends) + quotes_before) & 1) == 0
            quotes_before += len(quotes)
            found: NDArray[np.int64] = ends[outside]
            return found

        count = 0
        for starts in record_starts(scan, b"\r", newlines):
            yield starts[1:] if count == 0 else starts  # The first offset is that of the row of names.
            count += len(starts)
        if count < 2 or quotes_before & 1:
            problem = (
                "has an unterminated quoted field" if quotes_before & 1 else "is empty: expected a row of column names"
            )
            raise DataSourceError(
                f"{scan.path!r} {problem}. Restore the file, or pass quotechar=None if quotes are characters in it."
            )

    def decode(self, spans: list[bytes], request: SpanRequest) -> list[dict[str, str]]:
        texts = decode_texts(spans, self.encoding, request)
        try:
            rows = self.rows(texts)
        except csv.Error:
            rows = []
        if len(rows) != len(texts) or set(map(len, rows)) - {len(self.header)}:
            rows = [self._fields(text, row, request) for row, text in enumerate(texts)]
        if self.columns == self.header:
            return [dict(zip(self.columns, row, strict=True)) for row in rows]
        chosen = [self.header.index(name) for name in self.columns]
        return [{name: row[column] for name, column in zip(self.columns, chosen, strict=True)} for row in rows]

    def _fields(self, text: str, row: int, request: SpanRequest) -> list[str]:
        try:
            (fields,) = self.rows([text])
        except (csv.Error, ValueError) as error:
            raise request.error(
                row,
                f"it is not a row of CSV: {_reason(error)}. Fields that hold quotes or line ends must be in quotes, "
                "and quotes within them doubled. Or pass quotechar=None if quotes are characters.",
            ) from error
        if len(fields) != len(self.header):
            raise request.error(
                row, f"it has {len(fields)} fields, but the first row of the file names {len(self.header)} columns."
            )
        return fields

    def rows(self, texts: list[str]) -> list[list[str]]:
        """Returns the rows of texts; a field may have any length."""
        read = functools.partial(csv.reader, delimiter=self.delimiter, strict=True)
        if not self.has_quotes:
            read = functools.partial(read, quoting=csv.QUOTE_NONE)
        try:
            return list(read(texts))
        except csv.Error as error:
            if "field limit" not in str(error):
                raise
        # The process has one limit. Other threads that parse meanwhile see the increased one, which does no harm.
        with _RAISING_LIMIT:
            limit = csv.field_size_limit(max(map(len, texts)) + 1)
            try:
                return list(read(texts))
            finally:
                csv.field_size_limit(limit)


@final
class _UnquotedFormat(_CsvFormat):
    """A span is a line."""

    index_kind: ClassVar[str] = "csv-unquoted"
    has_quotes: ClassVar[bool] = False


def _reason(error: Exception) -> str:
    # Python advises to open the file in another mode.
    is_line_end = "new-line character" in str(error)
    return "it has a carriage return that is no line end, outside of quotes" if is_line_end else str(error)
