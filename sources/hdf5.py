"""The rows of HDF5 datasets."""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer
from millstream.errors import DataSourceError
from millstream.sources.base import RecordKeys, checked_record_key, checked_record_keys
from millstream.sources.column_blocks import records_of_arrays
from millstream.sources.files.multi_file import Files
from millstream.sources.hdf5_file import (
    Hdf5File,
    Layout,
    RowType,
    Segment,
    h5py_module,
    has_magic,
    inspect_file,
    split_patterns,
)
from millstream.sources.storage.urls import is_url
from millstream.sources.tables.decoded_cache import UnitCache


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

    def at(self, indices: NDArray[np.intp]) -> "_Rows":
        """Returns the records at indices of these."""
        return _Rows(self.rows[indices], self.keys[indices], self.within[indices])


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
class Hdf5DataSource(Files[Hdf5File]):
    """The rows of HDF5 datasets, as dicts by column. A row is an index of the first axis. It needs h5py.

    Datasets without filters are read by `pread`, row by row, in any order, without h5py and its lock. Datasets with
    filters (gzip, lzf, shuffle and all others that each h5py has) are decoded by h5py, one chunk at a time per process,
    and each process caches decoded chunks, up to `cache_bytes`. If they have several rows per chunk, the best order
    stays among a few chunks for a while, like that of `HierarchicalSampler`; `load(source, shuffle=True)` takes it by
    itself if not all rows fit into the cache.

    Values have the dtypes of the datasets, in native byte order: NumPy scalars for datasets of one axis, else arrays.

    Args:
        datasets: for each column, the path of a file (`~` is expanded), followed by the name of a dataset in it:
            `"train.h5/images"`. Both may be patterns, such as `"demos-*.hdf5/data/*/obs/image"`; their matches are
            sorted by name, and concatenated. All columns must be in the same files, and have the same matches of the
            patterns in the names, and the same numbers of rows.
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
            a column differ in dtype or shape; a dataset has values of variable length, a filter that h5py lacks, or its
            values in other files; a file is open for writing in this process; there are no records.

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
        files, self._patterns = split_patterns(_checked(datasets), _regular_files)
        self._segments: dict[str, list[Segment]] = {}
        self._types: dict[str, RowType] = {}
        self._types_by_file: dict[str, dict[str, tuple[str, RowType]]] = {}
        super().__init__(files)
        self._check_types()
        self._index_segments()
        self.window_units: int | None = None
        self._unit_sizes = self._index_units()
        self._begin()

    def __getitem__(self, record_key: SupportsIndex) -> dict[str, Any]:
        record: dict[str, Any] = self.__getitems__([checked_record_key(record_key, self._num_records)])[0]
        return record

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[dict[str, Any]]:
        """Returns the records of the keys, in their order; keys may repeat. A Batch takes the columns as they are."""
        keys = checked_record_keys(record_keys, self._num_records)
        self._open_files.check_open()
        columns = {name: np.empty((len(keys), *kind.shape), kind.dtype) for name, kind in self._types.items()}
        numbers = self._segment_ends.searchsorted(keys, side="right")
        wanted = _Rows(np.arange(len(keys)), keys, keys - self._segment_starts[numbers])
        for number, indices in _grouped(numbers):
            self._read_segment(number, wanted.at(indices), columns)
        return records_of_arrays(columns, len(keys))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_chunks"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

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
        import hashlib  # noqa: PLC0415  (lazy: OpenSSL takes long to import)

        described = [(name, self._patterns[name], repr(kind.dtype), kind.shape) for name, kind in self._types.items()]
        digest = hashlib.blake2b(repr(described).encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
        return f"{super().fingerprint()} columns={len(self._types)}:{digest}"

    def _count(self, path: str) -> int:
        self._segments[path], self._types_by_file[path] = inspect_file(path, path, self._patterns)
        return sum(segment.num_rows for segment in self._segments[path])

    def _open(self, path: str, location: str) -> Hdf5File:
        return Hdf5File(location, self._segments[path])

    def _begin(self) -> None:
        self._chunks: UnitCache[_Chunk] = UnitCache(self._cache_bytes, 1)

    def _check_types(self) -> None:
        first = self._types_by_file[self._paths[0]]
        for path, types in self._types_by_file.items():
            for name, (dataset, kind) in types.items():
                if kind != (expected := first[name][1]):
                    raise ValueError(
                        f"A column must have one type, got rows of {expected.dtype}{list(expected.shape)} in "
                        f"{self._paths[0]!r}, but of {kind.dtype}{list(kind.shape)} in {dataset!r} of {path!r}."
                    )
        self._types = {name: kind for name, (_, kind) in first.items()}
        del self._types_by_file

    def _index_segments(self) -> None:
        """Builds the tables that map a record key to a segment and a row in it."""
        self._all_segments = [(path, segment) for path in self._paths for segment in self._segments[path]]
        self._segment_ends = np.cumsum([segment.num_rows for _, segment in self._all_segments], dtype=np.int64)
        self._segment_starts = np.concatenate([[0], self._segment_ends[:-1]])

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
        if self._num_records * sum(row_bytes.values()) > self._cache_bytes:
            self.window_units = max(1, self._cache_bytes // (2 * max(1, unit_bytes)))
        return np.array(sizes, np.int64)

    def _read_segment(self, number: int, wanted: _Rows, columns: Mapping[str, NDArray[Any]]) -> None:
        """Reads records of one segment into their rows of the columns."""
        path, segment = self._all_segments[number]
        first = int(wanted.keys[0])
        file = self._acquire(path, self.locate(first)[1], first)
        try:
            for name, layout in segment.layouts.items():
                if layout.starts is None:
                    self._decode(file, (number, name), layout, wanted, columns[name])
                else:
                    self._read(file, layout, wanted, columns[name])
        finally:
            self._open_files.release(path)

    def _read(self, file: Hdf5File, layout: Layout, wanted: _Rows, column: NDArray[Any]) -> None:
        """Reads rows by `pread`."""
        is_whole = len(wanted.rows) == len(column)
        block = column if is_whole else np.empty((len(wanted.rows), *column.shape[1:]), column.dtype)
        try:
            failed = file.read_into(layout, wanted.within, block.reshape(len(block), -1).view(np.uint8))
        except OSError as error:
            raise self._error(wanted.keys[0], f"reading it, or another record of the batch, failed: {error}") from error
        if failed is not None:
            raise self._error(
                wanted.keys[failed], f"the file ends before its row of {layout.name!r}. Restore the file."
            )
        if not is_whole:
            column[wanted.rows] = block

    def _decode(
        self, file: Hdf5File, dataset: tuple[int, str], layout: Layout, wanted: _Rows, column: NDArray[Any]
    ) -> None:
        """Copies rows of decoded chunks."""

        def decode(key: tuple[int, str, int]) -> _Chunk:
            start = key[-1] * layout.rows_per_chunk
            return _Chunk(file.decode(layout, start, start + layout.rows_per_chunk))

        if not _is_cached(layout):
            for row, key, start in zip(*map(np.ndarray.tolist, wanted), strict=True):
                try:
                    column[row] = file.decode(layout, start, start + 1)[0]
                except DataSourceError as error:
                    raise self._error(key, str(error)) from error
            return
        for number, indices in _grouped(wanted.within // layout.rows_per_chunk):
            some = wanted.at(indices)
            try:
                chunk = self._chunks.get((*dataset, number), decode)
            except DataSourceError as error:
                raise self._error(some.keys[0], str(error)) from error
            column[some.rows] = chunk.rows[some.within - number * layout.rows_per_chunk]

    def _error(self, key: Any, reason: str) -> DataSourceError:
        path, position = self.locate(key)
        return DataSourceError(f"Cannot read record {position} of {path!r} (record key {key}): {reason}")


def _grouped(numbers: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yields each number, and the indices that have it."""
    order = np.argsort(numbers, kind="stable")
    for indices in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else ():
        yield int(numbers[indices[0]]), indices


