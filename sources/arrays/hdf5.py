"""The rows of HDF5 datasets."""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.errors import DataSourceError
from millstream.sources.arrays.hdf5_file import Hdf5File, content_of
from millstream.sources.arrays.hdf5_layout import DatasetLayout, FileSegment, h5py_module, inspect_file, split_paths
from millstream.sources.base import ReadsBatches, RecordKeys, checked_record_keys
from millstream.sources.column_names import paths_of_columns
from millstream.sources.column_records import records_of_arrays
from millstream.sources.digests import digest_of
from millstream.sources.files.multi_file import Files
from millstream.sources.keyed_pool import UnitCache
from millstream.sources.pieces import Pieces, cut, window_units
from millstream.sources.remote.urls import is_url
from millstream.sources.storage.byte_files import SpanReadError

_DECODED_TOGETHER = 4
"""The number of chunks of a batch that are decompressed concurrently."""

_REQUESTED_TOGETHER = 16
"""The number of datasets and chunks of objects that are requested concurrently."""


class _Rows(NamedTuple):
    """Records of one segment.

    Attributes:
        rows: the row of each record in the batch.
        keys: the key of each record, for errors.
        within: the row of each record in the segment.
    """

    rows: NDArray[np.intp]
    keys: NDArray[np.int64]
    within: NDArray[np.int64]

    def at(self, indices: NDArray[np.intp] | slice) -> "_Rows":
        return _Rows(self.rows[indices], self.keys[indices], self.within[indices])

    def cut(self, pieces: NDArray[Any], count: int) -> list[tuple[int, "_Rows"]]:
        """Returns each piece of those that the records belong to, `count` at most, and its records."""
        order, runs = cut(pieces, count)
        return [(piece, self.at(order[start:stop])) for piece, start, stop in runs]


