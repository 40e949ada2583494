"""Rows of CSV files, found by number."""

import csv
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.signal_safe_lock import SignalSafeLock
from millstream.sources.column_names import check_file_columns, checked_columns
from millstream.sources.files.scan import Scan, refuse_compressed
from millstream.sources.files.span_files import SpanFormat, SpanPlaces
from millstream.sources.files.spans import SpanRecords
from millstream.sources.storage.byte_files import open_stored
from millstream.sources.storage.file_cache import FileCache
from millstream.sources.text_lines import decode_texts, record_starts

_BYTE_ORDER_MARK = "\ufeff"

_RAISING_LIMIT = SignalSafeLock(threading.Lock())
"""Held while the limit of `csv` on the length of fields is another than the user's."""


@final
class CsvDataSource(SpanRecords[dict[str, str]]):
    """The rows of CSV files laid end to end, as dicts of `str` by the names in the first row, in any order.

    The files are those of RFC 4180, in UTF-8: fields may be in quotes, may then hold delimiters and newlines, and
    quotes that are doubled. Lines end with a newline, with or without a carriage return before it. The first row of
    each file has the names of its columns. Blank lines are passed over.

    To read a row at random, its offset in the file must be known: each file is scanned once, and the offsets are kept
    in the user's cache (`$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else `~/.cache/millstream`), 8 bytes a
    row; `millstream index` keeps them beside the file. A file that has changed is scanned again.

    Args:
        paths: one path or a sequence of paths, made absolute at once. A path is a file (`~` is expanded), a pattern
            such as `data/part-*.csv` (its matches sorted by name), or a file with a range of its rows
            `file.csv[100:200]`. The order of the paths is that of the records. A `str` may be a URL of
            `gs://`, `s3://`, `http://` or `https://`.
        columns: the names of the columns that are wanted, in the order of the dicts; None for all of them, in the
            order of the first file.
        delimiter: the character between fields, such as a tab.
        cache: a `FileCache`, to copy whole files of URLs to a local disk before they are read; None to read just the
            records.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read, or a pattern has no match.
        IsADirectoryError: a directory in place of a file.
        DataSourceError: a file is compressed as a whole, has no row of names, or ends within quotes.
        TypeError: paths that are not paths, or a set of paths, which has no order; columns that are not names.
        ValueError: a column that a file lacks, or has twice; files with other columns than the first, where all are
            wanted; a range that ends before it starts; no records at all.

    Each reading member raises DataSourceError, with the file and the row, for a row with more or fewer fields
    than there are names, or wrong quotes, and for a file that was truncated, removed or written to since the source was
    constructed. Files stay open, at most 512.

    Examples:
        >>> source = millstream.CsvDataSource("people.csv")
        >>> len(source), source[1]
        (2, {'name': 'Alan', 'age': '41'})
    """

    kind: ClassVar[str] = "CSV"

    def __init__(
        self, paths: Any, *, columns: Sequence[str] | None = None, delimiter: str = ",", cache: FileCache | None = None
    ) -> None:
        wanted = checked_columns(columns)
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
            raise ValueError(f"delimiter must be one character, and not a quote or line end, got {delimiter!r}.")
        self._delimiter = delimiter
        self._headers: dict[str, tuple[str, ...]] = {}
        super().__init__(paths, _CsvFormat(delimiter), cache)
        self._columns = self._headers[self._paths[0]] if wanted is None else wanted
        for path in self._paths:
            check_file_columns(path, self._headers[path], self._columns, is_all=wanted is None)

    def fingerprint(self) -> str:
        """Returns the number of files and records, columns, delimiter, and a digest of names, sizes, counts, ranges."""
        import hashlib  # noqa: PLC0415  (OpenSSL takes its time)

        names = hashlib.blake2b(repr(self._columns).encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
        return f"{super().fingerprint()} columns={len(self._columns)}:{names} delimiter={self._delimiter!r}"

    def _count(self, path: str) -> int:
        self._headers[path] = self._read_header(path, int(self._offsets_between(path, 0, 1)[0]))
        return super()._count(path)

    def _format_of(self, path: str) -> SpanFormat[dict[str, str]]:
        return _CsvFormat(self._delimiter, self._headers[path], self._columns)

    def _read_header(self, path: str, stop: int) -> tuple[str, ...]:
        """Returns the names in the row that ends before a place."""
        with self._at_hand(path) as place:
            file = open_stored(place, self._identities[path])
            try:
                content = file.read(0, stop)
            finally:
                file.close()
        try:
            text = content.decode().removeprefix(_BYTE_ORDER_MARK).strip("\r\n")
            (row,) = _rows([text], self._delimiter)
        except (ValueError, csv.Error) as error:
            raise DataSourceError(
                f"{path!r} does not begin with the names of its columns, in UTF-8: {error}."
            ) from error
        return tuple(row)


@final
@dataclasses.dataclass(frozen=True)
class _CsvFormat(SpanFormat[dict[str, str]]):
    """A span is a row with the blank lines after it. The row of names is before the first one."""

    index_kind: ClassVar[str] = "csv"

    delimiter: str
    header: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        refuse_compressed(scan)
        quotes_before = 0

        def newlines(block: NDArray[np.uint8]) -> NDArray[np.int64]:
            nonlocal quotes_before
            quotes, ends = np.flatnonzero(block == ord('"')), np.flatnonzero(block == ord("\n"))
            # In a well-formed file each quote opens or closes: after an even number of them, a newline ends a row.
            outside = ((np.searchsorted(quotes, ends) + quotes_before) & 1) == 0
            quotes_before += len(quotes)
            found: NDArray[np.int64] = ends[outside]
            return found

        count = 0
        for starts in record_starts(scan, b"\r", newlines):
            yield starts[1:] if count == 0 else starts  # The first one is that of the row of names.
            count += len(starts)
        if count < 2 or quotes_before & 1:
            what = (
                "ends within quotes" if quotes_before & 1 else "is empty: its first row should have the columns' names"
            )
            raise DataSourceError(f"{scan.path!r} {what}. Restore the file, or pass another delimiter.")

    def decode(self, spans: list[bytes], places: SpanPlaces) -> list[dict[str, str]]:
        texts = decode_texts(spans, "utf-8", places)
        try:
            rows = _rows(texts, self.delimiter)
        except csv.Error:
            rows = []
        if len(rows) != len(texts) or set(map(len, rows)) - {len(self.header)}:
            rows = [self._row(text, place, places) for place, text in enumerate(texts)]
        if self.columns == self.header:
            return [dict(zip(self.columns, row, strict=True)) for row in rows]
        chosen = [self.header.index(name) for name in self.columns]
        return [{name: row[place] for name, place in zip(self.columns, chosen, strict=True)} for row in rows]

    def _row(self, text: str, place: int, places: SpanPlaces) -> list[str]:
        """Returns the fields of one row, or raises what is wrong with it."""
        try:
            (row,) = _rows([text], self.delimiter)
        except (csv.Error, ValueError) as error:
            raise places.error(
                place,
                f"it is not a row of CSV: {error}. Fields that hold quotes or line ends must be in quotes, and quotes "
                "within them doubled.",
            ) from error
        if len(row) != len(self.header):
            raise places.error(
                place, f"it has {len(row)} fields, but the first row of the file names {len(self.header)} columns."
            )
        return row


def _rows(texts: list[str], delimiter: str) -> list[list[str]]:
    """Returns the rows of some texts; a field may be of any length.

    Raises:
        csv.Error: one of them is not well-formed.
    """
    try:
        return list(csv.reader(texts, delimiter=delimiter, strict=True))
    except csv.Error as error:
        if "field limit" not in str(error):
            raise
    # The limit is one for the whole process. Others who parse meanwhile see the higher one, which does no harm.
    with _RAISING_LIMIT:
        limit = csv.field_size_limit(max(map(len, texts)) + 1)
        try:
            return list(csv.reader(texts, delimiter=delimiter, strict=True))
        finally:
            csv.field_size_limit(limit)
