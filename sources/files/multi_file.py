"""Records in files of any format: several files as one source.

A format is a subclass of `FileRecords` that counts the records of a file and opens a file; if records are not read one
by one, it is a subclass of `Files`. Everything else is here: the file and the position of each record key, one read per
file and batch, a bounded number of open files, pickling, fingerprints.

Guarantees:
    - A file is opened by the process that reads it, when it reads, and only if it is unchanged since construction.
    - Any number of threads may read. A file is closed only while no thread reads it.
"""

import abc
import contextlib
import dataclasses
import functools
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, SupportsIndex, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.closing import Closing
from millstream.errors import DataSourceError
from millstream.sources.base import RecordKeys, RenderedSource, checked_record_key, checked_record_keys
from millstream.sources.digests import digest, digest_of, spread_keys
from millstream.sources.files.byte_files import LocalFile, identify, state_of
from millstream.sources.files.compression import refuse_compressed_name
from millstream.sources.files.file_cache import FileCache, LocalCopy
from millstream.sources.files.open_files import OUT_OF_DESCRIPTORS, OpenFile, OpenFiles, RecordFile, RecordT, in_threads
from millstream.sources.files.paths import (
    RECORD_LIMIT,
    FileIdentity,
    FileRange,
    names_within_common_folder,
    resolve_paths,
)
from millstream.sources.pieces import Pieces, cut
from millstream.sources.remote.urls import is_url

MAX_OPEN_FILES = 512
"""The maximum number of open files per source, if the process may have so many descriptors."""

INSPECTION_THREADS = 16
"""The number of files that a constructor inspects concurrently: on network storage each takes a few round trips."""

MARKED_FILES = 64
"""The maximum number of files in a digest of their content; of more files, evenly spread ones."""

_END_BYTES = 4096

FileT = TypeVar("FileT", bound=OpenFile)

IDENTIFYING_THREADS = 64
"""The number of objects in stores that a constructor inspects concurrently: each takes 20 to 100 ms."""


