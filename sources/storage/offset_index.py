"""The index of a file: the offsets of its records, found once and stored in an index file.

The index of `data/a.txt` is in the user's cache folder (see `cache_folder`). `millstream index` stores it beside the
data, as `data/.a.txt.lines-index`, which no glob such as `data/*` matches. A reader accepts both. If neither folder is
writable, the index is in memory.

An index file is little-endian:

    byte    magic[8] = "MSINDEX2"
    byte    digest[16] of the format, its version, and the state of each file that the index depends on
    uint64  size of the data file, in bytes
    uint64  number of offsets, n: the number of records plus one
    byte    zeros[20]
    uint32  CRC-32 of these 60 bytes
    int64   offset of each record, and of the end of the last record [n]
    uint32  CRC-32 of each block of 4,096 offsets [ceil(n / 4096)]

The state of a local file is its inode, size, and times of modification (mtime) and of change (ctime), in nanoseconds.
A program that rewrites a file can reset mtime, but not ctime. The device number is not part of the state, because hosts
that share a file system may number it differently.

Guarantees:
    - An index file is untrusted data. It is opened without following links or waiting for a pipe, is used only if it
      belongs to this user, to root or to the owner of the data, and is never mapped, because truncating a mapped file
      kills the process.
    - Checksums cover every bit, and are verified before an offset is used. A file that is not the complete index of
      this state of the data is rebuilt, even if it is damaged while it is open.
    - An index file appears under its name when it is complete, and replaces any other file of that name.
    - A folder that is full, read-only or another user's is skipped.
"""

import contextlib
import contextvars
import dataclasses
import enum
import functools
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.digests import digest
from millstream.sources.remote.urls import is_url
from millstream.sources.storage.cache_folder import cache_folder, cached_name, mark_used, prepare_cache_folder
from millstream.sources.storage.new_files import new_file
from millstream.sources.storage.offsets import BLOCK, DamagedIndexError, HeldOffsets, Offsets, StoredOffsets, num_blocks
from millstream.sources.storage.open_files import OUT_OF_DESCRIPTORS
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.private_folders import open_trusted

_HEADER = struct.Struct("<8s16sQQ20xI")
_MAGIC = b"MSINDEX2"

_FIRST_BYTES = 4096
"""Bytes of the first read of an index file, enough for the complete index of a small file."""


class Placement(enum.Enum):
    """The folder in which new indices are stored."""

    CACHE = "the user's cache, else beside the data"
    BESIDE = "beside the data, else the user's cache; an existing index in the cache does not suffice"
    NOWHERE = "memory"


placement = contextvars.ContextVar("placement", default=Placement.CACHE)
"""The folder in which sources that are constructed in this context store new indices."""


@dataclasses.dataclass(frozen=True)
class IndexKey:
    """The data and the format of an index.

    The path is empty if the data is not in a file. The version is that of the scan for records. Companions are the
    states of the other files that the index depends on; None for a missing file.
    """

    path: str
    kind: str
    version: int
    identity: FileIdentity
    companions: tuple[FileIdentity | None, ...] = ()

    @functools.cached_property
    def digest(self) -> bytes:
        """A digest of all fields except the path, 16 bytes."""
        states = [state and state.content_state for state in (self.identity, *self.companions)]
        return digest(16, repr((self.kind, self.version, states)).encode())

    @functools.cached_property
    def cached(self) -> str:
        version = self.identity.version if is_url(self.path) else b""
        return os.path.join(cache_folder(), f"{cached_name(self.path, version)}.{self.kind}-index")  # noqa: PTH118

    @property
    def beside(self) -> str | None:
        """The path beside the data; None if the data is not in a local file."""
        if is_url(self.path) or not self.path:
            return None
        folder, name = os.path.split(self.path)
        return os.path.join(folder, f".{name}.{self.kind}-index")  # noqa: PTH118

    def paths(self, where: Placement) -> list[str]:
        """Returns the possible paths, the preferred one first."""
        if where is Placement.NOWHERE:
            return []
        both = [self.cached, self.beside] if where is Placement.CACHE else [self.beside, self.cached]
        return [path for path in both if path is not None]


def find_offsets(key: IndexKey, where: Placement = Placement.CACHE) -> Offsets | None:
    paths = [key.cached, key.beside] if where is not Placement.BESIDE else [key.beside or key.cached]
    for path in paths:
        if path is not None and (offsets := _open(path, key)) is not None:
            return offsets
    return None


