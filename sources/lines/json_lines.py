"""The values of JSON Lines files."""

import contextlib
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
from millstream.sources.files.span_files import Scan, SpanFormat, SpanRequest, refuse_compressed
from millstream.sources.files.spans import SpanRecords
from millstream.sources.lines.text_lines import record_starts
from millstream.sources.storage.file_cache import FileCache

_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")


@final
class JsonLinesDataSource(SpanRecords[Any]):
    """The values of JSON Lines files (.jsonl, .ndjson), in any order: usually dicts.

    Each line is one JSON value in UTF-8 (jsonlines.org). Blank lines are skipped, and so is a byte order mark at the
    start of a file. If `orjson` is installed (`pip install 'millstream[json]'`), it parses at several times the speed.
    The values are the same: Python's `json` reads those that `orjson` refuses or reads differently, such as NaN and
    integers of more than 64 bits.

    Each file is scanned once for the offsets of its records, 8 bytes each. They are cached in `$MILLSTREAM_CACHE`
    (default: `~/.cache/millstream`), or stored beside the file by `millstream index`. A changed file is scanned again.

    Args:
        paths: one path or a sequence of paths, in the order of the records. A path is a file (`~` is expanded), a
            pattern such as `data/part-*.jsonl` (its matches are sorted), a file with a range of its records, such as
            `file.jsonl[100:200]`, or, as a `str`, a URL of `gs://`, `s3://`, `http://` or `https://`.
        cache: a `FileCache` for local copies of whole remote files; None to read only the records.

    Raises:
        FileNotFoundError, IsADirectoryError, …: a file cannot be found or read, or a pattern has no match.
        DataSourceError: a file is compressed, or is one JSON array of objects.
        TypeError: paths that are not paths, or a set of paths, which has no order.
        ValueError: a range that ends before it starts.

    Reading raises DataSourceError, with the file and the record, for a line that is not JSON, and for a
    file that was truncated, removed or changed since the source was constructed. At most 512 files stay open.

    Examples:
        >>> source = millstream.JsonLinesDataSource("train*.jsonl")
        >>> len(source), source[1]
        (2, {'text': 'two'})
    """

    kind: ClassVar[str] = "JSONL"

    def __init__(self, paths: Any, *, cache: FileCache | None = None) -> None:
        super().__init__(paths, _JsonLinesFormat(), cache)

    def _count(self, path: str) -> int:
        return _checked_count(self, path, super()._count(path))


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


@final
class JsonTexts(SpanRecords[bytes]):
    """The records of `JsonLinesDataSource` as the text in the file, in UTF-8.

    Numbers, the order of keys, and repeated names stay as they are. A line that is not JSON is the same error.
    """

    kind: ClassVar[str] = "JSONL"

    def __init__(self, paths: Any) -> None:
        super().__init__(paths, _JsonLinesFormat(is_text=True))

    def _count(self, path: str) -> int:
        return _checked_count(self, path, super()._count(path))


def _checked_count(source: SpanRecords[Any], path: str, count: int) -> int:
    """Returns the number of records of a file, unless its only line is an array of objects: a file of JSON."""
    if count == 1 and _ARRAY.match(source.first_bytes(path)):
        plain = f"{path.removesuffix('.json')}.jsonl"
        raise DataSourceError(
            f"{path!r} is one JSON array, not JSON Lines: it would be a single record. Write each value on a line of "
            f"its own, as `jq -c '.[]' {shlex.quote(path)} > {shlex.quote(plain)}` does."
        )
    return count


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
