"""The records of ArrayRecord files: their number, and the errors of damaged ones.

The library's reader starts 64 threads in a process that opens a file. A process that only needs the number of records,
and leaves reading to its workers, avoids them: three reads of 64 bytes suffice.

An ArrayRecord file is a Riegeli file. It has blocks of 64 KiB, each with a header of 24 bytes, and chunks, each with a
header of 40 bytes that the header of a block may interrupt. The first chunk is the signature of the file. The chunks of
records follow, each with group_size records; then the footer, a chunk with one record for the file and one for each
chunk of records; and last the postscript, a block with three copies of the footer's offset.

Guarantees:
    - Any number of threads may read. The library's `read(indices)` and `read(begin, end)` are const members of a
      thread-compatible class, and release the interpreter lock; `close` is not, so it must wait until no thread reads.
    - Every returned record equals a written one, byte for byte; otherwise there is an error with file and number.
    - Neither constructing nor pickling a source opens a reader: the library's first reader starts 64 threads. The
      constructor imports the library, so that a process that drops privileges afterwards can still read. (Files whose
      records are in groups are an exception: only a reader can count them. It is closed immediately, but the threads
      stay.)
    - A thread of a process that was forked after the library was used gets an error, see `_LIBRARY`.
"""

import errno
import functools
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, ClassVar, NamedTuple, final

from millstream.core.warn import warn
from millstream.errors import DataSourceError
from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.multi_file import FileRecords
from millstream.sources.files.paths import FileIdentity
from millstream.sources.reads import first_process, is_forked
from millstream.sources.remote.urls import Url, is_url

_MAX_RECORDS = (1 << 31) - 1
"""The library's `read(begin, end)` takes 32-bit numbers."""

# The library's defaults read ahead for sequential reading; these turn that off.
_READER_OPTIONS = {"readahead_buffer_size": "0", "max_parallelism": "0"}

# The overhead of the library's batched read: it wakes a thread per record, up to 64, and builds a table with a row for
# each record of the file, not only for the requested ones. Measured: 0.03 to 0.3 ms, and 1.8 ms for 600,000 records;
# 15 to 25 µs of processor time for each thread.
_BATCHED_READ_SECONDS = 1e-4
_BATCHED_READ_SECONDS_PER_RECORD_IN_FILE = 3e-9
_BATCHED_READ_SECONDS_PER_THREAD = 2e-5
_BATCHED_READ_THREADS = 64

# A small record read alone from the page cache takes 3 µs, as long as it takes in a batched read of a thousand.
_FAST_RECORD_SECONDS = 5e-6

_NOT_THE_FILE = (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOENT)
"""Errors that do not concern the content of the file. The library reports them as text only."""

_BLOCK_BYTES = 1 << 16
_BLOCK_HEADER_BYTES = 24
_CHUNK_HEADER_BYTES = 40
_FIRST_CHUNK = _BLOCK_HEADER_BYTES + _CHUNK_HEADER_BYTES
_RECORD_CHUNK_TYPES = b"rt"

# The protocol buffer {1: footer's offset, 2: magic number}, both as variable-length integers.
_POSTSCRIPT = re.compile(rb"\x08([\x80-\xff]{0,9}[\x00-\x7f])\x10\xde\xc0\xeb\xfe\x84\xce\xc3\xc9\x71", re.DOTALL)
_POSTSCRIPT_COPIES = 3
_POSTSCRIPT_BYTES = 256


