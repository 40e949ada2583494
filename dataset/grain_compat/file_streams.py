"""Files as streams, under Grain's names. They are read by random access, so a state is restored immediately."""

import errno
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, final

from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.map_dataset import MapDataset, dataset_of
from millstream.dataset.node_source import node_of
from millstream.dataset.nodes.index_nodes import InterleavedRows
from millstream.errors import DataSourceError
from millstream.sources.arrow.tables import filesystems
from millstream.sources.files.paths import FileIdentity, FileRange
from millstream.sources.formats.parquet import ParquetDataSource, ParquetFile
from millstream.sources.formats.tfrecord import HEADER_BYTES, TRAILER_BYTES, TFRecordDataSource, begins

CYCLE_LENGTH = 16
"""The number of Parquet files whose rows are interleaved, as in Grain."""

CACHE_BYTES_PER_FILE = 1 << 28


class TFRecordIterDataset(IterDataset[bytes]):
    """The records of a TFRecord file, as bytes.

    Their offsets are indexed once, as by `TFRecordDataSource`. So a state is restored immediately, and the operations
    after it are distributed over threads and workers.

    Args:
        path: a path or URL; the files of a pattern or of several paths are concatenated.

    Raises:
        OSError, DataSourceError, …: as `TFRecordDataSource`.

    Examples:
        >>> records = millstream.experimental.TFRecordIterDataset("train.tfrecord")
        >>> type(next(iter(records)))
        <class 'bytes'>
    """

    def __init__(self, path: Any) -> None:
        self._made_as(MapDataset.source(TFRecordDataSource(path)).to_iter_dataset())
        self._path = path


class HFIterDataset(IterDataset[Any]):
    """The rows of a Hugging Face stream: `IterDataset.source(hf_ds)`, under the name that Grain 0.2.19 has for it.

    A state holds the dataset's own `state_dict`. Workers do not divide the stream: they run the operations after it.

    Args:
        hf_ds: a stream of the library `datasets`, or any other iterable, see `IterDataset.source`.

    Examples:
        >>> rows = millstream.experimental.HFIterDataset([{"text": "a"}, {"text": "b"}])
        >>> list(rows.map(lambda row: row["text"]))
        ['a', 'b']
    """

    def __init__(self, hf_ds: Any) -> None:
        self._made_as(IterDataset.source(hf_ds))


class _TFRecordReader:
    """The records of a file, read from front to back, without an index. For programs that derive from Grain's.

    Subclasses set `_reader` to a binary file that they open themselves. Only the checksums of lengths are compared.
    """

    def __init__(self, path: Any) -> None:
        self._reader: BinaryIO = Path(path).open("rb")  # noqa: SIM115  (closed by `__del__`)

    def __next__(self) -> bytes:
        start = self._reader.tell()
        header = self._reader.read(HEADER_BYTES)
        if not header:
            raise StopIteration
        if not begins("", header):
            raise DataSourceError(f"{self._reader!r} has no TFRecord at byte {start:,}: the length is damaged.")
        num_bytes = int.from_bytes(header[:8], "little") + TRAILER_BYTES
        record = self._reader.read(num_bytes)
        if len(record) < num_bytes:
            raise DataSourceError(f"{self._reader!r} ends within the record at byte {start:,}. Restore the file.")
        return record[:-TRAILER_BYTES]

    def seek(self, offset: int) -> None:
        self._reader.seek(offset)

    def tell(self) -> int:
        return self._reader.tell()

    def __del__(self) -> None:
        if "_reader" in vars(self):
            self._reader.close()


