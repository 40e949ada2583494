"""Files of records that are written front to back: ArrayRecord and Bagz."""

import os
from collections.abc import Sequence
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.array_record_footer import count_records

EXTENSIONS = (".array_record", ".bag", ".bagz")
"""What the names of files that can be written end in."""

_DEFAULT_LEVEL = 3
"""Of zstd, as everywhere."""


class RecordWriter(Protocol):
    """A file that records are appended to."""

    def write(self, records: Sequence[bytes]) -> None:
        """Appends some records.

        Raises:
            OSError: they cannot be written.
        """

    def finish(self) -> NDArray[np.int64]:
        """Ends the file, and returns how many bytes each record had. It is on disk then.

        Raises:
            OSError: it cannot be written.
        """

    def abandon(self) -> None:
        """Closes a file that was not finished."""


def new_writer(path: str, extension: str, compression: str | None) -> RecordWriter:
    """Returns a writer.

    Args:
        path: the file, which is made or begun anew.
        extension: the format, one of EXTENSIONS.
        compression: "none" or "zstd", with or without a level, "zstd:1"; None for what the format is read most quickly
            with. Each record is compressed on its own, so that it can be read on its own.

    Raises:
        OSError: it cannot be written to.
        ValueError: a compression that is not known, or that the format lacks.
        ImportError: a Bagz file that is compressed, and no `zstandard`.
    """
    level = compression_level(extension, compression)
    return _ArrayRecordFile(path, level) if extension == ".array_record" else _BagzFile(path, level)


def compression_level(extension: str, compression: str | None) -> int | None:
    """Returns the level of zstd for a format, or None where nothing is compressed.

    Raises:
        ValueError: as `new_writer`.
    """
    if compression is None:
        compression = "zstd" if extension == ".bagz" else "none"
    name, _, level = compression.partition(":")
    if not (compression == "none" or (name == "zstd" and (compression == "zstd" or level.isdecimal()))):
        raise ValueError(f"compression must be none, zstd, or zstd with a level, such as zstd:1, got {compression}.")
    if name == "zstd" and level and not 1 <= int(level) <= 22:
        raise ValueError(f"The level of zstd must be between 1 and 22, got {level}.")
    if (extension, name) in {(".bag", "zstd"), (".bagz", "none")}:
        raise ValueError(
            f"Records of {extension} files are {'never' if name == 'zstd' else 'always'} compressed: write a "
            f"{'.bagz' if name == 'zstd' else '.bag'} file, or leave out the compression."
        )
    return (int(level) if level else _DEFAULT_LEVEL) if name == "zstd" else None


@final
class _ArrayRecordFile:
    """An ArrayRecord file with one record per group: each is read on its own, and has a checksum."""

    def __init__(self, path: str, level: int | None) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter  # noqa: PLC0415

        self._path = path
        self._sizes: list[int] = []
        options = "uncompressed" if level is None else f"zstd:{level}"
        self._writer: Any = ArrayRecordWriter(path, f"group_size:1,{options}")

    def write(self, records: Sequence[bytes]) -> None:
        """Appends some records."""
        try:
            for record in records:
                self._writer.write(record)
        except RuntimeError as error:
            raise self._error(error) from error
        self._sizes += map(len, records)

    def finish(self) -> NDArray[np.int64]:
        """Ends the file, and looks whether the records are in it."""
        try:
            self._writer.close()
        except RuntimeError as error:
            raise self._error(error) from error
        if (count := count_records(self._path)) != len(self._sizes):
            raise OSError(f"{self._path!r} has {count} records after {len(self._sizes)} were written to it.")
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return np.array(self._sizes, np.int64)

    def abandon(self) -> None:
        """Ends the file somehow."""
        if self._writer.is_open():
            try:
                self._writer.close()
            except RuntimeError:
                return  # It is thrown away.

    def _error(self, error: RuntimeError) -> OSError:
        return OSError(f"{self._path!r} cannot be written: {error}.")


@final
class _BagzFile:
    """Records laid end to end, and then, as uint64, where each ends. With a level, each is a frame of zstd."""

    def __init__(self, path: str, level: int | None) -> None:
        self._compress = None if level is None else _compressor(level)
        self._file = open(path, "wb")  # noqa: SIM115, PTH123  (closed by `finish` or `abandon`)
        self._sizes: list[int] = []
        self._stored: list[int] = []

    def write(self, records: Sequence[bytes]) -> None:
        """Appends some records."""
        self._sizes += map(len, records)
        if self._compress is not None:
            records = [self._compress(record) if record else record for record in records]
        self._stored += map(len, records)
        self._file.write(b"".join(records))

    def finish(self) -> NDArray[np.int64]:
        """Ends the file."""
        with self._file:
            self._file.write(np.cumsum(self._stored, dtype="<u8").tobytes())
            self._file.flush()
            os.fsync(self._file.fileno())
        return np.array(self._sizes, np.int64)

    def abandon(self) -> None:
        """Closes the file."""
        self._file.close()


def _compressor(level: int) -> Any:
    try:
        import zstandard  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Writing .bagz files needs `zstandard`: pip install 'millstream[bagz]'.") from error
    return zstandard.ZstdCompressor(level=level).compress
