"""Records of ArrayRecord files, found by number, read many at once.

Guarantees:
    - Readers open in the process that reads, when it reads: the library's first reader starts some 64 threads, which
      neither a constructor nor pickling needs. (Files whose records lie in groups are an exception: only a reader
      can count them. It is closed at once, but the threads stay.)
    - Any number of threads may read. The library's `read(indices)` and `read(begin, end)` are const members of a
      thread-compatible class, and release the interpreter lock; `close` is not, and waits until nobody reads.
    - Every record returned is, byte for byte, one that was written, or there is an error with its file and number.
"""

import bisect
import dataclasses
import errno
import hashlib
import itertools
import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, SupportsIndex, final

import numpy as np

from millstream.errors import DataSourceError
from millstream.sources.array_record_footer import count_records
from millstream.sources.array_record_paths import FilePart, resolve_paths
from millstream.sources.base import RecordKeys, checked_record_key, checked_record_keys
from millstream.sources.open_files import OpenFiles

MAX_OPEN_FILES = 512
"""How many files a source keeps open. Opening costs about 1 ms for each 20,000 records, so few is slow."""

INSPECTION_THREADS = 16
"""How many files a constructor looks at at once: on network storage each look is a few round trips."""

# The library's defaults read ahead for sequential reading; these turn that off.
_READER_OPTIONS = {"readahead_buffer_size": "0", "max_parallelism": "0"}

# What the library's batched read costs before it reads anything: waking its threads, and a table with a row for each
# record of the file, not only for those asked for. Measured: 0.03 to 0.3 ms, and 1.8 ms for 600,000 records.
_BATCHED_READ_SECONDS = 1e-4
_BATCHED_READ_SECONDS_PER_RECORD_IN_FILE = 3e-9

