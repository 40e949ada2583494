"""An open HDF5 file: its layout, found by h5py once, and its rows.

A dataset without filters is read by `pread`, without h5py and its lock, at offsets that h5py reports once. Every other
dataset is decoded by h5py, a chunk at a time.
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.storage.byte_files import MAX_PREAD_BYTES, LocalFile

_UNCHUNKED_BYTES = 1 << 20
"""The approximate size of the blocks in which a dataset without chunks is decoded, if `pread` cannot read it."""

_BUILT_IN_FILTERS = frozenset({1, 2, 3, 4, 5, 6, 32000})
"""The filters of every h5py: gzip, shuffle, fletcher32, szip, nbit, scaleoffset and lzf."""


class RowType(NamedTuple):
    """The dtype and the shape of a row of a dataset."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of a row in bytes."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class Layout(NamedTuple):
    """The position of the rows of a dataset.

    Attributes:
        name: the name of the dataset.
        rows_per_chunk: the number of rows that are stored or decoded together.
        starts: the offset of each chunk in the file, in bytes; None if h5py decodes it.
    """

    name: str
    rows_per_chunk: int
    starts: NDArray[np.int64] | None


class Segment(NamedTuple):
    """Datasets of one length, one for each column.

    Attributes:
        num_rows: the number of their rows.
        layouts: the layout of each column.
    """

    num_rows: int
    layouts: Mapping[str, Layout]


def h5py_module() -> Any:
    """Returns h5py.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import h5py  # noqa: PLC0415  (lazy: an optional package)
    except ImportError as error:
        raise ImportError("Cannot read HDF5 files without h5py: pip install 'millstream[hdf5]'.") from error
    return h5py


def has_magic(name: str) -> bool:
    """Returns True if a name is a pattern."""
    return any(character in name for character in "*?[")


def inspect_file(
    path: str, location: str, patterns: Mapping[str, str]
) -> tuple[list[Segment], dict[str, tuple[str, RowType]]]:
    """Returns the segments of a file in their order, and the name and type of the first dataset of each column.

    Args:
        path: the path of the file, for errors.
        location: the path to read.
        patterns: the pattern of the datasets of each column.

    Raises:
        DataSourceError: the file is not an HDF5 file, or is damaged.
        OSError: it cannot be opened.
        ValueError: its datasets do not match the patterns, differ in length or type, or have an unsupported type.
    """
    h5py = h5py_module()
    try:
        with h5py.File(location, "r") as file:
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


def _segments(
    h5py: Any, path: str, file: Any, patterns: Mapping[str, str]
) -> tuple[list[Segment], dict[str, tuple[str, RowType]]]:
    if file.mode != "r":
        raise _unsupported(
            path, "it is open for writing in this process, which may not have written everything yet. Close it there"
        )
    found = {
        name: dict(_matches(file, [part for part in pattern.split("/") if part], (), ""))
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
    segments: list[Segment] = []
    types: dict[str, tuple[str, RowType]] = {}
    for captured in sorted(found[first]):
        layouts: dict[str, Layout] = {}
        lengths: dict[str, int] = {}
        for name, matches in found.items():
            dataset = file[matches[captured]]
            lengths[matches[captured]], row_type, layouts[name] = _inspected(h5py, path, file, dataset)
            described, expected = types.setdefault(name, (matches[captured], row_type))
            if row_type != expected:
                raise _unsupported(
                    path,
                    f"{matches[captured]!r} has rows of {row_type.dtype}{list(row_type.shape)}, but {described!r} of "
                    f"{expected.dtype}{list(expected.shape)}, and a column has one type",
                )
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} has {length:,}" for name, length in lengths.items())
            raise _unsupported(path, f"columns must have one row per record, but {listed}")
        segments.append(Segment(next(iter(lengths.values())), layouts))
    return segments, types


def _matches(
    group: Any, components: Sequence[str], captured: tuple[str, ...], name: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the names that patterns match, without the names of groups, and the datasets' full names."""
    component, *others = components
    if not hasattr(group, "keys"):
        return
    is_pattern = has_magic(component)
    for member in fnmatch.filter(group.keys(), component) if is_pattern else [component] * (component in group):
        full, capture = f"{name}/{member}".lstrip("/"), (*captured, *[member] * is_pattern)
        if others:
            yield from _matches(group[member], others, capture, full)
        elif hasattr(group[member], "shape"):
            yield capture, full