def store_offsets(
    key: IndexKey, chunks: Callable[[], Iterable[Any]], where: Placement = Placement.CACHE
) -> tuple[Offsets, str | None, list[tuple[str, OSError]]]:
    """Stores the index of a file. Returns it, its path (None for memory), and the errors at the paths tried before.

    `chunks` yields the offsets in order, in arrays. It is called again if a path fails.
    """
    failures: list[tuple[str, OSError]] = []
    for path in key.paths(where):
        try:
            _write(path, key, chunks())
        except DataSourceError:
            raise
        except OSError as error:
            failures.append((path, error))
            continue
        if (offsets := _open(path, key)) is not None:
            return offsets, path, failures
        # Another process has replaced it meanwhile. No other path is better.
        failures.append((path, FileExistsError(0, "another process stores the index of another state there", path)))
    # If the error came from reading the data, and not from the folder, it is raised here again.
    found = [np.asarray(chunk, np.int64) for chunk in chunks()]
    return HeldOffsets(np.concatenate(found)), None, failures


def remove_offsets(key: IndexKey) -> None:
    """Removes the stored index of a file, as far as permitted."""
    for path in key.paths(Placement.CACHE):
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


def _open(path: str, key: IndexKey) -> Offsets | None:
    """Returns the index at a path, or None if there is no file or another one."""
    try:
        descriptor = open_trusted(path, key.identity.owner)
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise  # The caller closes another file. To scan the data again would take longer.
        return None
    stored = None
    try:
        start = os.pread(descriptor, _FIRST_BYTES, 0)
        size, count = _parse_header(start[: _HEADER.size], key)
        num_bytes = _HEADER.size + 8 * count + 4 * num_blocks(count)
        if size != key.identity.size or os.fstat(descriptor).st_size != num_bytes:
            return None
        mark_used(descriptor)
        if num_bytes <= _FIRST_BYTES:
            content, checksum = start[_HEADER.size : num_bytes - 4], start[num_bytes - 4 : num_bytes]
            is_valid = zlib.crc32(content) == int.from_bytes(checksum, "little")
            return HeldOffsets(np.frombuffer(content, "<i8").astype(np.int64, copy=False)) if is_valid else None
        stored = StoredOffsets(descriptor, count)
    except (OSError, DamagedIndexError):
        return None
    else:
        return stored
    finally:
        if stored is None:
            os.close(descriptor)


def _parse_header(header: bytes, key: IndexKey) -> tuple[int, int]:
    """Returns the size of the data file and the number of offsets, or raises DamagedIndexError."""
    if len(header) == _HEADER.size:
        magic, digest, size, count, checksum = _HEADER.unpack(header)
        if (magic, digest, checksum) == (_MAGIC, key.digest, zlib.crc32(header[:-4])) and count:
            return size, count
    raise DamagedIndexError("it is not the index of this file")


def _write(path: str, key: IndexKey, chunks: Iterable[Any]) -> None:
    if path == key.cached:
        prepare_cache_folder()
        mode = 0o600
    else:
        # The index has the same readers as the data.
        mode = os.stat(key.path).st_mode & 0o644 | 0o600  # noqa: PTH116  (paths are strings throughout)
    # Not synced: the checksums detect the effects of a power failure.
    with new_file(path, mode=mode, is_synced=False) as file:
        file.write(bytes(_HEADER.size))
        count, checksums = 0, []
        for block in _blocks(chunks):
            file.write(block.data)
            count += len(block)
            checksums.append(zlib.crc32(block.data))
        file.write(np.array(checksums, "<u4").data)
        header = _HEADER.pack(_MAGIC, key.digest, key.identity.size, count, 0)[:-4]
        file.seek(0)
        file.write(header + zlib.crc32(header).to_bytes(4, "little"))


def _blocks(chunks: Iterable[Any]) -> Iterator[NDArray[np.int64]]:
    """Yields the offsets in full blocks, and a last one that may be smaller."""
    pending: list[NDArray[np.int64]] = []
    count = 0
    for chunk in chunks:
        pending.append(np.asarray(chunk, "<i8"))
        count += len(chunk)
        if count >= BLOCK:
            joined = np.concatenate(pending)
            stop = count - count % BLOCK
            yield from joined[:stop].reshape(-1, BLOCK)
            pending, count = [joined[stop:]], count - stop
    if count:
        yield np.concatenate(pending)
