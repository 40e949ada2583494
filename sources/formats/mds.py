"""The samples of MDS shards, the format of MosaicML Streaming.

A dataset is a folder with `index.json`, which lists the shards and their columns. A shard is, little-endian:

    uint32  number of samples, n
    uint32  offset of each sample in the file, and the end of the last one [n + 1]
    byte    a copy of the columns, as JSON
    byte    samples: a uint32 size of each column without a fixed size, then the values of all columns

Values are decoded as MosaicML Streaming does.
"""

import dataclasses
import decimal
import functools
import itertools
import json
import os
import pickle
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_flag
from millstream.errors import DataSourceError
from millstream.sources.digests import digest_of
from millstream.sources.files.byte_files import read_whole
from millstream.sources.files.compression import zstandard_library
from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.paths import FileRange, absolute_path, member_path
from millstream.sources.files.spans import Scan, SpanFormat, SpanRecords, SpanRequest
from millstream.sources.remote.urls import is_url

SIZE_BYTES = 4
"""The size of a number of bytes or members."""

_SCALARS = frozenset(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)) - {"float8"}
_ARRAY_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_PIXEL_DTYPES = {"I": "<i4", "F": "<f4", "I;16": "<u2"}
"""The dtypes of the modes of Pillow that do not have a byte per channel."""

_SHAPE_DTYPES = ("uint8", "uint16", "uint32", "uint64")


@functools.cache
def decoder_of(encoding: str) -> Callable[[bytes], Any]:
    """Returns the function that decodes a value. An unknown encoding is a KeyError, ValueError or TypeError."""
    name, _, options = encoding.partition(":")
    if name in _SCALARS:
        return functools.partial(_scalar, np.dtype(name).newbyteorder("<"))
    if name == "ndarray":
        dtype, _, shape = options.partition(":")
        if dtype and dtype not in _ARRAY_DTYPES.values():
            raise ValueError(dtype)
        return functools.partial(_array, dtype or None, tuple(map(int, shape.split(","))) if shape else None)
    return _DECODERS[encoding]


def _scalar(dtype: np.dtype[Any], content: bytes) -> Any:
    (value,) = np.frombuffer(content, dtype)
    return value


def _array(dtype: str | None, shape: Sequence[int] | None, content: bytes) -> NDArray[Any]:
    start = 0
    if dtype is None:
        dtype, start = _ARRAY_DTYPES[content[0]], 1
    if shape is None:
        ndim, size = content[start] >> 2, 1 << (content[start] & 3)
        start += 1
        shape = np.frombuffer(content[start : start + ndim * size], _SHAPE_DTYPES[content[start - 1] & 3]).tolist()
        if len(shape) != ndim:
            raise ValueError("its shape is cut short")
        start += ndim * size
    # Copied: an operation may write to it.
    return np.frombuffer(content, dtype, offset=start).reshape(shape).copy()


def _image(content: bytes) -> NDArray[Any]:
    """Returns the pixels of an uncompressed image: shape (height, width) or (height, width, channels)."""
    width, height, length = struct.unpack_from("<3I", content)
    mode = content[12 : 12 + length].decode()
    if mode == "1":
        raise ValueError("images of one bit per pixel are not supported")
    pixels = np.frombuffer(content, _PIXEL_DTYPES.get(mode, "u1"), offset=12 + length).reshape(height, width, -1)
    return (pixels[..., 0] if pixels.shape[-1] == 1 else pixels).copy()


def _members(start: int, decode: Callable[[bytes], Any], content: bytes) -> list[Any]:
    """Returns the members of a list: from `start` on, a uint32 number, the sizes, and the values."""
    (count,) = struct.unpack_from("<I", content, start)
    sizes = struct.unpack_from(f"<{count}I", content, start + SIZE_BYTES)
    stops = np.cumsum([start + SIZE_BYTES * (count + 1), *sizes]).tolist()
    if stops[-1] != len(content):
        raise ValueError("its members do not fill it")
    return [decode(content[begin:stop]) for begin, stop in itertools.pairwise(stops)]


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda content: int(_scalar(np.dtype("<i8"), content)),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda content: decimal.Decimal(content.decode()),
    "json": json.loads,
    "jpeg": bytes,
    "png": bytes,
    "pil": _image,
    "jpeg_array": functools.partial(_members, 0, bytes),
    "jpegarray": functools.partial(_members, 0, bytes),
    "list[jpeg]": functools.partial(_members, SIZE_BYTES, bytes),
    "list[png]": functools.partial(_members, SIZE_BYTES, bytes),
    "list[pil]": functools.partial(_members, SIZE_BYTES, _image),
    "pkl": pickle.loads,
}
"""The functions that decode values of encodings without options."""


