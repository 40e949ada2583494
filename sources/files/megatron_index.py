"""The index of Megatron's datasets, which other files of tokens may have as well.

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
import struct
from collections.abc import Iterator

from millstream.errors import DataSourceError
from millstream.sources.files.byte_files import StoredFile, identify, open_stored
from millstream.sources.remote.urls import with_other_name

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""The header of an index: magic, version, code of the dtype, number of sequences, number of documents."""

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def index_path_of(path: str) -> str:
    return with_other_name(path, lambda name: name.removesuffix(".bin") + ".idx")


@contextlib.contextmanager
def open_index(path: str) -> Iterator[tuple[StoredFile, int]]:
    """Opens the index of a .bin file until the block ends, and yields it with its size."""
    index_path = index_path_of(path)
    identity = identify(index_path, "Megatron index")
    with contextlib.closing(open_stored(index_path, identity)) as file:
        yield file, identity.size


def read_header(path: str) -> tuple[str, int]:
    """Returns the dtype of the tokens of a .bin file, and the number of its sequences."""
    with open_index(path) as (file, size):
        header = file.read(0, HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise damaged_index(path, "it does not begin as one")
    _, version, code, count, _ = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
        raise damaged_index(path, f"its version {version} or the code of its dtype {code} is unknown")
    if HEADER.size + 12 * count > size:
        raise damaged_index(path, f"it ends before the offsets of its {count:,} sequences")
    return DTYPES[code], count


def damaged_index(path: str, reason: str) -> DataSourceError:
    return DataSourceError(
        f"{index_path_of(path)!r} is not the index of a Megatron dataset, is damaged, or does not fit its .bin file: "
        f"{reason}. Restore the files."
    )
