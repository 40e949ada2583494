"""The rows of HDF5 datasets: their layout, found by h5py once, an open file, and the source.

The path of a dataset is the path or URL of a file, followed by the name in it. Both may be patterns. Rows that are in
the file as they are, and chunks that gzip has compressed, are read at offsets that h5py reports once, without h5py and
its lock. Every other dataset is decoded by h5py, a chunk at a time.
"""

import contextlib
import fnmatch
import functools
import io
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.errors import DataSourceError
from millstream.sources.base import ReadsBatches, RecordKeys, checked_record_keys
from millstream.sources.digests import digest_of
from millstream.sources.files.byte_files import (
    MAX_PREAD_BYTES,
    LocalFile,
    RawFile,
    RemoteFile,
    SpanReadError,
    identify,
    open_stored,
)
from millstream.sources.files.compression import inflated
from millstream.sources.files.member_paths import split_path, split_paths
from millstream.sources.files.multi_file import Files
from millstream.sources.files.paths import FileIdentity
from millstream.sources.keyed_pool import UnitCache
from millstream.sources.memory import records_of_arrays
from millstream.sources.pieces import Pieces, cut, window_units
from millstream.sources.reads import map_in_threads
from millstream.sources.remote.urls import is_url
from millstream.sources.shared_units import ArrayFiles, ArrayUnit
from millstream.sources.source_checks import check_no_columns_beside, checked_columns, paths_of_columns

_UNCHUNKED_BYTES = 1 << 20
"""The approximate size of the blocks in which a dataset without chunks is decoded, if `pread` cannot read it."""

_COMPARED_BYTES = 1 << 20
"""The maximum size of the rows that are read twice to compare them with h5py's reading."""

_GZIP, _SHUFFLE = 1, 2
_BUILT_IN_FILTERS = frozenset({_GZIP, _SHUFFLE, 3, 4, 5, 6, 32000})
"""The filters of every h5py: gzip, shuffle, fletcher32, szip, nbit, scaleoffset and lzf."""


class RowType(NamedTuple):
    """The dtype and the shape of a row of a dataset."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class DatasetLayout(NamedTuple):
    """The position of the rows of a dataset.

    Attributes:
        name: the name of the dataset.
        row_type: the type of its rows.
        rows_per_chunk: the number of rows that are stored or decoded together.
        starts: the offset of each chunk in the file, in bytes; None if h5py decodes it.
        sizes: the size of each chunk in the file, in bytes, if gzip has compressed it; else None.
        shuffled: the number of bytes per value whose order was changed before the compression; 1 if none was.
    """

    name: str
    row_type: RowType
    rows_per_chunk: int
    starts: NDArray[np.int64] | None = None
    sizes: NDArray[np.int64] | None = None
    shuffled: int = 1

    @property
    def is_plain(self) -> bool:
        """True if the rows are in the file as they are."""
        return self.starts is not None and self.sizes is None

    def decompressed(self, span: bytes) -> NDArray[Any]:
        """Returns the rows of a chunk that gzip has compressed."""
        content = inflated(span, self.rows_per_chunk * self.row_type.num_bytes)
        if self.shuffled > 1:  # All first bytes of the values, then all second bytes, …
            content = np.frombuffer(content, np.uint8).reshape(self.shuffled, -1).T.tobytes()
        return np.frombuffer(content, self.row_type.dtype).reshape(self.rows_per_chunk, *self.row_type.shape)


class FileSegment(NamedTuple):
    """Datasets of one length, one for each column."""

    num_rows: int
    layouts: Mapping[str, DatasetLayout]


def datasets_of_group(paths: Any, columns: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """Returns the files that paths select, and for each column the name of the dataset in one group of all of them.

    Without names, these are the datasets in the group of the first file that have as many rows as the largest one.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    split = [split_path(os.fsdecode(path)) for path in given]
    if len({group for _, group in split}) != 1:
        raise ValueError(f"datasets must be a mapping, or paths with one group for all files, got {paths!r}.")
    files, group = list(dict.fromkeys(file for found, _ in split for file in found)), split[0][1]
    names = _largest_datasets(files[0], group) if columns is None else columns
    return files, {name: f"{group}/{name}".strip("/") for name in names}


