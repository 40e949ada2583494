"""The samples of MDS shards, the format of MosaicML Streaming.

A dataset is a folder with `index.json`, which lists the shards and their columns. A shard is, little-endian:

    uint32  number of samples, n
    uint32  offset of each sample in the file, and the end of the last one [n + 1]
    byte    a copy of the columns, as JSON
    byte    samples: a uint32 size of each column without a fixed size, then the values of all columns
"""

import dataclasses
import decimal
import functools
import itertools
import json
import os
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_flag
from millstream.errors import DataSourceError
from millstream.sources.files.scan import Scan
from millstream.sources.files.span_files import SpanFormat, SpanRequest
from millstream.sources.files.spans import SpanRecords
from millstream.sources.storage.byte_files import identify, open_stored
from millstream.sources.storage.file_cache import FileCache
from millstream.sources.storage.urls import is_url

_SIZE_BYTES = 4
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

_DAMAGE = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, struct.error, EOFError)
"""The errors that decoders raise for damaged bytes."""


class _Column(NamedTuple):
    """A column of a shard: its name, its encoding, and the size of a value in bytes, None if each has its own."""

    name: str
    encoding: str
    size: int | None


@final
class MdsDataSource(SpanRecords[dict[str, Any]]):
    """The samples of MosaicML's MDS shards, as dicts by column, in any order.

    Values have the types of MosaicML's reader: `str`, `int`, NumPy scalars and arrays, decimals, JSON. Images (`jpeg`,
    `png`, and lists of them) are the bytes of their files, to be decoded in an operation, by the workers; `pil` columns
    are arrays of their pixels. The offsets of the samples are checked and copied to `$MILLSTREAM_CACHE` (default:
    `~/.cache/millstream`).

    Args:
        folder: the folder that has `index.json`; `~` is expanded. A `str` may be a URL of `gs://`, `s3://`, `http://`
            or `https://`.
        allow_pickle: True to unpickle columns of the encoding `pkl`, which runs any code in the files: only for files
            that you trust.
        cache: a `FileCache` that copies whole remote shards to a local disk before they are read; None to read only the
            samples.

    Raises:
        FileNotFoundError, PermissionError, …: the index or a shard cannot be found or read.
        DataSourceError: the index or a shard is damaged, or a shard is compressed.
        ValueError: a column has an unknown encoding, or `pkl` without `allow_pickle`; there are no samples.

    Reading raises DataSourceError, with the file and the record, for a sample that cannot be decoded, and for a file
    that was truncated, removed or changed since the source was constructed. At most 512 files stay open.

    Examples:
        >>> source = millstream.MdsDataSource("mds")
        >>> len(source), source[1]
        (3, {'label': 1, 'text': 'two'})
    """

    kind: ClassVar[str] = "MDS"

    def __init__(
        self, folder: str | os.PathLike[str], *, allow_pickle: bool = False, cache: FileCache | None = None
    ) -> None:
        name = os.fsdecode(folder)
        # An absolute name and a URL stay as they are.
        root = name if is_url(name) else os.path.join(os.getcwd(), os.path.expanduser(name))  # noqa: PTH109, PTH111, PTH118
        shards = _shards(f"{root.rstrip('/')}/index.json", root.rstrip("/"))
        self._columns = {path: columns for path, _, columns in shards}
        self._allow_pickle = as_flag(allow_pickle, "allow_pickle")
        for path, columns in self._columns.items():
            for column in columns:
                _check_encoding(column, path, allow_pickle=self._allow_pickle)
        super().__init__(list(self._columns), _MdsFormat(), cache)
        for path, num_samples, _ in shards:
            if self._counts[path] != num_samples:
                raise DataSourceError(
                    f"{path!r} has {self._counts[path]:,} samples, but its index.json lists {num_samples:,}. Restore "
                    "the files."
                )

    def fingerprint(self) -> str:
        """Returns the number of files and records, and digests of the columns and of names, sizes and counts."""
        import hashlib  # noqa: PLC0415  (lazy: OpenSSL takes long to import)

        columns = sorted(set(self._columns.values()))
        digest = hashlib.blake2b(repr([list(map(tuple, each)) for each in columns]).encode(), digest_size=4)
        return f"{super().fingerprint()} columns={len(columns[0])}:{digest.hexdigest()}"

    def _format_of(self, path: str) -> SpanFormat[dict[str, Any]]:
        return _MdsFormat(self._columns[path])


