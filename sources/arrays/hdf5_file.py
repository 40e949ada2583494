"""An open HDF5 file, on a disk or in an object store, and its rows.

Rows that are in the file as they are, and chunks that gzip has compressed, are read at offsets that h5py reports once,
without h5py and its lock. Every other dataset is decoded by h5py, a chunk at a time.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.arrays.hdf5_layout import DatasetLayout, FileSegment, h5py_module
from millstream.sources.remote.urls import is_url
from millstream.sources.storage.byte_files import LocalFile, RemoteFile, SpanReadError, open_stored
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.raw_file import RawFile

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
        """Yields the rows of each chunk of a dataset; the last chunk may have more rows than the dataset."""
        try:
            if layout.starts is None or layout.sizes is None:
                yield from (self._decode_by_h5py(layout, chunk) for chunk in chunks.tolist())
                return
            spans = self._stored.begin(layout.starts[chunks].tolist(), layout.sizes[chunks].tolist())()
            yield from map(layout.decompressed, spans)
        except SpanReadError:
            raise
        except Exception as error:
            raise DataSourceError(f"{layout.name!r} cannot be decoded: {error}. Restore the file.") from error

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