def _largest_datasets(path: str, group: str) -> list[str]:
    identity = identify(path, "HDF5")
    below: list[str] = []
    try:
        with h5py_module().File(content_of(path, identity), "r") as file:
            parent = file.get(group or "/")
            members = dict(parent.items()) if hasattr(parent, "items") else {}
            sizes = {name: value.shape for name, value in members.items() if getattr(value, "shape", None)}
            if not sizes:
                file.visititems(lambda name, value: below.append(name) if hasattr(value, "shape") else None)
    except OSError as error:
        raise _damaged(path, error) from error
    if not sizes:
        found = below[0] if below else "NAME"
        raise ValueError(
            f"There is no dataset directly in {group or '/'!r} of {path!r}. Write the paths of the columns, which may "
            f"be patterns: Hdf5DataSource({{'x': {f'{path}/{found}'!r}}})."
        )
    rows = sizes[max(sizes, key=lambda name: math.prod(sizes[name]))][0]
    return [name for name, shape in sizes.items() if shape[0] == rows]


def h5py_module() -> Any:
    try:
        import h5py  # noqa: PLC0415  (lazy: an optional package)
    except ImportError as error:
        raise ImportError("Cannot read HDF5 files without h5py: pip install 'millstream[hdf5]'.") from error
    return h5py


def inspect_file(path: str, content: str | RawFile, patterns: Mapping[str, str]) -> list[FileSegment]:
    h5py = h5py_module()
    try:
        raw_file = io.FileIO(content) if isinstance(content, str) else contextlib.nullcontext(content)
        with raw_file as raw, h5py.File(content, "r") as file:
            return _segments(h5py, file, patterns, raw)
    except (DataSourceError, PermissionError):
        raise
    except _UnsupportedError as error:
        raise ValueError(f"Cannot read {path!r}: {error}.") from None
    except Exception as error:  # h5py raises errors of many types for damaged files.
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> DataSourceError:
    return DataSourceError(f"Cannot open {path!r}: it is not an HDF5 file, is damaged, or was truncated: {error}.")


class _UnsupportedError(Exception):
    """A file or dataset of a kind that cannot be read."""


def _segments(h5py: Any, file: Any, patterns: Mapping[str, str], raw: io.RawIOBase) -> list[FileSegment]:
    if file.mode != "r":
        raise _UnsupportedError(
            "it is open for writing in this process, which may not have written everything yet. Close it there"
        )
    found = {
        name: dict(_matches(file, [key for key in pattern.split("/") if key], (), ""))
        for name, pattern in patterns.items()
    }
    first, *others = found
    for name in (first, *others):
        if not found[name]:
            raise _UnsupportedError(f"no dataset matches {patterns[name]!r}")
        if missing := sorted(found[first].keys() ^ found[name].keys()):
            one, other = (first, name) if missing[0] in found[first] else (name, first)
            raise _UnsupportedError(
                f"it has {found[one][missing[0]]!r} for the column {one!r}, but nothing like {patterns[other]!r} with "
                f"the same names for {other!r}"
            )
    segments: list[FileSegment] = []
    for captured in sorted(found[first]):
        datasets = {name: file[matches[captured]] for name, matches in found.items()}
        # In an object, each row that is compared takes a request.
        compared = raw if not segments or isinstance(raw, io.FileIO) else None
        layouts = {name: _layout(h5py, file, dataset, compared) for name, dataset in datasets.items()}
        lengths = {layouts[name].name: len(dataset) for name, dataset in datasets.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} has {length:,}" for name, length in lengths.items())
            raise _UnsupportedError(f"columns must have one row per record, but {listed}")
        segments.append(FileSegment(next(iter(lengths.values())), layouts))
    return segments


