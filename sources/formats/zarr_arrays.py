"""The rows of Zarr and N5 arrays, read by TensorStore, or from the files of chunks that are plain enough.

TensorStore reads and decodes a chunk as a whole, and copies rows from it. `PlainChunks` reads rows of chunks without a
codec at their offsets, and decodes chunks of zstd once for all workers of a machine. It leaves whatever is not as
expected to TensorStore, such as a chunk that was never written or is damaged.
"""

import contextlib
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.errors import DataSourceError
from millstream.sources.base import ReadsBatches, RecordKeys, checked_record_keys
from millstream.sources.digests import digest_of, spread_keys
from millstream.sources.files.byte_files import prefetch_file
from millstream.sources.files.compression import zstandard_library
from millstream.sources.files.multi_file import MARKED_FILES, marks_of_paths
from millstream.sources.files.paths import absolute_path
from millstream.sources.keyed_pool import UnitCache
from millstream.sources.memory import records_of_arrays
from millstream.sources.pieces import cut, window_units
from millstream.sources.reads import LibraryReadError, OpenedHere, read_naming_failures
from millstream.sources.remote.object_clients import ATTEMPTS, FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS
from millstream.sources.remote.urls import is_url, with_other_name
from millstream.sources.shared_units import ArrayFiles, ArrayUnit, shared_folder
from millstream.sources.source_checks import check_no_columns_beside, checked_columns, paths_of_columns

_MIN_SHARED_BYTES = 1 << 16
"""The size of the chunks that workers share. Smaller ones are decoded in less time than their files take."""

_MAX_NAMES = 20
"""The maximum number of arrays of a group that an error names."""


_SLOW_READ_SECONDS = 60e-6
"""The time per file from which the files of the next batches are prefetched."""

_PREFETCHED_BATCHES = 16
"""The number of these batches."""

_DECODED_TOGETHER = 8
"""The maximum number of chunks that are decompressed concurrently."""


