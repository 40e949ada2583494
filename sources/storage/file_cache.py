"""Whole files of stores far away, copied to a local disk: a folder of a bounded size that processes share.

What is in the folder: `NAME.DIGEST`, a whole copy of one version of an object, last used at its time of change;
`NAME.DIGEST.part`, one that is being made, of its whole size from the start; and `lock`.

Guarantees:
    - The files of the folder are never larger than the bound, all together: room is made before a copy begins, and
      the disk space of a copy that is taken away is free at once, even if somebody still has it open.
    - A copy is taken away only while nobody reads it; those unused for the longest time go first.
    - However many processes need a file, one of them copies it. It appears under its name whole.
    - All is decided under locks that end with their process: nothing is left behind by one that is killed but its
      `.part`, which the next one that needs room or the file takes away.
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
from millstream.sources.storage.object_stores import SLOWEST_BYTES_PER_SECOND, STALL_SECONDS
from millstream.sources.storage.offset_index import cache_folder, object_name
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.stored_files import RemoteFile

_COPIED_BYTES = 4 << 20
"""How much is written at once; a few times as much is on its way."""

_WAIT_SECONDS = 0.02
"""How long to wait before looking again at what another process is doing."""

_TOUCH_SECONDS = 5.0
"""How often it is noted that a copy is being used."""

_PART = ".part"
_LOCK = "lock"

_OURS = re.compile(r".+\.[0-9a-f]{16}(\.part)?", re.DOTALL)
"""The names of copies: nothing else in the folder is counted, or taken away."""


@final
class FileCache:
    """A folder on a local disk for copies of whole remote files, of a bounded size in bytes.

    A source that is given one copies each file when it needs it first, and reads the copy: best for small records in
    files of some megabytes, in an order that stays with a few files at a time, such as that of
    `HierarchicalSampler(source.unit_sizes, window_units=...)`. Any number of sources and processes may share a folder,
    with the same bound. Copies stay until others need their room.

    Args:
        max_bytes: how many bytes all copies may have together, at least as large as the largest file. To copy each
            file only once an epoch, room for all files of two windows.
        folder: where the copies are; None for the folder `files` in `$MILLSTREAM_CACHE`, else
            `$XDG_CACHE_HOME/millstream`, else `~/.cache/millstream`.

    Attributes:
        max_bytes: as given.
        folder: the folder, absolute. It is made when it is needed.

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

    def known_size(self, url: str, version: bytes) -> int | None:
        """Returns how many bytes a version of an object has, if there is a copy of it."""
        try:
            return os.stat(self._place(url, version)).st_size  # noqa: PTH116  (the paths are strings throughout)
        except OSError:
            return None

    def copy_of(self, url: str, identity: FileIdentity) -> "LocalCopy":
        """Returns a copy of an object, in use until it is released; it is made if there is none.

        Raises:
            DataSourceError: the object cannot be read; there is no room for it on the disk, or in the bound; or
                another process that copies it does not come to an end.
        """
        place = self._place(url, identity.version)
        deadline = time.monotonic() + 2 * STALL_SECONDS + identity.size / SLOWEST_BYTES_PER_SECOND
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)  # noqa: PTH103
            while True:
                with self._locked(deadline, url):
                    if (copy := _open_whole(place, identity.size)) is not None:
                        return copy
                    part = self._begin(place, identity.size)
                if part is not None:
                    return self._finish(part, place, url, identity)
                self._wait(deadline, url)
        except DataSourceError:
            raise
        except OSError as error:
            raise DataSourceError(
                f"{url!r} cannot be copied to {self.folder!r}: {error.strerror}. Give the cache another folder, or "
                "less to hold."
            ) from error

    def _place(self, url: str, version: bytes) -> str:
        return os.path.join(self.folder, object_name(url, version))  # noqa: PTH118

    def _begin(self, place: str, size: int) -> int | None:
        """Returns a new part, open and locked, or None if there is no room yet, or another process makes it."""
        with os.scandir(self.folder) as entries:
            files = [entry for entry in entries if _OURS.fullmatch(entry.name)]
        sizes: dict[str, int] = {}
        ages: dict[str, float] = {}
        for entry in files:
            with contextlib.suppress(FileNotFoundError):  # One whose copying has failed just now.
                status = entry.stat()
                sizes[entry.path], ages[entry.path] = status.st_size, status.st_mtime
        for path in [path for path in sizes if path.endswith(_PART)]:
            if _take_away(path):  # The process that made it is gone.
                del sizes[path]
        if place + _PART in sizes:
            return None
        used = sum(sizes.values())
        for path in sorted(sizes, key=ages.__getitem__):
            if used + size > self.max_bytes and _take_away(path):
                used -= sizes[path]
        if used + size > self.max_bytes:
            return None
        part = os.open(place + _PART, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(part, size)
        return part

    def _finish(self, part: int, place: str, url: str, identity: FileIdentity) -> "LocalCopy":
        """Returns the copy that a part has become."""
        file = RemoteFile(url, identity)
        try:
            for start in range(0, identity.size, _COPIED_BYTES):
                _write(part, file.read(start, _COPIED_BYTES), start)
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
        return LocalCopy(place, part, identity.size)

    @contextlib.contextmanager
    def _locked(self, deadline: float, url: str) -> Iterator[None]:
        """Holds the lock of the folder, which is never held for long."""
        descriptor = os.open(os.path.join(self.folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # noqa: PTH118
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
                f"{url!r} was not copied to {self.folder!r} in time: the {self.max_bytes:,} bytes of the cache are "
                "taken by files that others are reading or copying. Raise max_bytes, or look for a process that hangs."
            )
        time.sleep(_WAIT_SECONDS)


@final
class LocalCopy:
    """A copy in a cache, which is in use when it is made, and until `release`.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: str, descriptor: int, size: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._size = size
        self._touched = 0.0
        self._touch()

    def use(self) -> bool:
        """Returns whether it is still there, in use then until `release`."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # It is being taken away.
        if os.fstat(self._descriptor).st_size != self._size:
            return False
        self._touch()
        return True

    def release(self) -> None:
        """Ends the use: it may be taken away."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Ends the use for good."""
        os.close(self._descriptor)

    def _touch(self) -> None:
        if time.monotonic() - self._touched >= _TOUCH_SECONDS:
            self._touched = time.monotonic()
            os.utime(self._descriptor)


def _open_whole(place: str, size: int) -> LocalCopy | None:
    """Returns the copy at a place, in use, if there is one. The lock of the folder is held."""
    try:
        descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if os.fstat(descriptor).st_size != size:
        os.close(descriptor)
        _take_away(place)  # Somebody else has written to it.
        return None
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return LocalCopy(place, descriptor, size)


def _take_away(path: str) -> bool:
    """Removes a file that nobody uses, and frees its space; returns whether it did. The lock of the folder is held."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)  # noqa: PTH108
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
