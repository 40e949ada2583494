"""Files as streams, under the names that Grain gives them: they are read at random beneath, and so resumed at once."""

import itertools
from typing import Any

from millstream.dataset.in_turn import InTurn
from millstream.dataset.map_dataset import MapDataset, node_of
from millstream.dataset.stream_nodes import ReadIterDataset
from millstream.sources.parquet import ParquetDataSource
from millstream.sources.tfrecord import TFRecordDataSource

CYCLE_LENGTH = 16
"""Rows of this many Parquet files are read in turn: as many as in Grain."""

CACHE_BYTES_PER_FILE = 1 << 28


class TFRecordIterDataset(ReadIterDataset):
    """The records of a TFRecord file, as bytes.

    Their places are found once and kept beside the file, as `TFRecordDataSource` says; so a state is restored at once,
    and what comes after in the chain is spread over threads and workers.

    Args:
        path: a path or URL; a pattern or several paths are read end to end.

    Raises:
        OSError, DataSourceError, …: as `TFRecordDataSource`.
    """

    def __init__(self, path: Any) -> None:
        super().__init__(MapDataset.source(TFRecordDataSource(path)))


class ParquetIterDataset(ReadIterDataset):
    """The rows of Parquet files, as dicts of the columns; of several files, up to 16 at a time, one row each in turn.

    Args:
        path: a path or URL, a pattern, or several in a list. For an order that is shuffled, write
            `MapDataset.source(ParquetDataSource(path)).shuffle(seed=0)`.
        read_kwargs: `columns` and `cache`, as `ParquetDataSource` takes them. What pyarrow takes, such as `filesystem`,
            is refused unless None: a path may be a URL.

    Raises:
        TypeError: another keyword.
        OSError, DataSourceError, …: as `ParquetDataSource`.
    """

    def __init__(self, path: Any, **read_kwargs: Any) -> None:
        given = {name: value for name, value in read_kwargs.items() if value is not None}
        if unknown := sorted(given.keys() - {"cache", "cache_bytes", "columns"}):
            raise TypeError(
                f"ParquetIterDataset takes columns, cache and cache_bytes, got {', '.join(unknown)}: for files of "
                "object stores, give their URLs as paths; other settings of pyarrow are not needed."
            )
        sizes = _sizes_of_files(source := ParquetDataSource(path, **given))
        turns = min(CYCLE_LENGTH, len(sizes))
        if turns > 1 and "cache_bytes" not in given:
            # All files whose turns it is have a row group at hand, and the next one.
            source = ParquetDataSource(path, **given, cache_bytes=turns * CACHE_BYTES_PER_FILE)
        rows = MapDataset.source(source)
        if turns > 1:
            rows = _RowsInTurn(rows, sizes, turns)
        super().__init__(rows)


class _RowsInTurn(MapDataset[Any]):
    """Rows of parts that lie end to end, one of each in turn."""

    def __init__(self, rows: MapDataset[Any], sizes: tuple[int, ...], cycle_length: int) -> None:
        super().__init__(rows)
        self._node = InTurn(node_of(rows), sizes, cycle_length)


def _sizes_of_files(source: ParquetDataSource) -> tuple[int, ...]:
    """Returns how many rows each file has, or each part of one."""
    sizes: list[int] = source.unit_sizes.tolist()
    starts = itertools.accumulate(sizes, initial=0)
    groups = [(source.locate(start)[0], size) for start, size in zip(starts, sizes, strict=False) if size]
    return tuple(sum(size for _, size in group) for _, group in itertools.groupby(groups, key=lambda group: group[0]))
