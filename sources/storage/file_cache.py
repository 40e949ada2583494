"""A size-limited local cache of whole remote files, shared between the processes of a user.

The folder holds `NAME.DIGEST`, a whole copy of one version of an object; `NAME.DIGEST.part`, a copy that is being made,
of its whole size from the start; and `lock`. The access time of a copy is the time of its last use. Its modification
time is a mark of the version (`FileIdentity.modified`): a copy that was written to later has lost it.

Guarantees:
    - The files of the folder are never larger than the bound, all together: room is made before a copy begins, and
      the disk space of an evicted copy is free immediately, even if a process still has it open.
    - A copy is evicted only while no process reads it, least recently used first.
    - Only regular files of this user with a single name are used or evicted, in a folder that no other user can write
      to. A link in the folder is never followed. Content is freed only after the last name of its file is gone.
    - However many processes need a file, one of them copies it. It appears under its name whole.
    - All is decided under locks that end with their process: nothing is left behind by one that is killed but its
      `.part`, which the next one that needs room or the file removes.
    - Every wait has a limit.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from typing import final

from millstream.checks import as_integer
from millstream.errors import DataSourceError
from millstream.sources.storage.byte_files import RemoteFile
from millstream.sources.storage.cache_folder import cache_folder, cached_name
from millstream.sources.storage.object_stores import SLOWEST_BYTES_PER_SECOND, STALL_SECONDS
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.private_folders import is_private, make_private_folder, open_private

_COPIED_BYTES = 4 << 20
"""How much is written at once; a few times as much is on its way."""

_WAIT_SECONDS = 0.02
"""How long to wait before looking again at what another process is doing."""

_TOUCH_SECONDS = 5.0
"""How often it is noted that a copy is being used."""

_PART = ".part"
_LOCK = "lock"

_OURS = re.compile(r".+\.[0-9a-f]{16}(\.part)?", re.DOTALL)
"""The names of copies: nothing else in the folder is counted or evicted."""


@final
class FileCache:
    """A folder on a local disk for copies of whole remote files, of a bounded size in bytes.

    A source that is given one copies each file when it needs it first, and reads the copy: best for small records in
    files of some megabytes, in an order that stays with a few files at a time, such as that of
    `HierarchicalSampler(source.unit_sizes, window_units=...)`. Any number of sources and processes of one user may
    share a folder, with the same bound. Copies stay until others need their room.

    Args:
        max_bytes: how many bytes all copies may have together, at least as large as the largest file. To copy each
            file only once an epoch, room for all files of two windows.
        folder: where the copies are; None for the folder `files` in `$MILLSTREAM_CACHE`, else
            `$XDG_CACHE_HOME/millstream`, else `~/.cache/millstream`. It must belong to this user, and no other user
            may write to it.

    Attributes:
        max_bytes: as given.
        folder: the folder, absolute. It is made when it is needed, with mode 0700.

    Raises:
        TypeError, ValueError: max_bytes is not a positive integer.

    Examples:
        >>> cache = millstream.FileCache(max_bytes=200 * 2**30, folder="/local/ssd")
        >>> source = millstream.JsonLinesDataSource("gs://my-bucket/train-*.jsonl", cache=cache)  # doctest: +SKIP
    """

    def __init__(self, max_bytes: int, folder: str | os.PathLike[str] | None = None) -> None:
        self.max_bytes = as_integer(max_bytes, "max_bytes", minimum=1)
        given = os.path.join(cache_folder(), "files") if folder is None else os.path.expanduser(folder)  # noqa: PTH111, PTH118
        self.folder = os.path.abspath(os.fspath(given))  # noqa: PTH100

    def __repr__(self) -> str:
        return f"FileCache({self.max_bytes:,} bytes in {self.folder!r})"

    def copy_of(self, url: str, identity: FileIdentity) -> "LocalCopy":
        """Returns a copy of an object, in use until it is released; it is made if there is none.

        Raises:
            DataSourceError: the object cannot be read; there is no room for it on the disk, or in the bound; the
                folder belongs to another user; or another process that copies it does not come to an end.
        """
        place = self._place(url, identity.version)
        deadline = time.monotonic() + 2 * STALL_SECONDS + identity.size / SLOWEST_BYTES_PER_SECOND
        try:
            make_private_folder(self.folder)
            while True:
                with self._locked(deadline, url):
                    if (copy := _open_whole(place, identity)) is not None:
                        return copy
                    part = self._begin(place, identity.size)
                if part is not None:
                    return self._finish(part, place, url, identity)
                self._wait(deadline, url)
        except DataSourceError:
            raise
        except OSError as error:
            raise DataSourceError(
                f"Cannot copy {url!r} to the cache in {self.folder!r}: {error.strerror}. Use another folder, or a "
                "smaller max_bytes if the disk is full."
            ) from error

    def _place(self, url: str, version: bytes) -> str:
        return os.path.join(self.folder, cached_name(url, version))  # noqa: PTH118

    def _begin(self, place: str, size: int) -> int | None:
        """Returns a new part, open and locked, or None if there is no room yet, or another process makes it."""
        with os.scandir(self.folder) as entries:
            files = [entry for entry in entries if _OURS.fullmatch(entry.name)]
        sizes: dict[str, int] = {}
        ages: dict[str, float] = {}
        for entry in files:
            with contextlib.suppress(FileNotFoundError):  # One whose copying has failed just now.
                status = entry.stat(follow_symlinks=False)
                if is_private(status):
                    sizes[entry.path], ages[entry.path] = status.st_size, status.st_atime
        for path in [path for path in sizes if path.endswith(_PART)]:
            if _evict(path):  # The process that made it is gone.
                del sizes[path]
        if place + _PART in sizes:
            return None
        used = sum(sizes.values())
        for path in sorted(sizes, key=ages.__getitem__):
            if used + size > self.max_bytes and _evict(path):
                used -= sizes[path]
        if used + size > self.max_bytes:
            return None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place + _PART)  # noqa: PTH108  (no copy, but a link or the like)
        part = open_private(place + _PART, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(part, size)
        return part

    def _finish(self, part: int, place: str, url: str, identity: FileIdentity) -> "LocalCopy":
        """Returns the copy that a part has become."""
        file = RemoteFile(url, identity)
        try:
            for start in range(0, identity.size, _COPIED_BYTES):
                _write(part, file.read(start, _COPIED_BYTES), start)
            os.utime(part, ns=(time.time_ns(), identity.modified))
            os.fsync(part)
            with self._locked(time.monotonic() + STALL_SECONDS, url):
                fcntl.flock(part, fcntl.LOCK_SH)
                os.rename(place + _PART, place)  # noqa: PTH104
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place + _PART)  # noqa: PTH108
            os.close(part)
            file.close()
            raise
        return LocalCopy(place, part, identity)

    @contextlib.contextmanager
    def _locked(self, deadline: float, url: str) -> Iterator[None]:
        """Holds the lock of the folder, which is never held for long."""
        descriptor = open_private(os.path.join(self.folder, _LOCK), os.O_RDWR | os.O_CREAT)  # noqa: PTH118
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._wait(deadline, url)
            yield
        finally:
            os.close(descriptor)

    def _wait(self, deadline: float, url: str) -> None:
        if time.monotonic() > deadline:
            raise DataSourceError(
                f"Timed out copying {url!r} to the cache in {self.folder!r}: other readers hold all "
                f"{self.max_bytes:,} bytes of it. Increase max_bytes, or check for a hung process."
            )
        time.sleep(_WAIT_SECONDS)


@final
class LocalCopy:
    """A copy in a cache, in use from the start, until `release`.

    Attributes:
        path: its path.
    """

    def __init__(self, path: str, descriptor: int, identity: FileIdentity) -> None:
        self.path = path
        self._descriptor = descriptor
        self._identity = identity
        self._touched = 0.0
        self._touch()

    def use(self) -> bool:
        """Returns True if the copy is still there; it is in use then, until `release`."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # It is being evicted.
        if not _is_copy_of(os.fstat(self._descriptor), self._identity):
            return False
        self._touch()
        return True

    def release(self) -> None:
        """Ends the use: the copy may be evicted."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Ends the use permanently."""
        os.close(self._descriptor)

    def _touch(self) -> None:
        if time.monotonic() - self._touched >= _TOUCH_SECONDS:
            self._touched = time.monotonic()
            os.utime(self._descriptor, ns=(time.time_ns(), self._identity.modified))


