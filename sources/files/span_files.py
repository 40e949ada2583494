"""A file whose records are spans of bytes: the scan for them, the format, the open file, and errors of records."""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.remote.urls import is_url
from millstream.sources.storage.byte_files import LocalFile, SpanReadError, StoredFile
from millstream.sources.storage.compression import HEAD_BYTES, compressed_error, compression_of
from millstream.sources.storage.offsets import DamagedIndexError, Offsets
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.progress import Progress

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

NEWLINE = b"\n"

BLOCK_BYTES = 1 << 20
"""The size of a read. Larger blocks leave the processor's cache."""

_COUNTED_BYTES = 64 << 20
"""The maximum offset up to which lines are counted for an error, which takes 30 ms."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpanRequest:
    """The records of one read of a file, for errors: their numbers in the file, their keys, and the spans' offsets."""

    path: str
    positions: Sequence[int]
    keys: Sequence[int]
    starts: Sequence[int]
    num_records: int

    def line_of(self, row: int) -> str:
        """Returns the line of the file, from 1, that a record begins in; or its offset if counting would take long."""
        start = self.starts[row]
        if not is_url(self.path) and start <= _COUNTED_BYTES:
            with contextlib.suppress(OSError), contextlib.closing(LocalFile(self.path)) as file:
                return f"line {1 + file.read(0, start).count(NEWLINE):,} of the file"
        return f"byte {start:,} of the file"

    def error(self, row: int, reason: str) -> DataSourceError:
        """Returns the error of one of the records; `row` is its number in the read, from 0."""
        return DataSourceError(
            f"Cannot read record {self.positions[row]} of {self.path!r} (record key {self.keys[row]}): {reason}"
        )


