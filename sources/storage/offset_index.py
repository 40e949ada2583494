"""The index of a file: the offsets at which its records begin, found once and kept in a file of its own.

The index of `data/a.txt` is kept in the user's cache: `$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else
`~/.cache/millstream`. `millstream index` keeps it beside the data, as `data/.a.txt.lines-index`, which no pattern such
as `data/*` matches. A reader accepts both. If neither folder takes a file, the index is in memory.

An index file, all of it little-endian:

    byte    magic[8] = "MSINDEX2"
    byte    digest[16] of the format, its version, and the state of each file that the index depends on
    uint64  size of the data file, in bytes
    uint64  number of offsets, n: one more than there are records
    byte    zeros[20]
    uint32  CRC-32 of these 60 bytes
    int64   offset of each record, and of the end of the last one [n]
    uint32  CRC-32 of each block of 4,096 offsets [ceil(n / 4096)]

The state of a local file is its inode, size, and times of modification (mtime) and of change (ctime), in nanoseconds:
whoever rewrites a file can set back the first time, but not the second. The number of the device is not part of it,
because hosts that share a file system may number it differently.

Guarantees:
    - An index file is data that any process could have written. It is opened without following links or waiting for a
      pipe, is used only if it belongs to this user, to root or to the owner of the data, and is never mapped: a mapped
      file that is cut short ends the process.
    - Every bit of it is covered by a checksum, which is compared before an offset is used. A file that is not a whole
      index of this state of the data is rebuilt, also if it is damaged while it is open.
    - It appears under its name whole, and replaces whatever has that name.
    - A folder that is full, read-only or another user's is skipped for the next one.
"""

import contextvars
import dataclasses
import enum
import functools
import os
import stat
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, Protocol, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.storage.new_files import new_file
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.urls import is_url, without_query

_HEADER = struct.Struct("<8s16sQQ20xI")
_MAGIC = b"MSINDEX2"

_BLOCK = 4096
"""The number of offsets under one checksum: to check it takes 10 µs, also where a shuffled run meets each block new."""

_FIRST_BYTES = 4096
"""The bytes of an index file that are read first: the whole index of a small file."""

_MAX_NAME = 60
"""The length to which a file's name is cut in the name of its index in the cache."""


class Placement(enum.Enum):
    """The folder in which new indices are kept."""

    CACHE = "the user's cache, else beside the data"
    BESIDE = "beside the data, else the user's cache; an index in the cache does not suffice"
    NOWHERE = "memory"


placement = contextvars.ContextVar("placement", default=Placement.CACHE)
"""The folder in which the sources that are constructed in this context keep new indices."""


class DamagedIndexError(Exception):
    """An index file is not what its checksums say."""


