"""The rows of Parquet files, read a row group at a time."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.core.warn import log_warning
from millstream.errors import DataSourceError
from millstream.sources.base import ReadsBatches, RecordKeys, checked_record_keys
from millstream.sources.column_names import check_file_columns, checked_columns
from millstream.sources.digests import digest_of
from millstream.sources.files.multi_file import Files, reading_error
from millstream.sources.pieces import Pieces, window_of, window_units
from millstream.sources.remote.urls import is_url
from millstream.sources.storage.byte_files import SpanReadError
from millstream.sources.storage.file_cache import FileCache
from millstream.sources.tables.arrow_structures import dicts_or_error, records_of
from millstream.sources.tables.arrow_tables import columns_of, has_valid_text, plain_types
from millstream.sources.tables.parquet_file import ParquetFile
from millstream.sources.tables.row_groups import RowGroup, RowGroups

_SAMPLED_UNITS = 16
"""The minimum number of evicted row groups that advice is based on."""

_WASTE_FACTOR = 4
"""Advice is given if fewer than one in this number of their rows were read."""

FETCHED_TOGETHER = 16
"""The number of row groups of objects in stores that are fetched concurrently for one batch."""

_DECODED_TOGETHER = 8
"""The maximum number of row groups of files that are decoded concurrently: a new window needs many."""


class ParquetDataSource(Files[ParquetFile], ReadsBatches):
    """The rows of Parquet files, as dicts, read a row group at a time. It needs pyarrow.

    Reading any row decodes all of its row group. If a batch needs several, threads that end with the read decode them
    concurrently. Each process caches decoded row groups, up to `cache_bytes`, so the best order of rows stays among a
    few row groups for a while. That is the order of `HierarchicalSampler`.

    Memory: window_units times the size of a decoded row group should be at most half of `cache_bytes`, because one
    window is read while another one ends. Prefer threads (`worker_count=0`), which share the row groups: each worker
    process would decode all of them. `load(source, shuffle=True)` takes this order by itself if not all row groups fit.
    A global shuffle works, but decodes a row group for nearly each row, and logs a warning.

    A record has the names of the columns as keys, and these values:

    - numbers and truth values: NumPy scalars; texts: `str`; binary columns: `bytes`;
    - dates and timestamps: `np.datetime64`, in UTC if there is a time zone; times of day and durations:
      `np.timedelta64`;
    - lists of these numbers: arrays of shape (length,), of objects if one of them is null; other lists: Python lists;
    - structs: dicts;
    - dictionaries: their values; extension types: their storage type, except tensors of one shape with axes in order
      (`arrow.fixed_shape_tensor`), which are arrays of that shape;
    - decimals, maps, and other types without a NumPy dtype, also within lists and structs: the values of pyarrow's
      `to_pylist`, such as `decimal.Decimal`;
    - nulls: None. A batch of None and numbers is an error: replace None in a Map before Batch.

    If Batch comes first, and there are no nulls, columns become the arrays of the batch without records in between.

    Args:
        paths: one path or a sequence of paths, in the order of the records. A path is a file (`~` is expanded), a
            pattern such as `data/train-*.parquet` (its matches are sorted), a file with a range of its rows, such as
            `file.parquet[100:200]`, or, as a `str`, a URL of `gs://`, `s3://`, `http://` or `https://`, of which only
            the wanted columns are fetched.
        columns: the names of the wanted columns, in the order of the dicts; None for all columns, in the order of the
            first file. Others are not read.
        cache_bytes: the memory, in bytes, for decoded row groups per process, besides those that are being read; with
            0, one row group is cached.
        cache: a `FileCache` for local copies of whole remote files; None to fetch only the wanted columns.

    Attributes:
        unit_sizes: the number of records of each row group, in the order of the records: int64, shape (n,).
        window_units: the number of row groups that a shuffle should keep together, so that they fit into half of
            `cache_bytes`, by their sizes in the files' metadata; None if all fit into `cache_bytes`, because any order
            is then equally fast.

    Raises:
        ImportError: pyarrow is not installed: `pip install 'millstream[parquet]'`.
        FileNotFoundError, IsADirectoryError, …: a file cannot be found or read, or a pattern has no match.
        DataSourceError: a file is not a Parquet file, is damaged, or was cut short.
        TypeError: paths that are not paths, or a set of paths, which has no order; columns that are not names.
        ValueError: a file lacks a wanted column, has it twice, or has it with another type than the first file; or, if
            all are wanted, has other columns than the first file; a range that ends before it starts.

    Reading raises DataSourceError, with the file and the row, for a damaged row group, and for a file that was
    truncated, removed or changed since the source was constructed. Checksums of pages are compared if files have them.
    At most 512 files stay open.

    Examples:
        >>> source = millstream.ParquetDataSource("train-*.parquet", columns=["tokens", "label"])
        >>> sampler = millstream.HierarchicalSampler(source.unit_sizes, window_units=16, seed=0)
        >>> loader = millstream.DataLoader(data_source=source, sampler=sampler, operations=[millstream.Batch(256)])
        >>> next(iter(loader))["tokens"].shape
        (256, 8)
    """

    kind: ClassVar[str] = "Parquet"

    def __init__(
        self,
        paths: Any,
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = 1 << 28,
        cache: FileCache | None = None,
    ) -> None:
        self._wanted = checked_columns(columns)
        self._cache_bytes = as_integer(cache_bytes, "cache_bytes", minimum=0)
        self._group_sizes: dict[str, list[int]] = {}
        self._group_bytes: dict[str, list[int]] = {}
        self._schemas: dict[str, Any] = {}
        super().__init__(paths, cache)
        schema = self._schemas[self._paths[0]]
        self._names = tuple(schema.names) if self._wanted is None else self._wanted
        for path in self._paths:
            check_file_columns(path, self._schemas[path].names, self._names, is_all=self._wanted is None)
        self._types = plain_types(schema, self._names)
        self._columns = columns_of(schema, self._names)
        for path in self._paths:
            self._check_types(path)
        self.window_units = self._window_units()
        del self._schemas, self._group_bytes
        self._index_units()
        concurrency = FETCHED_TOGETHER if self._is_far else min(_DECODED_TOGETHER, os.cpu_count() or 1)
        self._decoded_groups = RowGroups(self._columns, self._cache_bytes, concurrency)
        self._has_advised = False

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[Any]:
        keys = checked_record_keys(record_keys, self._num_records)
        self._open_files.check_open()
        if not len(keys):
            return []
        units, within = self._units.locate(keys)
        numbers, within = self._unit_groups[units], within + self._unit_starts[units]

        def decoded(number: int) -> RowGroup:
            first = int(np.argmax(numbers == number))
            return self._decoded(number, int(keys[first]), int(within[first]))

        groups, indices = self._decoded_groups.joined(numbers, decoded)
        if not self._has_advised:
            self._advise()
        rows = groups.rows(indices, within)
        if groups.is_valid:
            return records_of(self._columns, rows, keys, self._row_error)
        return dicts_or_error(self._columns, rows, keys, self._row_error)

    @property
    def unit_sizes(self) -> NDArray[np.int64]:
        """The number of records of each row group, in the order of the records: int64, shape (n,)."""
        return self._units.lengths.copy()

    def close(self) -> None:
        """Closes all files, and drops what was decoded. Reading then raises ValueError. May be called again."""
        super().close()
        self._decoded_groups.clear()

    def fingerprint(self) -> str:
        """Returns the number of files and records, the columns, and a digest of names, sizes, counts and ranges."""
        digest = digest_of([(name, column.type_name) for name, column in self._columns.items()], 4)
        return f"{super().fingerprint()} columns={len(self._columns)}:{digest}"

    def _count(self, path: str) -> int:
        file = self._open(path, path)
        file.close()
        self._group_sizes[path], self._schemas[path] = file.group_sizes, file.schema
        self._group_bytes[path] = file.group_bytes
        return file.num_records

    def _open(self, path: str, location: str) -> ParquetFile:
        del location  # It is the path: a copy is used for row groups only.
        return ParquetFile(path, self._identities[path])

    @property
    def _is_far(self) -> bool:
        return any(map(is_url, self._paths))

    def _check_types(self, path: str) -> None:
        columns = columns_of(self._schemas[path], self._names)
        for name, column in self._columns.items():
            if columns[name].type_name != column.type_name:
                raise ValueError(
                    f"Column {name!r} is {columns[name].type_name} in {path!r}, but {column.type_name} in "
                    f"{self._paths[0]!r}. Write the files with one schema."
                )

    def _window_units(self) -> int | None:
        largest, path, number = max(
            (num_bytes, path, number)
            for path, sizes in self._group_bytes.items()
            for number, num_bytes in enumerate([0, *sizes], -1)
        )
        if not largest:
            return None
        with contextlib.closing(self._open(path, path)) as file:
            share = file.decoded_share(number, self._names)
        num_bytes = sum(map(sum, self._group_bytes.values())) * share
        return window_units(num_bytes, round(largest * share), self._cache_bytes)

    def _index_units(self) -> None:
        """Builds the tables that map a record key to a row group and a row in it.

        A unit is the part of a row group that is in a range. It has the number of its group among all groups, and the
        group's row that it begins with.
        """
        self._groups: list[tuple[str, int, int]] = []  # The file, the group's number in it, its first row there.
        groups_of: dict[str, tuple[int, Pieces]] = {}
        for path, sizes in self._group_sizes.items():
            groups_of[path] = len(self._groups), (groups := Pieces(sizes))
            self._groups += [(path, group, start) for group, start in enumerate(groups.starts.tolist())]
        parts: list[NDArray[np.int64]] = []
        for file in self._ranges:
            first_group, groups = groups_of[file.path]
            starts, ends = (np.clip(bound, file.start, file.stop) for bound in (groups.starts, groups.ends))
            used = np.flatnonzero(ends > starts)
            parts.append(np.array([used + first_group, (starts - groups.starts)[used], (ends - starts)[used]]))
        self._unit_groups, self._unit_starts, lengths = np.concatenate(parts, axis=1)
        self._units = Pieces(lengths)

    def _decoded(self, number: int, key: int, row: int) -> RowGroup:
        path, group, start = self._groups[number]
        file = self._acquire(path, start + row, key)
        try:
            with self._location_of(path) as location:
                chunks = file.read_group(group, self._names, self._types, location)
            # Unchanged now, the file was unchanged while it was decoded.
            self._check_unchanged(path, file.num_records, self._identity_now(path))
        except SpanReadError as error:
            raise DataSourceError(
                f"Cannot read record {start + row} of {path!r} (record key {key}): {error}"
            ) from error
        except OSError as error:
            raise reading_error(error, path, start + row, key) from error
        except ValueError as error:
            raise DataSourceError(
                f"Cannot read record {start + row} of {path!r} (record key {key}): its row group, number {group}, "
                f"cannot be decoded: {error}. Restore the file."
            ) from error
        finally:
            self._open_files.release(path)
        num_bytes = int(sum(chunk.nbytes for chunk in chunks))
        decoded = RowGroup(number, path, chunks, sum(map(len, chunks)), num_bytes, has_valid_text(chunks))
        if decoded.num_bytes > self._cache_bytes:
            self._warn_of_large_group(decoded, group)
        return decoded

    def _row_error(self, key: int, error: ValueError) -> DataSourceError:
        """Returns the error of a damaged row, such as one with a text that is not UTF-8."""
        unit, row = self._units.find(key)
        path, group, start = self._groups[int(self._unit_groups[unit])]
        position = start + int(self._unit_starts[unit]) + row
        return DataSourceError(
            f"Cannot read record {position} of {path!r} (record key {key}), in row group {group}: {error}. "
            "Restore the file."
        )

    def _warn_of_large_group(self, decoded: RowGroup, group: int) -> None:
        if self._has_advised:
            return
        self._has_advised = True
        log_warning(
            f"Row group {group} of {decoded.path!r} has {decoded.num_records:,} rows, which take {decoded.num_bytes:,} "
            f"bytes of memory, more than cache_bytes={self._cache_bytes:,}. Only one such row group is cached, so a "
            "shuffle decodes it repeatedly. Write the file with smaller row groups (in pyarrow, "
            "write_table(..., row_group_size=10_000)), read fewer columns, or increase cache_bytes."
        )

    def _advise(self) -> None:
        count, served, records, num_bytes = self._decoded_groups.units.dropped
        if count < _SAMPLED_UNITS or served * _WASTE_FACTOR >= records:
            return
        self._has_advised = True
        num_bytes //= count
        window = window_of(num_bytes, self._cache_bytes)
        log_warning(
            f"Only {served:,} of {records:,} rows in {count} evicted row groups were read. The order is too "
            f"random for Parquet, or many worker processes decode the same row groups. A row group takes {num_bytes:,} "
            f"bytes of memory here. Use HierarchicalSampler(source.unit_sizes, window_units={window}, seed=...), with "
            "keys=... for a part of the records, or PackingSampler(..., unit_sizes=source.unit_sizes, "
            f"window_units={window}), which fit into cache_bytes={self._cache_bytes:,}, or increase cache_bytes, and "
            "use threads instead of workers (worker_count=0)."
        )
