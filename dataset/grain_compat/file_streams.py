"""Files as streams, under Grain's names. They are read by random access, so a state is restored immediately."""

import itertools
from typing import Any

from millstream.dataset.map_dataset import MapDataset, node_of
from millstream.dataset.nodes.interleaved_rows import InterleavedRows
from millstream.dataset.stream_nodes import ReadIterDataset
from millstream.sources.parquet import ParquetDataSource
from millstream.sources.parquet_of_filesystem import FilesystemParquetDataSource
from millstream.sources.tfrecord import TFRecordDataSource

CYCLE_LENGTH = 16
"""The number of Parquet files whose rows are interleaved, as in Grain."""

CACHE_BYTES_PER_FILE = 1 << 28


class TFRecordIterDataset(ReadIterDataset):
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
        super().__init__(MapDataset.source(TFRecordDataSource(path)))


class ParquetIterDataset(ReadIterDataset):
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
        place = "filesystem" if "filesystem" in given else "cache"
        if unknown := sorted(given.keys() - {"cache_bytes", "columns", place}):
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
            rows = _RowsInTurn(rows, sizes, turns)
        super().__init__(rows)


class _RowsInTurn(MapDataset[Any]):
    """Rows of concatenated files, interleaved one by one."""

    def __init__(self, rows: MapDataset[Any], sizes: tuple[int, ...], cycle_length: int) -> None:
        super().__init__(rows)
        self._node = InterleavedRows(node_of(rows), sizes, cycle_length)


def _sizes_of_files(source: ParquetDataSource) -> tuple[int, ...]:
    """Returns the number of rows of each file, or of each part of a file."""
    sizes: list[int] = source.unit_sizes.tolist()
    starts = itertools.accumulate(sizes, initial=0)
    groups = [(source.locate(start)[0], size) for start, size in zip(starts, sizes, strict=False) if size]
    return tuple(sum(size for _, size in group) for _, group in itertools.groupby(groups, key=lambda group: group[0]))
