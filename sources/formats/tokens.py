"""Tokens in files: windows of flat ones, and the sequences of Megatron's indexed datasets (see `megatron_index`).

Flat files are `.bin` of nanoGPT, llm.c and Megatron, `.npy`, and raw arrays under any name. A window is found by
arithmetic, so a file needs no index. Headers are skipped:

    .npy      NumPy's header, which has the dtype and the length; OLMo's `.npy` files have none and are raw
    llm.c     256 int32: the magic 20240520 (uint16 tokens) or 20240801 (uint32), a version, the number of tokens, zeros
    Megatron  nothing; the dtype is in the `.idx` file beside the `.bin` file
    others    nothing, as in nanoGPT's files; the dtype must be given
"""

import contextlib
import dataclasses
import functools
import io
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.core.warn import log_warning
from millstream.errors import DataSourceError
from millstream.sources.base import RecordKeys
from millstream.sources.files.byte_files import MAX_PREAD_BYTES, LocalFile, StoredFile, exists, open_stored
from millstream.sources.files.compression import compressed_error, compression_of
from millstream.sources.files.file_cache import FileCache
from millstream.sources.files.megatron_index import (
    HEADER,
    damaged_index,
    index_path_of,
    open_index,
    read_header,
)
from millstream.sources.files.multi_file import FileRecords
from millstream.sources.files.paths import FileIdentity
from millstream.sources.files.spans import Scan, SpanFormat, SpanRecords, SpanRequest, check_reads, complete_spans
from millstream.sources.memory import records_of_arrays
from millstream.sources.remote.urls import with_other_name, without_query

_SEQUENCES_PER_READ = 1 << 17


