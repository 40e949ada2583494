"""The layout of HDF5 files: the datasets that patterns match, and the positions of their rows, found by h5py once.

The path of a dataset is the path or URL of a file, followed by the name in it. Both may be patterns.
"""

import fnmatch
import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.remote.urls import Url, is_url
from millstream.sources.storage.byte_files import MAX_PREAD_BYTES, exists
from millstream.sources.storage.paths import GLOB, resolve_paths
from millstream.sources.storage.raw_file import RawFile

_UNCHUNKED_BYTES = 1 << 20
"""The approximate size of the blocks in which a dataset without chunks is decoded, if `pread` cannot read it."""

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


class FileSegment(NamedTuple):
    """Datasets of one length, one for each column."""

    num_rows: int
    layouts: Mapping[str, DatasetLayout]


def split_paths(datasets: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns the files, and the pattern of the datasets of each column; both may be patterns."""
    files: dict[str, list[str]] = {}
    patterns: dict[str, str] = {}
    for name, path in datasets.items():
        components = path.split("/")
        numbers = range(1, len(components) + 1)
        # A server of HTTP may answer for a folder, too.
        for number in reversed(numbers) if is_url(path) and not Url.of(path).can_list else numbers:
            if found := _matching_files("/".join(components[:number])):
                break
        else:
            raise FileNotFoundError(2, "No HDF5 file is at the beginning of the path", path)
        files[name], patterns[name] = list(found), "/".join(components[number:]).strip("/")
        if not patterns[name]:
            raise ValueError(
                f"The path of a column must be that of a file and a dataset in it, such as 'train.h5/images', got "
                f"{path!r} for {name!r}."
            )
    first, *others = files
    for name in others:
        if files[name] != files[first]:
            raise ValueError(
                f"All columns must be in the same files, got {files[first]} for {first!r}, but {files[name]} for "
                f"{name!r}."
            )
    return files[first], patterns


def _matching_files(path: str) -> list[str]:
    """Returns the regular files or objects that a path, URL or pattern means, sorted."""
    if is_url(path):
        try:
            can_list = Url.of(path).can_list
        except ValueError:  # A bucket.
            return []
        if not GLOB.search(path):
            return [path] if exists(path) else []
        try:
            return [file.path for file in resolve_paths(path, "HDF5")] if can_list else []
        except FileNotFoundError:
            return []
    if os.path.isfile(path):  # noqa: PTH113
        return [path]
    return sorted(filter(os.path.isfile, glob.glob(path)))  # noqa: PTH207


def h5py_module() -> Any:
    try:
        import h5py  # noqa: PLC0415  (lazy: an optional package)
    except ImportError as error:
        raise ImportError("Cannot read HDF5 files without h5py: pip install 'millstream[hdf5]'.") from error
    return h5py


def inspect_file(path: str, content: str | RawFile, patterns: Mapping[str, str]) -> list[FileSegment]:
    h5py = h5py_module()
    try:
        with h5py.File(content, "r") as file:
            return _segments(h5py, path, file, patterns)
    except (DataSourceError, PermissionError, _UnsupportedError):
        raise
    except Exception as error:  # h5py raises errors of many types for damaged files.
        raise DataSourceError(
            f"Cannot open {path!r}: it is not an HDF5 file, is damaged, or was truncated: {error}."
        ) from error


class _UnsupportedError(ValueError):
    """A file or dataset of a kind that cannot be read."""


def _unsupported(path: str, reason: str) -> _UnsupportedError:
    return _UnsupportedError(f"Cannot read {path!r}: {reason}.")


def _segments(h5py: Any, path: str, file: Any, patterns: Mapping[str, str]) -> list[FileSegment]:
    if file.mode != "r":
        raise _unsupported(
            path, "it is open for writing in this process, which may not have written everything yet. Close it there"
        )
    found = {
        name: dict(_matches(file, [key for key in pattern.split("/") if key], (), ""))
        for name, pattern in patterns.items()
    }
    first, *others = found
    for name in (first, *others):
        if not found[name]:
            raise _unsupported(path, f"no dataset matches {patterns[name]!r}")
        if missing := sorted(found[first].keys() ^ found[name].keys()):
            one, other = (first, name) if missing[0] in found[first] else (name, first)
            raise _unsupported(
                path,
                f"it has {found[one][missing[0]]!r} for the column {one!r}, but nothing like {patterns[other]!r} with "
                f"the same names for {other!r}",
            )
    segments: list[FileSegment] = []
    for captured in sorted(found[first]):
        datasets = {name: file[matches[captured]] for name, matches in found.items()}
        layouts = {name: _layout(h5py, path, file, dataset) for name, dataset in datasets.items()}
        lengths = {layouts[name].name: len(dataset) for name, dataset in datasets.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} has {length:,}" for name, length in lengths.items())
            raise _unsupported(path, f"columns must have one row per record, but {listed}")
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


def _layout(h5py: Any, path: str, file: Any, dataset: Any) -> DatasetLayout:
    name, dtype, properties = dataset.name.lstrip("/"), dataset.dtype, dataset.id.get_create_plist()
    if not dataset.shape:
        raise _unsupported(path, f"{name!r} must have one row per record, got a dataset without rows")
    if dtype.hasobject:
        raise _unsupported(
            path, f"{name!r} has values of variable length, which are not stored in rows. Store them with a fixed size"
        )
    storage = properties.get_layout()
    if storage == h5py.h5d.VIRTUAL or properties.get_external_count() or dataset.file.id != file.id:
        raise _unsupported(path, f"{name!r} has its values in other files. Read those")
    filters = [properties.get_filter(number) for number in range(properties.get_nfilters())]
    for code, _, _, label in filters:
        if code not in _BUILT_IN_FILTERS:
            raise _unsupported(
                path, f"{name!r} has the filter {code} ({label.decode(errors='replace')}), which h5py lacks. Rewrite "
                "the dataset with the filter gzip or lzf, or with none"
            )  # fmt: skip
    num_rows, shape, chunk = len(dataset), tuple(dataset.shape[1:]), dataset.chunks
    row_type = RowType(np.dtype(dtype.str) if dtype.names is None else dtype, shape)
    # h5py converts all types that NumPy stores in another way.
    is_native = h5py.h5t.py_create(dtype, logical=True) == dataset.id.get_type()
    is_readable = is_native and 0 < row_type.num_bytes < MAX_PREAD_BYTES and num_rows
    if chunk is None:
        # Rows that were never written are not stored, and h5py returns the fill value for them.
        is_stored = dataset.id.get_storage_size() == num_rows * row_type.num_bytes
        if is_readable and storage == h5py.h5d.CONTIGUOUS and is_stored:
            return DatasetLayout(name, row_type, num_rows, np.array([dataset.id.get_offset()], np.int64))
        return DatasetLayout(name, row_type, max(1, min(num_rows, _UNCHUNKED_BYTES // max(1, row_type.num_bytes))))
    layout = DatasetLayout(name, row_type, chunk[0])
    codes = [code for code, *_ in filters]
    if not is_readable or tuple(chunk[1:]) != shape or codes not in ([], [_GZIP], [_SHUFFLE, _GZIP]):
        return layout
    chunks = _chunks(dataset, -(-num_rows // chunk[0]))
    if chunks is None or not codes:
        return layout if chunks is None else layout._replace(starts=chunks[0])
    shuffled = filters[0][2][0] if len(codes) > 1 else 1
    return layout._replace(starts=chunks[0], sizes=chunks[1], shuffled=shuffled)


def _chunks(dataset: Any, num_chunks: int) -> NDArray[np.int64] | None:
    """Returns the offsets and the sizes of all chunks, or None if some were never written, or not filtered."""
    if dataset.id.get_num_chunks() != num_chunks:
        return None
    chunks = np.empty((2, num_chunks), np.int64)
    rows_per_chunk = dataset.chunks[0]
    unfiltered = 0

    def record(chunk: Any) -> None:
        nonlocal unfiltered
        unfiltered |= chunk.filter_mask
        chunks[:, chunk.chunk_offset[0] // rows_per_chunk] = chunk.byte_offset, chunk.size

    dataset.id.chunk_iter(record)
    return None if unfiltered else chunks
