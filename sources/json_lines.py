"""Objects of JSON Lines files, found by number."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.files.scan import Scan, refuse_compressed
from millstream.sources.files.span_files import SpanFormat, SpanPlaces
from millstream.sources.files.spans import SpanRecords
from millstream.sources.storage.file_cache import FileCache
from millstream.sources.text_lines import record_starts


@final
class JsonLinesDataSource(SpanRecords[Any]):
    """The values of JSON Lines files (.jsonl, .ndjson) laid end to end, in any order: mostly dicts.

    Each line is one JSON value in UTF-8 (jsonlines.org). Blank lines are passed over, and so is a byte order mark at
    the start of a file. Where `orjson` is installed (`pip install 'millstream[json]'`), it parses, at several times the
    speed. The values are the same: what it refuses or reads otherwise, such as NaN and integers of more than 64 bits,
    Python's `json` reads.

    To read a line at random, its offset in the file must be known: each file is scanned once, and the offsets are kept
    in the user's cache (`$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else `~/.cache/millstream`), 8 bytes a
    line; `millstream index` keeps them beside the file. A file that has changed is scanned again.

    Args:
        paths: one path or a sequence of paths, made absolute at once. A path is a file (`~` is expanded), a pattern
            such as `data/part-*.jsonl` (its matches sorted by name), or a file with a range of its records
            `file.jsonl[100:200]`. The order of the paths is that of the records. A `str` may be a URL of
            `gs://`, `s3://`, `http://` or `https://`.
        cache: a `FileCache`, to copy whole files of URLs to a local disk before they are read; None to read just the
            records.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read, or a pattern has no match.
        IsADirectoryError: a directory in place of a file.
        DataSourceError: a file is compressed as a whole.
        TypeError: paths that are not paths, or a set of paths, which has no order.
        ValueError: a range that ends before it starts, or no records at all.

    Each reading member raises DataSourceError, with the file and the record, for a line that is not JSON, and for a
    file that was truncated, removed or written to since the source was constructed. Files stay open, at most 512.

    Examples:
        >>> source = millstream.JsonLinesDataSource("train*.jsonl")
        >>> len(source), source[1]
        (2, {'text': 'two'})
    """

    kind: ClassVar[str] = "JSONL"

    def __init__(self, paths: Any, *, cache: FileCache | None = None) -> None:
        super().__init__(paths, _JsonLinesFormat(), cache)


@final
@dataclasses.dataclass(frozen=True)
class _JsonLinesFormat(SpanFormat[Any]):
    """A span is a line with the blank lines after it."""

    index_kind: ClassVar[str] = "json-lines"

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        refuse_compressed(scan)
        return record_starts(scan, b" \t\r", lambda block: np.flatnonzero(block == ord("\n")))

    def decode(self, spans: list[bytes], places: SpanPlaces) -> list[Any]:
        records: list[Any] = []
        if not _has_long_number(b"".join(spans)):
            with contextlib.suppress(ValueError):
                records.extend(map(_loads(), spans))
        records.extend(_loads_slowly(spans[place], place, places) for place in range(len(records), len(spans)))
        return records


@final
class JsonTexts(SpanRecords[bytes]):
    """The same records as of `JsonLinesDataSource`, as the text that they are written as, in UTF-8.

    So numbers, the order of keys, and names that come twice stay as they are. What is not JSON is the same error.
    """

    kind: ClassVar[str] = "JSONL"

    def __init__(self, paths: Any) -> None:
        super().__init__(paths, _JsonTextsFormat())


@final
@dataclasses.dataclass(frozen=True)
class _JsonTextsFormat(SpanFormat[bytes]):
    """A span is the same as where values are read."""

    index_kind: ClassVar[str] = _JsonLinesFormat.index_kind

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        return _JsonLinesFormat().offsets(scan)

    def decode(self, spans: list[bytes], places: SpanPlaces) -> list[bytes]:
        _JsonLinesFormat().decode(spans, places)
        return [span.strip() for span in spans]


_LONG_DIGITS = 19
"""An integer of more than 64 bits has more than this many digits, or as many: `orjson` makes a float of it."""

_DIGITS_AS_ZEROS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else ord(" ") for byte in range(256))


def _has_long_number(text: bytes) -> bool:
    """Whether there are _LONG_DIGITS digits in a row."""
    # Every ninth byte first: so many digits cover two of these.
    is_digit = np.frombuffer(text, np.uint8)[:: _LONG_DIGITS // 2] - np.uint8(ord("0")) < 10
    if not (is_digit[1:] & is_digit[:-1]).any():
        return False
    return b"0" * _LONG_DIGITS in text.translate(_DIGITS_AS_ZEROS)


@functools.cache
def _loads() -> Callable[[bytes], Any]:
    """Returns what parses one value quickly; it may refuse what `json` takes."""
    try:
        from orjson import loads  # noqa: PLC0415
    except ImportError:
        return json.loads
    return loads


def _loads_slowly(span: bytes, place: int, places: SpanPlaces) -> Any:
    """Returns one value, parsed by `json` where the quick parser refuses it or might read it otherwise."""
    if not _has_long_number(span):
        with contextlib.suppress(ValueError):
            return _loads()(span)
    try:
        return json.loads(span.decode())
    except (ValueError, RecursionError) as error:
        raise places.error(
            place, f"it is not a JSON value on a line of its own ({places.line_of(place)}): {error}."
        ) from error
