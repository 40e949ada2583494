"""One file whose records are spans of bytes, open: its format, its index, and the errors of its records."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.files.scan import Scan
from millstream.sources.storage.byte_files import SpanReadError, StoredFile
from millstream.sources.storage.offsets import DamagedIndexError, Offsets
from millstream.sources.storage.urls import is_url

RecordT = TypeVar("RecordT")

NEWLINE = b"\n"

_COUNTED_BYTES = 64 << 20
"""How far into a file the lines are counted for an error: that takes some 30 ms."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpanPlaces:
    """Where some records were read, for the errors of those that are wrong.

    Attributes:
        path: the file.
        positions: the number of each record in the file, from 0.
        keys: the key of each record.
        starts: the offset of each span in the file, in bytes.
        num_records: the number of records in the file.
    """

    path: str
    positions: Sequence[int]
    keys: Sequence[int]
    starts: Sequence[int]
    num_records: int

    def line_of(self, place: int) -> str:
        """Returns the line of the file that a record begins in, from 1; or its offset, if it takes long to count."""
        start = self.starts[place]
        if is_url(self.path) or start > _COUNTED_BYTES:
            return f"byte {start:,} of the file"
        try:
            with open(self.path, "rb") as file:  # noqa: PTH123  (the path is a string throughout)
                return f"line {1 + file.read(start).count(NEWLINE):,} of the file"
        except OSError:
            return f"byte {start:,} of the file"

    def error(self, place: int, reason: str) -> DataSourceError:
        """Returns the error of the record at a place of the batch, from 0."""
        return DataSourceError(
            f"Cannot read record {self.positions[place]} of {self.path!r} (record key {self.keys[place]}): {reason}"
        )


class SpanFormat(abc.ABC, Generic[RecordT]):
    """How the records of one format are found and decoded. It has no state but its options, and can be pickled."""

    index_kind: ClassVar[str]
    """The name of the index: one word, which is part of a file's name. Formats that differ in it never share one."""

    index_version: ClassVar[int] = 1
    """To be raised when records are found in another way: indices that were made before are made anew."""

    def companions(self, path: str) -> list[str]:  # noqa: ARG002  (most formats have none)
        """Returns the other files that the offsets of a file are read from, absent ones included."""
        return []

    @abc.abstractmethod
    def offsets(self, scan: Scan) -> Iterator[Any]:
        """Yields, in integer arrays of any lengths, where the records begin, and at last where the last one ends.

        A file without records has one offset.

        Raises:
            DataSourceError: the file is not of this format, or is damaged.
        """

    @abc.abstractmethod
    def decode(self, spans: list[bytes], places: SpanPlaces) -> list[RecordT]:
        """Returns the records of some spans.

        Raises:
            DataSourceError: one of them is damaged, made by `places.error`.
        """


@final
class SpanFile(Generic[RecordT]):
    """An open file with its index.

    Args:
        path: the name of the file.
        file: the file. It is closed with this.
        offsets: its index.
        span_format: how records are decoded.
        rebuild: a reference to what returns another index of the file, if this one is damaged.
    """

    def __init__(
        self,
        path: str,
        file: StoredFile,
        offsets: Offsets,
        span_format: SpanFormat[RecordT],
        rebuild: Callable[[], Callable[[str, DamagedIndexError], Offsets] | None],
    ) -> None:
        self._path = path
        self._file = file
        self._offsets = offsets
        self._format = span_format
        self._rebuild = rebuild

    @property
    def num_records(self) -> int:
        """How many records it holds."""
        return self._offsets.num_records

    def read(self, positions: Sequence[int], keys: Sequence[int]) -> list[RecordT]:
        """Returns the records at the positions, numbers from 0 in any order; the keys are for errors.

        Raises:
            DataSourceError: one of the records is damaged or lost.
        """
        return self.begin(positions, keys)()

    def begin(self, positions: Sequence[int], keys: Sequence[int]) -> Callable[[], list[RecordT]]:
        """Asks for the records, and returns what waits for them.

        Raises:
            DataSourceError: the index is damaged, and the file is not what it was.
        """
        rows = np.array(positions, np.int64)
        try:
            starts, lengths = self._spans(rows)
        except DamagedIndexError as error:
            rebuild = self._rebuild()
            if rebuild is None:
                raise ReferenceError("The source that this file belongs to is gone.") from None
            self._offsets = rebuild(self._path, error)
            starts, lengths = self._spans(rows)
        places = SpanPlaces(self._path, positions, keys, starts, self._offsets.num_records)
        finish = self._file.begin(starts, lengths)
        return lambda: self._format.decode(whole_spans(finish, lengths, places), places)

    def _spans(self, rows: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Returns where some records begin, and their lengths, in bytes."""
        begins, ends = self._offsets.spans(rows)
        starts: list[int] = begins.tolist()
        lengths: list[int] = (ends - begins).tolist()
        if min(lengths, default=0) < 0 or min(starts, default=0) < 0:
            raise DamagedIndexError("its offsets are not in order")
        return starts, lengths

    def close(self) -> None:
        """Closes it. Nobody reads it any more."""
        self._file.close()


def whole_spans(finish: Callable[[], list[bytes]], wanted: list[int], places: SpanPlaces) -> list[bytes]:
    """Returns the spans that were asked for, or raises the error of the first that is not whole."""
    try:
        spans = finish()
    except SpanReadError as error:
        raise places.error(error.span, str(error)) from error
    except OSError as error:
        raise places.error(
            0, f"reading failed here or at one of the other {len(places.keys) - 1} records that were asked for: {error}"
        ) from error
    if list(map(len, spans)) != wanted:
        place = next(n for n, (span, length) in enumerate(zip(spans, wanted, strict=True)) if len(span) != length)
        raise places.error(
            place,
            f"the file ends after {len(spans[place]):,} of its {wanted[place]:,} bytes, so it was cut short while "
            "it was open. Restore the file.",
        )
    return spans
