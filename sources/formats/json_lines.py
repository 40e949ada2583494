"""The values of JSON Lines files."""

import contextlib
import copy
import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.lines import record_starts
from millstream.sources.files.spans import Scan, SpanFormat, SpanRecords, SpanRequest, refuse_compressed

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
