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
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.storage.new_files import new_file
from millstream.sources.storage.offsets import BLOCK, DamagedIndexError, HeldOffsets, Offsets, StoredOffsets, num_blocks
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.urls import is_url, without_query

_HEADER = struct.Struct("<8s16sQQ20xI")
_MAGIC = b"MSINDEX2"

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
        descriptor = open_trusted(place, key.identity.owner)
    except OSError:
        return None
    stored = None
    try:
        start = os.pread(descriptor, _FIRST_BYTES, 0)
        size, count = _parsed(start[: _HEADER.size], key)
        whole = _HEADER.size + 8 * count + 4 * num_blocks(count)
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


def open_trusted(place: str, owner: int) -> int:
    """Returns a descriptor of a regular file that this user, root or the owner of the data made.

    No link is followed, and no pipe is waited for.

    Args:
        place: its path.
        owner: the owner of the data that it was made of.

    Raises:
        OSError: there is none.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(place, flags)
    status = os.fstat(descriptor)
    is_trusted = status.st_uid in (os.geteuid(), 0, owner) and not status.st_mode & stat.S_IWOTH
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
        if count >= BLOCK:
            joined = np.concatenate(waiting)
            stop = count - count % BLOCK
            yield from joined[:stop].reshape(-1, BLOCK)
            waiting, count = [joined[stop:]], count - stop
    if count:
        yield np.concatenate(waiting)
