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
        records: list[Any] = []
        if not _has_long_number(b"".join(spans)):
            with contextlib.suppress(ValueError):
                records.extend(map(_loads(), spans))
        records.extend(_loads_exactly(spans[row], row, request) for row in range(len(records), len(spans)))
        return [span.strip() for span in spans] if self.is_text else records


_LONG_DIGITS = 19
"""An integer of more than 64 bits has at least this number of digits. `orjson` returns a float for it."""

_DIGITS_AS_ZEROS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else ord(" ") for byte in range(256))


def _has_long_number(text: bytes) -> bool:
    """Returns True if there are _LONG_DIGITS digits one after another."""
    # Every ninth byte first: a number of that length covers two of these.
    is_digit = np.frombuffer(text, np.uint8)[:: _LONG_DIGITS // 2] - np.uint8(ord("0")) < 10
    if not (is_digit[1:] & is_digit[:-1]).any():
        return False
    return b"0" * _LONG_DIGITS in text.translate(_DIGITS_AS_ZEROS)


@functools.cache
def _loads() -> Callable[[bytes], Any]:
    """Returns the fastest parser of one value. It may refuse values that `json` reads."""
    try:
        from orjson import loads  # noqa: PLC0415
    except ImportError:
        return json.loads
    return loads


def _loads_exactly(span: bytes, row: int, request: SpanRequest) -> Any:
    """Returns one value, parsed by `json` if the fast parser refuses it or might read it differently."""
    if not _has_long_number(span):
        with contextlib.suppress(ValueError):
            return _loads()(span)
    try:
        return json.loads(span.decode())
    except (ValueError, RecursionError) as error:
        raise request.error(row, f"it is not a JSON value on one line ({request.line_of(row)}): {error}.") from error
