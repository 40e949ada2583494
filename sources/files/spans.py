"""Records that are spans of bytes in files: the base of all sources that need no library to read one.

A format finds the offsets of the records of a file, in one pass over it, and turns their bytes into records. All else
is here: the index of these offsets is built once and saved (see `offset_index`); a batch is read by one `pread` per
record, or one request to a store (see `byte_files`).

Guarantees, besides those of all sources of files:
    - An index that is damaged while it is open is rebuilt, and the records are read.
    - The time to open a file does not depend on the number of files: the indices of small ones stay in memory.
    - A span beyond the end of its file is an error with file and record.
    - If files are objects in stores, all records of a batch are requested before the first one is awaited.
"""

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from millstream.core.warn import log_warning
from millstream.errors import DataSourceError
from millstream.sources.files.file_records import FileRecords
from millstream.sources.files.span_files import Scan, SpanFile, SpanFormat
from millstream.sources.remote.urls import is_url
from millstream.sources.storage.byte_files import open_stored, state_of
from millstream.sources.storage.compression import HEAD_BYTES
from millstream.sources.storage.file_cache import FileCache
from millstream.sources.storage.offset_index import IndexKey, find_offsets, placement, remove_offsets, store_offsets
from millstream.sources.storage.offsets import DamagedIndexError, HeldIndices, HeldOffsets, Offsets
from millstream.sources.storage.paths import FileIdentity, FileRange
from millstream.sources.storage.progress import CancelledScanError, Progress

RecordT = TypeVar("RecordT")

_CLOCK_TICK_SECONDS = 0.02
"""Two writes within this time may leave a file with the same time. No index is built of a younger file."""


class SpanRecords(FileRecords[RecordT]):
    """The records of files of one `SpanFormat`."""

    descriptors_per_file: ClassVar[int] = 2  # The index of a large file takes another one.

    def __init__(self, paths: Any, span_format: SpanFormat[RecordT], cache: FileCache | None = None) -> None:
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