class _Chunk(NamedTuple):
    """Decoded rows of a dataset."""

    rows: NDArray[Any]

    @property
    def num_records(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes


@final
class Hdf5DataSource(Files[Hdf5File], ReadsBatches):
    """The rows of HDF5 datasets, as dicts by column. A row is an index of the first axis. It needs h5py.

    Rows of datasets without filters are read in any order, without h5py and its lock. Those of a batch that are near
    each other in the file are read by one call. Chunks that gzip has compressed, with or without shuffle, are also read
    without h5py, and decompressed concurrently. Datasets with other filters (lzf and all others that each h5py has) are
    decoded by h5py, one chunk at a time per process. Each process caches decoded chunks, up to `cache_bytes`. If they
    have several rows per chunk, the best order stays among a few chunks for a while, like that of
    `HierarchicalSampler`; `load(source, shuffle=True)` takes it by itself if not all rows fit into the cache.

    Values have the dtypes of the datasets, in native byte order: NumPy scalars for datasets of one axis, else arrays. A
    value that is an array of HDF5 is an array. Texts and bytes of variable length, such as encoded images, are `bytes`,
    read by h5py one by one.

    Args:
        datasets: for each column, the path of a file (`~` is expanded), followed by the name of a dataset in it:
            `"train.h5/images"`. Both may be patterns, such as `"demos-*.hdf5/data/*/obs/image"`; their matches are
            sorted by name, and concatenated. A `str` may begin with the URL of a file, such as `"s3://bucket/a.h5/x"`,
            whose rows and chunks are requested together. All columns must be in the same files, and have the same
            matches of the patterns in the names, and the same numbers of rows.
        cache_bytes: the memory, in bytes, for decoded chunks per process, besides those that are being read.

    Attributes:
        unit_sizes: the number of records of each chunk, of the decoded column with the most bytes; or of each dataset
            if no chunk has several rows to decode: int64, shape (n,).
        window_units: the number of chunks that a shuffle should keep together, so that they fit into half of
            `cache_bytes`; None if any order is equally fast.

    Raises:
        ImportError: h5py is not installed: `pip install 'millstream[hdf5]'`.
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: a file is not an HDF5 file, is damaged, or was cut short.
        TypeError: datasets that are not a mapping of names to paths.
        ValueError: no dataset matches a pattern; columns differ in their files, matches or numbers of rows; datasets of
            a column differ in dtype or shape; a dataset has lists of variable length, references, a type without a
            NumPy dtype, a filter that h5py lacks, or its values in other files; a file is open for writing in this
            process.

    Reading raises DataSourceError, with the file and the record, for a damaged chunk, and for a file that was
    truncated, removed or changed since the source was constructed. At most 512 files stay open. While h5py has a file
    open, no other process can open it for writing.

    Examples:
        >>> source = millstream.Hdf5DataSource({"image": "demos.hdf5/data/*/image", "grip": "demos.hdf5/data/*/grip"})
        >>> len(source), source[4]["image"].shape, source[4]["grip"]
        (6, (8, 8, 3), np.float32(4.0))
    """

    kind: ClassVar[str] = "HDF5"
    descriptors_per_file: ClassVar[int] = 2  # h5py takes another one.

    def __init__(self, datasets: Mapping[str, str | os.PathLike[str]], *, cache_bytes: int = 1 << 28) -> None:
        h5py_module()  # It raises ImportError here, and not after the search for files.
        self._cache_bytes = as_integer(cache_bytes, "cache_bytes", minimum=0)
        files, self._patterns = split_paths(paths_of_columns(datasets, "datasets", "train.h5/images"))
        self._segments: dict[str, list[FileSegment]] = {}
        super().__init__(files)
        self._index_segments()
        self._unit_sizes = self._index_units()
        self._chunks: UnitCache[tuple[int, str, int], _Chunk] = UnitCache(self._cache_bytes)

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[dict[str, Any]]:
        keys = checked_record_keys(record_keys, self._num_records)
        self._open_files.check_open()
        columns = {name: np.empty((len(keys), *kind.shape), kind.dtype) for name, kind in self._types.items()}
        numbers, within = self._pieces_of_segments.locate(keys)
        wanted = _Rows(np.arange(len(keys)), keys, within)
        reads = [
            functools.partial(self._read_dataset, number, name, rows, column)
            for number, rows in wanted.cut(numbers, len(self._all_segments))
            for name, column in columns.items()
        ]
        if len(reads) > 1 and self._is_far:
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (lazy: it takes long to import)

            with ThreadPoolExecutor(min(len(reads), _REQUESTED_TOGETHER), "millstream-hdf5") as threads:
                for _ in threads.map(lambda read: read(), reads):
                    pass
        else:
            for read in reads:
                read()
        return records_of_arrays(columns, len(keys))

    @property
    def unit_sizes(self) -> NDArray[np.int64]:
        """The number of records of each unit, in the order of the records: int64, shape (n,)."""
        return self._unit_sizes

    def close(self) -> None:
        """Closes all files, and drops what was decoded. Reading then raises ValueError. May be called again."""
        super().close()
        self._chunks.clear()

    def fingerprint(self) -> str:
        """Returns the number of files and records, the columns, and a digest of names, sizes and counts."""
        described = [(name, self._patterns[name], repr(kind.dtype), kind.shape) for name, kind in self._types.items()]
        digest = digest_of(described, 4)
        return f"{super().fingerprint()} columns={len(self._types)}:{digest}"

    def _count(self, path: str) -> int:
        self._segments[path] = inspect_file(path, content_of(path, self._identities[path]), self._patterns)
        return sum(segment.num_rows for segment in self._segments[path])

    def _open(self, path: str, location: str) -> Hdf5File:
        del location  # It is the path: there are no copies.
        return Hdf5File(path, self._identities[path], self._segments[path])

    @property
    def _is_far(self) -> bool:
        return is_url(self._paths[0])

    def _index_segments(self) -> None:
        """Builds the tables that map a record key to a segment and a row in it."""
        self._all_segments = [(path, segment) for path in self._paths for segment in self._segments[path]]
        first_path, first = self._all_segments[0]
        self._types = {name: layout.row_type for name, layout in first.layouts.items()}
        for path, segment in self._all_segments:
            for name, layout in segment.layouts.items():
                if layout.row_type != self._types[name]:
                    raise ValueError(
                        f"A column must have one type, got rows of {self._types[name]} in {first_path!r}, but of "
                        f"{layout.row_type} in {layout.name!r} of {path!r}."
                    )
        self._pieces_of_segments = Pieces(segment.num_rows for _, segment in self._all_segments)

    def _index_units(self) -> NDArray[np.int64]:
        """Returns the sizes of units, and sets the number of units of a window."""
        row_bytes: dict[str, int] = {
            name: kind.num_bytes
            for name, kind in self._types.items()
            if any(_is_cached(segment.layouts[name]) for _, segment in self._all_segments)
        }
        sizes: list[int] = []
        largest = max(row_bytes, key=row_bytes.__getitem__, default=None)
        for _, segment in self._all_segments:
            step = segment.num_rows if largest is None else segment.layouts[largest].rows_per_chunk
            sizes += [min(step, segment.num_rows - start) for start in range(0, segment.num_rows, max(1, step))]
        unit_bytes = max(sizes, default=1) * sum(row_bytes.values())
        num_bytes = self._num_records * sum(row_bytes.values())
        self.window_units = window_units(num_bytes, unit_bytes, self._cache_bytes)
        return np.array(sizes, np.int64)

    def _read_dataset(self, number: int, name: str, wanted: _Rows, column: NDArray[Any]) -> None:
        path, segment = self._all_segments[number]
        layout = segment.layouts[name]
        first = int(wanted.keys[0])
        file = self._acquire(path, self.locate(first)[1], first)
        try:
            if layout.is_plain:
                self._read(file, layout, wanted, column)
            elif _is_cached(layout):
                self._decode(file, (number, name), layout, wanted, column)
            else:
                for row, rows in zip(wanted.rows.tolist(), self._decoded(file, layout, wanted), strict=True):
                    column[row] = rows[0]
        finally:
            self._open_files.release(path)

    def _read(self, file: Hdf5File, layout: DatasetLayout, wanted: _Rows, column: NDArray[Any]) -> None:
        """Reads rows that are in the file as they are."""
        is_whole = len(wanted.rows) == len(column)
        block = column if is_whole else np.empty((len(wanted.rows), *column.shape[1:]), column.dtype)
        try:
            failed = file.read_into(layout, wanted.within, block.reshape(len(block), -1).view(np.uint8))
        except SpanReadError as error:
            raise self._error(wanted.keys[error.span], str(error)) from error
        except OSError as error:
            raise self._error(wanted.keys[0], f"reading it, or another record of the batch, failed: {error}") from error
        if failed is not None:
            raise self._error(
                wanted.keys[failed], f"the file ends before its row of {layout.name!r}. Restore the file."
            )
        if not is_whole:
            column[wanted.rows] = block

    def _decode(
        self, file: Hdf5File, dataset: tuple[int, str], layout: DatasetLayout, wanted: _Rows, column: NDArray[Any]
    ) -> None:
        numbers = wanted.within // layout.rows_per_chunk
        groups = {(*dataset, number): rows for number, rows in wanted.cut(numbers, int(numbers.max()) + 1)}

        def decode(key: tuple[int, str, int]) -> _Chunk:
            (rows,) = self._decoded(file, layout, groups[key].at(slice(1)))
            return _Chunk(rows)

        # h5py decodes one chunk at a time.
        count = 1 if layout.starts is None else _REQUESTED_TOGETHER if self._is_far else _DECODED_TOGETHER
        chunks = self._chunks.get_all({key: len(rows.keys) for key, rows in groups.items()}, decode, count)
        for (key, own), chunk in zip(groups.items(), chunks, strict=True):
            column[own.rows] = chunk.rows[own.within - key[-1] * layout.rows_per_chunk]

    def _decoded(self, file: Hdf5File, layout: DatasetLayout, wanted: _Rows) -> Iterator[NDArray[Any]]:
        done = 0
        try:
            for rows in file.decode(layout, wanted.within // layout.rows_per_chunk):
                yield rows
                done += 1
        except SpanReadError as error:
            raise self._error(wanted.keys[error.span], str(error)) from error
        except DataSourceError as error:
            raise self._error(wanted.keys[done], str(error)) from error

    def _error(self, key: Any, reason: str) -> DataSourceError:
        path, position = self.locate(key)
        return DataSourceError(f"Cannot read record {position} of {path!r} (record key {key}): {reason}")


def _is_cached(layout: DatasetLayout) -> bool:
    """Returns True if decoded chunks are cached, because they have several rows."""
    return not layout.is_plain and layout.rows_per_chunk > 1