_DAMAGE = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, struct.error, EOFError)
"""The errors that decoders raise for damaged bytes."""


class _Column(NamedTuple):
    """A column of a shard: its name, its encoding, and the size of a value in bytes, None if each has its own."""

    name: str
    encoding: str
    size: int | None


class _Shard(NamedTuple):
    """A shard. Its unpacked size is that of its content in bytes, if the file is compressed; else None."""

    path: str
    num_samples: int
    columns: tuple[_Column, ...]
    unpacked_size: int | None


@final
class MdsDataSource(SpanRecords[dict[str, Any]]):
    """The samples of MosaicML's MDS shards, as dicts by column, in any order.

    Values have the types of MosaicML's reader: `str`, `int`, NumPy scalars and arrays, decimals, JSON. Images (`jpeg`,
    `png`, and lists of them) are the bytes of their files, to be decoded in an operation, by the workers; `pil` columns
    are arrays of their pixels.

    Args:
        folder: the folder that has `index.json`; `~` is expanded. A `str` may be a URL of `gs://`, `s3://`, `http://`
            or `https://`.
        allow_pickle: True to unpickle columns of the encoding `pkl`, which runs any code in the files: only for files
            that you trust.
        cache: a `FileCache` that copies whole remote shards to a local disk before they are read; None to read only the
            samples. Shards that Zstandard has compressed (`.mds.zstd`) need one, also if they are local: the copies are
            their content. A shard is then unpacked when it is first read, so read samples in an order that stays within
            a few shards for a while, such as `HierarchicalSampler(source.unit_sizes, window_units=...)`.

    Raises:
        FileNotFoundError, PermissionError, …: the index or a shard cannot be found or read.
        DataSourceError: the index or a shard is damaged, or a shard is compressed by something else than Zstandard.
        ImportError: a shard is compressed, and `zstandard` is not installed: `pip install 'millstream[bagz]'`.
        ValueError: a column has an unknown encoding, or `pkl` without `allow_pickle`; shards are compressed, and there
            is no `cache`, or it is smaller than the content of a shard; there are no shards.

    Reading raises DataSourceError, with the file and the record, for a sample that cannot be decoded, and for a file
    that has changed, see "All sources of files" in docs/formats.md.

    Examples:
        >>> source = millstream.MdsDataSource("mds")
        >>> len(source), source[1]
        (3, {'label': 1, 'text': 'two'})
    """

    kind = "MDS"

    def __init__(
        self, folder: str | os.PathLike[str], *, allow_pickle: bool = False, cache: FileCache | None = None
    ) -> None:
        shards = _shards(absolute_path(os.fsdecode(folder)))
        self._columns = {shard.path: shard.columns for shard in shards}
        self._unpacked = {shard.path: shard for shard in shards if shard.unpacked_size is not None}
        if self._unpacked:
            _check_cache(cache, self._unpacked.values())
        self._allow_pickle = as_flag(allow_pickle, "allow_pickle")
        for path, columns in self._columns.items():
            for column in columns:
                _check_encoding(column, path, allow_pickle=self._allow_pickle)
        super().__init__(list(map(FileRange, self._columns)), _MdsFormat(), cache)
        for shard in shards:
            if self._counts[shard.path] != shard.num_samples:
                raise DataSourceError(
                    f"{shard.path!r} has {self._counts[shard.path]:,} samples, but its index.json lists "
                    f"{shard.num_samples:,}. Restore the files."
                )

    def fingerprint(self) -> str:
        """Returns the number of files and records, and digests of the columns and of names, sizes and counts."""
        columns = sorted(set(self._columns.values()))
        digest = digest_of([list(map(tuple, each)) for each in columns], 4)
        return f"{super().fingerprint()} columns={len(columns[0])}:{digest}"

    def _count(self, path: str) -> int:
        # A compressed shard is not unpacked before it is read. Its index is compared with this number then.
        return self._unpacked[path].num_samples if path in self._unpacked else super()._count(path)

    def _is_copied(self, path: str) -> bool:
        return path in self._unpacked or super()._is_copied(path)

    def _unpacked_size(self, path: str) -> int | None:
        return self._unpacked[path].unpacked_size if path in self._unpacked else None

    def _format_of(self, path: str) -> SpanFormat[dict[str, Any]]:
        return _MdsFormat(self._columns[path])