class Files(RenderedSource, Closing, Generic[FileT]):
    """The records of several files, one file after another: the base of all sources that read files."""

    kind: str
    """The name of the format, for texts and errors."""

    descriptors_per_file: ClassVar[int] = 1
    """The number of descriptors per open file."""

    counts_ranges: ClassVar[bool] = True
    """True if files are counted even if only ranges of them are read, so that an end beyond the file is found early."""

    def __init__(self, paths: Any, cache: FileCache | None = None) -> None:
        if not isinstance(cache, FileCache | None):
            raise TypeError(f"cache must be a FileCache, or None to read without one, got {type(cache).__name__}.")
        self._cache = cache
        self._ranges = self._resolved(paths)
        self._paths = list(dict.fromkeys(file.path for file in self._ranges))
        self._identities: dict[str, FileIdentity] = {}
        self._marks: dict[str, str] | None = None
        self._counts: dict[str, int] = {}
        self._inspect()
        self._index_ranges()
        self._open_files = self._no_open_files()

    @abc.abstractmethod
    def _count(self, path: str) -> int:
        """Returns the number of records in a file. Several threads call it concurrently, each for its own file."""

    @abc.abstractmethod
    def _open(self, path: str, location: str) -> FileT:
        """Opens a file, given its path or URL and the one to read: the same, or the path of a copy.

        An OSError has the operating system's error number.
        """

    def _resolved(self, paths: Any) -> list[FileRange]:
        return resolve_paths(paths, self.kind)

    @property
    def files(self) -> dict[str, FileIdentity]:
        """The identity of each file at construction, by path, in their order."""
        return {path: self._identities[path] for path in self._paths}

    def __len__(self) -> int:
        return self._num_records

    def __repr__(self) -> str:
        files = f"{len(self._paths)} file{'s'[: len(self._paths) > 1]}, first {self._paths[0]!r}"
        return f"{type(self).__name__}({self._num_records:,} records in {files})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_open_files"} | {
            "_closed": self._open_files.closed
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        closed = state.pop("_closed")
        vars(self).update(state)
        self._open_files = self._no_open_files()
        if closed:
            self._open_files.close()

    def _no_open_files(self) -> OpenFiles[FileT]:
        # A copy in a cache is locked by another descriptor.
        return OpenFiles(MAX_OPEN_FILES, self.descriptors_per_file + (self._cache is not None))

    def locate(self, record_key: SupportsIndex) -> tuple[str, int]:
        """Returns the file of a record, and the record's position in it, from 0.

        Args:
            record_key: the record key, 0 … len(source) - 1.

        Raises:
            IndexError: the record key is out of range.
        """
        key = checked_record_key(record_key, self._num_records)
        number, row = self._pieces.find(key)
        file = self._ranges[number]
        return file.path, file.start + row

    def close(self) -> None:
        """Closes all files. Reading then raises ValueError. May be called again."""
        self._open_files.close()

    @property
    def unit_sizes(self) -> NDArray[np.int64]:
        """The number of records of each file or range, for `HierarchicalSampler`: an array of shape (n,)."""
        return self._pieces.lengths.copy()

    def fingerprint(self) -> str:
        """Returns the number of files and records, and a digest of names, sizes, counts and ranges, in their order.

        A name is the path within the common folder of all files, so that folder may move.
        """
        names = dict(zip(self._paths, names_within_common_folder(self._paths), strict=True))
        described = (
            (names[file.path], self._identities[file.path].size, file.start, file.stop) for file in self._ranges
        )
        named = digest(8, *(repr(each).encode("utf-8", "surrogateescape") for each in described)).hex()
        return f"{self.kind} files={len(self._paths)} records={self._num_records} digest={named}"

    def content_marks(self) -> dict[str, str]:
        """Returns digests of file ends and of versions of objects. A checkpoint warns if they differ."""
        if self._marks is None:
            sample = [self._paths[row] for row in spread_keys(len(self._paths), MARKED_FILES)]
            self._marks = marks_of_files((path, self._identities[path]) for path in sample)
        return self._marks

    def _inspect(self) -> None:
        count = IDENTIFYING_THREADS if any(map(is_url, self._paths)) else INSPECTION_THREADS
        self._identities.update(zip(self._paths, in_threads(self._identify, self._paths, count), strict=True))
        if not self.counts_ranges:
            self._count_files(list(dict.fromkeys(file.path for file in self._ranges if file.stop is None)))
            return
        self._count_files(self._paths)
        for file in self._ranges:
            if file.stop is not None and file.stop > self._counts[file.path]:
                raise _beyond_end(file.path, self._counts[file.path], file.stop)

    def _identify(self, path: str) -> FileIdentity:
        """Returns the identity of a file. Several threads call it concurrently."""
        refuse_compressed_name(path)
        identity = identify(path, self.kind)
        if self._cache is not None and is_url(path) and identity.size > self._cache.max_bytes:
            raise ValueError(
                f"max_bytes of the cache must be at least the size of the largest file, but {path!r} has "
                f"{identity.size:,} bytes, got {self._cache.max_bytes:,}."
            )
        return identity

    def _is_copied(self, path: str) -> bool:
        return self._cache is not None and is_url(path)

    def _copy_of(self, path: str) -> LocalCopy:
        return self._cache.acquire(path, self._identities[path], self._unpacked_size(path))  # type: ignore[union-attr]

    def _unpacked_size(self, path: str) -> int | None:
        """Returns the size of the content of a compressed file, in bytes; None for all others."""

    @contextlib.contextmanager
    def _location_of(self, path: str) -> Iterator[str]:
        """Yields the path or URL to read a file from: its own, or that of a copy that stays until the block ends."""
        if not self._is_copied(path):
            yield path
            return
        copy = self._copy_of(path)
        try:
            yield copy.path
        finally:
            copy.close()

    def _count_files(self, paths: Sequence[str]) -> None:
        self._counts.update(zip(paths, in_threads(self._count, paths, INSPECTION_THREADS, self._cancel), strict=True))

    def _cancel(self) -> None:
        """Ends calls of `_count` early, because another one has failed."""

    def _index_ranges(self) -> None:
        """Builds the tables that map a record key to a file and a position in it."""
        stops = [self._counts[file.path] if file.stop is None else file.stop for file in self._ranges]
        self._ranges = [dataclasses.replace(file, stop=stop) for file, stop in zip(self._ranges, stops, strict=True)]
        self._stops: dict[str, int] = {}
        for file, stop in zip(self._ranges, stops, strict=True):
            self._stops[file.path] = max(stop, self._stops.get(file.path, 0))
        lengths = [stop - file.start for file, stop in zip(self._ranges, stops, strict=True)]
        self._num_records = sum(lengths)
        if self._num_records > RECORD_LIMIT:
            raise ValueError(f"A source must have fewer than 2**63 records, got ranges of {self._num_records}.")
        self._pieces = Pieces(lengths)
        self._first_rows = np.array([file.start for file in self._ranges], np.int64)
        numbers = {path: number for number, path in enumerate(self._paths)}
        self._file_numbers = np.array([numbers[file.path] for file in self._ranges], np.int64)

    def _acquire(self, path: str, position: int, key: int) -> FileT:
        """Returns the open file. It stays open until `self._open_files.release(path)`. Errors name the record."""
        try:
            return self._open_files.acquire(path, self._open_unchanged)
        except OSError as error:
            raise reading_error(error, path, position, key) from error

    def _open_unchanged(self, path: str) -> FileT:
        return self._open_checked(path, path)

    def _open_checked(self, path: str, location: str) -> FileT:
        """Opens a file, and compares it with its state at construction."""
        self._check_regular(path)
        file = self._open(path, location)
        try:
            # Checked after opening: the file that is at the path now is the opened one, or a newer one.
            self._check_unchanged(path, file.num_records, self._identity_now(path))
        except BaseException:
            file.close()
            raise
        return file

    def _check_regular(self, path: str) -> None:
        """Refuses a pipe that has replaced a file, because a library would wait for it."""
        if not is_url(path):
            FileIdentity.of_regular_file(path, self.kind)

    def _identity_now(self, path: str) -> FileIdentity:
        """Returns the identity of the file that is at a path now. An object is compared when it is read."""
        return self._identities[path] if is_url(path) else FileIdentity.of(path)

    def _check_unchanged(self, path: str, num_records: int, now: FileIdentity) -> None:
        seen, count = self._identities[path], self._counts.get(path, num_records)
        if (now.size, num_records) != (seen.size, count):
            raise DataSourceError(
                f"{path!r} has {num_records} records in {now.size:,} bytes, and had {count} in {seen.size:,} when the "
                "source was constructed. It was changed, or is damaged. Construct the source again."
            )
        # Device and inode may differ: for a copy that kept its time, and on network storage.
        if now.modified != seen.modified:
            raise DataSourceError(
                f"{path!r} was last written to at {now.last_written}, and at {seen.last_written} when the "
                "source was constructed, so it may have other records. Construct the source again."
            )
        stop = self._stops.get(path, 0)
        if stop > num_records:
            raise _beyond_end(path, num_records, stop)


def _beyond_end(path: str, num_records: int, stop: int) -> DataSourceError:
    return DataSourceError(f"{path!r} has {num_records} records, but a range of it ends at record {stop}.")


def reading_error(error: OSError, path: str, position: int, key: int) -> DataSourceError:
    reason = str(error) if isinstance(error, DataSourceError) else f"cannot open it: {error.strerror}."
    if error.errno in OUT_OF_DESCRIPTORS:
        reason += " Raise the limit (`ulimit -n`) or close other files: no source has an idle file to close."
    return DataSourceError(f"Cannot read record {position} of {path!r} (record key {key}): {reason}")


def marks_of_paths(paths: Sequence[str]) -> dict[str, str]:
    """Returns the marks of files and a digest of their sizes, without those that are missing or cannot be read."""
    found = zip(paths, in_threads(_state_or_none, paths, INSPECTION_THREADS), strict=True)
    files = {path: state for path, state in found if state is not None}
    return marks_of_files(files.items()) | {"sizes": f"#{digest_of([state.size for state in files.values()], 4)}"}


def _state_or_none(path: str) -> FileIdentity | None:
    try:
        return state_of(path)
    except OSError:
        return None


def marks_of_files(files: Iterable[tuple[str, FileIdentity]]) -> dict[str, str]:
    """Returns a digest of the first and last 4 KB of files, and one of the versions of objects in stores."""
    ends = versions = 0
    for path, identity in files:
        if is_url(path):
            versions = zlib.crc32(identity.version, versions + 1)
        else:
            ends = _crc_of_ends(path, identity.size, ends + 1)
    marks = {"first_and_last_bytes": ends, "versions": versions}
    return {name: f"#{mark:08x}" for name, mark in marks.items() if mark}


def _crc_of_ends(path: str, size: int, crc: int) -> int:
    """Returns the CRC continued over the first and last bytes of a file. Errors are raised when the file is read."""
    with contextlib.suppress(OSError), contextlib.closing(LocalFile(path)) as file:
        for start in (0, max(0, size - _END_BYTES)):
            crc = zlib.crc32(file.read(start, _END_BYTES), crc)
    return crc


class FileRecords(Files[RecordFile[RecordT]]):
    """The records of several files, found one by one: each file of a batch is read in one call."""

    def __getitem__(self, record_key: SupportsIndex) -> RecordT:
        path, position = self.locate(record_key)
        return self._read(path, [position], [operator.index(record_key)])[0]

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[RecordT]:
        """Returns the records of the keys, in their order; keys may repeat. Each file is read once."""
        keys = checked_record_keys(record_keys, self._num_records)
        if len(self._ranges) == 1 and len(keys):
            # Nothing to sort: sorting is most of the work if a mixture reads a few records of each of many sources.
            return self._read(self._paths[0], (keys + self._ranges[0].start).tolist(), keys.tolist())
        ranges, rows = self._pieces.locate(keys)
        by_file = cut(self._file_numbers[ranges], len(self._paths))
        positions = (rows + self._first_rows[ranges])[by_file.order].tolist()
        sorted_keys = keys[by_file.order].tolist()
        records = self._read_files(
            (self._paths[file], positions[start:stop], sorted_keys[start:stop]) for file, start, stop in by_file.runs
        )
        return by_file.put_back(records)

    def _read_files(self, requests: Iterable[tuple[str, list[int], list[int]]]) -> list[RecordT]:
        """Returns the records of files in stores by requesting all of them before the first one is awaited."""
        if not self._reads_stores:
            return [record for request in requests for record in self._read(*request)]
        begun: list[Callable[[], list[RecordT]]] = []
        acquired: list[str] = []
        try:
            for path, positions, keys in requests:
                file = self._acquire(path, positions[0], keys[0])
                acquired.append(path)
                begin = getattr(file, "begin", None)
                begun.append(begin(positions, keys) if begin else functools.partial(file.read, positions, keys))
            return [record for finish in begun for record in finish()]
        finally:
            for path in acquired:
                self._open_files.release(path)

    @functools.cached_property
    def _reads_stores(self) -> bool:
        return self._cache is None and any(map(is_url, self._paths))

    def _read(self, path: str, positions: list[int], keys: list[int]) -> list[RecordT]:
        file = self._acquire(path, positions[0], keys[0])
        try:
            return file.read(positions, keys)
        finally:
            self._open_files.release(path)

    def _open_unchanged(self, path: str) -> RecordFile[RecordT]:
        if not self._is_copied(path):
            return super()._open_unchanged(path)
        copy = self._copy_of(path)
        try:
            return _CopiedFile(copy, self._open_checked(path, copy.path))
        except BaseException:
            copy.close()
            raise


@final
class _CopiedFile(Generic[RecordT]):
    """A file that is read from a copy in a cache, which is not evicted while the file has users."""

    def __init__(self, copy: LocalCopy, file: RecordFile[RecordT]) -> None:
        self._copy, self._file = copy, file
        self.num_records, self.read = file.num_records, file.read
        self.pause, self.resume = copy.release, copy.reacquire

    def close(self) -> None:
        self._file.close()
        self._copy.close()