class Offsets(Protocol):
    """The index of a file, open. Any number of threads may read it."""

    @property
    def num_records(self) -> int:
        """The number of records in the file."""
        ...

    def spans(self, rows: NDArray[np.int64], /) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the offsets at which some records begin and end, in bytes; raises DamagedIndexError."""
        ...

    def between(self, start: int, stop: int, /) -> NDArray[np.int64]:
        """Returns the offsets `start` … `stop - 1`; raises DamagedIndexError."""
        ...


@final
class HeldOffsets:
    """An index in memory.

    Args:
        offsets: shape (records + 1,).
    """

    def __init__(self, offsets: NDArray[np.int64]) -> None:
        self._offsets = offsets

    @property
    def num_records(self) -> int:
        """The number of records in the file."""
        return len(self._offsets) - 1

    def spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the offsets at which some records begin and end, in bytes."""
        return self._offsets[rows], self._offsets[rows + 1]

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the offsets `start` … `stop - 1`."""
        return self._offsets[start:stop]


@final
class StoredOffsets:
    """An index in a file, read by `pread`. A block is checked when it is first used.

    Args:
        descriptor: the file, open. It is closed with this.
        count: the number of offsets.
    """

    def __init__(self, descriptor: int, count: int) -> None:
        self._descriptor = descriptor
        self._count = count
        self._is_checked = bytearray(_num_blocks(count))
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        self._finalizer.atexit = False

    @property
    def num_records(self) -> int:
        """The number of records in the file."""
        return self._count - 1

    @property
    def num_bytes(self) -> int:
        """The memory that it takes to hold it, in bytes."""
        return 8 * self._count

    def spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the offsets at which some records begin and end, in bytes; raises DamagedIndexError."""
        for block in np.union1d(rows // _BLOCK, (rows + 1) // _BLOCK).tolist():
            if not self._is_checked[block]:
                self._read_block(block)
        places = (rows * 8 + _HEADER.size).tolist()
        pairs = np.frombuffer(b"".join([self._read(place, 16) for place in places]), "<i8").reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the offsets `start` … `stop - 1`; raises DamagedIndexError."""
        first = start // _BLOCK
        blocks = [self._read_block(block) for block in range(first, -(-stop // _BLOCK))]
        offsets = np.frombuffer(b"".join(blocks), "<i8")[start - first * _BLOCK : stop - first * _BLOCK]
        return offsets.astype(np.int64, copy=False)

    def held(self) -> HeldOffsets:
        """Returns the same in memory; raises DamagedIndexError."""
        return HeldOffsets(self.between(0, self._count))

    def close(self) -> None:
        """Closes the file."""
        self._finalizer()

    def _read_block(self, block: int) -> bytes:
        """Returns a block of offsets, after comparing its checksum."""
        start = _HEADER.size + 8 * _BLOCK * block
        content = self._read(start, 8 * min(_BLOCK, self._count - _BLOCK * block))
        stored = self._read(_HEADER.size + 8 * self._count + 4 * block, 4)
        if zlib.crc32(content) != int.from_bytes(stored, "little"):
            raise DamagedIndexError(f"the checksum of its block {block} is wrong")
        self._is_checked[block] = 1
        return content

    def _read(self, place: int, length: int) -> bytes:
        try:
            content = os.pread(self._descriptor, length, place)
        except OSError as error:
            raise DamagedIndexError(f"it cannot be read: {error.strerror}") from error
        if len(content) != length:
            raise DamagedIndexError("it was cut short")
        return content


@dataclasses.dataclass(frozen=True)
class IndexKey:
    """What an index must be of.

    Attributes:
        path: the data file.
        kind: the name of the format, such as `lines`.
        version: the version of the search for records.
        identity: the state of the data file.
        companions: the states of the other files that the index depends on; None for one that is absent.
    """

    path: str
    kind: str
    version: int
    identity: FileIdentity
    companions: tuple[FileIdentity | None, ...] = ()

    @functools.cached_property
    def digest(self) -> bytes:
        """A digest of all of that but the path, 16 bytes."""
        import hashlib  # noqa: PLC0415  (OpenSSL takes its time)

        states = [state and state.content_state for state in (self.identity, *self.companions)]
        return hashlib.blake2b(repr((self.kind, self.version, states)).encode(), digest_size=16).digest()

    @functools.cached_property
    def cached(self) -> str:
        """The path of the index in the cache."""
        name = (
            object_name(self.path, self.identity.version)
            if is_url(self.path)
            else _cached_name(os.path.basename(self.path), self.path)  # noqa: PTH119
        )
        return os.path.join(cache_folder(), f"{name}.{self.kind}-index")  # noqa: PTH118

    @property
    def beside(self) -> str | None:
        """The path of the index beside the data; None for an object in a store."""
        if is_url(self.path):
            return None
        folder, name = os.path.split(self.path)
        return os.path.join(folder, f".{name}.{self.kind}-index")  # noqa: PTH118

    def places(self, where: Placement) -> list[str]:
        """Returns the paths at which the index may be kept, the best one first."""
        if where is Placement.NOWHERE:
            return []
        both = [self.cached, self.beside] if where is Placement.CACHE else [self.beside, self.cached]
        return [place for place in both if place is not None]


def find_offsets(key: IndexKey, where: Placement = Placement.CACHE) -> Offsets | None:
    """Returns the index of a file, or None if there is none that fits."""
    places = [key.cached, key.beside] if where is not Placement.BESIDE else [key.beside or key.cached]
    for place in places:
        if place is not None and (offsets := _opened(place, key)) is not None:
            return offsets
    return None


def indexed_size(key: IndexKey) -> int | None:
    """Returns the size of a version of an object in bytes, if its index is there to say so."""
    try:
        descriptor = _open_regular(key.cached, key)
    except OSError:
        return None
    try:
        return _parsed(os.pread(descriptor, _HEADER.size, 0), key)[0]
    except (OSError, DamagedIndexError):
        return None
    finally:
        os.close(descriptor)


def store_offsets(
    key: IndexKey, chunks: Callable[[], Iterable[Any]], where: Placement = Placement.CACHE
) -> tuple[Offsets, str | None, list[tuple[str, OSError]]]:
    """Keeps the index of a file, and returns it, its path (None for memory), and the error at each path before.

    Args:
        key: what it is the index of.
        chunks: finds the offsets, and yields them in order, in arrays. It is called again after a folder was full.
        where: the folder to prefer.
    """
    failures: list[tuple[str, OSError]] = []
    for place in key.places(where):
        try:
            _write(place, key, chunks())
        except DataSourceError:
            raise
        except OSError as error:
            failures.append((place, error))
            continue
        if (offsets := _opened(place, key)) is not None:
            return offsets, place, failures
        # Replaced meanwhile by the index of another state, for which there is no better place.
        failures.append((place, FileExistsError(0, "another process keeps the index of another state there", place)))
    # An error that another file of the data raised, not this folder, comes again here.
    found = [np.asarray(chunk, np.int64) for chunk in chunks()]
    return HeldOffsets(np.concatenate(found)), None, failures


def forget_offsets(key: IndexKey) -> None:
    """Removes the index of a file where that is possible."""
    for place in key.places(Placement.CACHE):
        try:
            os.unlink(place)  # noqa: PTH108
        except OSError:
            continue


def object_name(url: str, version: bytes) -> str:
    """Returns the name in the cache of what is kept of one version of an object."""
    plain = without_query(url)
    return _cached_name(plain.rpartition("/")[2], plain, version)


def cache_folder() -> str:
    """Returns the folder of the user's cache, absolute."""
    if own := os.environ.get("MILLSTREAM_CACHE"):
        return os.path.abspath(own)  # noqa: PTH100
    # The XDG Base Directory Specification says to ignore a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # noqa: PTH117
        base = os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118
    return os.path.join(base, "millstream")  # noqa: PTH118


def _cached_name(name: str, whole: str, version: bytes = b"") -> str:
    """Returns the beginning of a name, and a digest of what else tells files apart."""
    import hashlib  # noqa: PLC0415  (OpenSSL takes its time)

    return f"{name[:_MAX_NAME]}.{hashlib.blake2b(os.fsencode(whole) + version, digest_size=8).hexdigest()}"


def _opened(place: str, key: IndexKey) -> Offsets | None:
    """Returns the index that is at a path, or None if there is none, or another file."""
    try:
        descriptor = _open_regular(place, key)
    except OSError:
        return None
    stored = None
    try:
        start = os.pread(descriptor, _FIRST_BYTES, 0)
        size, count = _parsed(start[: _HEADER.size], key)
        whole = _HEADER.size + 8 * count + 4 * _num_blocks(count)
        if size != key.identity.size or os.fstat(descriptor).st_size != whole:
            return None
        if whole <= _FIRST_BYTES:
            content, checksum = start[_HEADER.size : whole - 4], start[whole - 4 : whole]
            is_right = zlib.crc32(content) == int.from_bytes(checksum, "little")
            return HeldOffsets(np.frombuffer(content, "<i8").astype(np.int64, copy=False)) if is_right else None
        stored = StoredOffsets(descriptor, count)
    except (OSError, DamagedIndexError):
        return None
    else:
        return stored
    finally:
        if stored is None:
            os.close(descriptor)


def _open_regular(place: str, key: IndexKey) -> int:
    """Returns a descriptor of a regular file of a trusted owner.

    Raises:
        OSError: there is none.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(place, flags)
    status = os.fstat(descriptor)
    is_trusted = status.st_uid in (os.geteuid(), 0, key.identity.owner) and not status.st_mode & stat.S_IWOTH
    if stat.S_ISREG(status.st_mode) and is_trusted:
        return descriptor
    os.close(descriptor)
    raise PermissionError(0, "it is not a regular file, or another user could have written it", place)


def _parsed(header: bytes, key: IndexKey) -> tuple[int, int]:
    """Returns the size of the data file and the number of offsets, or raises DamagedIndexError."""
    if len(header) == _HEADER.size:
        magic, digest, size, count, checksum = _HEADER.unpack(header)
        if (magic, digest, checksum) == (_MAGIC, key.digest, zlib.crc32(header[:-4])) and count:
            return size, count
    raise DamagedIndexError("it is not the index of the file")


def _num_blocks(count: int) -> int:
    return -(-count // _BLOCK)


def _write(place: str, key: IndexKey, chunks: Iterable[Any]) -> None:
    """Writes an index file.

    Raises:
        OSError: the folder does not take it; or whatever `chunks` raises.
    """
    if place == key.cached:
        os.makedirs(cache_folder(), mode=0o700, exist_ok=True)  # noqa: PTH103
        mode = 0o600
    else:
        # Whoever may read the data may read its index.
        mode = os.stat(key.path).st_mode & 0o644 | 0o600  # noqa: PTH116
    # Not synced: after a power failure, the checksums tell.
    with new_file(place, mode=mode, is_synced=False) as file:
        file.write(bytes(_HEADER.size))
        count, checksums = 0, []
        for block in _blocks(chunks):
            file.write(block.data)
            count += len(block)
            checksums.append(zlib.crc32(block.data))
        file.write(np.array(checksums, "<u4").data)
        _write_header(file, key, count)


def _write_header(file: BinaryIO, key: IndexKey, count: int) -> None:
    header = _HEADER.pack(_MAGIC, key.digest, key.identity.size, count, 0)[:-4]
    file.seek(0)
    file.write(header + zlib.crc32(header).to_bytes(4, "little"))


def _blocks(chunks: Iterable[Any]) -> Iterator[NDArray[np.int64]]:
    """Yields offsets in blocks: all of them full but the last one."""
    waiting: list[NDArray[np.int64]] = []
    count = 0
    for chunk in chunks:
        waiting.append(np.asarray(chunk, "<i8"))
        count += len(chunk)
        if count >= _BLOCK:
            joined = np.concatenate(waiting)
            stop = count - count % _BLOCK
            yield from joined[:stop].reshape(-1, _BLOCK)
            waiting, count = [joined[stop:]], count - stop
    if count:
        yield np.concatenate(waiting)