@final
@dataclasses.dataclass(frozen=True)
class _MdsFormat(SpanFormat[dict[str, Any]]):
    """A span is a sample."""

    index_kind: ClassVar[str] = "mds"

    columns: tuple[_Column, ...] = ()

    def offsets(self, scan: Scan) -> Any:
        count = int.from_bytes(scan.read(0, SIZE_BYTES), "little")
        stop = SIZE_BYTES * (count + 2)
        if scan.size < stop:
            raise _damaged(scan.path, f"it ends before the offsets of its {count:,} samples")
        offsets = np.frombuffer(scan.read(SIZE_BYTES, stop - SIZE_BYTES), "<u4").astype(np.int64)
        if offsets[0] < stop or offsets[-1] != scan.size or (np.diff(offsets) < 0).any():
            raise _damaged(scan.path, "the offsets of its samples are not in order")
        yield offsets

    def decode(self, spans: list[bytes], request: SpanRequest) -> list[dict[str, Any]]:
        decoders = [decoder_of(column.encoding) for column in self.columns]
        num_sizes = sum(column.size is None for column in self.columns)
        head = struct.Struct(f"<{num_sizes}I")
        samples: list[dict[str, Any]] = []
        for row, span in enumerate(spans):
            sample: dict[str, Any] = {}
            try:
                sizes = iter(head.unpack_from(span))
                start = head.size
                for column, decode in zip(self.columns, decoders, strict=True):
                    stop = start + (next(sizes) if column.size is None else column.size)
                    sample[column.name] = decode(span[start:stop])
                    start = stop
            except (*_DAMAGE, pickle.UnpicklingError) as error:
                name = self.columns[len(sample)].name
                raise request.error(
                    row, f"its column {name!r} cannot be decoded: {error}. Restore the file."
                ) from error
            if start != len(span):
                raise request.error(row, f"its columns have {start:,} of its {len(span):,} bytes. Restore the file.")
            samples.append(sample)
        return samples


def _shards(root: str) -> list[_Shard]:
    index_path = member_path(root, "index.json")
    content = read_whole(index_path, "MDS index")
    try:
        return [_shard(entry, index_path, root) for entry in json.loads(content)["shards"]]
    except DataSourceError:
        raise
    except _DAMAGE as error:
        raise _damaged(index_path, f"it does not list shards ({error})") from error


def _shard(entry: Mapping[str, Any], index_path: str, root: str) -> _Shard:
    if entry["version"] != 2 or entry["format"] != "mds":
        raise DataSourceError(f"{index_path!r} must list shards of MDS version 2, got {entry['format']!r} shards.")
    columns = tuple(
        _Column(str(name), str(kind), size or None)
        for name, kind, size in zip(
            entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True
        )
    )
    path = _path_of(entry["raw_data"], index_path, root)
    zipped = entry.get("zip_data")
    if not zipped or (not is_url(root) and os.path.exists(path)):  # noqa: PTH110
        return _Shard(path, int(entry["samples"]), columns, None)
    zip_path = _path_of(zipped, index_path, root)
    if str(entry.get("compression")).partition(":")[0] != "zstd":
        raise DataSourceError(
            f"Cannot read {zip_path!r}: it is compressed by {entry.get('compression')!r}, not by Zstandard. Decompress "
            "the shards, and remove zip_data from index.json if they are remote."
        )
    return _Shard(zip_path, int(entry["samples"]), columns, int(entry["raw_data"]["bytes"]))


def _path_of(file: Mapping[str, Any], index_path: str, root: str) -> str:
    try:
        return member_path(root, str(file["basename"]))
    except ValueError as error:
        raise _damaged(index_path, str(error)) from None


def _check_cache(cache: FileCache | None, shards: Collection[_Shard]) -> None:
    """Raises ValueError unless the cache has room for the content of each compressed shard."""
    zstandard_library("read compressed shards")
    largest = max(shard.unpacked_size or 0 for shard in shards)
    first = next(iter(shards)).path
    if cache is None:
        total = sum(shard.unpacked_size or 0 for shard in shards)
        raise ValueError(
            f"cache must be a FileCache, because {first!r} is compressed and has no random access, got None. Pass "
            f"cache=FileCache(max_bytes=...), with {total:,} for the content of all shards, or at least {largest:,}."
        )
    if isinstance(cache, FileCache) and cache.max_bytes < largest:
        raise ValueError(
            f"max_bytes of the cache must be at least the size of the largest shard, {largest:,}, got "
            f"{cache.max_bytes:,}."
        )


def _check_encoding(column: _Column, path: str, *, allow_pickle: bool) -> None:
    if column.encoding == "pkl" and not allow_pickle:
        raise ValueError(
            f"Column {column.name!r} of {path!r} is pickled, and unpickling runs any code in the file. If you trust "
            "the file, pass allow_pickle=True."
        )
    try:
        decoder_of(column.encoding)
    except (KeyError, ValueError, TypeError):
        raise ValueError(
            f"Column {column.name!r} of {path!r} has an unknown encoding, got {column.encoding!r}."
        ) from None


def _damaged(path: str, problem: str) -> DataSourceError:
    return DataSourceError(f"{path!r} is not of an MDS dataset, is damaged, or was cut short: {problem}.")
