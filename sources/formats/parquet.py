"""The rows of Parquet files, read a row group at a time.

A random batch takes rows from many decoded row groups, as from one table.

Guarantees:
    - Any number of threads may read row groups.
    - All needed columns of a row group in an object store are requested together, in a few requests. Bytes of another
      version of the object are an error.
    - Metadata of a column is used only after pyarrow has begun to read the column, which raises an error for metadata
      that are damaged or encrypted. `RowGroupMetaData.column` would abort the process for them.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.core.warn import log_warning
from millstream.errors import DataSourceError
from millstream.sources.arrow.columns import Column, Rows
from millstream.sources.arrow.table_files import TableColumns, TableFile
from millstream.sources.arrow.tables import (
    ArrowTable,
    arrow,
    columns_of,
    dicts_or_error,
    has_valid_text,
    records_of,
)
from millstream.sources.base import ReadsBatches, RecordKeys, checked_record_keys
from millstream.sources.digests import digest_of
from millstream.sources.files.byte_files import RawFile, RemoteFile, SpanReadError
from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.multi_file import Files, reading_error
from millstream.sources.files.paths import FileIdentity, FileRange, resolve_with_folders, values_in_folders
from millstream.sources.keyed_pool import UnitCache
from millstream.sources.pieces import Pieces, window_of, window_units
from millstream.sources.remote.urls import is_url
from millstream.sources.shared_units import shared_folder
from millstream.sources.source_checks import checked_columns

_CHUNK_BYTES = 4 << 20
"""Bytes per request. The chunks of a large column are requested concurrently."""


class ParquetFile:
    """An open Parquet file; `open_file` opens it if it is in a file system of another library."""

    def __init__(self, path: str, identity: FileIdentity, open_file: Callable[[], Any] | None = None) -> None:
        import pyarrow.parquet as pq  # noqa: PLC0415

        self.path = path
        self._identity = identity
        self._open_file = open_file
        self._file = None if open_file is not None or is_url(path) else arrow().OSFile(path)
        try:
            with self._reading(path) as file:
                reader = pq.ParquetFile(file, page_checksum_verification=True)
                self._metadata = reader.metadata
                self.schema = reader.schema_arrow
            self.group_sizes = [self._metadata.row_group(n).num_rows for n in range(self._metadata.num_row_groups)]
            if min(self.group_sizes, default=0) < 0 or sum(self.group_sizes) != self._metadata.num_rows:
                raise ValueError("the numbers of rows of its row groups do not add up to that of the file")  # noqa: TRY301
        except SpanReadError as error:
            raise DataSourceError(str(error)) from error
        except Exception as error:
            self.close()
            raise DataSourceError(
                f"Cannot open {path!r}: it is not a Parquet file, is damaged, or was truncated: {_message_of(error)}."
            ) from error

    @property
    def group_bytes(self) -> list[int]:
        """The decompressed size in bytes of each row group, of all columns, at least 1."""
        groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
        return [max(1, group.total_byte_size) for group in groups]

    def decoded_share(self, group: int, names: Sequence[str]) -> float:
        """Returns the size in memory of the named columns of a row group, as a multiple of its `group_bytes`."""
        if (columns := self._columns(group, names)) is None:
            return 1
        return max(1, sum(map(_column_bytes, columns))) / self.group_bytes[group]

    @property
    def num_records(self) -> int:
        return int(sum(self.group_sizes))

    def close(self) -> None:
        """Closes the file, which no thread reads."""
        if self._file is not None:
            self._file.close()

    def read_group(self, group: int, columns: TableColumns, values: Mapping[str, Any], path: str) -> list[Any]:
        """Returns the rows of a row group as normalised record batches, read from the file or its copy at `path`.

        `values` has the values of columns that are not in the file; others that it lacks are null.
        """
        import pyarrow.parquet as pq  # noqa: PLC0415

        if shared_folder():
            _take_system_memory()
        stored = [name for name in columns.names if name in self.schema.names]
        try:
            with self._reading(path, group, stored) as file:
                # A separate reader per call, because a reader is not thread-safe.
                reader = pq.ParquetFile(file, metadata=self._metadata, page_checksum_verification=True)
                # Without threads of pyarrow: they do not survive a fork, and are no faster here.
                table = reader.read_row_group(group, columns=stored, use_threads=False)
            table.validate()
            batches: list[tuple[dict[str, Any], int]] = [({}, self.group_sizes[group])]
            if stored:
                batches = [(dict(zip(stored, batch.columns, strict=True)), len(batch)) for batch in table.to_batches()]
            chunks = [columns.normalised(arrays, length, values) for arrays, length in batches if length]
        except SpanReadError:
            raise
        except Exception as error:
            raise ValueError(_message_of(error)) from error
        if (count := sum(map(len, chunks))) != self.group_sizes[group]:
            raise ValueError(f"it has {count} rows instead of {self.group_sizes[group]}")
        return chunks

    @contextlib.contextmanager
    def _reading(self, path: str, group: int | None = None, names: Sequence[str] = ()) -> Iterator[Any]:
        """Yields a file for pyarrow. The columns of a row group in an object store are requested together."""
        if self._file is not None:
            yield self._file
            return
        if self._open_file is not None:
            with self._open_file() as file:
                yield file
            return
        if not is_url(path):
            with arrow().OSFile(path) as file:  # A copy, which may be evicted after the block.
                yield file
            return
        remote = RemoteFile(path, self._identity)
        spans = [] if group is None else self._spans(group, names)
        with arrow().PythonFile(RawFile(_reader(remote, spans), self._identity.size), "r") as file:
            yield file

    def _spans(self, group: int, names: Sequence[str]) -> list[tuple[int, int]]:
        """Returns the starts and lengths of the columns of a row group, without those that exceed the file."""
        spans = []
        for column in self._columns(group, names) or ():
            # Some writers set the offset of a dictionary to 0.
            starts = [column.data_page_offset, column.dictionary_page_offset or 0]
            start, length = min(filter(None, starts), default=0), column.total_compressed_size
            if 0 < start < start + length <= self._identity.size:
                spans.append((start, length))
        return spans

    def _columns(self, group: int, names: Sequence[str]) -> list[Any] | None:
        """Returns the metadata of the columns of a row group, and of their members, that have one of the names.

        None if pyarrow cannot read one of them.
        """
        import pyarrow.parquet as pq  # noqa: PLC0415

        paths = [self._metadata.schema.column(number).path for number in range(self._metadata.num_columns)]
        wanted = [
            number for number, path in enumerate(paths) if any(f"{path}.".startswith(f"{name}.") for name in names)
        ]
        with arrow().PythonFile(RawFile(_refuse, 1 << 62), "r") as file:
            reader = pq.ParquetFile(file, metadata=self._metadata)
            for number in wanted:
                try:
                    reader.read_row_group(group, columns=[paths[number]], use_threads=False)
                except _BytesAreReadError as error:
                    # pyarrow may keep the error, whose traceback has the frame of this call, and so this file.
                    error.__traceback__ = None
                except Exception as error:  # noqa: BLE001
                    error.__traceback__ = None
                    return None
        return [self._metadata.row_group(group).column(number) for number in wanted]


@functools.cache
def _take_system_memory() -> None:
    """Makes Arrow allocate by the C library in this worker, unless the user has chosen.

    A worker frees a decoded row group after writing it. Arrow's default allocator, mimalloc, then returns the pages to
    the system, and the next row group takes them again, which doubles the time of decoding.
    """
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa = arrow()
        pa.set_memory_pool(pa.system_memory_pool())


class _BytesAreReadError(Exception):
    """pyarrow wants bytes of a column, so it has accepted the metadata of the column."""


def _refuse(start: int, length: int) -> bytes:  # noqa: ARG001  (as RawFile calls it)
    raise _BytesAreReadError


def _reader(file: RemoteFile, spans: Sequence[tuple[int, int]]) -> Callable[[int, int], bytes]:
    """Returns a function that reads an object. Given spans are read in advance, others when they are needed."""
    known = list(zip((start for start, _ in spans), _read_spans(file, spans), strict=True))

    def read(start: int, length: int) -> bytes:
        for begin, content in known:
            if begin <= start and start + length <= begin + len(content):
                return content[start - begin : start - begin + length]
        return _read_spans(file, [(start, length)])[0]

    return read


def _read_spans(file: RemoteFile, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """Returns the bytes of spans, which are requested together in chunks."""
    chunks = [
        (number, position, min(_CHUNK_BYTES, start + length - position))
        for number, (start, length) in enumerate(spans)
        for position in range(start, start + length, _CHUNK_BYTES)
    ]
    contents = file.begin([start for _, start, _ in chunks], [length for _, _, length in chunks])()
    of_span: list[list[bytes]] = [[] for _ in spans]
    for (number, _, _), content in zip(chunks, contents, strict=True):
        of_span[number].append(content)
    return [contents[0] if len(contents) == 1 else b"".join(contents) for contents in of_span]


def _message_of(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


_VALUE_BYTES = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}


def _column_bytes(column: Any) -> int:
    """Returns the size of a column of a row group, decompressed and without dictionaries of numbers."""
    stored: int = column.total_uncompressed_size
    decoded: int = column.num_values * _VALUE_BYTES.get(column.physical_type, 0)
    return max(stored, decoded)


_MAX_JOINED = 2
"""Limit of the tables of several row groups: some threads may read the next window while others read the last one."""


@final
@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RowGroup:
    """A decoded row group, with its number in the source and, nearly always, one record batch.

    `is_valid` is True if all texts are UTF-8.
    """

    number: int
    path: str
    chunks: Sequence[Any]
    num_records: int
    num_bytes: int
    is_valid: bool


@final
class JoinedGroups:
    """The rows of several row groups, sorted by number, as one table, without a copy."""

    def __init__(self, columns: Mapping[str, Column], groups: Iterable[RowGroup]) -> None:
        self.groups = sorted(groups, key=lambda group: group.number)
        self.is_valid = all(group.is_valid for group in self.groups)
        self._numbers = np.array([group.number for group in self.groups], np.int64)
        self._starts = Pieces(group.num_records for group in self.groups).starts
        self._table = ArrowTable(columns, [chunk for group in self.groups for chunk in group.chunks])

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.intp] | None:
        """Returns the indices in `groups` of the groups with the given numbers, or None if one is missing."""
        indices = self._numbers.searchsorted(numbers)
        # An index beyond the last group is clipped to it, and its number differs.
        return None if (self._numbers.take(indices, mode="clip") != numbers).any() else indices

    def rows(self, indices: NDArray[np.intp], within: NDArray[np.int64]) -> Rows:
        return self._table.rows(self._starts[indices] + within)


_IS_VALID = b"is_valid"


@final
@dataclasses.dataclass(frozen=True)
class RowGroupFiles:
    """Files of Arrow's IPC format, for workers that share decoded row groups."""

    def write(self, group: RowGroup, path: str) -> None:
        pa = arrow()
        schema = group.chunks[0].schema.with_metadata({_IS_VALID: str(int(group.is_valid)), "path": group.path})
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for chunk in group.chunks:
                writer.write_batch(chunk)

    def map(self, key: int, path: str) -> RowGroup:
        pa = arrow()
        with pa.memory_map(path) as file:
            reader = pa.ipc.open_file(file)
            chunks = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        stored = reader.schema.metadata
        return _row_group(key, stored[b"path"].decode(), chunks, is_valid=stored[_IS_VALID] == b"1")


