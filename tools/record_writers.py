"""Records as bytes, and the files that they are written to: ArrayRecord, Bagz, and Megatron's token files."""

import dataclasses
import datetime as dt
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import find_loss
from millstream.errors import DataSourceError
from millstream.sources.file_formats import format_of_file
from millstream.sources.files import megatron_index
from millstream.sources.files.compression import zstandard_library
from millstream.sources.files.megatron_index import DTYPES
from millstream.transforms import encode_example

AUTO = "auto"
TOKENS = "tokens"

_TOKEN_DTYPES = {np.dtype(name).name: name for name in DTYPES.values() if np.dtype(name).kind != "f"}
"""The dtypes of tokens in a file, by their names in NumPy."""


def raw_bytes(record: Any) -> bytes:
    """Returns bytes unchanged, text as UTF-8, and an array as its bytes, little-endian."""
    if isinstance(record, bytes):
        return record
    if isinstance(record, str):
        return record.encode()
    if isinstance(record, np.ndarray) and not record.dtype.hasobject and not find_loss([record]):
        return record.astype(record.dtype.newbyteorder("<"), copy=False).tobytes()
    raise TypeError(f"it is of type {type(record).__name__}, and only bytes, str and arrays are written unchanged")


def json_text(record: Any) -> bytes:
    """Returns a value as compact JSON in UTF-8, with arrays as lists and times in ISO 8601."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        # `tolist` turns times finer than microseconds into numbers.
        return (value.astype(str) if value.dtype.kind == "M" else value).tolist()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    raise TypeError(f"it holds a value of type {type(value).__name__}, which JSON lacks")


def example_bytes(record: Any) -> bytes:
    if not isinstance(record, Mapping):
        raise TypeError(f"it is of type {type(record).__name__}, and an Example is built from a dict")
    return encode_example(record)


_ENCODERS: dict[str, Callable[[Any], bytes]] = {"raw": raw_bytes, "json": json_text, "example": example_bytes}
ENCODINGS = tuple(_ENCODERS)


@final
@dataclasses.dataclass(frozen=True)
class Encoding:
    """The conversion of a record to bytes.

    Attributes:
        name: one of `ENCODINGS`, or `TOKENS`.
        feature: for tokens, the entry of a dict that holds them; None if a record is the tokens themselves.
        dtype: for tokens, their dtype, little-endian.
    """

    name: str
    feature: str | None = None
    dtype: str | None = None

    def encode(self, record: Any) -> bytes:
        if self.name != TOKENS:
            return _ENCODERS[self.name](record)
        tokens = _tokens_of(record, self.feature)
        if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and tokens.size):
            raise TypeError(
                f"tokens are integers in one dimension, and it has {tokens.dtype} of shape {tokens.shape}. Tokenize "
                "the text in a Map first"
            )
        written: NDArray[Any] = tokens.astype(self.dtype)
        if (written != tokens).any():
            raise ValueError(f"token {int(tokens[written != tokens][0])} exceeds the range of {np.dtype(self.dtype)}")
        return written.tobytes()


def choose_encoding(record: Any) -> Encoding:
    """Returns the encoding for records such as this one.

    Bytes, text and arrays stay unchanged, dicts that hold bytes or arrays become Examples, all else becomes JSON.
    """
    if isinstance(record, bytes | str | np.ndarray):
        return Encoding("raw")
    if isinstance(record, Mapping) and any(isinstance(value, bytes | np.ndarray) for value in record.values()):
        return Encoding("example")
    return Encoding("json")


def token_encoding(record: Any, feature: str | None, dtype: Any) -> Encoding:
    """Returns the encoding of tokens such as those of this record.

    `feature` may be None if there is one entry, or records are the tokens; `dtype`, if the tokens are an array.
    """
    if feature is None and isinstance(record, Mapping):
        if len(record) != 1:
            raise ValueError(f"feature must be one of {', '.join(map(repr, record))}, the entry that holds the tokens.")
        (feature,) = record
    if dtype is None:
        tokens = record.get(feature) if isinstance(record, Mapping) else record
        if isinstance(tokens, np.ndarray):
            dtype = tokens.dtype
        else:
            # Texts, too, have no dtype: that is not what is wrong with them.
            try:
                Encoding(TOKENS, feature, "<i8").encode(record)
            except TypeError as error:
                raise ValueError(f"Cannot write the first record as tokens: {error}.") from error
    try:
        name = "None" if dtype is None else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _TOKEN_DTYPES:
        raise ValueError(
            f"dtype must be the dtype of the tokens in the file, one of {', '.join(_TOKEN_DTYPES)}, got {name}. Pass "
            "--dtype=uint16 (dtype='uint16') for a vocabulary of up to 65,536 tokens, else int32."
        )
    return Encoding(TOKENS, feature, _TOKEN_DTYPES[name])


def encode_records(
    encoding: Encoding, records: Sequence[Any], keys: Sequence[int], *, skips_none: bool = False
) -> list[bytes]:
    """Returns records as bytes; raises a DataSourceError with the key of one that cannot be encoded."""
    encoded: list[bytes] = []
    for key, record in zip(keys, records, strict=True):
        if record is None and skips_none:
            continue
        try:
            encoded.append(encoding.encode(record))
        except (TypeError, ValueError, RecursionError) as error:
            remedy = "" if encoding.name == TOKENS else f" Choose another of {', '.join(ENCODINGS)}."
            raise DataSourceError(
                f"Cannot write record {key} with encode={encoding.name!r}: {str(error).rstrip('.')}.{remedy}"
            ) from error
    return encoded


def _tokens_of(record: Any, feature: str | None) -> NDArray[Any]:
    if feature is not None and (not isinstance(record, Mapping) or feature not in record):
        raise TypeError(f"it is not a dict with an entry {feature!r}")
    tokens = record if feature is None else record[feature]
    if found := find_loss([tokens]):
        raise TypeError(found[1])
    return np.asarray(tokens)


RECORD_EXTENSIONS = (".array_record", ".bag", ".bagz")
BIN_EXTENSION = ".bin"
EXTENSIONS = (*RECORD_EXTENSIONS, BIN_EXTENSION)
_DEFAULT_LEVEL = 3


def new_writer(path: str, encoding: Encoding, compression: str | None) -> "_ArrayRecordFile | _BagzFile | _TokenFile":
    """Creates a file, and returns its writer, whose `write` takes concatenated records and the size of each.

    The compression is "none" or "zstd", optionally with a level, "zstd:1"; None for the fastest to read. Each record is
    compressed separately, so that records can be read separately.
    """
    extension = os.path.splitext(path)[1]  # noqa: PTH122  (paths are strings throughout)
    level = compression_level(extension, compression)
    if encoding.name == TOKENS:
        return _TokenFile(path, str(encoding.dtype))
    return _ArrayRecordFile(path, level) if extension == ".array_record" else _BagzFile(path)


def compressed(records: list[bytes], extension: str, compression: str | None) -> list[bytes]:
    """Returns the records of a file as `new_writer` takes them: those of Bagz files are compressed, if at all."""
    level = compression_level(extension, compression)
    if level is None or extension != ".bagz":
        return records
    compress = zstandard_library("write .bagz files").ZstdCompressor(level=level).compress
    return [compress(record) if record else record for record in records]


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

    def write(self, data: NDArray[np.uint8], sizes: NDArray[np.int64]) -> None:
        content, start = data.data, 0
        try:
            for size in sizes.tolist():
                self._writer.write(bytes(content[start : start + size]))
                start += size
        except RuntimeError as error:
            raise self._error(error) from error
        self._count += len(sizes)

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
    """Concatenated records, followed by the end of each as uint64."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "wb")  # noqa: SIM115, PTH123  (closed by `finish` or `abandon`)
        self._sizes: list[int] = []

    def write(self, data: NDArray[np.uint8], sizes: NDArray[np.int64]) -> None:
        self._sizes += sizes.tolist()
        self._file.write(data.data)

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

    def write(self, data: NDArray[np.uint8], sizes: NDArray[np.int64]) -> None:
        self._sizes += sizes.tolist()
        self._file.write(data.data)

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
