"""The records of ArrayRecord files.

Guarantees, besides those of all sources of files:
    - Neither constructing nor pickling a source opens a reader: the library's first reader starts 64 threads. The
      constructor imports the library, so that a process that drops privileges afterwards can still read. (Files whose
      records are in groups are an exception: only a reader can count them. It is closed immediately, but the threads
      stay.)
    - A thread of a process that was forked after the library was used gets an error, see `_LIBRARY`.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

from millstream.core.warn import warn
from millstream.errors import DataSourceError
from millstream.sources.files.file_records import FileRecords
from millstream.sources.library_reads import first_process, is_forked
from millstream.sources.records.array_record_file import ArrayRecordFile, count_records, open_array_record
from millstream.sources.remote.urls import Url, is_url
from millstream.sources.storage.file_cache import FileCache
from millstream.sources.storage.paths import FileIdentity

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
        FileNotFoundError, IsADirectoryError, …: a file cannot be found or read, or a pattern has no match.
        DataSourceError: a file is not an ArrayRecord file.
        TypeError: paths that are not paths, or a set of paths, which has no order.
        ValueError: a range that ends before it starts, or a URL that only a cache can read.

    Reading raises DataSourceError, with the file and the record, for a file that is damaged, was truncated, removed or
    changed since the source was constructed, or has fewer records than a range of it. At most 512 files stay open, and
    never more than half of the process's descriptors (`ulimit -n`).

    Examples:
        >>> source = millstream.ArrayRecordDataSource("train-*.array_record")
        >>> len(source), source[1], source.__getitems__([2, 0])
        (3, b'two', [b'three', b'one'])
        >>> loader = millstream.load(source, shuffle=True, seed=0, transformations=[bytes.decode], batch_size=3)
        >>> next(iter(loader))
        array(['three', 'two', 'one'], dtype='<U5')
    """

    kind: ClassVar[str] = "ArrayRecord"
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