def _row_group(number: int, path: str, chunks: Sequence[Any], *, is_valid: bool) -> RowGroup:
    num_bytes = int(sum(chunk.nbytes for chunk in chunks))
    return RowGroup(number, path, chunks, sum(map(len, chunks)), num_bytes, is_valid)


@final
class RowGroups:
    """A cache of decoded row groups."""

    def __init__(self, columns: Mapping[str, Column], units: UnitCache[int, RowGroup], max_threads: int) -> None:
        self.units = units
        self._columns = columns
        self._max_threads = max_threads
        self._recent: tuple[JoinedGroups, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroups, (self._columns, self.units, self._max_threads)

    def clear(self) -> None:
        self.units.clear()
        self._recent = ()

    def joined(
        self, numbers: NDArray[np.int64], decode: Callable[[int], RowGroup]
    ) -> tuple[JoinedGroups, NDArray[np.intp]]:
        """Returns joined row groups, and the index in them of the row group of each record, at least one."""
        for recent in self._recent:
            if (indices := recent.find(numbers)) is not None:
                found = np.bincount(indices).tolist()
                self.units.touch((group.number, count) for group, count in zip(recent.groups, found, strict=False))
                return recent, indices
        needed, counts = np.unique(numbers, return_counts=True)
        wanted = dict(zip(needed.tolist(), counts.tolist(), strict=True))
        groups = self.units.get_all(wanted, decode, self._max_threads)
        joined = JoinedGroups(self._columns, [*groups, *self._others_in_use(groups)])
        # A table keeps its row groups in memory, so it must not outlive them in the cache.
        tables = (joined, *self._recent[: _MAX_JOINED - 1])
        self._recent = tuple(each for each in tables if self._are_cached(each.groups))
        indices = joined.find(numbers)
        if indices is None:
            raise AssertionError("One of the row groups is missing.")
        return joined, indices

    def _are_cached(self, groups: Iterable[RowGroup]) -> bool:
        return self.units.has((group.number, group) for group in groups)

    def _others_in_use(self, groups: Sequence[RowGroup]) -> list[RowGroup]:
        """Returns the other row groups of the last table that are not used up, if it has any of these.

        They belong to the same window, of which a small batch needs only a few groups.
        """
        wanted = {group.number for group in groups}
        last = self._recent[0].groups if self._recent else ()
        if all(group.number not in wanted for group in last):
            return []
        others = [group for group in last if group.number not in wanted and not self.units.is_used_up(group.number)]
        return others if sum(group.num_bytes for group in [*groups, *others]) <= self.units.max_bytes else []


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
    concurrently. Decoded row groups are cached, up to `cache_bytes`, so the best order of rows stays among a few row
    groups for a while. That is the order of `HierarchicalSampler`.

    Memory: window_units times the size of a decoded row group should be at most half of `cache_bytes`, because one
    window is read while another one ends. Threads share the row groups, and so do the workers of a loader on one
    machine: each row group is decoded once, into a file in `/dev/shm` or `$TMPDIR` that all of them map, and without
    room there, by each worker. `load(source, shuffle=True)` takes this order by itself if not all row groups fit. A
    global shuffle works, but decodes a row group for nearly each row, and logs a warning.

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
        paths: one path or a sequence of paths, in the order of the records: files, patterns such as
            `data/train-*.parquet`, ranges such as `file.parquet[100:200]`, and URLs, of which only the wanted columns
            are fetched. A folder, or a URL that ends in a slash, stands for all files in it, at any depth, sorted by
            name. Matches and files in folders are skipped if their names begin with `_`, like `_SUCCESS`, or a dot.
        columns: the names of the wanted columns, in the order of the dicts; None for all columns, in the order of the
            first file. Others are not read. Folders named like `year=2024` are columns, too, of integers if all
            values are, else of text: those within a given folder always, others if they are named here.
        schema: a `pyarrow.Schema` that all files are read with, or `"union"` for the one that has all columns of all
            files; None if all files must have the same. Values of a file are promoted to its types: integers and
            floats to wider ones, decimals to more digits, timestamps to finer units. A column that a file lacks is
            None.
        cache_bytes: the memory, in bytes, for decoded row groups in the trainer, or in all workers of a loader
            together, besides those that are being read; with 0, one row group is cached.
        cache: a `FileCache` for local copies of whole remote files; None to fetch only the wanted columns.

    Attributes:
        unit_sizes: the number of records of each row group, in the order of the records: int64, shape (n,).
        window_units: the number of row groups that a shuffle should keep together, so that they fit into half of
            `cache_bytes`, by their sizes in the files' metadata; None if all fit into `cache_bytes`, because any order
            is then equally fast.

    Raises:
        ImportError: pyarrow is not installed: `pip install 'millstream[parquet]'`.
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: a file is not a Parquet file, is damaged, or was cut short.
        TypeError: columns that are not names, or a schema of another kind.
        ValueError: a file has a wanted column twice, or with a type that cannot be promoted; without a schema, a file
            lacks a wanted column, has it with another type than the first file, or, if all are wanted, has other
            columns than the first file; with one, a column that no file has.

    Reading raises DataSourceError, with the file and the row, for a damaged row group, and for a file that has changed,
    see "All sources of files" in docs/formats.md. Checksums of pages are compared if files have them.

    Examples:
        >>> source = millstream.ParquetDataSource("train-*.parquet", columns=["tokens", "label"])
        >>> sampler = millstream.HierarchicalSampler(source.unit_sizes, window_units=16, seed=0)
        >>> loader = millstream.DataLoader(data_source=source, sampler=sampler, operations=[millstream.Batch(256)])
        >>> next(iter(loader))["tokens"].shape
        (256, 8)
    """

    kind = "Parquet"

    def __init__(
        self,
        paths: Any,
        *,
        columns: Sequence[str] | None = None,
        schema: Any = None,
        cache_bytes: int = 1 << 28,
        cache: FileCache | None = None,
    ) -> None:
        self._wanted = checked_columns(columns)
        self._cache_bytes = as_integer(cache_bytes, "cache_bytes", minimum=0)
        if not (schema is None or schema == "union" or isinstance(schema, arrow().Schema)):
            raise TypeError(f"schema must be a pyarrow.Schema, 'union', or None, got {schema!r}.")
        self._group_sizes: dict[str, list[int]] = {}
        self._group_bytes: dict[str, list[int]] = {}
        self._schemas: dict[str, Any] = {}
        super().__init__(paths, cache)
        folders = {path: values_in_folders(path.removeprefix(self._roots.get(path, ""))) for path in self._paths}
        files = {path: TableFile(self._schemas[path], folders[path], path in self._roots) for path in self._paths}
        self._table = TableColumns.of(files, self._wanted, schema)
        self._columns = columns_of(self._table.schema, self._table.names)
        self.window_units = self._window_units()
        del self._schemas, self._group_bytes, self._roots
        self._index_units()
        concurrency = FETCHED_TOGETHER if self._is_far else min(_DECODED_TOGETHER, os.cpu_count() or 1)
        units = UnitCache[int, RowGroup](self._cache_bytes, RowGroupFiles())
        self._decoded_groups = RowGroups(self._columns, units, concurrency)
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
        described = [(name, column.type_name) for name, column in self._columns.items()]
        values = [sorted(self._table.values[path].items()) for path in self._paths]
        digest = digest_of([described, values] if any(values) else described, 4)
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

    def _resolved(self, paths: Any) -> list[FileRange]:
        ranges, self._roots = resolve_with_folders(paths, self.kind, (".parquet", ".pq"))
        return ranges

    def _window_units(self) -> int | None:
        largest, path, number = max(
            (num_bytes, path, number)
            for path, sizes in self._group_bytes.items()
            for number, num_bytes in enumerate([0, *sizes], -1)
        )
        if not largest:
            return None
        with contextlib.closing(self._open(path, path)) as file:
            share = file.decoded_share(number, self._table.names)
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
        tables: list[NDArray[np.int64]] = []
        for file in self._ranges:
            first_group, groups = groups_of[file.path]
            starts, ends = (np.clip(bound, file.start, file.stop) for bound in (groups.starts, groups.ends))
            used = np.flatnonzero(ends > starts)
            tables.append(np.array([used + first_group, (starts - groups.starts)[used], (ends - starts)[used]]))
        self._unit_groups, self._unit_starts, lengths = np.concatenate(tables, axis=1)
        self._units = Pieces(lengths)

    def _decoded(self, number: int, key: int, row: int) -> RowGroup:
        path, group, start = self._groups[number]
        file = self._acquire(path, start + row, key)
        try:
            with self._location_of(path) as location:
                chunks = file.read_group(group, self._table, self._table.values[path], location)
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
        decoded = _row_group(number, path, chunks, is_valid=has_valid_text(chunks))
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
            f"random for Parquet. A row group takes {num_bytes:,} "
            f"bytes of memory here. Use HierarchicalSampler(source.unit_sizes, window_units={window}, seed=...), with "
            "keys=... for a part of the records, or PackingSampler(..., unit_sizes=source.unit_sizes, "
            f"window_units={window}), which fit into cache_bytes={self._cache_bytes:,}, or increase cache_bytes."
        )