@final
class Scan:
    """The bytes of one open file, which it closes, for the format that finds its records.

    `size` is that of the file, or of its content if it is compressed. Progress is reported in bytes.
    """

    def __init__(self, path: str, file: StoredFile, identity: FileIdentity, progress: Progress, *, size: int) -> None:
        self.path = path
        self.size = size
        self._identity = identity
        self._progress = progress
        self._done = 0
        self._file = file

    def close(self) -> None:
        self._file.close()

    def read(self, start: int, length: int) -> bytes:
        """Returns the bytes from `start` on; fewer than `length` only at the end of the file."""
        try:
            block = self._file.read(start, length)
        except DataSourceError:
            raise
        except OSError as error:
            raise DataSourceError(f"Cannot read {self.path!r} at byte {start:,}: {error.strerror or error}.") from error
        if len(block) < min(length, self.size - start):
            raise self.changed()
        return block[: max(0, self.size - start)]

    def blocks(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        for start in range(0, self.size, BLOCK_BYTES):
            yield start, np.frombuffer(self.read(start, BLOCK_BYTES), np.uint8)
            self.report(start + BLOCK_BYTES)

    def report(self, done: int) -> None:
        """Reports that the bytes before this offset are done."""
        done = min(max(done, self._done), self.size)  # A scan may start again.
        self._progress.advance(done - self._done)
        self._done = done

    def check_unchanged(self) -> None:
        if is_url(self.path):
            return  # Each response of a store has the version of its object.
        now = FileIdentity.of(self.path)
        if now.content_state != self._identity.content_state:
            raise self.changed()

    def changed(self) -> DataSourceError:
        return DataSourceError(
            f"Cannot index {self.path!r}: it was changed during the scan. Construct the source again when no process "
            "writes to its files."
        )


def refuse_compressed(scan: Scan) -> None:
    """Raises DataSourceError if all of a file is compressed. No text begins like a compressed file."""
    if (compression := compression_of(scan.read(0, HEAD_BYTES))) is not None:
        raise compressed_error(scan.path, compression)


class SpanFormat(abc.ABC, Generic[RecordT]):
    """The search for the records of one format, and their decoding. It has no state but its options, for pickling."""

    index_kind: ClassVar[str]
    """The name of the index, as one word for a file's name. Formats with different names never share an index."""

    index_version: ClassVar[int] = 1
    """Increase it when the search changes: older indices are then rebuilt."""

    def companions(self, path: str) -> list[str]:  # noqa: ARG002  (most formats have none)
        """Returns the other files that the offsets of a file depend on, missing ones included."""
        return []

    @abc.abstractmethod
    def offsets(self, scan: Scan) -> Iterator[Any]:
        """Yields the offsets at which records begin, and at last the end of the last record, in integer arrays.

        The arrays may have any lengths. A file without records has one offset. One that is not of this format, or is
        damaged, is a DataSourceError.
        """

    @abc.abstractmethod
    def decode(self, spans: list[bytes], request: SpanRequest) -> list[RecordT]:
        """Returns the records of the spans, or raises `request.error` for a damaged one."""


@final
class SpanFile(Generic[RecordT]):
    """An open file, which it closes, with its index.

    `size` is that of the file, or of its content if it is compressed, in bytes. `rebuild` is a weak reference to the
    function that rebuilds the index.
    """

    def __init__(
        self,
        path: str,
        file: StoredFile,
        offsets: Offsets,
        span_format: SpanFormat[RecordT],
        rebuild: Callable[[], Callable[[str, DamagedIndexError], Offsets] | None],
        *,
        size: int,
    ) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._offsets = offsets
        self._format = span_format
        self._rebuild = rebuild

    @property
    def num_records(self) -> int:
        return self._offsets.num_records

    def read(self, positions: Sequence[int], keys: Sequence[int]) -> list[RecordT]:
        return self.begin(positions, keys)()

    def begin(self, positions: Sequence[int], keys: Sequence[int]) -> Callable[[], list[RecordT]]:
        """Requests the records, and returns the function that waits for them."""
        rows = np.array(positions, np.int64)
        try:
            starts, lengths = self._spans(rows)
        except DamagedIndexError as error:
            rebuild = self._rebuild()
            if rebuild is None:
                raise ReferenceError("The source that this file belongs to is gone.") from None
            self._offsets = rebuild(self._path, error)
            starts, lengths = self._spans(rows)
        request = SpanRequest(self._path, positions, keys, starts, self._offsets.num_records)
        finish = self._file.begin(starts, lengths)
        return lambda: self._format.decode(complete_spans(finish, lengths, request), request)

    def _spans(self, rows: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Returns the offsets and lengths of records, in bytes."""
        begins, ends = self._offsets.spans(rows)
        starts: list[int] = begins.tolist()
        lengths: list[int] = (ends - begins).tolist()
        # A longer span than the file would be allocated before it is read.
        if lengths and (min(lengths) < 0 or max(lengths) > self._size or min(starts) < 0):
            raise DamagedIndexError("its offsets are not those of records")
        return starts, lengths

    def close(self) -> None:
        self._file.close()


def complete_spans(finish: Callable[[], list[bytes]], lengths: list[int], request: SpanRequest) -> list[bytes]:
    """Returns the spans, or raises the error of the first one that is incomplete."""
    spans = _finished(finish, request)
    _check_lengths(list(map(len, spans)), lengths, request)
    return spans


def check_reads(read: Callable[[], list[int]], lengths: list[int], request: SpanRequest) -> None:
    """Reads spans into memory that the caller owns, or raises the error of the first one that is incomplete."""
    _check_lengths(_finished(read, request), lengths, request)


def _finished(finish: Callable[[], ResultT], request: SpanRequest) -> ResultT:
    try:
        return finish()
    except SpanReadError as error:
        raise request.error(error.span, str(error)) from error
    except OSError as error:
        raise request.error(
            0, f"reading this record, or one of {len(request.keys) - 1} others in the same batch, failed: {error}"
        ) from error


def _check_lengths(found: list[int], lengths: list[int], request: SpanRequest) -> None:
    if found != lengths:
        row = next(row for row, (have, length) in enumerate(zip(found, lengths, strict=True)) if have != length)
        raise request.error(
            row,
            f"the file ends after {found[row]:,} of its {lengths[row]:,} bytes, so it was cut short while it was open. "
            "Restore the file.",
        )
