"""The index of a file: the offsets of its records, found once and stored in an index file.

The index of `data/a.txt` is in the user's cache folder (see `private_files`). `millstream index` stores it beside the
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
    - Any number of threads may read an index.
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
import itertools
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.digests import digest
from millstream.sources.files.byte_files import LocalFile
from millstream.sources.files.open_files import OUT_OF_DESCRIPTORS
from millstream.sources.files.paths import FileIdentity
from millstream.sources.files.private_files import (
    cache_folder,
    cached_name,
    mark_used,
    new_file,
    open_trusted,
    prepare_cache_folder,
)
from millstream.sources.remote.urls import is_url

HEADER_BYTES = 64
"""Bytes of an index file before its offsets."""

BLOCK = 4096
"""Offsets per checksum. Verifying a block takes 10 µs, so a shuffled read whose every block is new stays fast."""

HELD_BYTES = 32 << 20
"""The memory that the indices of a source may take per process. Further indices are read from their files."""

CARRIED_BYTES = 4 << 20
"""The size of the indices that a pickled source carries to worker processes, which need not open them again."""

_HELD_OVERHEAD_BYTES = 256
"""The overhead of an index in memory, besides its offsets."""


class DamagedIndexError(Exception):
    """An index file does not match its checksums."""


@final
class HeldOffsets:
    """An index in memory: offsets of shape (records + 1,)."""

    def __init__(self, offsets: NDArray[np.int64]) -> None:
        self._offsets = offsets

    @property
    def num_records(self) -> int:
        return len(self._offsets) - 1

    def spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the start and end offsets of the given records, in bytes."""
        try:
            return self._offsets[rows], self._offsets[rows + 1]
        except IndexError:  # It is the index of another state of the file.
            raise DamagedIndexError("it has too few records") from None

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the offsets `start` … `stop - 1`."""
        return self._offsets[start:stop]


@final
class StoredOffsets:
    """An index in a file, which it owns, read by `pread`. A block is verified when it is first used."""

    def __init__(self, descriptor: int, count: int) -> None:
        self._descriptor = descriptor
        self._count = count
        self._is_checked = bytearray(num_blocks(count))
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        self._finalizer.atexit = False

    @property
    def num_records(self) -> int:
        return self._count - 1

    def spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if rows.max(initial=-1) >= self.num_records:
            raise DamagedIndexError("it has too few records")
        for block in np.union1d(rows // BLOCK, (rows + 1) // BLOCK).tolist():
            if not self._is_checked[block]:
                self._read_block(block)
        positions = (rows * 8 + HEADER_BYTES).tolist()
        pairs = np.frombuffer(b"".join([self._read(position, 16) for position in positions]), "<i8").reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the offsets `start` … `stop - 1`; raises DamagedIndexError."""
        first = start // BLOCK
        blocks = [self._read_block(block) for block in range(first, -(-stop // BLOCK))]
        offsets = np.frombuffer(b"".join(blocks), "<i8")[start - first * BLOCK : stop - first * BLOCK]
        return offsets.astype(np.int64, copy=False)

    def held(self) -> HeldOffsets:
        """Loads the index into memory; raises DamagedIndexError."""
        return HeldOffsets(self.between(0, self._count))

    def close(self) -> None:
        self._finalizer()

    def _read_block(self, block: int) -> bytes:
        """Returns a block of offsets, and verifies its checksum."""
        start = HEADER_BYTES + 8 * BLOCK * block
        content = self._read(start, 8 * min(BLOCK, self._count - BLOCK * block))
        stored = self._read(HEADER_BYTES + 8 * self._count + 4 * block, 4)
        if zlib.crc32(content) != int.from_bytes(stored, "little"):
            raise DamagedIndexError(f"the checksum of its block {block} is wrong")
        self._is_checked[block] = 1
        return content

    def _read(self, position: int, length: int) -> bytes:
        try:
            content = os.pread(self._descriptor, length, position)
        except OSError as error:
            raise DamagedIndexError(f"it cannot be read: {error.strerror}") from error
        if len(content) != length:
            raise DamagedIndexError("it was truncated")
        return content


def num_blocks(count: int) -> int:
    return -(-count // BLOCK)


Offsets: TypeAlias = HeldOffsets | StoredOffsets
"""The index of a file. Any number of threads may read it."""


@final
class HeldIndices:
    """Indices by the path of their file. A copy in another process has the first CARRIED_BYTES of them."""

    def __init__(self) -> None:
        self._by_path: dict[str, HeldOffsets] = {}
        self._num_bytes = 0
        self._built: list[str | None] = []
        self._failures: list[tuple[str, str, OSError]] = []

    def __getstate__(self) -> dict[str, Any]:
        room, carried = CARRIED_BYTES, {}
        for path, held in list(self._by_path.items()):
            if (room := room - 8 * (held.num_records + 1)) < 0:
                break
            carried[path] = held.between(0, held.num_records + 1)
        # One array for all, because a source may have a file for each record.
        offsets = np.concatenate(list(carried.values())) if carried else np.zeros(0, np.int64)
        return {"paths": list(carried), "counts": list(map(len, carried.values())), "offsets": offsets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        HeldIndices.__init__(self)
        stops = itertools.accumulate(state["counts"])
        for path, count, stop in zip(state["paths"], state["counts"], stops, strict=True):
            self.held(path, HeldOffsets(state["offsets"][stop - count : stop]))

    def get(self, path: str) -> HeldOffsets | None:
        return self._by_path.get(path)

    def held(self, path: str, offsets: Offsets) -> Offsets:
        """Returns the index, loaded into memory if there is room; raises DamagedIndexError."""
        num_bytes = 8 * (offsets.num_records + 1) + _HELD_OVERHEAD_BYTES
        if self._num_bytes + num_bytes > HELD_BYTES:
            return offsets
        if isinstance(offsets, StoredOffsets):
            stored, offsets = offsets, offsets.held()
            stored.close()
        if isinstance(offsets, HeldOffsets) and path not in self._by_path:
            self._num_bytes += num_bytes
            self._by_path[path] = offsets
        return offsets

    def remove(self, path: str) -> None:
        if (held := self._by_path.pop(path, None)) is not None:
            self._num_bytes -= 8 * (held.num_records + 1) + _HELD_OVERHEAD_BYTES

    def record_built(self, path: str, saved_at: str | None, failures: list[tuple[str, OSError]]) -> None:
        """Records for `report` that an index was built: its location, and the error of each location that failed."""
        self._built.append(saved_at)
        self._failures += [(path, location, error) for location, error in failures]

    def report(self) -> None:
        """Logs the indices that were built since the last report, and the first failure to save one."""
        if not self._built:
            return
        import logging  # noqa: PLC0415  (lazy: takes long to import)

        log = logging.getLogger("millstream")
        folders = {os.path.dirname(location) for location in self._built if location is not None}  # noqa: PTH120
        where = " and ".join(map(repr, sorted(folders)[:2])) or "memory"
        if folders:
            log.info("Indexed %d file%s; the index is in %s.", len(self._built), "s"[: len(self._built) > 1], where)
        if self._failures:
            path, location, error = self._failures[0]
            log.warning(
                "Cannot save the index of %r%s in %r: %s. It is in %s instead. Set MILLSTREAM_CACHE to a "
                "writable folder.",
                path,
                f" and of {len(self._failures) - 1} others" if len(self._failures) > 1 else "",
                os.path.dirname(location),  # noqa: PTH120
                error.strerror or error,
                where,
            )
        self._built, self._failures = [], []


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
