"""Records that are spans of bytes in files: the base of all sources that need no library to read one.

A format finds the offsets of the records of a file, in one pass over it (a `Scan`), and turns their bytes into records.
All else is here: the index of these offsets is built once and saved (see `offset_index`); a batch is read by one
`pread` per record, or one request to a store (see `byte_files`); errors name the record.

Guarantees, besides those of all sources of files:
    - An index that is damaged while it is open is rebuilt, and the records are read.
    - The time to open a file does not depend on the number of files: the indices of small ones stay in memory.
    - A span beyond the end of its file is an error with file and record.
    - If files are objects in stores, all records of a batch are requested before the first one is awaited.
"""

import abc
import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.warn import log_warning
from millstream.errors import DataSourceError
from millstream.sources.files.byte_files import LocalFile, SpanReadError, StoredFile, open_stored, state_of
from millstream.sources.files.compression import HEAD_BYTES, compressed_error, compression_of
from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.multi_file import FileRecords
from millstream.sources.files.offset_index import (
    DamagedIndexError,
    HeldIndices,
    HeldOffsets,
    IndexKey,
    Offsets,
    find_offsets,
    placement,
    remove_offsets,
    store_offsets,
)
from millstream.sources.files.paths import FileIdentity, FileRange
from millstream.sources.files.progress import CancelledScanError, Progress
from millstream.sources.remote.urls import is_url

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
    """The search for the records of a format that are spans of bytes in a file, and their decoding. Provisional.

    Its source, which `FileFormat` makes, has all that sources of files have: an index that is built once and saved, a
    batch in one read per record or requested together, errors with file and record, fingerprints and pickling. The
    object has no state but its options, so that it can be pickled.

    Examples:
        >>> class Pairs(millstream.SpanFormat):
        ...     index_kind = "pairs"
        ...
        ...     def offsets(self, scan):
        ...         yield np.arange(0, scan.size + 1, 2)
        ...
        ...     def decode(self, spans, request):
        ...         return [tuple(span) for span in spans]
        >>> np.arange(10, dtype=np.uint8).tofile("x.pairs")
        >>> millstream.FileFormat("pairs", (".pairs",), Pairs).open("x.pairs")[1]
        (2, 3)
    """

    index_kind: ClassVar[str]
    """The name of the index, as one word for a file's name. Formats with different names never share an index."""

    index_version: ClassVar[int] = 1
    """Increase it when the search changes: older indices are then rebuilt."""

    def companions(self, path: str) -> list[str]:  # noqa: ARG002  (most formats have none)
        """Returns the other files that the offsets of a file depend on, missing ones included.

        Args:
            path: the path of the file.
        """
        return []

    @abc.abstractmethod
    def offsets(self, scan: Scan) -> Iterator[Any]:
        """Yields the offsets at which records begin, and at last the end of the last record, in integer arrays.

        The arrays may have any lengths. A file without records has one offset. One that is not of this format, or is
        damaged, is a DataSourceError.

        Args:
            scan: the bytes of the file: `scan.size`, `scan.read(start, length)`, or `scan.blocks()`, which yields the
                offset and the array of each block. `scan.path` is its path, for errors.
        """

    @abc.abstractmethod
    def decode(self, spans: list[bytes], request: SpanRequest) -> list[RecordT]:
        """Returns the records of the spans.

        Args:
            spans: the bytes of each record.
            request: their place; `request.error(row, "it is … . Restore the file.")` is the error of a damaged one.
        """


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


_CLOCK_TICK_SECONDS = 0.02
"""Two writes within this time may leave a file with the same time. No index is built of a younger file."""


