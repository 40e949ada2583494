"""Decoded units that the workers of a machine share: files that one of them writes, and that the others map.

A trainer creates a folder for its workers (`SharedFolder`). A worker that needs a unit decodes it while it holds the
lock of the unit's file, and maps the file afterwards, like all others: the pages of a unit exist once.

Guarantees:
    - A unit is decoded by one process at a time. The others decode other units meanwhile, or wait.
    - Every wait has a limit. If a process hangs, if there is no room, or if the folder is gone, a process decodes what
      it needs by itself. So the files change how often a unit is decoded, and nothing else.
    - The lock of a process that dies ends with it, and the next process that needs the unit decodes it.
    - The files of a cache take at most its `max_bytes` and a sixteenth, in whole pages, or there is one file. The least
      recently mapped ones are removed. A mapped file lives until no process maps it; see `UnitCache`.
    - A folder can be read by this user only. It is removed by the process that created it; if that was killed, by the
      fork server of its workers; if that was killed too, by the next process of the user that creates one.
"""

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.warn import log_warning
from millstream.sources.digests import digest

KeyT = TypeVar("KeyT", bound=Hashable)
UnitT = TypeVar("UnitT")
KeyT_contra = TypeVar("KeyT_contra", contravariant=True)

_PREFIX = "millstream-units-"

_MIN_FREE_BYTES = 1 << 29
"""The free space that a file system must have for a folder. A container may have 64 MB of shared memory."""

_WAIT_SECONDS = 10.0
"""Limit of the wait for a process that decodes a unit. It may be fetched from a bucket meanwhile."""

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.0005, 0.02

_KEPT_SHARE = 31 / 32
"""The share of the limit that the other files keep at an eviction, so that one eviction makes room for many files."""

_PARTIAL_SUFFIX = ".part"
_TOTALS_NAME = "totals"
_TOTALS = struct.Struct("<qq")


class UnitFiles(Protocol[KeyT_contra, UnitT]):
    """The files of a kind of units."""

    def write(self, unit: UnitT, path: str) -> None:
        """Writes a unit. Any exception means that it cannot be shared."""

    def map(self, key: KeyT_contra, path: str) -> UnitT:
        """Returns the unit of a key without a copy of its data; raises FileNotFoundError if there is no file."""


