"""The rows of CSV files."""

import csv
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.signals import SignalSafeLock
from millstream.errors import DataSourceError
from millstream.sources.digests import digest_of
from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.lines import checked_encoding, decode_texts, record_starts
from millstream.sources.files.spans import Scan, SpanFormat, SpanRecords, SpanRequest, refuse_compressed
from millstream.sources.source_checks import check_file_columns, checked_columns

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