@final
class ArrayRecordFile(NamedTuple):
    """A file with the library's reader, and its state when it was opened.

    Attributes:
        path: the path of the file, or of its copy.
        reader: the library's `ArrayRecordReader`.
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
        self.reader.close()

    def _read_adaptively(self, positions: Sequence[int]) -> list[bytes]:
        """Returns the records at the positions, fast from the page cache and from slow storage.

        Reading one by one is best for small records in the page cache, but waits for each record of slow storage. The
        batched read requests 64 records together, but its overhead is that of 100 to 1,000 records. This method reads
        one by one until it has lost as much time as that overhead, and then the remainder by the batched read, if that
        is expected to save more than it costs: it takes at most about twice the time of the better one. The last few
        records are read one by one, because the time that they lose may be that of other threads that compute.
        """
        records: list[bytes] = []
        read = self.reader.read
        overhead = _BATCHED_READ_SECONDS + _BATCHED_READ_SECONDS_PER_RECORD_IN_FILE * self.num_records
        fast_end = time.perf_counter()
        for done, position in enumerate(positions, start=1):
            records += read(position, position + 1)
            fast_end += _FAST_RECORD_SECONDS
            lost = time.perf_counter() - fast_end
            if lost > overhead:
                remaining = len(positions) - done
                threads_seconds = _BATCHED_READ_SECONDS_PER_THREAD * min(remaining, _BATCHED_READ_THREADS)
                # The batched read waits as long as one record does.
                if lost / done * (remaining - 1) > overhead + threads_seconds:
                    records += read(positions[done:])
                    break
        return records

    def _read_alone(self, position: int, key: int) -> bytes:
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
    reader_class: Callable[[bytes, str], Any], path: str, options: Mapping[str, str], name: str
) -> ArrayRecordFile:
    """Opens a file, or an object at a gs:// URL, for random access.

    The options take precedence over those for random access. The name is that of the file in errors. An OSError has
    the operating system's error number.
    """
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


def count_records(path: str) -> int | None:
    """Returns the number of records of a file with one record per chunk, or None for any other file.

    For None, only the library's reader can count: the file has groups of several records, or another format. Only
    plausibility is checked, because the checksums of Riegeli are not in the standard library. The reader that opens the
    file later verifies everything, and its count is compared with this one.
    """
    with open(path, "rb") as file:  # noqa: PTH123  (the path is a string throughout)
        size = os.fstat(file.fileno()).st_size
        if size < 2 * _BLOCK_BYTES or size % _BLOCK_BYTES:
            return None
        footer_offset = _footer_offset(file, size)
        if footer_offset is None or not _FIRST_CHUNK <= footer_offset < size - _BLOCK_BYTES:
            return None
        first_chunk_records = _chunk_records(file, _FIRST_CHUNK)
        footer_records = _chunk_records(file, footer_offset)
    if not first_chunk_records or not footer_records:
        return None
    num_chunks = footer_records - 1
    if num_chunks == 0:
        return 0
    # Every chunk has the number of records of the first one; the last chunk may have fewer.
    if first_chunk_records != 1 or num_chunks * _CHUNK_HEADER_BYTES > size:
        return None
    return num_chunks


def _footer_offset(file: BinaryIO, size: int) -> int | None:
    """Returns the offset of the footer, or None if the postscript does not have three equal copies of it."""
    file.seek(size - _BLOCK_BYTES)
    copies = _POSTSCRIPT.findall(file.read(_POSTSCRIPT_BYTES))
    if len(copies) != _POSTSCRIPT_COPIES or len(set(copies)) != 1:
        return None
    varint: bytes = copies[0]
    return sum((byte & 0x7F) << (7 * number) for number, byte in enumerate(varint))


def _chunk_records(file: BinaryIO, offset: int) -> int | None:
    """Returns the number of records of the chunk that begins at `offset`, or None if its type has no records."""
    file.seek(offset)
    header = file.read(_CHUNK_HEADER_BYTES + _BLOCK_HEADER_BYTES)
    to_boundary = -offset % _BLOCK_BYTES
    if to_boundary < _CHUNK_HEADER_BYTES:
        header = header[:to_boundary] + header[to_boundary + _BLOCK_HEADER_BYTES :]
    # 8 bytes each: hash of the header, size of the data, hash of the data; then 1 byte type, 7 bytes number of records.
    if header[24] not in _RECORD_CHUNK_TYPES:
        return None
    return int.from_bytes(header[25:32], "little")


_LIBRARY = "array_record"
"""The library, whose threads and thread-local data a fork does not copy.

