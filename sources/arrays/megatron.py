"""The sequences of Megatron's indexed datasets.

An indexed dataset (megatron/core/datasets/indexed_dataset.py) is two files: PREFIX.bin, the concatenated tokens of all
sequences, and PREFIX.idx, all of it little-endian:

    byte    magic[9] = "MMIDIDX", two zeros
    uint64  version = 1
    uint8   code of the tokens' dtype
    uint64  number of sequences, n
    uint64  number of documents
    int32   number of tokens of each sequence [n]
    int64   offset of each sequence in the .bin file, in bytes [n]
    …       offsets of documents, and more, which is not read here
"""

import contextlib
import dataclasses
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.files.span_files import Scan, SpanFormat, SpanRequest
from millstream.sources.files.spans import SpanRecords
from millstream.sources.remote.urls import with_other_name
from millstream.sources.storage.byte_files import StoredFile, identify, open_stored
from millstream.sources.storage.file_cache import FileCache

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""The header of an index: magic, version, code of the dtype, number of sequences, number of documents."""

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}

_SEQUENCES_PER_READ = 1 << 17


@final
class MegatronDataSource(SpanRecords[NDArray[Any]]):
    """The sequences of Megatron's indexed datasets (PREFIX.bin and PREFIX.idx), in any order.

    A record is a sequence, usually a document: its tokens, as an array of shape (length,) and of the dtype in the file.
    The offsets of the sequences are checked and copied to `$MILLSTREAM_CACHE` (default: `~/.cache/millstream`), or
    beside the file by `millstream index`.

    Args:
        prefix: one path or a sequence of paths, in the order of the records, with or without `.bin`. A path may be a
            pattern, such as `data/*_text_document`, or, as a `str`, a URL of `gs://`, `s3://`, `http://` or `https://`.
            The query of a signed URL is used for both files.
        cache: a `FileCache` for local copies of whole remote files; None to read only the records.

    Raises:
        FileNotFoundError, IsADirectoryError, …: a file cannot be found or read, or a pattern has no match.
        DataSourceError: an index is not one of Megatron's, is damaged, or does not fit its `.bin` file.
        TypeError: paths that are not paths, or a set of paths, which has no order.
        ValueError: no paths.

    Reading raises DataSourceError, with the file and the record, for a file that was truncated, removed or changed
    since the source was constructed. At most 512 files stay open.

    Examples:
        >>> source = millstream.MegatronDataSource("corpus_text_document")
        >>> len(source), source[1]
        (2, array([0, 1, 2, 3], dtype=uint16))
    """

    kind: ClassVar[str] = "Megatron"

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
        with _open_index(scan.path) as (lengths_file, _), _open_index(scan.path) as (starts_file, _):
            for first in range(0, count, _SEQUENCES_PER_READ):
                number = min(_SEQUENCES_PER_READ, count - first)
                lengths = np.frombuffer(lengths_file.read(HEADER.size + 4 * first, 4 * number), "<i4")
                starts = np.frombuffer(starts_file.read(HEADER.size + 4 * count + 8 * first, 8 * number), "<i8")
                stops = stop + np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
                expected = np.concatenate([[stop], stops[:-1]])
                if lengths.min() < 0 or (starts != expected).any():
                    raise _damaged(scan.path, "its sequences are not contiguous")
                stop = int(stops[-1])
                yield starts
        if stop != scan.size:
            raise _damaged(scan.path, f"its sequences have {stop:,} bytes, but the .bin file has {scan.size:,}")
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


def index_path_of(path: str) -> str:
    return with_other_name(path, lambda name: name.removesuffix(".bin") + ".idx")


@contextlib.contextmanager
def _open_index(path: str) -> Iterator[tuple[StoredFile, int]]:
    """Opens the index of a .bin file until the block ends, and yields it with its size."""
    index_path = index_path_of(path)
    identity = identify(index_path, "Megatron index")
    with contextlib.closing(open_stored(index_path, identity)) as file:
        yield file, identity.size


def read_header(path: str) -> tuple[str, int]:
    """Returns the dtype of the tokens of a .bin file, and the number of its sequences."""
    with _open_index(path) as (file, size):
        header = file.read(0, HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise _damaged(path, "it does not begin as one")
    _, version, code, count, _ = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
        raise _damaged(path, f"its version {version} or the code of its dtype {code} is unknown")
    if HEADER.size + 12 * count > size:
        raise _damaged(path, f"it ends before the offsets of its {count:,} sequences")
    return DTYPES[code], count


def _damaged(path: str, reason: str) -> DataSourceError:
    return DataSourceError(
        f"{index_path_of(path)!r} is not the index of a Megatron dataset, is damaged, or does not fit its .bin file: "
        f"{reason}. Restore the files."
    )
