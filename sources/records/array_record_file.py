"""An open ArrayRecord file: its records, and the errors of damaged ones.

Guarantees:
    - Any number of threads may read. The library's `read(indices)` and `read(begin, end)` are const members of a
      thread-compatible class, and release the interpreter lock; `close` is not, so it must wait until no thread reads.
    - Every returned record equals a written one, byte for byte; otherwise there is an error with file and number.
"""

import errno
import itertools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

from millstream.errors import DataSourceError
from millstream.sources.remote.urls import is_url
from millstream.sources.storage.paths import FileIdentity

_MAX_RECORDS = (1 << 31) - 1
"""The library's `read(begin, end)` takes 32-bit numbers."""

# The library's defaults read ahead for sequential reading; these turn that off.
_READER_OPTIONS = {"readahead_buffer_size": "0", "max_parallelism": "0"}

# The overhead of the library's batched read: it wakes threads, and builds a table with a row for each record of the
# file, not only for the requested ones. Measured: 0.03 to 0.3 ms, and 1.8 ms for 600,000 records.
_BATCHED_READ_SECONDS = 1e-4
_BATCHED_READ_SECONDS_PER_RECORD_IN_FILE = 3e-9

# A small record read alone from the page cache takes 3 µs, as long as it takes in a batched read of a thousand.
_FAST_RECORD_SECONDS = 5e-6

_NOT_THE_FILE = (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOENT)
"""Errors that do not concern the content of the file. The library reports them as text only."""


@final
class ArrayRecordFile(NamedTuple):
    """A file with its reader, and its state when it was opened.

    Attributes:
        path: the path of the file, or of its copy.
        reader: the library's `ArrayRecordReader`, of which `read`, `num_records`, `writer_options_string`, `ok` and
            `close` are used.
        num_records: the number of records in the file.
        group_size: the number of records per compressed group, or None if the file does not have it.
        identity: the identity of the file; None for an object that the library reads from its store.
        name: the name of the file in errors.
    """

    path: str
    reader: Any
    num_records: int
    group_size: int | None
    identity: FileIdentity | None
    name: str

    def read(self, positions: Sequence[int], keys: Sequence[int]) -> list[bytes]:
        """Returns the records at the positions.

        Args:
            positions: the numbers of records in the file, from 0, in any order; they may repeat.
            keys: the record keys of the positions, for errors.

        Raises:
            DataSourceError: one of the records is damaged or lost.
        """
        try:
            records = self._read_adaptively(positions)
        except (RuntimeError, IndexError):
            # The library reports an offset in the file, not a record: reading one by one finds the record.
            records = []
        if len(records) != len(positions):
            records = list(map(self._read_alone, positions, keys))
        if not all(records) and (change := self._change()):
            # Beyond the end of a truncated file, the library returns empty records without an error.
            empty = records.index(b"")
            raise self._error(positions[empty], keys[empty], f"it reads as empty, and {change}")
        return records

    def close(self) -> None:
        """Closes the reader."""
        self.reader.close()

    def _read_adaptively(self, positions: Sequence[int]) -> list[bytes]:
        """Returns the records at the positions, fast from the page cache and from slow storage.

        Reading one by one is best for small records in the page cache, but waits for each record of slow storage. The
        batched read requests 64 records together, but its overhead is that of 100 to 1,000 records. This method reads
        one by one until it has lost as much time as that overhead, and reads the remainder by the batched read: it
        takes at most about twice the time of the better one.
        """
        records: list[bytes] = []
        read = self.reader.read
        start_seconds = _BATCHED_READ_SECONDS + _BATCHED_READ_SECONDS_PER_RECORD_IN_FILE * self.num_records
        deadline = time.perf_counter() + start_seconds
        for done, position in enumerate(positions, start=1):
            records += read(position, position + 1)
            deadline += _FAST_RECORD_SECONDS
            if time.perf_counter() > deadline:
                remainder = positions[done:]
                return records + read(remainder) if remainder else records
        return records

    def _read_alone(self, position: int, key: int) -> bytes:
        """Returns one record, or raises an error that names it."""
        record: bytes
        try:
            (record,) = self.reader.read(position, position + 1)
        except (RuntimeError, IndexError, ValueError) as error:
            raise self._error(position, key, str(error)) from error
        return record

    def _change(self) -> str | None:
        """Returns the change of the file since it was opened, for an error, or None."""
        if self.identity is None:
            return None
        try:
            now = FileIdentity.of(self.path)
        except FileNotFoundError:
            return "the file was removed while it was open"
        if (now.device, now.inode) != (self.identity.device, self.identity.inode):
            return "it was replaced by another file while it was open"
        if now.size != self.identity.size:
            return f"the file changed from {self.identity.size:,} to {now.size:,} bytes while it was open"
        return None

    def _error(self, position: int, key: int, reason: str) -> DataSourceError:
        return DataSourceError(
            f"Cannot read record {position} of {self.name!r} (record key {key}): {reason}. Restore the file."
        )


def open_array_record(
    reader_class: Callable[[bytes, str], Any], path: str, options: Mapping[str, str], name: str | None = None
) -> ArrayRecordFile:
    """Opens a file for random access.

    Args:
        reader_class: the library's `ArrayRecordReader`.
        path: the file, or the gs:// URL of an object.
        options: options of the reader, which take precedence over those for random access.
        name: the name of the file in errors.

    Raises:
        DataSourceError: the file is not an ArrayRecord file, or is damaged.
        OSError: the file cannot be opened, with the operating system's error number.
        ValueError: an option that the library does not know.
    """
    name = path if name is None else name
    identity = None if is_url(path) else FileIdentity.of(path)
    try:
        reader = reader_class(
            os.fsencode(path), ",".join(itertools.starmap("{}:{}".format, (_READER_OPTIONS | dict(options)).items()))
        )
    except ValueError as error:
        raise ValueError(
            f"reader_options must be options of ArrayRecordReader, got {dict(options)}: {error}"
        ) from error
    if not reader.ok():
        raise _open_error(
            name, reader, "cannot be read" if is_url(path) else "is not an ArrayRecord file, or is damaged"
        )
    num_records = reader.num_records()
    if num_records > _MAX_RECORDS:
        raise DataSourceError(
            f"{name!r} must have at most {_MAX_RECORDS:,} records, got {num_records:,}. Write several files."
        )
    written_with = re.search(r"group_size:(\d+)", reader.writer_options_string() or "")
    return ArrayRecordFile(path, reader, num_records, int(written_with[1]) if written_with else None, identity, name)


def _open_error(path: str, reader: Any, problem: str) -> OSError:
    """Returns the error of opening, which the library raises only when the reader is closed."""
    try:
        reader.close()
        reason = RuntimeError()
    except RuntimeError as error:
        reason = error
    for number in _NOT_THE_FILE:
        if os.strerror(number) in str(reason):
            return OSError(number, os.strerror(number), path)
    cause = str(reason) or "the library gives no reason"
    failure = DataSourceError(f"{path!r} {problem}: {cause}.")
    failure.__cause__ = reason
    return failure