def _inspected(h5py: Any, path: str, file: Any, dataset: Any) -> tuple[int, RowType, Layout]:
    """Returns the number of rows of a dataset, their type and their position."""
    name, dtype, properties = dataset.name.lstrip("/"), dataset.dtype, dataset.id.get_create_plist()
    if not dataset.shape:
        raise _unsupported(path, f"{name!r} must have one row per record, got a dataset without rows")
    if dtype.hasobject:
        raise _unsupported(
            path, f"{name!r} has values of variable length, which are not stored in rows. Store them with a fixed size"
        )
    layout = properties.get_layout()
    if layout == h5py.h5d.VIRTUAL or properties.get_external_count() or dataset.file.id != file.id:
        raise _unsupported(path, f"{name!r} has its values in other files. Read those")
    filters = [properties.get_filter(number) for number in range(properties.get_nfilters())]
    for code, _, _, label in filters:
        if code not in _BUILT_IN_FILTERS:
            raise _unsupported(
                path, f"{name!r} has the filter {code} ({label.decode(errors='replace')}), which h5py lacks. Rewrite "
                "the dataset with the filter gzip or lzf, or with none"
            )  # fmt: skip
    num_rows, shape = len(dataset), tuple(dataset.shape[1:])
    row_type = RowType(np.dtype(dtype.str) if dtype.names is None else dtype, shape)
    chunk = dataset.chunks
    rows = chunk[0] if chunk else max(1, min(num_rows, _UNCHUNKED_BYTES // max(1, row_type.num_bytes)))
    starts = None
    # h5py converts all types that NumPy stores in another way.
    is_plain = h5py.h5t.py_create(dtype, logical=True) == dataset.id.get_type()
    if is_plain and not filters and 0 < row_type.num_bytes < MAX_PREAD_BYTES and num_rows:
        # Rows that were never written are not stored, and h5py returns the fill value for them.
        if layout == h5py.h5d.CONTIGUOUS and dataset.id.get_storage_size() == num_rows * row_type.num_bytes:
            rows, starts = num_rows, np.array([dataset.id.get_offset()], np.int64)
        elif layout == h5py.h5d.CHUNKED and tuple(chunk[1:]) == shape:
            starts = _chunk_starts(dataset, -(-num_rows // rows))
    return num_rows, row_type, Layout(name, rows, starts)


def _chunk_starts(dataset: Any, num_chunks: int) -> NDArray[np.int64] | None:
    """Returns the offset of each chunk, or None if some were never written."""
    if dataset.id.get_num_chunks() != num_chunks:
        return None
    starts = np.empty(num_chunks, np.int64)
    rows_per_chunk = dataset.chunks[0]

    def record(chunk: Any) -> None:
        starts[chunk.chunk_offset[0] // rows_per_chunk] = chunk.byte_offset

    dataset.id.chunk_iter(record)
    return starts


@final
class Hdf5File:
    """An open HDF5 file.

    Args:
        path: the path of the file.
        segments: its segments.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, segments: Sequence[Segment]) -> None:
        self.num_records = sum(segment.num_rows for segment in segments)
        self._stored = LocalFile(path)
        self._size = self._stored.size()
        self._file = None
        self._datasets: dict[str, Any] = {}
        if any(layout.starts is None for segment in segments for layout in segment.layouts.values()):
            try:
                self._file = h5py_module().File(path, "r")
            except Exception as error:
                self._stored.close()
                raise DataSourceError(f"h5py cannot open {path!r}: {error}.") from error

    def read_into(self, layout: Layout, within: NDArray[np.int64], rows: NDArray[np.uint8]) -> int | None:
        """Reads rows of a dataset that `pread` can read.

        Args:
            layout: the layout of the dataset.
            within: the number of each row in the dataset.
            rows: the bytes to read each row into: C-contiguous, shape (n, bytes).

        Returns:
            The number in `within` of the first row that the file lacks, or None.
        """
        chunks, offsets = np.divmod(within, layout.rows_per_chunk)
        # Chunks of a dataset that `pread` can read exist.
        starts = layout.starts[chunks] + offsets * rows.shape[1]  # type: ignore[index]
        lengths = self._stored.read_into(starts.tolist(), rows)
        return next((number for number, length in enumerate(lengths) if length != rows.shape[1]), None)

    def decode(self, layout: Layout, start: int, stop: int) -> NDArray[Any]:
        """Returns rows of a dataset that h5py decodes.

        Raises:
            DataSourceError: they are damaged.
        """
        try:
            dataset = self._datasets.get(layout.name)
            if dataset is None:
                dataset = self._datasets[layout.name] = self._file[layout.name]  # type: ignore[index]  # It is open.
            # h5py reads a single row in a third of the time of a slice.
            rows = np.asarray(dataset[start])[np.newaxis] if layout.rows_per_chunk == 1 else dataset[start:stop]
            # Beyond the end of a file, HDF5 reads zeros.
            if self._stored.size() < self._size:
                raise EOFError("the file was cut short while it was open")  # noqa: TRY301
            return np.asarray(rows)
        except Exception as error:
            raise DataSourceError(f"{layout.name!r} cannot be decoded: {error}. Restore the file.") from error

    def close(self) -> None:
        """Closes the file, which no thread reads."""
        self._stored.close()
        if self._file is not None:
            self._file.close()


def split_patterns(
    datasets: Mapping[str, Any], find_files: Callable[[str], Sequence[str]]
) -> tuple[list[str], dict[str, str]]:
    """Returns the files, and the pattern of the datasets of each column.

    Args:
        datasets: the path of a file followed by the name of a dataset, by column. Both may be patterns.
        find_files: returns the regular files that a path or pattern means, in order.

    Raises:
        FileNotFoundError: no file is at the beginning of a path.
        ValueError: a path has no name of a dataset, or columns have different files.
    """
    files: dict[str, list[str]] = {}
    patterns: dict[str, str] = {}
    for name, path in datasets.items():
        components = path.split("/")
        for number in range(1, len(components) + 1):
            if found := find_files("/".join(components[:number])):
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