def _is_cached(layout: Layout) -> bool:
    """Returns True if decoded chunks are cached, because they have several rows."""
    return layout.starts is None and layout.rows_per_chunk > 1


def _checked(datasets: Any) -> dict[str, str]:
    """Returns the paths of the columns, absolute.

    Raises:
        TypeError: they are not a mapping of names to paths.
        ValueError: there are none, or one is a URL.
    """
    if not isinstance(datasets, Mapping) or not all(
        isinstance(name, str) and isinstance(path, str | os.PathLike) for name, path in datasets.items()
    ):
        raise TypeError(
            "datasets must be a mapping of columns to the paths of their datasets, such as "
            f"{{'image': 'train.h5/images'}}, got {datasets!r}."
        )
    if not datasets:
        raise ValueError("datasets must have at least one column, got none.")
    paths = {name: os.fsdecode(path) for name, path in datasets.items()}
    if (url := next(filter(is_url, paths.values()), None)) is not None:
        raise ValueError(f"HDF5 files must be on a disk, because h5py opens them, got {url!r}. Copy them.")
    return {name: os.path.join(os.getcwd(), os.path.expanduser(path)) for name, path in paths.items()}  # noqa: PTH109, PTH111, PTH118


def _regular_files(path: str) -> list[str]:
    """Returns the files that a path or pattern means, sorted."""
    if os.path.isfile(path) or not has_magic(path):  # noqa: PTH113
        return [path] * os.path.isfile(path)  # noqa: PTH113
    return sorted(filter(os.path.isfile, glob.glob(path)))  # noqa: PTH207