_MAX_RECORDS_PER_FILE = (1 << 31) - 1
"""The library's `read(begin, end)` takes 32-bit numbers."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _OpenFile:
    """A file with its reader, and what it looked like when it was opened."""

    path: str
    reader: Any
    num_records: int
    group_size: int | None
    identity: tuple[int, int, int]

    def read(self, positions: Sequence[int]) -> list[bytes]:
        """Returns the records at the positions, fast from memory as well as from slow storage.

        One by one costs 3 µs a record while the file is in the page cache, but waits for each record of slow storage
        in turn. The batched read asks for 64 records at once, but costs as much as a hundred to a thousand records
        before it starts. So this reads one by one until that has taken as long as the batched read's start would,
        and leaves the rest to the latter: never more than twice the time of the better of the two.
        """
        records: list[bytes] = []
        enough = time.perf_counter() + (
            _BATCHED_READ_SECONDS + _BATCHED_READ_SECONDS_PER_RECORD_IN_FILE * self.num_records
        )
        for position in positions:
            records += self.reader.read(position, position + 1)
            if time.perf_counter() > enough:
                break
        if len(records) < len(positions):
            records += self.reader.read(positions[len(records) :])
        if len(records) != len(positions):
            raise RuntimeError(f"asked for {len(positions)} records, the library returned {len(records)}")
        return records

    def change(self) -> str | None:
        """Returns what has happened to the file since it was opened, or None."""
        try:
            identity = _identity(self.path)
        except FileNotFoundError:
            return "the file was removed while it was open"
        if identity[:2] != self.identity[:2]:
            return "another file took its place while it was open"
        if identity[2] != self.identity[2]:
            return f"the file was changed while it was open, from {self.identity[2]:,} bytes to {identity[2]:,}"
        return None

    def close(self) -> None:
        self.reader.close()


@final
class ArrayRecordDataSource:
    """The records of ArrayRecord files laid end to end, as bytes.

    Files are best written with `group_size:1`, one record per group, as any read decodes a whole group; there is a
    warning otherwise. Random access is quick whatever the number of files and records: the index of each open file is
    in memory (about 10 bytes for each of its records).

    Args:
        paths: one path or a sequence of paths. A path is a file (`~` is expanded), a pattern such as
            `data/train-*.array_record` (its matches sorted by name), a file with a range of its records
            `file.array_record[100:200]`, or an object with `filename`, `skip` and `take`, such as the file
            instructions of TensorFlow Datasets. A file may occur more than once.
        reader_options: options of the library's reader, such as `{"index_storage_option": "offloaded"}`; they take
            precedence over the ones for random access that are set here.

    Raises:
        FileNotFoundError: a file is missing, or a pattern has no match.
        IsADirectoryError: a directory in place of a file.
        DataSourceError: a file is no ArrayRecord file.
        ValueError: a range that ends before it starts, or no records at all.

    Each reading member raises DataSourceError, with the file and the record, for a file that is damaged, was
    truncated, removed or changed, or has fewer records than a range of it asks for.
    """

    def __init__(self, paths: Any, reader_options: Mapping[str, str] | None = None) -> None:
        self._reader_options = _READER_OPTIONS | dict(reader_options or {})
        self._group_size_reported = False
        self._sizes: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._parts = self._inspect(resolve_paths(paths))
        self._index_parts()
        self._open_files = OpenFiles(self._open, MAX_OPEN_FILES)
        if not self._num_records:
            raise ValueError(f"A source must hold at least one record, got none in {self._named_files()}.")

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, record_key: SupportsIndex) -> bytes:
        key = checked_record_key(record_key, self._num_records)
        part = bisect.bisect_right(self._ends, key)
        return self._read(self._parts[part].path, [key + self._shifts[part]], [key])[0]

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[bytes]:
        """Returns the records of the keys, in their order; keys may repeat. Each file is asked once."""
        keys = checked_record_keys(record_keys, self._num_records)
        parts = np.searchsorted(self._ends_array, keys, side="right")
        positions = keys + self._shifts_array[parts]
        files = self._files_array[parts]
        order = np.argsort(files, kind="stable")
        starts = np.flatnonzero(np.diff(files[order], prepend=-1))
        if len(starts) == 1:
            return self._read(self._paths[int(files[0])], positions.tolist(), keys.tolist())
        records = [b""] * len(keys)
        for places in np.split(order, starts[1:]) if len(starts) else ():
            path = self._paths[int(files[places[0]])]
            found = self._read(path, positions[places].tolist(), keys[places].tolist())
            for place, record in zip(places.tolist(), found, strict=True):
                records[place] = record
        return records

    def __repr__(self) -> str:
        return f"ArrayRecordDataSource({self._num_records:,} records in {self._named_files()})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_open_files"} | {
            "_closed": self._open_files.closed
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        closed = state.pop("_closed")
        vars(self).update(state)
        self._open_files = OpenFiles(self._open, MAX_OPEN_FILES)
        if closed:
            self._open_files.close()

    def close(self) -> None:
        """Closes all files. Reading then raises ValueError. May be called again."""
        self._open_files.close()

    def fingerprint(self) -> str:
        """Returns the number of files and records, and a digest of names, sizes, counts and ranges.

        The directories are left out: the data may move.
        """
        digest = hashlib.blake2b(digest_size=8)
        for part in self._parts:
            words = (os.path.basename(part.path), self._sizes[part.path], part.start, part.stop)  # noqa: PTH119
            digest.update(repr(words).encode())
        return f"ArrayRecord files={len(self._paths)} records={self._num_records} digest={digest.hexdigest()}"

    def _inspect(self, parts: Sequence[FilePart]) -> list[FilePart]:
        """Returns the parts with their ends; notes the files' sizes, and counts the records where an end is open."""
        paths = list(dict.fromkeys(part.path for part in parts))
        to_count = list(dict.fromkeys(part.path for part in parts if part.stop is None))
        with ThreadPoolExecutor(INSPECTION_THREADS) as threads:
            self._sizes.update(zip(paths, threads.map(os.path.getsize, paths), strict=True))
            self._counts.update(zip(to_count, threads.map(self._count, to_count), strict=True))
        return [
            part if part.stop is not None else dataclasses.replace(part, stop=self._counts[part.path]) for part in parts
        ]

    def _count(self, path: str) -> int:
        count = count_records(path)
        if count is None:
            file = self._open(path)
            file.close()
            count = file.num_records
        return count

    def _index_parts(self) -> None:
        """Sets the tables that lead from a record key to its part, and from there to the file and the place in it."""
        lengths = [part.stop - part.start for part in self._parts if part.stop is not None]
        self._ends = list(itertools.accumulate(lengths))
        self._num_records = self._ends[-1]
        self._shifts = [part.start - end + n for part, end, n in zip(self._parts, self._ends, lengths, strict=True)]
        self._paths = list(dict.fromkeys(part.path for part in self._parts))
        numbers = {path: number for number, path in enumerate(self._paths)}
        self._ends_array = np.array(self._ends, dtype=np.int64)
        self._shifts_array = np.array(self._shifts, dtype=np.int64)
        self._files_array = np.array([numbers[part.path] for part in self._parts], dtype=np.int64)

    def _named_files(self) -> str:
        return f"{len(self._paths)} file{'s'[: len(self._paths) > 1]}, first {self._paths[0]!r}"

    def _read(self, path: str, positions: list[int], keys: list[int]) -> list[bytes]:
        """Returns the records at the positions of one file; the keys are for errors."""
        file = self._acquire(path, positions[0], keys[0])
        try:
            try:
                records = file.read(positions)
            except (RuntimeError, IndexError):
                # The library names a place in the file, not a record: the records one by one will tell.
                records = []
            if len(records) != len(positions):
                records = list(map(_read_alone, itertools.repeat(file), positions, keys))
            if b"" in records and (change := file.change()):
                # Beyond the end of a truncated file the library finds empty records, without an error.
                place = records.index(b"")
                raise _read_error(file, positions[place], keys[place], f"it came out empty, and {change}")
            return records
        finally:
            self._open_files.release(path)

    def _acquire(self, path: str, position: int, key: int) -> _OpenFile:
        try:
            return self._open_files.acquire(path)
        except DataSourceError as error:
            error.add_note(f"This happened on reading record {position} of the file (record key {key}).")
            raise
        except OSError as error:
            hint = ""
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                hint = " Raise the limit (`ulimit -n`), or close other files: this source has no idle file to close."
            raise DataSourceError(
                f"Cannot open {path!r} to read record {position} (record key {key}): {error.strerror}.{hint}"
            ) from error

    def _open(self, path: str) -> _OpenFile:
        identity = _identity(path)
        if identity[2] != self._sizes[path]:
            raise DataSourceError(
                f"{path!r} has {identity[2]:,} bytes, and had {self._sizes[path]:,} when the source was constructed: "
                "files must not change. Construct the source again."
            )
        file = _open_reader(path, self._reader_options, identity)
        try:
            self._check_count(file)
            self._report_group_size(file)
        except BaseException:
            file.close()
            raise
        return file

    def _check_count(self, file: _OpenFile) -> None:
        counted = self._counts.get(file.path, file.num_records)
        if file.num_records != counted:
            raise DataSourceError(
                f"{file.path!r} holds {file.num_records} records by its index, and {counted} by its index's length: "
                "the file is damaged, or was changed after the source was constructed."
            )
        # While constructing, files are counted: there are no parts yet.
        asked = max((part.stop or 0 for part in getattr(self, "_parts", ()) if part.path == file.path), default=0)
        if asked > file.num_records:
            raise DataSourceError(
                f"{file.path!r} holds {file.num_records} records, but a range of it asks for those before {asked}."
            )

    def _report_group_size(self, file: _OpenFile) -> None:
        if file.group_size in {None, 1} or file.num_records <= 1 or self._group_size_reported:
            return
        self._group_size_reported = True
        warnings.warn(
            f"{file.path!r} was written with group_size:{file.group_size}: to read one record, the whole group that "
            "it lies in is read and decoded, which makes random access slow. Write the files again with "
            "ArrayRecordWriter(path, 'group_size:1').",
            stacklevel=2,
        )


