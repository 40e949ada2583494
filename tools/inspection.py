"""What files hold, in some lines of text."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from millstream.sources.files.file_records import FileRecords
from millstream.sources.formats import FileFormat
from millstream.sources.storage.offset_index import Placement
from millstream.tools.record_preview import escaped, shown_record
from millstream.tools.record_sizes import histogram, in_bytes, sizes_of

_COLUMN = 10


def inspected(kind: FileFormat, paths: Sequence[str]) -> Iterator[str]:
    """Yields what the files of one format hold, line by line: their number, records, sizes, and the first record.

    Raises:
        OSError: a file cannot be read; DataSourceError if it is damaged.
        ValueError: they have no records.
    """
    with kind.open(list(paths), Placement.NOWHERE) as source:
        more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        yield f"{escaped(paths[0])}{more}"
        for name, lines in _facts(kind, source):
            for number, line in enumerate(lines):
                yield f"  {name if number == 0 else '':<{_COLUMN}}{line}"


def _facts(kind: FileFormat, source: Any) -> Iterator[tuple[str, list[str]]]:
    yield "format", [f"{kind.name}, read by millstream.{kind.source}"]
    sizes = [identity.size for identity in source.files.values()]
    yield "files", [f"{len(sizes):,}, {in_bytes(sum(sizes))}"]
    yield "records", [f"{len(source):,}"]
    if not len(source):
        return
    if (units := getattr(source, "unit_sizes", None)) is not None:
        # Where records are read one by one, units are the files, which are copied as a whole where there is a cache.
        what = f"file{'s'[: len(units) > 1]}" if isinstance(source, FileRecords) else "that are read whole"
        yield (
            "units",
            [f"{len(units):,} {what}, of {int(np.median(units)):,} records (median), {int(max(units)):,} at most"],
        )
    if (found := sizes_of(source)) is not None:
        record_sizes, are_all = found
        yield "sizes", list(_described_sizes(record_sizes, are_all=are_all))
    yield "first", list(shown_record(source[0]))


def _described_sizes(sizes: Any, *, are_all: bool) -> Iterator[str]:
    of_some = "" if are_all else f", of {len(sizes):,} records spread evenly"
    points = {"least": sizes.min(), "median": np.median(sizes), "mean": sizes.mean(), "most": sizes.max()}
    yield ", ".join(f"{name} {in_bytes(float(size))}" for name, size in points.items()) + of_some
    yield from histogram(sizes)