@final
class ArrayUnit(NamedTuple):
    """Decoded rows."""

    rows: NDArray[Any]

    @property
    def num_records(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes


@final
class ArrayFiles:
    """Files of NumPy."""

    def write(self, unit: ArrayUnit, path: str) -> None:
        with open(path, "wb") as file:  # noqa: PTH123  (paths are strings throughout)
            np.save(file, unit.rows, allow_pickle=False)

    def map(self, key: object, path: str) -> ArrayUnit:  # noqa: ARG002
        return ArrayUnit(np.asarray(np.load(path, mmap_mode="r")))


@final
class SharedFolder:
    """The folder of the workers of this process, until `remove`.

    Attributes:
        path: its path; "" if no file system has room, or after it was removed.
    """

    def __init__(self) -> None:
        self.path = ""
        self._owner = os.getpid()
        self._lock = -1
        for parent in _parents():
            # There may be no descriptor left for a folder.
            with contextlib.suppress(OSError):
                _remove_abandoned(parent)
                if _free_bytes(parent) >= _MIN_FREE_BYTES:
                    self.path, self._lock = _create(parent)
                    return

    def remove(self) -> None:
        """Removes the folder. Files that are mapped live on. Does nothing in a forked process. Thread-safe."""
        if self.path and self._owner == os.getpid():
            remove_tree(self.path)
            self.path = ""
            # In one statement without a call, so that no other thread closes it, too.
            lock, self._lock = self._lock, -1
            if lock >= 0:
                os.close(lock)


def remove_tree(path: str) -> None:
    """Removes a folder of this user with all that is in it. Ignores errors.

    Not by shutil, because a worker would take 2 ms to import it, and a trainer may have moved to a folder with another.
    """
    with contextlib.suppress(OSError):
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    remove_tree(entry.path)
                else:
                    os.unlink(entry.path)  # noqa: PTH108  (paths are strings throughout)
        os.rmdir(path)  # noqa: PTH106


def _parents() -> list[str]:
    """Returns the folders in which there may be room: memory first, then those for temporary files."""
    return ["/dev/shm", *filter(None, [os.environ.get("TMPDIR")]), "/tmp", "/var/tmp"]  # noqa: S108  (it is private)


def _free_bytes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _create(parent: str) -> tuple[str, int]:
    """Returns the path of a new folder, and a descriptor whose lock shows that its owner lives."""
    while True:
        path = f"{parent}/{_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
        os.mkdir(path, 0o700)  # noqa: PTH102  (paths are strings throughout)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            os.rmdir(path)  # noqa: PTH106  (paths are strings throughout)
            raise
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(path, descriptor):
                return path, descriptor
        os.close(descriptor)  # Another process took it for an abandoned one.


def _remove_abandoned(parent: str) -> None:
    """Removes the folders of this user whose owners do not live."""
    with os.scandir(parent) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in found:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(path)
            finally:
                os.close(descriptor)


def _is_same(path: str, descriptor: int) -> bool:
    """Returns True if a path still has the open file or folder."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))  # noqa: PTH116  (paths are strings throughout)
    except FileNotFoundError:
        return False


_folder = ""


def share_units_in(folder: str) -> None:
    """Makes the caches of this process share their units in a folder from now on; "" for none."""
    global _folder  # noqa: PLW0603  (a process is a worker of one trainer)
    _folder = folder


def shared_folder() -> str:
    """Returns the folder in which this process shares units; "" for none."""
    return _folder


class Found(NamedTuple, Generic[UnitT]):
    """A shared unit.

    Attributes:
        unit: the unit; None if another process is decoding it.
        file: the name of the file that is mapped; "" without one.
        is_decoded: True if it was decoded by this call.
    """

    unit: UnitT | None
    file: str = ""
    is_decoded: bool = False


@final
class SharedUnits(Generic[KeyT, UnitT]):
    """The units of a cache that processes share in a folder.

    Args:
        folder: the path of a `SharedFolder`.
        name: the name of the cache, the same in all processes.
        files: the files of its units.
        max_bytes: the limit for the bytes of all files.
    """

    def __init__(self, folder: str, name: str, files: UnitFiles[KeyT, UnitT], max_bytes: int) -> None:
        self._files = files
        # Files are a little larger than the memory that a cache counts.
        self._max_bytes = max_bytes + max_bytes // 16
        self._folder = os.path.join(folder, name)  # noqa: PTH118  (paths are strings throughout)
        self._failures: list[object] = []
        self._evictions = 0
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)  # noqa: PTH102
        except OSError as error:
            self._give_up(error)

    def get(self, key: KeyT, decode: Callable[[KeyT], UnitT], *, waits: bool) -> Found[UnitT]:
        """Returns the unit of a key, mapped or decoded; or none if another process decodes it, unless it waits."""
        file = digest(16, repr(key).encode()).hex()
        path = f"{self._folder}/{file}"
        deadline = time.monotonic() + _WAIT_SECONDS if waits else 0.0
        while not self._failures:
            try:
                if (unit := self._mapped(key, path)) is not None:
                    return Found(unit, file)
                descriptor = os.open(path + _PARTIAL_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                self._give_up(error)
                break
            try:
                if not _locked(descriptor, deadline):
                    if not waits:
                        return Found(None)
                    break
                if _is_same(path + _PARTIAL_SUFFIX, descriptor):
                    return self._decoded(key, path, decode)
                # Another process has decoded it, or could not, while this one waited for the lock.
            finally:
                os.close(descriptor)
        return Found(decode(key), is_decoded=True)

    def names(self) -> Collection[str] | None:
        """Returns the names of all files if some were evicted since the last call, else None."""
        try:
            with self._totals(0.0) as totals:
                if totals is None or totals[1] == self._evictions:
                    return None
                self._evictions = totals[1]
            return set(os.listdir(self._folder))  # noqa: PTH208
        except OSError:
            return None

    def _mapped(self, key: KeyT, path: str) -> UnitT | None:
        try:
            unit = self._files.map(key, path)
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001  (of any library)
            self._give_up(error)
            return None
        return unit

    def _decoded(self, key: KeyT, path: str, decode: Callable[[KeyT], UnitT]) -> Found[UnitT]:
        """Returns a unit that is decoded here, and shared if possible. The caller holds the lock of its file."""
        partial = path + _PARTIAL_SUFFIX
        unit, is_shared = None, False
        try:
            if (unit := self._mapped(key, path)) is not None:  # Another process has completed it just before the lock.
                return Found(unit, os.path.basename(path))  # noqa: PTH119
            unit = decode(key)
            try:
                self._files.write(unit, partial)
                # The memory of the process is free again.
                unit = self._files.map(key, partial)
                is_shared = self._publish(partial, path)
            except Exception as error:  # noqa: BLE001  (whatever a library raises for values that it cannot write)
                self._give_up(error)
        finally:
            # Under either name, the lock of the file ends, and the others look for it again.
            if not is_shared:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(partial)  # noqa: PTH108
        return Found(unit, os.path.basename(path) if is_shared else "", is_decoded=True)  # noqa: PTH119

    def _publish(self, partial: str, path: str) -> bool:
        """Renames a new file, and removes others if it needs their room. Returns False if a lock cannot be had."""
        with self._totals(_WAIT_SECONDS) as totals:
            if totals is None:
                return False
            num_bytes = _allocated_bytes(os.stat(partial))  # noqa: PTH116
            totals[0] += num_bytes
            if totals[0] > self._max_bytes:
                kept = min(self._max_bytes - num_bytes, int(self._max_bytes * _KEPT_SHARE))
                totals[:] = num_bytes + self._evict(kept), totals[1] + 1
            # Before the lock ends: another process that evicts would not count this file.
            os.rename(partial, path)  # noqa: PTH104
        return True

    def _evict(self, kept: int) -> int:
        """Removes the least recently mapped files until the others have at most `kept` bytes. Returns their bytes."""
        files: list[tuple[int, int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if not entry.name.endswith((_PARTIAL_SUFFIX, _TOTALS_NAME)):
                        status = entry.stat()
                        files.append((status.st_mtime_ns, _allocated_bytes(status), entry.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= kept:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
            total -= size
        return total

    @contextlib.contextmanager
    def _totals(self, seconds: float) -> Iterator[list[int] | None]:
        """Yields the bytes of all files, and the number of evictions, to be changed; None if others hold the lock."""
        descriptor = os.open(f"{self._folder}/{_TOTALS_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _locked(descriptor, time.monotonic() + seconds):
                yield None
                return
            stored = os.pread(descriptor, _TOTALS.size, 0)
            totals = list(_TOTALS.unpack(stored) if stored else (0, 0))
            before = totals.copy()
            yield totals
            if totals != before:
                os.pwrite(descriptor, _TOTALS.pack(*totals), 0)
        finally:
            os.close(descriptor)

    def _give_up(self, error: Exception) -> None:
        """Shares no more units in this process. The first error is logged, unless the loader was closed."""
        # Two threads may fail together. Not the error itself, whose traceback would keep a unit in memory.
        self._failures.append(failure := object())
        if self._failures[0] is failure and not isinstance(error, FileNotFoundError):
            log_warning(
                f"cannot share decoded units with other workers in {self._folder!r}: {error}. Each worker decodes all "
                "that it needs. Give /dev/shm or $TMPDIR more room if it is full."
            )


def _allocated_bytes(status: os.stat_result) -> int:
    """Returns the memory or disk space of a file, which has whole pages. Not all file systems know it."""
    return max(status.st_size, 512 * status.st_blocks)


def _locked(descriptor: int, deadline: float) -> bool:
    """Locks an open file. Returns False if another process holds the lock until the deadline."""
    seconds = _FIRST_POLL_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(seconds)
            seconds = min(2 * seconds, _LAST_POLL_SECONDS)
        else:
            return True