def _identity(path: str) -> tuple[int, int, int]:
    """Returns device, inode and size in bytes: while they stay, so does the file."""
    status = os.stat(path)  # noqa: PTH116
    return status.st_dev, status.st_ino, status.st_size


def _open_reader(path: str, options: Mapping[str, str], identity: tuple[int, int, int]) -> _OpenFile:
    """Returns the file, open.

    Raises:
        DataSourceError: it is no ArrayRecord file, or a damaged one.
        OSError: it cannot be opened, with the operating system's error number where that is known.
        ValueError: an option that the library does not know.
    """
    from array_record.python.array_record_module import (  # type: ignore[import-untyped]  # noqa: PLC0415
        ArrayRecordReader,  # (only those who read ArrayRecord files import the library)
    )

    try:
        reader = ArrayRecordReader(path, ",".join(f"{name}:{value}" for name, value in options.items()))
    except ValueError as error:
        raise ValueError(
            f"reader_options must be options of ArrayRecordReader, got {dict(options)}: {error}"
        ) from error
    if not reader.ok():
        raise _open_error(path, reader)
    num_records = reader.num_records()
    if num_records > _MAX_RECORDS_PER_FILE:
        raise DataSourceError(f"{path!r} holds {num_records} records, more than the 2**31 - 1 that can be read.")
    written_with = re.search(r"group_size:(\d+)", reader.writer_options_string() or "")
    return _OpenFile(path, reader, num_records, int(written_with[1]) if written_with else None, identity)


def _open_error(path: str, reader: Any) -> OSError:
    """Returns the error that the library keeps to itself until a reader is closed."""
    try:
        reader.close()
        reason: Exception = RuntimeError("the library does not say why")
    except RuntimeError as error:
        reason = error
    for number in (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOENT):
        if os.strerror(number) in str(reason):
            return OSError(number, os.strerror(number), path)
    failure = DataSourceError(f"{path!r} is no ArrayRecord file, or a damaged one: {reason}.")
    failure.__cause__ = reason
    return failure


def _read_alone(file: _OpenFile, position: int, key: int) -> bytes:
    """Returns one record, or raises the error that says which one it is."""
    try:
        (record,) = file.reader.read(position, position + 1)
    except (RuntimeError, IndexError, ValueError) as error:
        raise _read_error(file, position, key, str(error)) from error
    assert isinstance(record, bytes)  # noqa: S101  (for the type checker: the library has no types)
    return record


def _read_error(file: _OpenFile, position: int, key: int, reason: str) -> DataSourceError:
    return DataSourceError(
        f"Cannot read record {position} of {file.path!r} (record key {key}): {reason}. Restore the file."
    )