@final
class MegatronDataSource(SpanRecords[NDArray[Any]]):
    """The sequences of Megatron's indexed datasets (PREFIX.bin and PREFIX.idx), in any order.

    A record is a sequence, usually a document: its tokens, as an array of shape (length,) and of the dtype in the file.

    Args:
        prefix: one path or a sequence of paths, in the order of the records, with or without `.bin`. A path may be a
            pattern, such as `data/*_text_document`, or, as a `str`, a URL of `gs://`, `s3://`, `http://` or `https://`.
            The query of a signed URL is used for both files.
        cache: a `FileCache` for local copies of whole remote files.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: an index is not one of Megatron's, is damaged, or does not fit its `.bin` file.

    Reading raises DataSourceError, with the file and the record, for a file that has changed, see "All sources of
    files" in docs/formats.md.

    Examples:
        >>> source = millstream.MegatronDataSource("corpus_text_document")
        >>> len(source), source[1]
        (2, array([0, 1, 2, 3], dtype=uint16))
    """

    kind = "Megatron"

    def __init__(self, prefix: Any, *, cache: FileCache | None = None) -> None:
        self._dtypes: dict[str, str] = {}
        super().__init__(_data_paths(prefix), _MegatronFormat(), cache)

    def fingerprint(self) -> str:
        """Returns the number of files and records, the dtypes, and a digest of names, sizes, counts and ranges."""
        return f"{super().fingerprint()} dtype={','.join(sorted(set(self._dtypes.values())))}"

    def sequence_lengths(self) -> NDArray[np.int64]:
        """Returns the number of tokens of each record, without reading any of them: shape (records,)."""
        lengths = [self._sizes_within(file) // np.dtype(self._dtypes[file.path]).itemsize for file in self._ranges]
        return np.concatenate(lengths)

    def _count(self, path: str) -> int:
        self._dtypes[path] = np.dtype(read_header(path)[0]).name
        return super()._count(path)

    def _format_of(self, path: str) -> SpanFormat[NDArray[Any]]:
        return _MegatronFormat(self._dtypes[path])


@final
@dataclasses.dataclass(frozen=True)
class _MegatronFormat(SpanFormat[NDArray[Any]]):
    """A span is the tokens of a sequence."""

    index_kind: ClassVar[str] = "megatron"

    dtype: str = ""

    def companions(self, path: str) -> list[str]:
        return [index_path_of(path)]

    def offsets(self, scan: Scan) -> Iterator[NDArray[np.int64]]:
        dtype, count = read_header(scan.path)
        stop = 0
        # Opened twice, because it is read at two alternating offsets, and files in stores are read ahead.
        with open_index(scan.path) as (lengths_file, _), open_index(scan.path) as (starts_file, _):
            for first in range(0, count, _SEQUENCES_PER_READ):
                number = min(_SEQUENCES_PER_READ, count - first)
                lengths = np.frombuffer(lengths_file.read(HEADER.size + 4 * first, 4 * number), "<i4")
                starts = np.frombuffer(starts_file.read(HEADER.size + 4 * count + 8 * first, 8 * number), "<i8")
                stops = stop + np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
                expected = np.concatenate([[stop], stops[:-1]])
                if lengths.min() < 0 or (starts != expected).any():
                    raise damaged_index(scan.path, "its sequences are not contiguous")
                stop = int(stops[-1])
                yield starts
        if stop != scan.size:
            raise damaged_index(scan.path, f"its sequences have {stop:,} bytes, but the .bin file has {scan.size:,}")
        yield np.array([stop])

    def decode(self, spans: list[bytes], request: SpanRequest) -> list[NDArray[Any]]:  # noqa: ARG002  (any bytes are tokens)
        dtype = np.dtype(self.dtype).newbyteorder("<")
        # Copied: an operation may write to a record.
        return [np.frombuffer(span, dtype).astype(self.dtype) for span in spans]


def _data_paths(prefix: Any) -> Any:
    """Returns the paths of the .bin files. Other values are returned, and refused later."""
    if isinstance(prefix, str | os.PathLike):
        return with_other_name(os.fsdecode(prefix), lambda name: name if name.endswith(".bin") else f"{name}.bin")
    if isinstance(prefix, Iterable) and not isinstance(prefix, bytes | set | frozenset):
        return [_data_paths(one) for one in prefix]
    return prefix


_NPY_MAGIC = b"\x93NUMPY"
_LLM_C = struct.Struct("<3i")
_LLM_C_BYTES = 1024
_LLM_C_DTYPES = {20240520: "<u2", 20240801: "<u4"}
_BEGINNING_BYTES = 4096
"""The number of bytes that are read of each file for its header. That of NumPy has some 128 bytes."""


_MAX_DROPPED = 0.05
"""The share of tokens that may be in no window without a warning."""


class TokenLayout(NamedTuple):
    """The position of the tokens in a file: their little-endian dtype, and the offset of the first one in bytes."""

    dtype: np.dtype[Any]
    start: int
    num_tokens: int


@final
class TokenDataSource(FileRecords[NDArray[Any]]):
    """Windows of the tokens in flat files, in any order. No index is needed, whatever the number of tokens.

    A record is `{"tokens": array of shape (window,)}` of the files' dtype. Windows begin every `stride` tokens and stay
    within one file; the tokens of a file after its last complete window are dropped, which is a warning in the log if
    they are more than 5 % of all. Files may be those of nanoGPT, llm.c, Megatron (the `.bin` file) and OLMo, or NumPy's
    `.npy` of one dimension.

    Args:
        paths: one path or a sequence of paths, in the order of the records. A path may be a pattern, such as
            `data/*.bin`, or, as a `str`, a URL.
        window: the number of tokens in a record. To predict each next token of a context of n, read n + 1.
        stride: the number of tokens from the beginning of one window to that of the next; `window` by default. With
            `window - 1`, the last token of a window is the first of the next.
        dtype: the integer dtype of the tokens, such as `"uint16"`; None to read it from the files. Raw files, such as
            nanoGPT's, do not have it.
        cache: a `FileCache` for local copies of whole remote files.

    Attributes:
        dropped_tokens: the number of tokens of all files after their last complete windows.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        DataSourceError: a header is damaged or is that of another array, or the size of a file does not fit.
        TypeError, ValueError: an argument has the wrong type or is out of range, the dtype is unknown, or the files
            have several dtypes.

    Reading raises DataSourceError, with the file and the record, for a file that has changed, see "All sources of
    files" in docs/formats.md.

    Examples:
        >>> np.arange(100, dtype=np.uint16).tofile("tokens.bin")
        >>> source = millstream.TokenDataSource("tokens.bin", window=9, stride=8, dtype="uint16")
        >>> len(source), source[1]["tokens"]
        (12, array([ 8,  9, 10, 11, 12, 13, 14, 15, 16], dtype=uint16))
    """

    kind = "token"

    def __init__(
        self,
        paths: Any,
        window: SupportsIndex,
        stride: SupportsIndex | None = None,
        dtype: Any = None,
        *,
        cache: FileCache | None = None,
    ) -> None:
        self._window = as_integer(window, "window", 1)
        self._stride = self._window if stride is None else as_integer(stride, "stride", 1)
        self._dtype = None if dtype is None else _integer_dtype(dtype)
        self._layouts: dict[str, TokenLayout] = {}
        super().__init__(paths, cache)
        first, *others = self._paths
        for path in others:
            if self._layouts[path].dtype != self._layouts[first].dtype:
                raise ValueError(
                    f"All files must have tokens of one dtype, got {self._layouts[first].dtype} in {first!r} and "
                    f"{self._layouts[path].dtype} in {path!r}: make a source of each, and concatenate or mix them."
                )
        total = sum(layout.num_tokens for layout in self._layouts.values())
        self.dropped_tokens = sum(map(self._dropped_in, self._paths))
        if self.dropped_tokens > _MAX_DROPPED * total:
            log_warning(
                f"{self.dropped_tokens:,} of {total:,} tokens are in no window of {self!r}, because windows stay "
                "within one file. Concatenate short files, or choose a shorter window."
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the tokens."""
        return self._layouts[self._paths[0]].dtype.newbyteorder("=")

    def __getitem__(self, record_key: SupportsIndex) -> dict[str, NDArray[Any]]:  # type: ignore[override]  # arrays below
        return {"tokens": super().__getitem__(record_key).astype(self.dtype, copy=False)}

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[dict[str, NDArray[Any]]]:  # type: ignore[override]
        found = super().__getitems__(record_keys)
        windows = np.concatenate(found) if isinstance(found, list) and found else np.asarray(found, self.dtype)
        return records_of_arrays({"tokens": windows.reshape(-1, self._window)}, len(found))

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.dropped_tokens:,} tokens dropped)"

    def _dropped_in(self, path: str) -> int:
        windows = self._counts[path]
        return self._layouts[path].num_tokens - ((windows - 1) * self._stride + self._window if windows else 0)

    def fingerprint(self) -> str:
        """Returns the number of files and records, window, stride, dtype, and a digest of names, sizes and ranges."""
        return f"{super().fingerprint()} window={self._window} stride={self._stride} dtype={self.dtype.name}"

    def _count(self, path: str) -> int:
        layout = self._layouts[path] = _layout_of(path, self._identities[path], self._dtype)
        return max(0, (layout.num_tokens - self._window) // self._stride + 1)

    def _open(self, path: str, location: str) -> "_TokenFile":
        layout = self._layouts[path]
        return _TokenFile(
            path,
            open_stored(path, self._identities[path], location),
            layout,
            self._stride * layout.dtype.itemsize,
            self._window * layout.dtype.itemsize,
            self._counts[path],
        )


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _TokenFile:
    """An open file of windows."""

    path: str
    file: StoredFile
    layout: TokenLayout
    stride_bytes: int
    window_bytes: int
    num_records: int

    def read(self, positions: Sequence[int], keys: Sequence[int]) -> Any:
        """Returns the windows at the positions, shape (n, window); the keys are for errors."""
        return self.begin(positions, keys)()

    def begin(self, positions: Sequence[int], keys: Sequence[int]) -> Callable[[], Any]:
        """Requests the windows, and returns the function that waits for them."""
        starts = [self.layout.start + position * self.stride_bytes for position in positions]
        lengths = [self.window_bytes] * len(starts)
        request = SpanRequest(self.path, positions, keys, starts, self.num_records)
        file = self.file
        if isinstance(file, LocalFile) and self.window_bytes < MAX_PREAD_BYTES:
            block = np.empty((len(starts), self.window_bytes), np.uint8)

            def windows() -> Any:
                check_reads(functools.partial(file.read_into, starts, block), lengths, request)
                return block.view(self.layout.dtype)

            return windows
        finish = file.begin(starts, lengths)
        return lambda: np.frombuffer(
            bytearray().join(complete_spans(finish, lengths, request)), self.layout.dtype
        ).reshape(len(starts), -1)

    def close(self) -> None:
        self.file.close()


def _integer_dtype(given: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] | None = None
    with contextlib.suppress(TypeError):
        dtype = np.dtype(given)
    if dtype is None or dtype.kind not in "iu":
        raise TypeError(f"dtype must be an integer dtype, such as 'uint16', got {given!r}.")
    return dtype.newbyteorder("<")


def _layout_of(path: str, identity: FileIdentity, given: np.dtype[Any] | None) -> TokenLayout:
    size = identity.size
    with contextlib.closing(open_stored(path, identity)) as file:
        beginning = file.read(0, min(size, _BEGINNING_BYTES))
    if (compression := compression_of(beginning)) is not None:
        raise compressed_error(path, compression)
    layout = _layout_by_header(path, beginning)
    if layout is None:
        dtype = given
        if dtype is None and without_query(path).endswith(".bin") and exists(index_path_of(path)):
            dtype = np.dtype(read_header(path)[0])
        if dtype is None:
            raise ValueError(
                f"dtype must be given, because {path!r} has no header. Pass dtype='uint16' for the tokens of a "
                "vocabulary below 65,536, else dtype='uint32'."
            )
        layout = TokenLayout(dtype, 0, size // dtype.itemsize)
    elif given is not None and given != layout.dtype:
        raise ValueError(f"dtype must be that of the files, but {path!r} has {layout.dtype}, got {given}.")
    end = layout.start + layout.num_tokens * layout.dtype.itemsize
    if end != size:
        raise DataSourceError(
            f"{path!r} has {size:,} bytes, but {layout.num_tokens:,} tokens of {layout.dtype} from byte {layout.start} "
            f"on end at byte {end:,}: it is cut short, or has another dtype."
        )
    return layout


def _layout_by_header(path: str, beginning: bytes) -> TokenLayout | None:
    """Returns the position of the tokens by the header of NumPy or llm.c, or None if there is no header."""
    if beginning.startswith(_NPY_MAGIC):
        header = io.BytesIO(beginning)
        try:
            major, _ = np.lib.format.read_magic(header)
            read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(header)
        except Exception as error:  # NumPy raises errors of many types, such as those of Python's tokenizer.
            raise DataSourceError(f"{path!r} has a damaged NumPy header: {error}.") from error
        if len(shape) != 1 or dtype.kind not in "iu" or dtype != dtype.newbyteorder("<"):
            raise DataSourceError(
                f"{path!r} holds an array of shape {shape} and dtype {dtype}; tokens are integers, little-endian, in "
                "one dimension. Save them with numpy.save(path, tokens.reshape(-1))."
            )
        return TokenLayout(dtype.newbyteorder("<"), header.tell(), shape[0])
    if len(beginning) >= _LLM_C_BYTES:
        magic, _, num_tokens = _LLM_C.unpack_from(beginning)
        if magic in _LLM_C_DTYPES:
            return TokenLayout(np.dtype(_LLM_C_DTYPES[magic]), _LLM_C_BYTES, num_tokens)
    return None