class _TFRecordDatasetIterator(DatasetIterator[bytes]):
    """The records of a file, in order. Subclasses replace the reader by their own."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        self._reader = _TFRecordReader(path)

    def __next__(self) -> bytes:
        return next(self._reader)

    def get_state(self) -> dict[str, int]:
        return {"reader_offset": self._reader.tell()}

    def set_state(self, state: dict[str, int]) -> None:
        self._reader.seek(state["reader_offset"])


class ParquetIterDataset(IterDataset[dict[str, Any]]):
    """The rows of Parquet files, as dicts of the columns; rows of several files, up to 16 at a time, are interleaved.

    Args:
        path: a path or URL, a pattern, or several in a list. For a shuffled order, write
            `MapDataset.source(ParquetDataSource(path)).shuffle(seed=0)`.
        read_kwargs: `columns`, `cache` and `cache_bytes`, as `ParquetDataSource` takes them; or the `filesystem` of
            the paths: a `pyarrow.fs.FileSystem`, or one of fsspec, such as `huggingface_hub.HfFileSystem()`. Then
            paths are not patterns. URLs of stores need none.

    Raises:
        TypeError: another keyword, or something that is not a file system.
        OSError, DataSourceError, …: as `ParquetDataSource`.

    Examples:
        >>> rows = millstream.experimental.ParquetIterDataset("train-*.parquet", columns=["label"])
        >>> [row["label"] for row in millstream.experimental.LimitIterDataset(rows, 3)]
        [np.int64(0), np.int64(1), np.int64(2)]
    """

    def __init__(self, path: Any, **read_kwargs: Any) -> None:
        given = {name: value for name, value in read_kwargs.items() if value is not None}
        storage = "filesystem" if "filesystem" in given else "cache"
        if unknown := sorted(given.keys() - {"cache_bytes", "columns", storage}):
            raise TypeError(
                f"ParquetIterDataset takes columns, cache_bytes, and cache or filesystem, got {', '.join(unknown)}: "
                "other settings of pyarrow are not needed."
            )
        kind = FilesystemParquetDataSource if "filesystem" in given else ParquetDataSource
        sizes = _sizes_of_files(source := kind(path, **given))
        turns = min(CYCLE_LENGTH, len(sizes))
        if turns > 1 and "cache_bytes" not in given:
            # The cache has room for the current and the next row group of each open file.
            source = kind(path, **given, cache_bytes=turns * CACHE_BYTES_PER_FILE)
        rows = MapDataset.source(source)
        if turns > 1:
            rows = dataset_of(InterleavedRows(node_of(rows), sizes, turns), rows)
        self._made_as(rows.to_iter_dataset())


def _sizes_of_files(source: ParquetDataSource) -> tuple[int, ...]:
    """Returns the number of rows of each file, or of each part of a file."""
    sizes: list[int] = source.unit_sizes.tolist()
    starts = itertools.accumulate(sizes, initial=0)
    groups = [(source.locate(start)[0], size) for start, size in zip(starts, sizes, strict=False) if size]
    return tuple(sum(size for _, size in group) for _, group in itertools.groupby(groups, key=lambda group: group[0]))


@final
class FilesystemParquetDataSource(ParquetDataSource):
    """The rows of Parquet files of any file system. All else is as in `ParquetDataSource`.

    A file is opened for each row group, because network file systems have a connection per open file. It must not
    change while it is read: that is not checked.

    Args:
        paths: one path of the file system, or a sequence of them. Patterns and ranges are not supported.
        filesystem: a `pyarrow.fs.FileSystem`, or one of fsspec, such as `huggingface_hub.HfFileSystem()`. It must be
            picklable for worker processes.
        options: `columns` and `cache_bytes`.

    Raises:
        TypeError: `filesystem` is not a file system; otherwise as `ParquetDataSource`.
    """

    def __init__(self, paths: Any, filesystem: Any, **options: Any) -> None:
        self._filesystem = filesystem
        _arrow_filesystem(filesystem)
        super().__init__(paths, **options)

    def _resolved(self, paths: Any) -> list[FileRange]:
        given: Sequence[Any] = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not given:
            raise ValueError("paths must name at least one file, got an empty sequence.")
        # No path is a folder.
        self._roots = {}
        return [FileRange(os.fspath(path)) for path in given]

    def _identify(self, path: str) -> FileIdentity:
        fs = filesystems()
        found = _arrow_filesystem(self._filesystem).get_file_info(path)
        if found.type == fs.FileType.NotFound:
            raise FileNotFoundError(errno.ENOENT, "No such Parquet file", path)
        if found.type == fs.FileType.Directory:
            raise IsADirectoryError(errno.EISDIR, "Parquet sources read files, not directories", path)
        if found.size is None:
            raise DataSourceError(f"Cannot find the size of {path!r} in its file system. Copy it to a local file.")
        return FileIdentity.of_object(found.size, repr((found.size, found.mtime_ns)).encode())

    def _check_regular(self, path: str) -> None:
        """Checks nothing, because the path is one of another file system."""

    def _identity_now(self, path: str) -> FileIdentity:
        return self._identities[path]

    def _open(self, path: str, location: str) -> ParquetFile:
        del location  # There are no copies.
        return ParquetFile(path, self._identities[path], self._opener(path))

    def _opener(self, path: str) -> Callable[[], Any]:
        return lambda: _arrow_filesystem(self._filesystem).open_input_file(path)

    @property
    def _is_far(self) -> bool:
        return True


def _arrow_filesystem(given: Any) -> Any:
    fs = filesystems()
    if isinstance(given, fs.FileSystem):
        return given
    if not all(callable(getattr(given, name, None)) for name in ("info", "isfile", "open")):
        raise TypeError(f"filesystem must be one of pyarrow.fs or of fsspec, got {type(given).__name__}.")
    return fs.PyFileSystem(fs.FSSpecHandler(given))