class ChunkGrid(NamedTuple):
    """The chunks of an array.

    Attributes:
        shape: the number of elements along each axis.
        sizes: the size of a chunk along each axis.
        prefix, separator: the characters before and between the numbers of a chunk in its file's name.
        is_plain: True if chunks have their elements in order, without a codec but zstd, and in native byte order.
        is_zstd: True if chunks are compressed by zstd.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    prefix: str
    separator: str
    is_plain: bool
    is_zstd: bool

    @classmethod
    def of(cls, driver: str, metadata: Mapping[str, Any]) -> "ChunkGrid":
        """Returns the chunks of an array, given the driver of TensorStore, and the metadata of the format."""
        shape = tuple(metadata.get("dimensions") or metadata["shape"])
        if driver == "n5":
            return cls(shape, tuple(metadata["blockSize"]), "", "/", is_plain=False, is_zstd=False)
        if driver == "zarr3":
            encoding = metadata["chunk_key_encoding"]
            is_default = encoding["name"] == "default"
            separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
            sizes = tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
            first, *others = metadata["codecs"]
            is_zstd = [codec["name"] for codec in others] == ["zstd"]
            is_plain = first in _PLAIN_CODECS and (is_zstd or not others)
            return cls(shape, sizes, f"c{separator}" if is_default else "", separator, is_plain, is_zstd)
        codec, dtype = metadata["compressor"], metadata["dtype"]
        is_zstd = codec is not None and codec["id"] == "zstd"
        is_native = isinstance(dtype, str) and np.dtype(dtype).isnative
        is_plain = is_native and (codec is None or is_zstd) and not metadata["filters"] and metadata["order"] == "C"
        separator = metadata.get("dimension_separator", ".")
        return cls(shape, tuple(metadata["chunks"]), "", separator, is_plain, is_zstd)

    @property
    def has_whole_rows(self) -> bool:
        """True if each chunk has all elements of its rows."""
        return self.sizes[1:] == self.shape[1:] and all(self.shape)

    def file(self, cell: tuple[int, ...]) -> str:
        """Returns the name of the file of a chunk, in the folder of the array."""
        return self.prefix + self.separator.join(map(str, cell))


_PLAIN_CODECS = [{"name": "bytes"}, {"name": "bytes", "configuration": {"endian": "little"}}]


DecodedChunks: TypeAlias = UnitCache[tuple[str, int], ArrayUnit]
"""Decompressed chunks, by the column and the number of the chunk."""


@final
class PlainChunks:
    """The rows of an array whose chunks each have whole rows.

    Args:
        folder: the path of the array.
        grid: its chunks, which are plain.
        dtype: the dtype of its elements.
        units: the cache of decompressed chunks.
        column: the name of the array in the cache.
    """

    def __init__(
        self,
        folder: str,
        grid: ChunkGrid,
        dtype: np.dtype[Any],
        units: DecodedChunks,
        column: str,
    ) -> None:
        self._folder = folder
        self._grid = grid
        self._dtype = dtype
        self._units = units
        self._column = column
        self._rows = grid.sizes[0]
        self._row_bytes = dtype.itemsize * int(np.prod(grid.shape[1:], dtype=np.int64))
        self._seconds: list[float] = []  # Of the reads of the last batch, by any thread.
        self._prefetched = 1  # It is not known how fast the storage is.
        self._others = (0,) * (len(grid.shape) - 1)

    @property
    def is_quicker(self) -> bool:
        """True if TensorStore takes longer. It decodes by several threads, but once in each worker process."""
        return not self._grid.is_zstd or bool(shared_folder())

    def read(self, keys: NDArray[np.int64]) -> NDArray[Any] | None:
        """Returns the rows of record keys, in their order; None if TensorStore has to read them."""
        rows = np.empty((len(keys), *self._grid.shape[1:]), self._dtype)
        numbers, within = np.divmod(keys, self._rows)
        order, runs = cut(numbers, -(-self._grid.shape[0] // self._rows))
        paths = [self._path(number) for number, _, _ in runs]
        try:
            if self._grid.is_zstd:
                for path in paths if self._prefetched > 0 else ():
                    prefetch_file(path)
                self._prefetched -= 1
                wanted = {(self._column, number): stop - start for number, start, stop in runs}
                units = self._units.get_all(wanted, self._decoded, min(_DECODED_TOGETHER, os.cpu_count() or 1))
                self._time(sum(self._seconds), len(self._seconds))
                self._seconds = []
                for unit, (_, start, stop) in zip(units, runs, strict=True):
                    rows[order[start:stop]] = unit.rows[within[order[start:stop]]]
            else:
                self._read_all(rows, paths, order.tolist(), runs, (within * self._row_bytes).tolist())
        except (OSError, _NotPlainError):
            return None
        return rows

    def _read_all(
        self,
        rows: NDArray[Any],
        paths: list[str],
        order: list[int],
        runs: list[tuple[int, int, int]],
        starts: list[int],
    ) -> None:
        """Reads rows from the files of their chunks."""
        target = rows.reshape(-1).view(np.uint8).data.cast("B")
        size = self._row_bytes
        spans = [[(starts[index], size) for index in order[start:stop]] for _, start, stop in runs]
        for path, wanted in zip(paths, spans, strict=True) if self._prefetched > 0 else ():
            prefetch_file(path, wanted)
        self._prefetched -= 1
        before = time.perf_counter()
        for path, (_, start, stop) in zip(paths, runs, strict=True):
            self._read_rows(path, order[start:stop], starts, target)
        self._time(time.perf_counter() - before, len(paths))

    def _time(self, seconds: float, num_files: int) -> None:
        """Prefetches the files of the next batches if these took long."""
        if seconds > _SLOW_READ_SECONDS * num_files:
            self._prefetched = _PREFETCHED_BATCHES

    def _path(self, number: int) -> str:
        return f"{self._folder}/{self._grid.file((number, *self._others))}"

    def _read_rows(self, path: str, indices: list[int], starts: list[int], target: memoryview) -> None:
        """Reads rows of a chunk, given their rows in the batch, into the memory of the batch."""
        size = self._row_bytes
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != size * self._rows:
                raise _NotPlainError
            for index in indices:
                if os.preadv(descriptor, [target[index * size : (index + 1) * size]], starts[index]) != size:
                    raise _NotPlainError
        finally:
            os.close(descriptor)

    def _decoded(self, key: tuple[str, int]) -> ArrayUnit:
        before = time.perf_counter()
        with open(self._path(key[1]), "rb") as file:  # noqa: PTH123  (paths are strings throughout)
            packed = file.read()
        self._seconds.append(time.perf_counter() - before)
        num_bytes = self._row_bytes * self._rows
        try:
            content = _decompressor().decompress(packed, num_bytes, allow_extra_data=False)
        except Exception as error:
            raise _NotPlainError from error
        if len(content) != num_bytes:
            raise _NotPlainError
        return ArrayUnit(np.frombuffer(content, self._dtype).reshape(self._rows, *self._grid.shape[1:]))


_local = threading.local()


def _decompressor() -> Any:
    """Returns the decompressor of this thread, whose memory takes a tenth of the time to get."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard_library("read chunks of zstd").ZstdDecompressor()
    return _local.decompressor