In a process that was forked after the library was used, a read by any thread but the one that forked ends in a
segmentation fault. (Seen with array_record 0.8. A library that is only imported, or first used by a worker process of
millstream, is safe.)
"""


@final
class ArrayRecordDataSource(FileRecords[bytes]):
    """The records of ArrayRecord files, as bytes.

    Write files with `group_size:1`, one record per group, because any read decodes a whole group; other files cause a
    warning. Random access is fast for any number of files and records: the index of each open file is in memory (about
    10 bytes per record).

    Do not fork a process that has read or written ArrayRecord files: a fork does not copy the library's threads. Reads
    by threads of such a process raise an error, and its main thread may hang. `worker_count` is safe, and so are the
    start methods `spawn` and `forkserver` of multiprocessing (in PyTorch, `multiprocessing_context="spawn"`).

    Args:
        paths: one path or a sequence of paths, in the order of the records. A path is a file (`~` is expanded), a
            pattern such as `data/train-*.array_record` (its matches are sorted), a file with a range of its records,
            such as `file.array_record[100:200]`, or an object with `filename`, `skip` and `take`, such as the file
            instructions of TensorFlow Datasets. A file may occur more than once. Sort the paths of `Path.glob`, whose
            order differs between machines. A `str` may be a URL of `gs://`, which the library itself reads, or, with a
            cache, also of `s3://`, `http://` and `https://`.
        reader_options: options of the library's reader, such as `{"readahead_buffer_size": "16M"}`. They take
            precedence over the options for random access that are set here. None for only those.
        cache: a `FileCache` that copies whole remote files to a local disk before they are read. With None, each record
            of `gs://` is one request.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: a file is not an ArrayRecord file.
        ValueError: a range that ends before it starts, or a URL that only a cache can read.

    Reading raises DataSourceError, with the file and the record, for a file that is damaged or has changed, see "All
    sources of files" in docs/formats.md.

    Examples:
        >>> source = millstream.ArrayRecordDataSource("train-*.array_record")
        >>> len(source), source[1], source.__getitems__([2, 0])
        (3, b'two', [b'three', b'one'])
        >>> loader = millstream.load(source, shuffle=True, seed=0, transformations=[bytes.decode], batch_size=3)
        >>> next(iter(loader))
        array(['three', 'two', 'one'], dtype='<U5')
    """

    kind = "ArrayRecord"
    counts_ranges: ClassVar[bool] = False

    def __init__(
        self, paths: Any, reader_options: Mapping[str, str] | None = None, *, cache: FileCache | None = None
    ) -> None:
        self._reader_options = dict(reader_options or {})
        self._group_sizes: dict[str, int] = {}
        self._group_size_reported = False
        _reader_class()
        super().__init__(paths, cache)
        self._report_group_size()

    def _identify(self, path: str) -> FileIdentity:
        if self._cache is not None or not is_url(path):
            return super()._identify(path)
        if Url.of(path).scheme != "gs":
            raise ValueError(
                f"ArrayRecord files are read by their library, which reads local files and gs://, got {path!r}. Pass "
                "cache=FileCache(max_bytes), which copies whole files to a local disk first, or mount the bucket."
            )
        return FileIdentity.of_object(0, b"")  # The library reads it, with its own credentials.

    def _count(self, path: str) -> int:
        with self._location_of(path) as location:
            count = None if is_url(location) else count_records(location)
            if count is not None:
                return count
            file = self._open_reader(path, location)
        file.close()
        return file.num_records

    def _open(self, path: str, location: str) -> ArrayRecordFile:
        file = self._open_reader(path, location)
        self._report_group_size()
        return file

    def _open_reader(self, path: str, location: str) -> ArrayRecordFile:
        first_process(_LIBRARY)
        file = open_array_record(_reader_class(), location, self._reader_options, path)
        if file.group_size is not None and file.group_size > 1 and file.num_records > 1:
            self._group_sizes[path] = file.group_size
        return file

    def _read(self, path: str, positions: list[int], keys: list[int]) -> list[bytes]:
        if is_forked(_LIBRARY) and threading.current_thread() is not threading.main_thread():
            raise DataSourceError(
                f"Cannot read record {positions[0]} of {path!r} (record key {keys[0]}) in a thread of this process: it "
                "was forked after ArrayRecord files had been read, and the library would crash. Use worker_count, or "
                "start processes by 'spawn' or 'forkserver'."
            )
        return super()._read(path, positions, keys)

    def _report_group_size(self) -> None:
        if self._group_size_reported or not self._group_sizes:
            return
        self._group_size_reported = True
        path = next(path for path in self._paths if path in self._group_sizes)
        warn(
            f"{path!r} was written with group_size:{self._group_sizes[path]}. Reading one record decodes its whole "
            "group, so random access is slow. Write the files again with ArrayRecordWriter(path, 'group_size:1'), or "
            "by `python -m millstream convert`."
        )


@functools.cache
def _reader_class() -> Callable[[bytes, str], Any]:
    from array_record.python.array_record_module import ArrayRecordReader  # noqa: PLC0415

    reader: Callable[[bytes, str], Any] = ArrayRecordReader
    return reader
