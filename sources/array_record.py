"""Records of ArrayRecord files, found by number, read many at once.

Guarantees:
    - Readers open in the process that reads, when it reads: the library's first reader starts some 64 threads, which
      neither constructing nor pickling a source needs. (Files whose records lie in groups are an exception: only a
      reader can count them. It is closed at once, but the threads stay.)
    - Any number of threads may read. A file is closed when nobody reads it.
"""

import bisect
import dataclasses
import errno
import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self, SupportsIndex, final

import numpy as np

from millstream.errors import DataSourceError
from millstream.sources.array_record_file import ArrayRecordFile, open_array_record
from millstream.sources.array_record_footer import count_records
from millstream.sources.array_record_paths import resolve_paths
from millstream.sources.base import RecordKeys, checked_record_key, checked_record_keys, items_at
from millstream.sources.open_files import OpenFiles

MAX_OPEN_FILES = 512
"""How many files a source keeps open. Opening costs about 1 ms for each 20,000 records, so few would be slow."""

INSPECTION_THREADS = 16
"""How many files a constructor looks at at once: on network storage each look is a few round trips."""


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
        reader_options: options of the library's reader, such as `{"footer_prefetch_bytes": "16M"}`; they take
            precedence over the ones for random access that are set here.

    Raises:
        FileNotFoundError: a file is missing, or a pattern has no match.
        IsADirectoryError: a directory in place of a file.
        DataSourceError: a file is no ArrayRecord file.
        ValueError: a range that ends before it starts, or no records at all.

    Each reading member raises DataSourceError, with the file and the record, for a file that is damaged, was
    truncated, removed or changed, or has fewer records than a range of it asks for.
    """

    takes_key_arrays: ClassVar[bool] = True

    def __init__(self, paths: Any, reader_options: Mapping[str, str] | None = None) -> None:
        self._reader_options = dict(reader_options or {})
        self._group_size_reported = False
        self._sizes: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._parts = resolve_paths(paths)
        self._inspect()
        self._index_parts()
        self._open_files = OpenFiles[ArrayRecordFile](MAX_OPEN_FILES)
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
        files, positions, keys = files[order], positions[order].tolist(), keys[order].tolist()
        records: list[bytes] = []
        for stop in (*(np.flatnonzero(files[1:] != files[:-1]) + 1).tolist(), len(keys)):
            start = len(records)
            if stop > start:
                records += self._read(self._paths[files[start]], positions[start:stop], keys[start:stop])
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return list(items_at(records, places.tolist()))

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
        self._open_files = OpenFiles[ArrayRecordFile](MAX_OPEN_FILES)
        if closed:
            self._open_files.close()

    def close(self) -> None:
        """Closes all files. Reading then raises ValueError. May be called again."""
        self._open_files.close()

    def fingerprint(self) -> str:
        """Returns the number of files and records, and a digest of names, sizes, counts and ranges.

        The directories are left out: the data may move.
        """
        import hashlib  # noqa: PLC0415  (OpenSSL takes its time)

        digest = hashlib.blake2b(digest_size=8)
        for part in self._parts:
            words = (os.path.basename(part.path), self._sizes[part.path], part.start, part.stop)  # noqa: PTH119
            digest.update(repr(words).encode())
        return f"ArrayRecord files={len(self._paths)} records={self._num_records} digest={digest.hexdigest()}"

    def _inspect(self) -> None:
        """Notes the size of every file, and counts the records of those where a part's end is open."""
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (as for the library: only readers pay)

        paths = list(dict.fromkeys(part.path for part in self._parts))
        to_count = list(dict.fromkeys(part.path for part in self._parts if part.stop is None))
        with ThreadPoolExecutor(INSPECTION_THREADS, "millstream-inspect") as threads:
            self._sizes.update(zip(paths, threads.map(os.path.getsize, paths), strict=True))
            counted = list(threads.map(self._count, to_count))
        for path, (count, group_size) in zip(to_count, counted, strict=True):
            self._counts[path] = count
            self._report_group_size(path, count, group_size)

    def _count(self, path: str) -> tuple[int, int | None]:
        """Returns the number of records, and the number in a group, of which None stands for one or unknown."""
        count = count_records(path)
        if count is not None:
            return count, None
        file = self._open_reader(path)
        file.close()
        return file.num_records, file.group_size

    def _index_parts(self) -> None:
        """Sets the tables that lead from a record key to its part, and from there to the file and the place in it."""
        stops = [self._counts[part.path] if part.stop is None else part.stop for part in self._parts]
        self._parts = [dataclasses.replace(part, stop=stop) for part, stop in zip(self._parts, stops, strict=True)]
        lengths = [stop - part.start for part, stop in zip(self._parts, stops, strict=True)]
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
        try:
            file = self._open_files.acquire(path, self._open)
        except OSError as error:
            raise _open_error(error, path, positions[0], keys[0]) from error
        try:
            return file.read(positions, keys)
        finally:
            self._open_files.release(path)

    def _open(self, path: str) -> ArrayRecordFile:
        """Returns the file, open, after comparing it with what the constructor saw."""
        file = self._open_reader(path)
        try:
            self._check_unchanged(file)
            self._report_group_size(path, file.num_records, file.group_size)
        except BaseException:
            file.close()
            raise
        return file

    def _open_reader(self, path: str) -> ArrayRecordFile:
        from array_record.python.array_record_module import (  # noqa: PLC0415
            ArrayRecordReader,  # (the library is for those who read ArrayRecord files)
        )

        return open_array_record(ArrayRecordReader, path, self._reader_options)

    def _check_unchanged(self, file: ArrayRecordFile) -> None:
        size, count = self._sizes[file.path], self._counts.get(file.path, file.num_records)
        if (file.identity.size, file.num_records) != (size, count):
            raise DataSourceError(
                f"{file.path!r} has {file.num_records} records in {file.identity.size:,} bytes, and had {count} in "
                f"{size:,} when the source was constructed: it was changed, or is damaged. Construct the source again."
            )
        asked = max((part.stop or 0 for part in self._parts if part.path == file.path), default=0)
        if asked > file.num_records:
            raise DataSourceError(
                f"{file.path!r} holds {file.num_records} records, and a range of it asks for the ones before {asked}."
            )

    def _report_group_size(self, path: str, num_records: int, group_size: int | None) -> None:
        if group_size in {None, 1} or num_records <= 1 or self._group_size_reported:
            return
        self._group_size_reported = True
        warnings.warn(
            f"{path!r} was written with group_size:{group_size}: to read one record, the whole group that "
            "it lies in is read and decoded, which makes random access slow. Write the files again with "
            "ArrayRecordWriter(path, 'group_size:1').",
            stacklevel=2,
        )


def _open_error(error: OSError, path: str, position: int, key: int) -> DataSourceError:
    reason = str(error) if isinstance(error, DataSourceError) else f"{path!r} cannot be opened: {error.strerror}."
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        reason += " Raise the limit (`ulimit -n`) or close other files; this source has no idle one to close."
    return DataSourceError(f"Cannot read record {position} of its file (record key {key}): {reason}")