class SpanRecords(FileRecords[RecordT]):
    """The records of files of one `SpanFormat`."""

    descriptors_per_file: ClassVar[int] = 2  # The index of a large file takes another one.

    kind = "data"

    def __init__(
        self, paths: Any, span_format: SpanFormat[RecordT], cache: FileCache | None = None, *, kind: str | None = None
    ) -> None:
        self.kind = kind or self.kind
        self._format = span_format
        self._placement = placement.get()
        self._unsaved: dict[str, HeldOffsets] = {}
        self._held = HeldIndices()
        self._companions: dict[str, tuple[FileIdentity | None, ...]] = {}
        self._progress: Progress | None = None
        super().__init__(paths, cache)

    def _count_files(self, paths: Sequence[str]) -> None:
        """Builds the index of every file that has none."""
        num_files = f"{len(paths)} file{'s'[: len(paths) > 1]}"
        progress = Progress(f"Indexing {num_files}", sum(identity.size for identity in self._identities.values()))
        self._progress = progress
        try:
            super()._count_files(paths)
        finally:
            self._progress = None
            progress.close()
        self._held.report()

    def _cancel(self) -> None:
        if self._progress is not None:
            self._progress.cancel()

    @property
    def unkept_indices(self) -> list[str]:
        """The files whose index could not be saved, so that the next run builds it again."""
        return list(self._unsaved)

    def span_sizes(self) -> NDArray[np.int64]:
        """Returns the number of bytes of each record in its file, framing included: shape (records,)."""
        return np.concatenate([self._sizes_within(file) for file in self._ranges])

    def _sizes_within(self, file: FileRange) -> NDArray[np.int64]:
        stop = self._counts[file.path] if file.stop is None else file.stop
        return np.diff(self._offsets_between(file.path, file.start, stop + 1))

    def _offsets_between(self, path: str, start: int, stop: int) -> NDArray[np.int64]:
        try:
            return self._within_file(path, self._offsets(path).between(start, stop))
        except DamagedIndexError as error:
            return self._rebuilt(path, error).between(start, stop)

    def _within_file(self, path: str, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        if offsets.size and not 0 <= offsets.min() <= offsets.max() <= self._content_size(path):
            raise DamagedIndexError("its offsets are not those of records")
        return offsets

    def _content_size(self, path: str) -> int:
        """Returns the size of a file, or that of its content if it is compressed, in bytes."""
        unpacked_size = self._unpacked_size(path)
        return self._identities[path].size if unpacked_size is None else unpacked_size

    def _count(self, path: str) -> int:
        return self._offsets(path).num_records

    def first_bytes(self, path: str, stop: int = HEAD_BYTES) -> bytes:
        """Returns the bytes of a file before an offset."""
        with (
            self._location_of(path) as location,
            contextlib.closing(open_stored(path, self._identities[path], location)) as file,
        ):
            return file.read(0, stop)

    def _open(self, path: str, location: str) -> "SpanFile[RecordT]":
        stored = open_stored(path, self._identities[path], location)
        try:
            # After opening: the file that is at the path now is the opened one, or a newer one.
            self._follow(path, self._identity_now(path))
            rebuild = weakref.WeakMethod(self._rebuilt)  # A weak reference: open files must not keep the source alive.
            offsets, size = self._offsets(path), self._content_size(path)
            return SpanFile(path, stored, offsets, self._format_of(path), rebuild, size=size)
        except BaseException:
            stored.close()
            raise

    def _follow(self, path: str, now: FileIdentity) -> None:
        """Compares a local file, and the files that its index depends on, with their state at construction."""
        if is_url(path):
            return
        seen = self._identities[path]
        if now.content_state != seen.content_state and (now.size, now.modified) == (seen.size, seen.modified):
            # Its name, permissions or links changed; or it was rewritten and its time set back. Only an index of its
            # present state has the offsets of its records.
            self._identities[path] = now
            self._forget_held(path)
        names = self._format.companions(path)
        if not names:
            return
        states = self._states_of_companions(path)
        for name, before, after in zip(names, self._companions[path], states, strict=True):
            if (before and (before.size, before.modified)) != (after and (after.size, after.modified)):
                raise DataSourceError(
                    f"{name!r} has changed since the source was constructed. Construct the source again."
                )
        if states != self._companions[path]:
            self._companions[path] = states
            self._forget_held(path)

    def _states_of_companions(self, path: str) -> tuple[FileIdentity | None, ...]:
        return tuple(map(state_of, self._format.companions(path)))

    def _forget_held(self, path: str) -> None:
        self._held.remove(path)
        self._unsaved.pop(path, None)

    def _index_key(self, path: str, identity: FileIdentity) -> IndexKey:
        if path not in self._companions:
            self._companions[path] = self._states_of_companions(path)
        companions = tuple(zip(self._format.companions(path), self._companions[path], strict=True))
        return IndexKey(path, self._format.index_kind, self._format.index_version, identity, companions)

    def _format_of(self, path: str) -> SpanFormat[RecordT]:  # noqa: ARG002  (a format may depend on the file)
        return self._format

    def _offsets(self, path: str) -> Offsets:
        """Returns the index of a file. It is built if it is missing or of another state of the file."""
        if (held := self._unsaved.get(path) or self._held.get(path)) is not None:
            return held
        key = self._index_key(path, self._identities[path])
        if (found := find_offsets(key, self._placement)) is not None:
            if self._progress is not None:
                self._progress.advance(key.identity.size)
            try:
                return self._held.held(path, found)
            except DamagedIndexError:
                remove_offsets(key)
        return self._indexed(key)

    def _rebuilt(self, path: str, error: DamagedIndexError) -> Offsets:
        """Returns a new index of a file in place of a damaged one."""
        log_warning(f"the index of {path!r} is rebuilt: {error}.")
        key = self._index_key(path, self._identities[path])
        self._forget_held(path)
        remove_offsets(key)
        return self._indexed(key)

    def _indexed(self, key: IndexKey) -> Offsets:
        path, progress = key.path, self._progress or Progress(f"Indexing {key.path!r}", key.identity.size)
        with self._location_of(path) as location:
            _wait_for_clock(key.identity)
            file = open_stored(path, key.identity, location)
            scan = Scan(path, file, key.identity, progress, size=self._content_size(path))
            try:
                offsets, saved_at, failures = store_offsets(key, lambda: self._scanned(scan), self._placement)
            except CancelledScanError:
                raise DataSourceError(f"Indexing of {path!r} was cancelled.") from None
            finally:
                scan.close()
                if progress is not self._progress:
                    progress.close()
        self._held.record_built(path, saved_at, failures)
        if isinstance(offsets, HeldOffsets) and saved_at is None:
            self._unsaved[path] = offsets
            return offsets
        return self._held.held(path, offsets)

    def _scanned(self, scan: Scan) -> Iterator[Any]:
        yield from self._format.offsets(scan)
        scan.check_unchanged()


def _wait_for_clock(identity: FileIdentity) -> None:
    """Waits until another write to a local file would change its time."""
    age = time.time() - identity.changed / 1e9
    if 0 <= age < _CLOCK_TICK_SECONDS:
        time.sleep(_CLOCK_TICK_SECONDS - age)
