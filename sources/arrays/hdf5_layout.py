"""The layout of HDF5 files: the datasets that patterns match, and the positions of their rows, found by h5py once.

The path of a dataset is the path or URL of a file, followed by the name in it. Both may be patterns.
"""

import contextlib
import fnmatch
import io
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.remote.urls import Url, is_url
from millstream.sources.storage.byte_files import MAX_PREAD_BYTES, exists
from millstream.sources.storage.compression import inflated
from millstream.sources.storage.paths import GLOB, absolute_path, glob_paths, resolve_paths
from millstream.sources.storage.raw_file import RawFile

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
    name = absolute_path(path)
    if is_url(name):
        try:
            can_list = Url.of(name).can_list
        except ValueError:  # A bucket.
            return []
        if not GLOB.search(name):
            return [name] if exists(name) else []
        try:
            return [file.path for file in resolve_paths(name, "HDF5")] if can_list else []
        except FileNotFoundError:
            return []
    if os.path.isfile(name):  # noqa: PTH113
        return [name]
    return list(filter(os.path.isfile, glob_paths(path)))


def h5py_module() -> Any:
    try:
        import h5py  # noqa: PLC0415  (lazy: an optional package)
    except ImportError as error:
        raise ImportError("Cannot read HDF5 files without h5py: pip install 'millstream[hdf5]'.") from error
    return h5py


def inspect_file(path: str, content: str | RawFile, patterns: Mapping[str, str]) -> list[FileSegment]:
    h5py = h5py_module()
    try:
        with h5py.File(content, "r") as file, _raw_file(content) as raw:
            return _segments(h5py, file, patterns, raw)
    except (DataSourceError, PermissionError):
        raise
    except _UnsupportedError as error:
        raise ValueError(f"Cannot read {path!r}: {error}.") from None
    except Exception as error:  # h5py raises errors of many types for damaged files.
        raise DataSourceError(
            f"Cannot open {path!r}: it is not an HDF5 file, is damaged, or was truncated: {error}."
        ) from error


def _raw_file(content: str | RawFile) -> contextlib.AbstractContextManager[io.RawIOBase]:
    return io.FileIO(content) if isinstance(content, str) else contextlib.nullcontext(content)


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