def _matches(
    group: Any, components: Sequence[str], captured: tuple[str, ...], name: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the names that patterns match, without the names of groups, and the datasets' full names."""
    component, *others = components
    if not hasattr(group, "keys"):
        return
    is_name = component in group
    for member in [component] if is_name else fnmatch.filter(group.keys(), component):
        full = f"{name}/{member}".lstrip("/")
        names = captured if is_name else (*captured, member)
        if others:
            yield from _matches(group[member], others, names, full)
        elif hasattr(group[member], "shape"):
            yield names, full


def _layout(h5py: Any, file: Any, dataset: Any, compared: io.RawIOBase | None) -> DatasetLayout:
    """Returns the layout of a dataset, whose rows are compared with those of h5py in a file, if one is given."""
    name, properties = dataset.name.lstrip("/"), dataset.id.get_create_plist()
    if not dataset.shape:
        raise _UnsupportedError(f"{name!r} must have one row per record, got a dataset without rows")
    try:
        dtype = dataset.dtype
    except TypeError as error:
        raise _UnsupportedError(f"{name!r} has values without a NumPy dtype: {error}") from error
    if properties.get_layout() == h5py.h5d.VIRTUAL or properties.get_external_count() or dataset.file.id != file.id:
        raise _UnsupportedError(f"{name!r} has its values in other files. Read those")
    filters = [properties.get_filter(number) for number in range(properties.get_nfilters())]
    for code, _, _, label in filters:
        if code not in _BUILT_IN_FILTERS:
            raise _UnsupportedError(
                f"{name!r} has the filter {code} ({label.decode(errors='replace')}), which h5py lacks. Rewrite the "
                "dataset with the filter gzip or lzf, or with none"
            )
    shape = (*dataset.shape[1:], *dtype.shape)  # A value of HDF5 may be an array.
    if dtype.hasobject:
        _check_objects(h5py, name, dtype)
        return DatasetLayout(name, RowType(np.dtype(object), shape), 1)
    row_type = RowType(dtype.base if dtype.base.names else np.dtype(dtype.base.str), shape)
    unchunked = max(1, min(len(dataset), _UNCHUNKED_BYTES // max(1, row_type.num_bytes)))
    decoded = DatasetLayout(name, row_type, dataset.chunks[0] if dataset.chunks else unchunked)
    # h5py converts all types that NumPy stores in another way.
    is_native = h5py.h5t.py_create(dtype, logical=True) == dataset.id.get_type()
    if not is_native or not len(dataset) or not 0 < row_type.num_bytes < MAX_PREAD_BYTES:
        return decoded
    located = _located(h5py, dataset, decoded, filters)
    is_right = located is not None and (compared is None or _is_read_alike(dataset, located, compared))
    return located if located is not None and is_right else decoded


def _check_objects(h5py: Any, name: str, dtype: np.dtype[Any]) -> None:
    """Refuses values that are Python objects, except text and bytes."""
    if h5py.check_string_dtype(dtype) is not None or h5py.check_vlen_dtype(dtype) == np.uint8:
        return
    reason = "members of variable length, or references. Store the members as datasets of their own"
    if h5py.check_ref_dtype(dtype) is not None:
        reason = "references to other data. Read those"
    elif h5py.check_vlen_dtype(dtype) is not None:
        reason = "lists of variable length. Pad them to one length, or store their bytes: h5py.vlen_dtype(np.uint8)"
    raise _UnsupportedError(f"{name!r} has {reason}")


def _located(h5py: Any, dataset: Any, layout: DatasetLayout, filters: Sequence[Any]) -> DatasetLayout | None:
    """Returns the layout with the offsets at which h5py finds the rows; None if it has to decode them."""
    num_rows, codes = len(dataset), [code for code, *_ in filters]
    if dataset.chunks is None:
        # Rows that were never written are not stored, and h5py returns the fill value for them.
        is_stored = dataset.id.get_storage_size() == num_rows * layout.row_type.num_bytes
        if not is_stored or dataset.id.get_create_plist().get_layout() != h5py.h5d.CONTIGUOUS:
            return None
        return layout._replace(rows_per_chunk=num_rows, starts=np.array([dataset.id.get_offset()], np.int64))
    if dataset.chunks[1:] != dataset.shape[1:] or codes not in ([], [_GZIP], [_SHUFFLE, _GZIP]):
        return None
    chunks = _chunks(dataset, -(-num_rows // layout.rows_per_chunk))
    if chunks is None or not codes:
        return None if chunks is None else layout._replace(starts=chunks[0])
    shuffled = filters[0][2][0] if len(codes) > 1 else 1
    return layout._replace(starts=chunks[0], sizes=chunks[1], shuffled=shuffled)


def _is_read_alike(dataset: Any, layout: DatasetLayout, file: io.RawIOBase) -> bool:
    """Returns True if the last row at its offset is that of h5py; or the first row, if the last one is damaged.

    Not all versions of HDF5 report the right offsets. Of a large row, its beginning is compared.
    """
    row_bytes = num_bytes = layout.row_type.num_bytes
    index: list[int] = []
    for size in dataset.shape[1:]:
        if num_bytes > _COMPARED_BYTES:
            index.append(0)
            num_bytes //= size
    if layout.sizes is not None and layout.rows_per_chunk * row_bytes > _COMPARED_BYTES:
        return True  # Bytes at another offset cannot be decompressed.
    for row in (len(dataset) - 1, 0):
        chunk, within = divmod(row, layout.rows_per_chunk)
        start = int(layout.starts[chunk])  # type: ignore[index]  # They are located.
        try:
            if layout.sizes is None:
                file.seek(start + within * row_bytes)
                own = file.read(num_bytes)
            else:
                file.seek(start)
                own = layout.decompressed(file.read(int(layout.sizes[chunk])))[within].tobytes()[:num_bytes]
        except (ValueError, zlib.error):
            continue
        try:
            return bool(own == np.asarray(dataset[(row, *index)]).tobytes())
        except OSError:
            return False
    return False


def _chunks(dataset: Any, num_chunks: int) -> NDArray[np.int64] | None:
    """Returns the offsets and the sizes of all chunks, or None if some were never written, or not filtered."""
    if dataset.id.get_num_chunks() != num_chunks:
        return None
    chunks = np.full((2, num_chunks), -1, np.int64)
    rows_per_chunk = dataset.chunks[0]
    unfiltered = 0

    def record(chunk: Any) -> None:
        nonlocal unfiltered
        unfiltered |= chunk.filter_mask
        chunks[:, chunk.chunk_offset[0] // rows_per_chunk] = chunk.byte_offset, chunk.size

    dataset.id.chunk_iter(record)
    # Two entries of a damaged index may be for one chunk.
    return None if unfiltered or (chunks < 0).any() else chunks


_BLOCK_BYTES = 256 << 10
"""Bytes per request for the metadata of an object."""

_CACHED_BLOCKS = 64

_AS_BYTES = np.frompyfunc(bytes, 1, 1)
"""Converts an array of values of variable length: h5py has them as bytes, or as arrays of uint8."""


@final
class Hdf5File:
    """An open HDF5 file."""

    def __init__(self, path: str, identity: FileIdentity, segments: Sequence[FileSegment]) -> None:
        self.num_records = sum(segment.num_rows for segment in segments)
        self._stored = open_stored(path, identity)
        self._size = identity.size
        self._file = None
        self._datasets: dict[str, Any] = {}
        if any(layout.starts is None for segment in segments for layout in segment.layouts.values()):
            try:
                self._file = h5py_module().File(content_of(path, identity), "r")
            except Exception as error:
                self._stored.close()
                raise DataSourceError(f"h5py cannot open {path!r}: {str(error).rstrip('.')}.") from error

    def read_into(self, layout: DatasetLayout, within: NDArray[np.int64], rows: NDArray[np.uint8]) -> int | None:
        """Reads rows that are in the file as they are; returns the index of the first row that the file lacks, or None.

        Args:
            layout: the layout of the dataset.
            within: the number of each row in the dataset.
            rows: the bytes to read each row into: C-contiguous, shape (n, bytes).
        """
        chunks, offsets = np.divmod(within, layout.rows_per_chunk)
        # Chunks of such a dataset exist.
        starts = layout.starts[chunks] + offsets * rows.shape[1]  # type: ignore[index]
        lengths = self._stored.read_into(starts.tolist(), rows)
        return next((number for number, length in enumerate(lengths) if length != rows.shape[1]), None)

    def decode(self, layout: DatasetLayout, chunks: NDArray[np.int64]) -> Iterator[NDArray[Any]]:
        """Yields the rows of each chunk of a dataset; the last chunk may have more rows than the dataset.

        A chunk that cannot be read or decoded is a SpanReadError with its index in `chunks`.
        """
        decode: Callable[[Any], NDArray[Any]]
        if layout.starts is None or layout.sizes is None:
            decode, stored = functools.partial(self._decode_by_h5py, layout), chunks.tolist()
        else:
            decode = layout.decompressed
            stored = self._stored.begin(layout.starts[chunks].tolist(), layout.sizes[chunks].tolist())()
        for index, chunk in enumerate(stored):
            try:
                rows = decode(chunk)
            except Exception as error:
                reason = f"{layout.name!r} cannot be decoded: {error}. Restore the file."
                raise SpanReadError(index, reason) from error
            yield rows

    def close(self) -> None:
        """Closes the file, which no thread reads."""
        self._stored.close()
        if self._file is not None:
            self._file.close()

    def _decode_by_h5py(self, layout: DatasetLayout, chunk: int) -> NDArray[Any]:
        dataset = self._datasets.get(layout.name)
        if dataset is None:
            dataset = self._datasets[layout.name] = self._file[layout.name]  # type: ignore[index]  # It is open.
        start = chunk * layout.rows_per_chunk
        if layout.row_type.dtype.hasobject:
            return np.asarray(_AS_BYTES(dataset[start : start + 1]))
        # h5py reads a single row in a third of the time of a slice.
        is_row = layout.rows_per_chunk == 1
        rows = np.asarray(dataset[start])[np.newaxis] if is_row else dataset[start : start + layout.rows_per_chunk]
        # Beyond the end of a file, HDF5 reads zeros.
        if isinstance(self._stored, LocalFile) and self._stored.size() < self._size:
            raise EOFError("the file was cut short while it was open")
        return np.asarray(rows)


def content_of(path: str, identity: FileIdentity) -> str | RawFile:
    """Returns the file as h5py opens it: its path, or an object of a store."""
    if not is_url(path):
        return path
    return RawFile(_block_reader(RemoteFile(path, identity), identity.size), identity.size)


def _block_reader(file: RemoteFile, size: int) -> Callable[[int, int], bytes]:
    """Returns a function that reads an object in blocks, because h5py reads metadata in small pieces here and there.

    h5py holds its lock while it reads. Requests are made by the same thread, because another one might wait for the
    lock, to free an object of h5py.
    """

    @functools.lru_cache(_CACHED_BLOCKS)
    def block(number: int) -> bytes:
        return file.read_here(number * _BLOCK_BYTES, min((number + 1) * _BLOCK_BYTES, size))

    def read(start: int, length: int) -> bytes:
        first = start // _BLOCK_BYTES
        content = b"".join(map(block, range(first, -(-(start + length) // _BLOCK_BYTES))))
        begin = start - first * _BLOCK_BYTES
        return content[begin : begin + length]

    return read


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

    def cut(self, numbers: NDArray[Any], count: int) -> list[tuple[int, "_Rows"]]:
        """Returns each of the numbers, one per record and below `count`, and the records that have it."""
        order, runs = cut(numbers, count)
        return [(number, self.at(order[start:stop])) for number, start, stop in runs]


@final
class Hdf5DataSource(Files[Hdf5File], ReadsBatches):
    """The rows of HDF5 datasets, as dicts by column. A row is an index of the first axis. It needs h5py.

    Rows of datasets without filters are read in any order, without h5py and its lock. Those of a batch that are near
    each other in the file are read by one call. Chunks that gzip has compressed, with or without shuffle, are also read
    without h5py, and decompressed concurrently. Datasets with other filters (lzf and all others that each h5py has) are
    decoded by h5py, one chunk at a time per process. Decoded chunks are cached, up to `cache_bytes`, and the workers of
    a loader share them, as row groups of a `ParquetDataSource`. If they have several rows per chunk, the best order
    stays among a few chunks for a while, like that of `HierarchicalSampler`; `load(source, shuffle=True)` takes it by
    itself if not all rows fit into the cache.

    Values have the dtypes of the datasets, in native byte order: NumPy scalars for datasets of one axis, else arrays. A
    value that is an array of HDF5 is an array. Texts and bytes of variable length, such as encoded images, are `bytes`,
    read by h5py one by one.

    Args:
        datasets: for each column, the path of a file (`~` is expanded), followed by the name of a dataset in it:
            `"train.h5/images"`. Both may be patterns, such as `"demos-*.hdf5/data/*/obs/image"`; their matches are
            sorted by name, and concatenated. A `str` may begin with the URL of a file, such as `"s3://bucket/a.h5/x"`,
            whose rows and chunks are requested together. All columns must be in the same files, and have the same
            matches of the patterns in the names, and the same numbers of rows. Or the path of a file, of a group in it
            or of several files, whose datasets are columns by their names.
        columns: the names of datasets in a file or group that are columns; None for those that are directly in it, and
            have as many rows as the largest one.
        cache_bytes: the memory, in bytes, for decoded chunks in the trainer, or in all workers of a loader together,
            besides those that are being read.

    Attributes:
        unit_sizes: the number of records of each chunk, of the decoded column with the most bytes; or of each dataset
            if no chunk has several rows to decode: int64, shape (n,).
        window_units: the number of chunks that a shuffle should keep together, so that they fit into half of
            `cache_bytes`; None if any order is equally fast.

    Raises:
        ImportError: h5py is not installed: `pip install 'millstream[hdf5]'`.
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: a file is not an HDF5 file, is damaged, or was cut short.
        TypeError: datasets that are neither paths nor a mapping of names to paths.
        ValueError: no dataset matches a pattern; columns differ in their files, matches or numbers of rows; datasets of
            a column differ in dtype or shape; a dataset has lists of variable length, references, a type without a
            NumPy dtype, a filter that h5py lacks, or its values in other files; a file is open for writing in this
            process.

    Reading raises DataSourceError, with the file and the record, for a damaged chunk, and for a file that has changed,
    see "All sources of files" in docs/formats.md. While h5py has a file open, no other process can open it for writing.

    Examples:
        >>> source = millstream.Hdf5DataSource({"image": "demos.hdf5/data/*/image", "grip": "demos.hdf5/data/*/grip"})
        >>> len(source), source[4]["image"].shape, source[4]["grip"]
        (6, (8, 8, 3), np.float32(4.0))
    """

    kind = "HDF5"
    descriptors_per_file: ClassVar[int] = 2  # h5py takes another one.

    def __init__(
        self,
        datasets: Mapping[str, str | os.PathLike[str]] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = 1 << 28,
    ) -> None:
        h5py_module()  # It raises ImportError here, and not after the search for files.
        self._cache_bytes = as_integer(cache_bytes, "cache_bytes", minimum=0)
        if isinstance(datasets, Mapping):
            check_no_columns_beside(columns, "datasets")
            files, self._patterns = split_paths(paths_of_columns(datasets, "datasets", "train.h5/images"))
        else:
            files, self._patterns = datasets_of_group(datasets, checked_columns(columns))
        self._segments: dict[str, list[FileSegment]] = {}
        super().__init__(files)
        self._index_segments()
        self._unit_sizes = self._index_units()
        self._chunks: UnitCache[tuple[int, str, int], ArrayUnit] = UnitCache(self._cache_bytes, ArrayFiles())

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
        map_in_threads(lambda read: read(), reads, _REQUESTED_TOGETHER if self._is_far else 1, "millstream-hdf5")
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
        numbers, offsets = np.divmod(wanted.within, layout.rows_per_chunk)
        by_chunk = dict(wanted._replace(within=offsets).cut(numbers, int(numbers.max()) + 1))

        def decode(key: tuple[int, str, int]) -> ArrayUnit:
            first = np.flatnonzero(numbers == key[-1])[:1]
            return ArrayUnit(next(self._decoded(file, layout, wanted.at(first))))

        # h5py decodes one chunk at a time.
        count = 1 if layout.starts is None else _REQUESTED_TOGETHER if self._is_far else _DECODED_TOGETHER
        counts = {(*dataset, number): len(rows.keys) for number, rows in by_chunk.items()}
        for rows, chunk in zip(by_chunk.values(), self._chunks.get_all(counts, decode, count), strict=True):
            column[rows.rows] = chunk.rows[rows.within]

    def _decoded(self, file: Hdf5File, layout: DatasetLayout, wanted: _Rows) -> Iterator[NDArray[Any]]:
        """Yields the rows of the chunk of each record."""
        try:
            yield from file.decode(layout, wanted.within // layout.rows_per_chunk)
        except SpanReadError as error:
            raise self._error(wanted.keys[error.span], str(error)) from error

    def _error(self, key: Any, reason: str) -> DataSourceError:
        path, position = self.locate(key)
        return DataSourceError(f"Cannot read record {position} of {path!r} (record key {key}): {reason}")


def _is_cached(layout: DatasetLayout) -> bool:
    """Returns True if decoded chunks are cached, because they have several rows."""
    return not layout.is_plain and layout.rows_per_chunk > 1