class _NotPlainError(Exception):
    """A chunk is not as its metadata say."""


@final
class ZarrDataSource(ReadsBatches):
    """The rows of Zarr arrays (versions 2 and 3) and N5 arrays, as dicts by column. It needs TensorStore.

    A row is an index of the first axis. All rows of a batch are requested together; each chunk is decoded as a whole,
    and chunks are cached, up to `cache_bytes`. Local chunks of whole rows are read without TensorStore: those without a
    codec row by row; in worker processes also those of zstd, by the package `zstandard`, once for all of them. If
    chunks have several rows, the best order stays among a few chunks for a while, like that of `HierarchicalSampler`;
    `load(source, shuffle=True)` takes it by itself if not all rows fit into the cache.

    Values have the dtypes of the arrays, in native byte order: NumPy scalars for arrays of one axis, else arrays. Axes
    of N5 are in the order of Zarr's Python package, the last one contiguous. Rows of chunks that were never written
    have the fill value, as the format says: a chunk that was lost is not noticed.

    TensorStore does not survive a fork. Worker processes of a loader are not forked from this one, and read on their
    own; in other forks of a process that has such a source, reading is an error. It has no dates, texts, LZ4 (but in
    Blosc), LZMA or delta filter.

    Args:
        arrays: for each column, the path of an array (`~` is expanded); or, as a `str`, a URL of `gs://`, `s3://`,
            `http://` or `https://`, which TensorStore reads with its own credentials. Arrays of a group have the path
            of the group, followed by their names: `"era5.zarr/t2m"`. Or the path of a group, whose arrays are columns
            by their names, or of a single array.
        columns: the names of the arrays of a group that are columns; None, for a local group, for those that are
            directly in it and have as many rows as the largest one, without coordinates of other axes.
        cache_bytes: the memory, in bytes, for decoded chunks per process.

    Attributes:
        unit_sizes: the number of records of each chunk of the column with the most bytes: int64, shape (n,).
        window_units: the number of chunks that a shuffle should keep together, so that they fit into half of
            `cache_bytes`; None if any order is equally fast.

    Raises:
        ImportError: TensorStore is not installed: `pip install 'millstream[zarr]'`.
        FileNotFoundError: there is no array at a path.
        DataSourceError: the metadata of an array is damaged, or it has a data type or codec that TensorStore lacks.
        TypeError: arrays that are neither a path nor a mapping of names to paths.
        ValueError: there are no columns, one is a group, an array has no axis, or columns differ in the numbers of
            rows.

    Reading raises DataSourceError, with the array and the record, for a chunk that cannot be read or decoded, and for
    an array whose metadata have changed since the source was constructed. Chunks that are overwritten meanwhile are
    not noticed.

    Examples:
        >>> source = millstream.ZarrDataSource({"image": "digits.zarr/image", "label": "digits.zarr/label"})
        >>> len(source), source[7]["image"].shape, source[7]["label"]
        (10, (8, 8), np.int32(7))
    """

    def __init__(
        self,
        arrays: Mapping[str, str | os.PathLike[str]] | str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = 1 << 28,
    ) -> None:
        if isinstance(arrays, str | os.PathLike):
            paths = _arrays_of_group(os.fsdecode(arrays), checked_columns(columns))
        else:
            check_no_columns_beside(columns, "arrays")
            paths = paths_of_columns(arrays, "arrays", "train.zarr/x")
        self._urls = {column: absolute_path(path) for column, path in paths.items()}
        self._cache_bytes = as_integer(cache_bytes, "cache_bytes", minimum=0)
        self._metadata: dict[str, str] = {}
        self._marks: dict[str, str] | None = None
        self._arrays: OpenedHere[dict[str, Any]] = OpenedHere("TensorStore")
        opened = self._arrays.get(self._open)
        lengths = {name: array.shape[0] for name, array in opened.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} has {length:,}" for name, length in lengths.items())
            raise ValueError(f"Columns must have one row per record, but {listed}.")
        self._num_records: int = next(iter(lengths.values()))
        row_bytes = {
            name: array.dtype.numpy_dtype.itemsize * array.size // max(1, array.shape[0])
            for name, array in opened.items()
        }
        chunk = opened[max(row_bytes, key=row_bytes.__getitem__)].chunk_layout.read_chunk.shape[0] or 1
        starts = np.arange(0, self._num_records, chunk, dtype=np.int64)
        self.unit_sizes: NDArray[np.int64] = np.minimum(chunk, self._num_records - starts)
        all_bytes = sum(row_bytes.values())
        window = window_units(self._num_records * all_bytes, chunk * all_bytes, self._cache_bytes)
        self.window_units = None if chunk == 1 else window
        files = ArrayFiles() if chunk * max(row_bytes.values()) >= _MIN_SHARED_BYTES else None
        self._decoded: DecodedChunks = UnitCache(self._cache_bytes, files)
        self._plain = {name: plain for name, array in opened.items() if (plain := self._plain_chunks(name, array))}

    def __len__(self) -> int:
        return self._num_records

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[dict[str, Any]]:
        keys = checked_record_keys(record_keys, self._num_records)
        columns = read_naming_failures(self._read, keys)
        return records_of_arrays(columns, len(keys))

    def __repr__(self) -> str:
        first, *others = self._urls.values()
        arrays = f"{1 + len(others)} array{'s'[: len(others)]}"
        return f"ZarrDataSource({self._num_records:,} records in {arrays}, first {first!r})"

    @property
    def origin(self) -> str:
        """The paths or URLs of the arrays, which the fingerprint lacks, because they may move."""
        return " ".join(self._urls.values())

    def fingerprint(self) -> str:
        """Returns the number of records, and a digest of the columns' names and of the arrays' metadata."""
        digest = digest_of(list(self._metadata.items()), 8)
        return f"Zarr records={self._num_records} columns={len(self._urls)} digest={digest}"

    def content_marks(self) -> dict[str, str]:
        """Returns digests of the sizes and ends of the files of up to 64 chunks per local array.

        A checkpoint warns if they differ.
        """
        if self._marks is None:
            arrays = self._arrays.get(self._open)
            paths = [path for name, url in self._urls.items() if not is_url(url) for path in _chunks(arrays[name], url)]
            self._marks = marks_of_paths(paths) if paths else {}
        return self._marks

    def _plain_chunks(self, name: str, array: Any) -> PlainChunks | None:
        """Returns the chunks of an array if they can be read without TensorStore, which reads the last row alike."""
        url = self._urls[name]
        if is_url(url) or not array.size:
            return None
        grid = _grid(array)
        if not (grid.is_plain and grid.has_whole_rows) or (grid.is_zstd and find_spec("zstandard") is None):
            return None
        plain = PlainChunks(url, grid, array.dtype.numpy_dtype, self._decoded, name)
        last = np.array([array.shape[0] - 1])
        try:
            row, expected = plain.read(last), array[last].read().result()
        except (ValueError, OSError, RuntimeError):
            return plain  # The row is damaged, which is an error when it is read.
        return None if row is not None and row.tobytes() != expected.tobytes() else plain

    def _open(self) -> dict[str, Any]:
        tensorstore = _tensorstore()
        retries = {"max_retries": ATTEMPTS - 1, "initial_delay": f"{FIRST_DELAY_SECONDS}s"}
        retries["max_delay"] = f"{LONGEST_DELAY_SECONDS}s"
        context = tensorstore.Context(
            {f"{store}_request_retries": retries for store in ("http", "gcs", "s3")}
            | {"cache_pool": {"total_bytes_limit": self._cache_bytes}}
        )
        arrays = {name: _open_array(tensorstore, url, context) for name, url in self._urls.items()}
        for name, array in arrays.items():
            described = _describe(array)
            if self._metadata.setdefault(name, described) != described:
                raise DataSourceError(
                    f"{self._urls[name]!r} has changed since the source was constructed. Construct it again."
                )
        return arrays

    def _read(self, keys: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        arrays = self._arrays.get(self._open)
        plain = {name: self._plain.get(name) for name in arrays}
        columns: dict[str, Any] = {
            name: None if chunks is None or not chunks.is_quicker else chunks.read(keys)
            for name, chunks in plain.items()
        }
        begun = {name: arrays[name][keys].read() for name, rows in columns.items() if rows is None}
        for name, request in begun.items():
            try:
                # Several columns of one row: TensorStore returns arrays in any memory order.
                columns[name] = np.ascontiguousarray(request.result())
            except (ValueError, OSError, RuntimeError) as error:
                reason = f"{_reason(error)}. Restore the array, or try again if its store does not answer."
                raise LibraryReadError(f"{self._urls[name]!r} (record key {keys[0]}): {reason}") from error
        return columns


def _open_array(tensorstore: Any, url: str, context: Any) -> Any:
    """Returns an open array, with the order of axes of Zarr."""
    folder = with_other_name(url, lambda path: path.rstrip("/") + "/")
    store: Any = str(folder) if is_url(url) else {"driver": "file", "path": folder}
    try:
        array = tensorstore.open(
            {"driver": "auto", "kvstore": store}, read=True, recheck_cached_data=False, context=context
        ).result()
    except (ValueError, OSError, RuntimeError) as error:
        names = [] if is_url(url) else [name for name, _ in itertools.islice(_arrays_below(folder), _MAX_NAMES)]
        if names:
            raise _group_error(url, names) from error
        if "Failed to detect format" in str(error):
            raise FileNotFoundError(2, "No Zarr or N5 array", url) from error
        raise DataSourceError(
            f"Cannot open the array {url!r}: {_reason(error)}. Restore it if it is damaged. If it has a data type or a "
            "codec that TensorStore lacks, write it again with another one, or name other arrays: columns=[...]."
        ) from error
    if not array.ndim:
        raise ValueError(f"The array {url!r} must have one row per record, got an array without axes.")
    if array.dtype.numpy_dtype.hasobject:
        raise ValueError(f"The array {url!r} must have numbers, got values of {array.dtype.name}.")
    return array.T if array.spec().to_json()["driver"] == "n5" else array


def _group_error(url: str, names: Sequence[str]) -> ValueError:
    listed = ", ".join(repr(f"{url.rstrip('/')}/{name}") for name in names)
    return ValueError(f"A column must be an array, but {url!r} is a group. Write one of its arrays: {listed}.")


def _joined(name: str, folder: str) -> str:
    return f"{folder}/{name}"


def _arrays_of_group(path: str, columns: Sequence[str] | None) -> dict[str, str]:
    """Returns the paths of arrays of a group by their names; without names, those with the rows of the largest one."""
    folder = path.rstrip("/")
    if columns is not None:
        return {name: with_other_name(folder, partial(_joined, name)) for name in columns}
    if is_url(path):
        name = folder.rpartition("/")[2]
        raise ValueError(
            f"The names of arrays in a store must be given. Write ZarrDataSource({path!r}, columns=['NAME', …]) for a "
            f"group, or ZarrDataSource({{{name!r}: {path!r}}}) for an array."
        )
    local = absolute_path(folder)
    shapes = dict(_arrays_below(local, depth=1))
    if not shapes:
        if names := [name for name, _ in itertools.islice(_arrays_below(local), _MAX_NAMES)]:
            raise _group_error(folder, names)
        return {local.rpartition("/")[2].partition(".")[0]: folder}  # An array, or else an error when it is opened.
    rows = shapes[max(shapes, key=lambda name: math.prod(shapes[name]) if shapes[name] else 0)][:1]
    return {name: f"{folder}/{name}" for name, shape in shapes.items() if shape[:1] == rows}


def _arrays_below(folder: str, name: str = "", depth: int = 3) -> Iterator[tuple[str, list[int]]]:
    """Yields the names and shapes of the arrays in a local group and its groups, of a few levels."""
    with contextlib.suppress(OSError):
        for member in sorted(os.listdir(folder)):  # noqa: PTH208  (paths are strings throughout)
            path, full = os.path.join(folder, member), f"{name}{member}"  # noqa: PTH118
            if (shape := _shape_of_array(path)) is not None:
                yield full, shape
            elif depth > 1 and os.path.isdir(path):  # noqa: PTH112
                yield from _arrays_below(path, f"{full}/", depth - 1)


def _shape_of_array(folder: str) -> list[int] | None:
    """Returns the shape of a local array, by its metadata, or None if the folder is not an array."""
    for name, shape, other in (
        (".zarray", "shape", "chunks"),
        ("zarr.json", "shape", "chunk_grid"),
        ("attributes.json", "dimensions", "blockSize"),
    ):
        with contextlib.suppress(OSError, ValueError, TypeError):
            metadata = json.loads(Path(folder, name).read_bytes())
            if shape in metadata and other in metadata:
                sizes = list(map(int, metadata[shape]))
                return sizes[::-1] if name == "attributes.json" else sizes
    return None


def _grid(array: Any) -> ChunkGrid:
    spec = array.spec().to_json()
    return ChunkGrid.of(spec["driver"], spec["metadata"])


def _chunks(array: Any, path: str) -> list[str]:
    """Returns the paths of files of chunks of a local array, evenly spread ones, which need not exist."""
    grid = _grid(array)
    counts = [-(-length // size) for length, size in zip(grid.shape, grid.sizes, strict=True)]
    rows = spread_keys(math.prod(counts), MARKED_FILES)
    return [
        f"{path}/{grid.file(cell)}"
        for cell in zip(*map(np.ndarray.tolist, np.unravel_index(rows, counts)), strict=True)
    ]


def _describe(array: Any) -> str:
    """Returns the metadata of an array, without its position."""
    spec = array.spec().to_json()
    return json.dumps([spec["driver"], spec.get("metadata"), array.dtype.name, array.shape], sort_keys=True)


def _reason(error: Exception) -> str:
    """Returns the text of TensorStore's error, without the specification of the array that ends it."""
    return str(error).partition(" [")[0]


def _tensorstore() -> Any:
    try:
        import tensorstore  # noqa: PLC0415  (lazy: it takes long to import)
    except ImportError as error:
        raise ImportError("Cannot read Zarr arrays without TensorStore: pip install 'millstream[zarr]'.") from error
    return tensorstore
