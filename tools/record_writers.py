"""Writers of record files: ArrayRecord, Bagz, and Megatron's token files."""

import os
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from millstream.sources.file_formats import format_of_file
from millstream.sources.files import megatron_index
from millstream.sources.files.compression import zstandard_library
from millstream.tools.record_encoding import TOKENS, Encoding

RECORD_EXTENSIONS = (".array_record", ".bag", ".bagz")
BIN_EXTENSION = ".bin"
EXTENSIONS = (*RECORD_EXTENSIONS, BIN_EXTENSION)
_DEFAULT_LEVEL = 3


def new_writer(path: str, encoding: Encoding, compression: str | None) -> "_ArrayRecordFile | _BagzFile | _TokenFile":
    """Creates a file, and returns its writer.

    The compression is "none" or "zstd", optionally with a level, "zstd:1"; None for the fastest to read. Each record is
    compressed separately, so that records can be read separately.
    """
    extension = os.path.splitext(path)[1]  # noqa: PTH122  (paths are strings throughout)
    level = compression_level(extension, compression)
    if encoding.name == TOKENS:
        return _TokenFile(path, str(encoding.dtype))
    return _ArrayRecordFile(path, level) if extension == ".array_record" else _BagzFile(path, level)


def companion_of(path: str) -> str | None:
    """Returns the path of the second file of a token file, its index; None for other formats."""
    return path.removesuffix(BIN_EXTENSION) + ".idx" if path.endswith(BIN_EXTENSION) else None


def compression_level(extension: str, compression: str | None) -> int | None:
    """Returns the level of zstd for a format, or None for no compression."""
    if compression is None:
        compression = "zstd" if extension == ".bagz" else "none"
    name, _, level = compression.partition(":")
    if not (compression == "none" or (name == "zstd" and (compression == "zstd" or level.isdecimal()))):
        raise ValueError(f"compression must be none, zstd, or zstd with a level, such as zstd:1, got {compression}.")
    if name == "zstd" and level and not 1 <= int(level) <= 22:
        raise ValueError(f"The level of zstd must be between 1 and 22, got {level}.")
    if name == "zstd" and extension in {".bag", BIN_EXTENSION}:
        raise ValueError(f"Records of {extension} files are never compressed. Use another format, or no compression.")
    if name == "none" and extension == ".bagz":
        raise ValueError("Records of .bagz files are always compressed. Write a .bag file, or omit the compression.")
    return (int(level) if level else _DEFAULT_LEVEL) if name == "zstd" else None


@final
class _ArrayRecordFile:
    """An ArrayRecord file with one record per group: each is read separately, and has a checksum."""

    def __init__(self, path: str, level: int | None) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter  # noqa: PLC0415

        self._path = path
        self._count = 0
        options = "uncompressed" if level is None else f"zstd:{level}"
        self._writer: Any = ArrayRecordWriter(path, f"group_size:1,{options}")

    def write(self, records: Sequence[bytes]) -> None:
        try:
            for record in records:
                self._writer.write(record)
        except RuntimeError as error:
            raise self._error(error) from error
        self._count += len(records)

    def finish(self) -> None:
        """Completes the file, and checks its number of records, because the writer does not report a full disk."""
        try:
            self._writer.close()
        except RuntimeError as error:
            raise self._error(error) from error
        with format_of_file(self._path).open(self._path) as source:
            count = len(source)
        if count != self._count:
            raise OSError(f"{self._path!r} has {count} records after {self._count} were written to it.")
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def abandon(self) -> None:
        if self._writer.is_open():
            try:
                self._writer.close()
            except RuntimeError:
                return  # The file is discarded.

    def _error(self, error: RuntimeError) -> OSError:
        return OSError(f"Cannot write {self._path!r}: {error}.")


@final
class _BagzFile:
    """Concatenated records, followed by the end of each as uint64. With a level, each record is a frame of zstd."""

    def __init__(self, path: str, level: int | None) -> None:
        self._compress = None
        if level is not None:
            self._compress = zstandard_library("write .bagz files").ZstdCompressor(level=level).compress
        self._file = open(path, "wb")  # noqa: SIM115, PTH123  (closed by `finish` or `abandon`)
        self._sizes: list[int] = []

    def write(self, records: Sequence[bytes]) -> None:
        if self._compress is not None:
            records = [self._compress(record) if record else record for record in records]
        self._sizes += map(len, records)
        self._file.write(b"".join(records))

    def finish(self) -> None:
        with self._file:
            self._file.write(np.cumsum(self._sizes, dtype="<u8").tobytes())
            self._file.flush()
            os.fsync(self._file.fileno())

    def abandon(self) -> None:
        self._file.close()


@final
class _TokenFile:
    """Concatenated tokens, and Megatron's index with the length of each record (see `megatron_index`)."""

    def __init__(self, path: str, dtype: str) -> None:
        self._index_path = f"{companion_of(path)}"
        self._dtype = dtype
        self._file = open(path, "wb")  # noqa: SIM115, PTH123  (closed by `finish` or `abandon`)
        self._sizes: list[int] = []

    def write(self, records: Sequence[bytes]) -> None:
        self._sizes += map(len, records)
        self._file.write(b"".join(records))

    def finish(self) -> None:
        sizes, count = np.array(self._sizes, np.int64), len(self._sizes)
        lengths = sizes // np.dtype(self._dtype).itemsize
        if lengths.max(initial=0) > np.iinfo(np.int32).max:
            raise OSError("Cannot write a record of more than 2,147,483,647 tokens: Megatron's index has 32 bits.")
        (code,) = (code for code, dtype in megatron_index.DTYPES.items() if dtype == self._dtype)
        with open(self._index_path, "wb") as index:  # noqa: PTH123
            index.write(
                megatron_index.HEADER.pack(megatron_index.MAGIC, megatron_index.VERSION, code, count, count + 1)
            )
            index.write(lengths.astype("<i4").tobytes())
            index.write((np.cumsum(sizes) - sizes).astype("<i8").tobytes())
            index.write(np.arange(count + 1, dtype="<i8").tobytes())
            index.flush()
            os.fsync(index.fileno())
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def abandon(self) -> None:
        self._file.close()
