"""The commands `millstream inspect`, which also previews a record, and `millstream index`."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.loader.reporting.snapshot import bytes_text
from millstream.sources.digests import spread_keys
from millstream.sources.file_formats import FileFormat
from millstream.sources.files.multi_file import FileRecords
from millstream.sources.files.offset_index import Placement
from millstream.sources.files.spans import SpanRecords
from millstream.tf_example.features import KINDS
from millstream.tf_example.wire import WireData, WireError, fields_of
from millstream.transforms import VariableLengthFeature, decode_examples

_LABEL_WIDTH = 10
_SAMPLE = 256
"""The number of records that are read to estimate sizes that no index contains."""

_MAX_BARS = 12
_BAR_WIDTH = 40


def build_index(kind: FileFormat, paths: Sequence[str]) -> str:
    """Builds the indices of files, stores them beside the files, and returns a summary in one line."""
    with opened(kind, paths, Placement.BESIDE) as source:
        number = len(getattr(source, "files", paths))
        summary = f"{kind.name}: {len(source):,} records in {number:,} file{'s'[: number > 1]}"
        if not isinstance(source, SpanRecords):
            return f"{summary}, which need no index"
        if lost := source.unkept_indices:
            raise PermissionError(
                f"Cannot write the indices of {lost[0]!r} and {len(lost) - 1:,} other files: neither their folders nor "
                "the cache folder are writable. Set MILLSTREAM_CACHE to a writable folder."
            )
        return f"{summary}, indexed"


@contextlib.contextmanager
def opened(kind: FileFormat, paths: Sequence[str], where: Placement | None = None) -> Iterator[Any]:
    """Yields the source of files or a folder, and closes it, if it can be."""
    source = kind.open(list(paths)) if where is None else kind.open_with_indices(list(paths), where)
    try:
        yield source
    finally:
        if callable(close := getattr(source, "close", None)):
            close()


def inspect_files(kind: FileFormat, paths: Sequence[str]) -> Iterator[str]:
    """Yields lines about the files of one format: their number, the sizes of their records, and the first record."""
    with opened(kind, paths, Placement.NOWHERE) as source:
        more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        yield f"{escaped(paths[0])}{more}"
        for label, lines in _sections(kind, source):
            for number, line in enumerate(lines):
                yield f"  {label if number == 0 else '':<{_LABEL_WIDTH}}{line}"


def _sections(kind: FileFormat, source: Any) -> Iterator[tuple[str, list[str]]]:
    yield "format", [f"{kind.name}, read by {kind.class_name}"]
    if (files := getattr(source, "files", None)) is not None:
        sizes = [identity.size for identity in files.values()]
        yield "files", [f"{len(sizes):,}, {bytes_text(sum(sizes))}"]
    yield "records", [f"{len(source):,}"]
    if not len(source):
        return
    if (units := getattr(source, "unit_sizes", None)) is not None:
        # Units are files if records are read one by one: a cache copies whole files.
        unit = f"file{'s'[: len(units) > 1]}" if isinstance(source, FileRecords) else "that are read whole"
        median, largest = int(np.median(units)), int(max(units))
        yield "units", [f"{len(units):,} {unit}, of {median:,} records (median), at most {largest:,}"]
    if (found := _record_sizes(source)) is not None:
        record_sizes, is_complete = found
        yield "sizes", [_size_summary(record_sizes, is_complete=is_complete), *histogram(record_sizes)]
    if (classes := getattr(source, "classes", None)) is not None:
        counts = np.bincount(source.labels, minlength=len(classes)).tolist()
        yield "classes", [f"{escaped(name)}: {count:,}" for name, count in zip(classes, counts, strict=True)]
    yield "first", list(preview_lines(source[0]))


def _record_sizes(source: Any) -> tuple[NDArray[np.int64], bool] | None:
    """Returns sizes of records in bytes, and True if these are all of them; None if records are not bytes or text.

    They are those in the index if there is one, else those of evenly spaced records, which are read.
    """
    if isinstance(source, SpanRecords):
        return source.span_sizes(), True
    if not isinstance(source[0], bytes | str):
        return None  # If records are read in units, each of the sample would be in another unit.
    keys = spread_keys(len(source), _SAMPLE)
    records = source.__getitems__(keys)
    if not all(isinstance(record, bytes | str) for record in records):
        return None
    return np.array([len(record) for record in records], np.int64), len(keys) == len(source)


def _size_summary(sizes: NDArray[np.int64], *, is_complete: bool) -> str:
    sample = "" if is_complete else f", of {len(sizes):,} evenly spaced records"
    values = {"min": sizes.min(), "median": np.median(sizes), "mean": sizes.mean(), "max": sizes.max()}
    return ", ".join(f"{name} {bytes_text(float(size))}" for name, size in values.items()) + sample


def histogram(sizes: NDArray[np.int64]) -> Iterator[str]:
    """Yields a line per size class: its upper bound, a bar, and the number of records."""
    exponents = np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    low, high = int(exponents.min()), int(exponents.max())
    if low == high:
        return
    step = -(-(high - low + 1) // _MAX_BARS)
    counts = np.bincount((exponents - low) // step)
    for number, count in enumerate(counts.tolist()):
        bar = "#" * -(-_BAR_WIDTH * count // int(counts.max()))
        limit = bytes_text(2 ** (low + (number + 1) * step - 1))
        yield f"up to {limit:>9}  {bar:<{_BAR_WIDTH}}  {count:,}"


_MAX_ROWS = 32
_MAX_CHARACTERS = 60
_MAX_ITEMS = 200
"""The number of bytes, characters or items of a value that are formatted."""


def preview_lines(record: Any) -> Iterator[str]:
    """Yields the type of a record, and a line per entry: its name, its type, and the beginning of its value."""
    title, entries = _entries_of(record)
    yield title
    if entries is None:
        return
    rows = [
        (escaped(str(name)), type_of(value), beginning_of(value)) for name, value in list(entries.items())[:_MAX_ROWS]
    ]
    names, types = (min(40, max((len(row[column]) for row in rows), default=0)) for column in (0, 1))
    for name, kind, beginning in rows:
        yield f"  {name:<{names}}  {kind:<{types}}  {beginning}".rstrip()
    if len(entries) > _MAX_ROWS:
        yield f"  … and {len(entries) - _MAX_ROWS:,} more"


def escaped(name: str) -> str:
    """Returns a name from a file with its control characters escaped, because they could control the terminal."""
    return name if name.isprintable() else repr(name)[1:-1]


def type_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, np.generic):
        return str(value.dtype)
    if isinstance(value, bytes):
        return f"bytes, {len(value):,}"
    if isinstance(value, str):
        return f"str, {len(value):,}"
    if isinstance(value, list | tuple | Mapping):
        return f"{type(value).__name__} of {len(value):,}"
    return "null" if value is None else type(value).__name__


def beginning_of(value: Any) -> str:
    """Returns the beginning of the Python literal of a value, on one line."""
    if isinstance(value, np.ndarray):
        text = " ".join(map(str, value.reshape(-1)[:_MAX_ITEMS].tolist()))
    elif isinstance(value, Mapping):
        text = repr({key: value[key] for key in list(value)[:_MAX_ITEMS]})
    elif isinstance(value, bytes | str | list | tuple):
        text = repr(value[:_MAX_ITEMS])
    else:
        text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"


def _entries_of(record: Any) -> tuple[str, Mapping[Any, Any] | None]:
    if isinstance(record, Mapping):
        return type_of(record), record
    if isinstance(record, bytes):
        if (features := _features_of(record)) is not None:
            return f"{type_of(record)}: a tf.train.Example", features
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(record)
            if isinstance(value, dict):
                return f"{type_of(record)}: JSON", value
    return f"{type_of(record)}: {beginning_of(record)}", None


def _features_of(record: bytes) -> dict[str, Any] | None:
    """Returns the values of a serialised `tf.train.Example` by name, or None if it is not one."""
    data = WireData([record])
    try:
        top = fields_of(data, data.starts, data.stops)
        entries = fields_of(data, top.of(1).starts, top.of(1).stops)
        members = fields_of(data, entries.of(1).starts, entries.of(1).stops)
        names, values = members.of(1), members.of(2)
        lists = fields_of(data, values.starts, values.stops)
    except WireError:
        return None
    is_example = (top.number == 1).all() and (entries.number == 1).all() and (members.number <= 2).all()
    kinds = {number: kind for kind, (number, _) in KINDS.items()}
    count = len(entries.message)
    if not (is_example and count == len(names.message) == len(values.message) == len(lists.message)):
        return None
    try:
        texts = [name.decode() for name in data.slices(names.starts, names.stops)]
        features = {
            name: VariableLengthFeature(kinds[number])
            for name, number in zip(texts, lists.number.tolist(), strict=True)
        }
        columns = decode_examples(features).map([record])
    except (ValueError, KeyError):  # ValueError: a name is not text, or a feature is empty.
        return None
    return {name: _single_or_all(columns[name].values) for name in features}


def _single_or_all(values: Any) -> Any:
    """Returns the only value of an array, or the array, with objects as a list."""
    if len(values) == 1:
        return values[0]
    return values.tolist() if values.dtype == np.object_ else values