@final
@dataclasses.dataclass(frozen=True)
class _MdsFormat(SpanFormat[dict[str, Any]]):
    """A span is a sample."""

    index_kind: ClassVar[str] = "mds"

    columns: tuple[_Column, ...] = ()

    def offsets(self, scan: Scan) -> Any:
        count = int.from_bytes(scan.read(0, _SIZE_BYTES), "little")
        stop = _SIZE_BYTES * (count + 2)
        if scan.size < stop:
            raise _damaged(scan.path, f"it ends before the offsets of its {count:,} samples")
        offsets = np.frombuffer(scan.read(_SIZE_BYTES, stop - _SIZE_BYTES), "<u4").astype(np.int64)
        if offsets[0] < stop or offsets[-1] != scan.size or (np.diff(offsets) < 0).any():
            raise _damaged(scan.path, "the offsets of its samples are not in order")
        yield offsets

    def decode(self, spans: list[bytes], request: SpanRequest) -> list[dict[str, Any]]:
        decoders = [_decoder(column.encoding) for column in self.columns]
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


def _shards(index_path: str, root: str) -> list[tuple[str, int, tuple[_Column, ...]]]:
    """Returns the path, the number of samples and the columns of each shard."""
    file = open_stored(index_path, identity := identify(index_path, "MDS index"))
    try:
        content = b""
        while len(content) < identity.size and (block := file.read(len(content), identity.size - len(content))):
            content += block
    finally:
        file.close()
    try:
        return [_shard(entry, index_path, root) for entry in json.loads(content)["shards"]]
    except DataSourceError:
        raise
    except _DAMAGE as error:
        raise _damaged(index_path, f"it does not list shards ({error})") from error


def _shard(entry: Mapping[str, Any], index_path: str, root: str) -> tuple[str, int, tuple[_Column, ...]]:
    if entry["version"] != 2 or entry["format"] != "mds":
        raise DataSourceError(f"{index_path!r} must list shards of MDS version 2, got {entry['format']!r} shards.")
    name = str(entry["raw_data"]["basename"])
    path = f"{root}/{name}"
    # The index is data: it must not name files outside its folder.
    if name.startswith("/") or ".." in name.split("/"):
        raise _damaged(index_path, f"it names {name!r}, which is not in its folder")
    zipped = (entry.get("zip_data") or {}).get("basename")
    if zipped and (is_url(root) or not os.path.exists(path)):  # noqa: PTH110
        raise DataSourceError(
            f"{root + '/' + zipped!r} is compressed, so its samples have no random access. Decompress the shards, for "
            "instance by `zstd -d *.zstd`, and remove zip_data from index.json if they are remote."
        )
    columns = zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True)
    return (
        path,
        int(entry["samples"]),
        tuple(_Column(str(name), str(kind), size or None) for name, kind, size in columns),
    )


def _check_encoding(column: _Column, path: str, *, allow_pickle: bool) -> None:
    if column.encoding == "pkl" and not allow_pickle:
        raise ValueError(
            f"Column {column.name!r} of {path!r} is pickled, and unpickling runs any code in the file. If you trust "
            "the file, pass allow_pickle=True."
        )
    try:
        _decoder(column.encoding)
    except (KeyError, ValueError, TypeError):
        raise ValueError(
            f"Column {column.name!r} of {path!r} has an unknown encoding, got {column.encoding!r}."
        ) from None


@functools.cache
def _decoder(encoding: str) -> Callable[[bytes], Any]:
    """Returns the function that decodes a value.

    Raises:
        KeyError, ValueError, TypeError: the encoding is unknown.
    """
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
    sizes = struct.unpack_from(f"<{count}I", content, start + _SIZE_BYTES)
    stops = np.cumsum([start + _SIZE_BYTES * (count + 1), *sizes]).tolist()
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
    "list[jpeg]": functools.partial(_members, _SIZE_BYTES, bytes),
    "list[png]": functools.partial(_members, _SIZE_BYTES, bytes),
    "list[pil]": functools.partial(_members, _SIZE_BYTES, _image),
    "pkl": pickle.loads,
}
"""The functions that decode values of encodings without options."""


def _damaged(path: str, problem: str) -> DataSourceError:
    return DataSourceError(f"{path!r} is not of an MDS dataset, is damaged, or was cut short: {problem}.")