def _is_copy_of(status: os.stat_result, identity: FileIdentity) -> bool:
    """Returns True if a file is a whole copy of this version, which nothing has written to since."""
    # Some file systems keep times in whole seconds.
    is_marked = status.st_mtime_ns // 10**9 == identity.modified // 10**9
    return is_private(status) and status.st_size == identity.size and is_marked


def _open_whole(place: str, identity: FileIdentity) -> LocalCopy | None:
    """Returns the copy at a path, in use, or None if there is none. The lock of the folder is held."""
    try:
        descriptor = open_private(place, os.O_RDWR)
    except FileNotFoundError:
        return None
    except PermissionError:
        os.unlink(place)  # noqa: PTH108  (a link or the like: only its name is removed)
        return None
    if not _is_copy_of(os.fstat(descriptor), identity):
        os.close(descriptor)
        _evict(place)  # Something else has written to it.
        return None
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return LocalCopy(place, descriptor, identity)


def _evict(path: str) -> bool:
    """Removes a file that no process uses, and frees its space; returns whether it did. The folder's lock is held."""
    try:
        descriptor = open_private(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)  # noqa: PTH108
        if os.fstat(descriptor).st_nlink == 0:  # Processes that have it open would keep its space.
            os.ftruncate(descriptor, 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _write(descriptor: int, content: bytes, start: int) -> None:
    """Writes all of some bytes."""
    rest = memoryview(content)
    while rest:
        written = os.pwrite(descriptor, rest, start)
        rest, start = rest[written:], start + written
