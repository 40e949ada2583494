"""The index of a file: the offsets of its records, found once and stored in an index file.

The index of `data/a.txt` is in the user's cache folder (see `cache_folder`). `millstream index` stores it beside the
data, as `data/.a.txt.lines-index`, which no glob such as `data/*` matches. A reader accepts both. If neither folder is
writable, the index is in memory.

An index file is little-endian:

    byte    magic[8] = "MSINDEX2"
    byte    digest[16] of the format, its version, and the state of each file that the index depends on
    uint64  size of the data file, in bytes
    uint64  number of offsets, n: the number of records plus one
    byte    digest[16] of the same with all times cut to seconds; beside the data only
    byte    zeros[4]
    uint32  CRC-32 of these 60 bytes
    int64   offset of each record, and of the end of the last record [n]
    uint32  CRC-32 of each block of 4,096 offsets [ceil(n / 4096)]

In the cache, the state of a local file is its inode, size, and times of modification (mtime) and of change (ctime), in
nanoseconds. A program that rewrites a file can reset mtime, but not ctime. The device number is not part of the state,
because hosts that share a file system may number it differently.

Beside the data, it is the size, mtime, and a digest of the first, middle and last 4 KB. So an index is valid for a copy
that keeps the time of the data (`cp -a`, `rsync -a`, `tar`, a layer of an image), under any name and with any
permissions. Some of these copy whole seconds only, hence the second digest.

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
from millstream.sources.storage.byte_files import LocalFile
from millstream.sources.storage.cache_folder import cache_folder, cached_name, mark_used, prepare_cache_folder
from millstream.sources.storage.new_files import new_file
from millstream.sources.storage.offsets import BLOCK, DamagedIndexError, HeldOffsets, Offsets, StoredOffsets, num_blocks
from millstream.sources.storage.open_files import OUT_OF_DESCRIPTORS
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.private_folders import open_trusted

_HEADER = struct.Struct("<8s16sQQ16s4xI")
_MAGIC = b"MSINDEX2"

_FIRST_BYTES = 4096
"""Bytes of the first read of an index file, enough for the complete index of a small file."""

_SAMPLE_BYTES = 4096
_SECOND = 1_000_000_000


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
    paths and states of the other files that the index depends on; None for a missing file.
    """

    path: str
    kind: str
    version: int
    identity: FileIdentity
    companions: tuple[tuple[str, FileIdentity | None], ...] = ()

    def digests(self, path: str) -> tuple[bytes, bytes]:
        """Returns digests of the format and of the state of all files, for an index at a path, 16 bytes each.

        The second one is that of a copy of the files whose times are cut to seconds. It is zeros in the cache.
        """
        files = [(self.path, self.identity), *self.companions]
        if path == self.cached:
            return self._digest([state and state.content_state for _, state in files]), bytes(16)
        samples = [state and (state.version or _sample(name, state.size)) for name, state in files]
        times = [state.modified if state and not state.version else 0 for _, state in files]
        seconds = [time - time % _SECOND for time in times]
        return self._digest([samples, times]), self._digest([samples, seconds])

    def _digest(self, states: list[Any]) -> bytes:
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
    descriptor, stored = -1, None
    try:
        descriptor = open_trusted(path, key.identity.owner)
        start = os.pread(descriptor, _FIRST_BYTES, 0)
        count = _parse_header(start[: _HEADER.size], path, key)
        num_bytes = _HEADER.size + 8 * count + 4 * num_blocks(count)
        if os.fstat(descriptor).st_size != num_bytes:
            return None
        mark_used(descriptor)
        if num_bytes <= _FIRST_BYTES:
            content, checksum = start[_HEADER.size : num_bytes - 4], start[num_bytes - 4 : num_bytes]
            is_valid = zlib.crc32(content) == int.from_bytes(checksum, "little")
            return HeldOffsets(np.frombuffer(content, "<i8").astype(np.int64, copy=False)) if is_valid else None
        stored = StoredOffsets(descriptor, count)
    except DamagedIndexError:
        return None
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise  # The caller closes another file. To scan the data again would take longer.
        return None
    else:
        return stored
    finally:
        if stored is None and descriptor >= 0:
            os.close(descriptor)


def _parse_header(header: bytes, path: str, key: IndexKey) -> int:
    """Returns the number of offsets, or raises DamagedIndexError if the header is not that of the key."""
    if len(header) == _HEADER.size:
        magic, exact, size, count, seconds, checksum = _HEADER.unpack(header)
        is_whole = (magic, size, checksum) == (_MAGIC, key.identity.size, zlib.crc32(header[:-4])) and count
        if is_whole and key.digests(path)[0] in (exact, seconds):
            return int(count)
    raise DamagedIndexError("it is not the index of this file")


def _sample(path: str, size: int) -> bytes:
    """Returns the size of a local file and a digest of its first, middle and last bytes."""
    starts = (0, max(0, (size - _SAMPLE_BYTES) // 2), max(0, size - _SAMPLE_BYTES))
    with contextlib.closing(LocalFile(path)) as file:
        return digest(16, b"%d:" % size, *(file.read(start, _SAMPLE_BYTES) for start in starts))


def _write(path: str, key: IndexKey, chunks: Iterable[Any]) -> None:
    if path == key.cached:
        prepare_cache_folder()
        mode = 0o600
    else:
        # The index has the same readers as the data.
        mode = os.stat(key.path).st_mode & 0o644 | 0o600  # noqa: PTH116  (paths are strings throughout)
    # Before the scan, which ends with a look at the state of the file.
    exact, seconds = key.digests(path)
    # Not synced: the checksums detect the effects of a power failure.
    with new_file(path, mode=mode, is_synced=False) as file:
        file.write(bytes(_HEADER.size))
        count, checksums = 0, []
        for block in _blocks(chunks):
            file.write(block.data)
            count += len(block)
            checksums.append(zlib.crc32(block.data))
        file.write(np.array(checksums, "<u4").data)
        header = _HEADER.pack(_MAGIC, exact, key.identity.size, count, seconds, 0)[:-4]
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
