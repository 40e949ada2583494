"""A size-limited local cache of whole remote files, shared between the processes of a user.

The cache folder contains:

    NAME.DIGEST        a complete copy of one version of an object
    NAME.DIGEST.part   an incomplete copy, which has its full size from the start
    lock               the lock file

The access time of a copy is the time of its last use. Its modification time encodes the version
(`FileIdentity.modified`), so that a copy that was modified later is noticed.

Guarantees:
    - The files never exceed the size limit. Files are evicted before a download begins, and the disk space of an
      evicted file is free immediately, even if a process still has it open.
    - A file is evicted only while no process reads it, least recently used first.
    - Only regular files of this user with a single name are used or evicted, in a folder that no other user can write
      to. Links in the folder are never followed. A file is truncated only after its last name is gone.
    - If several processes need a file, one of them downloads it. It appears under its name when it is complete.
    - All locks end with their process. A killed process leaves at most a `.part` file, which the next process that
      needs the space or the file removes.
    - Every wait has a limit.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import final

from millstream.core.checks import as_integer
from millstream.errors import DataSourceError
from millstream.sources.files.byte_files import open_stored
from millstream.sources.files.compression import unpacked_zstd
from millstream.sources.files.open_files import OUT_OF_DESCRIPTORS
from millstream.sources.files.paths import FileIdentity
from millstream.sources.files.private_files import (
    cache_folder,
    cached_name,
    is_private,
    make_private_folder,
    open_private,
)
from millstream.sources.remote.object_stores import SLOWEST_BYTES_PER_SECOND, STALL_SECONDS

_CHUNK_BYTES = 4 << 20
"""Bytes per write. A few chunks are in flight."""

_POLL_SECONDS = 0.02
"""Interval between checks of the progress of another process."""

_TOUCH_SECONDS = 5.0
"""Minimum interval between two updates of the time of last use."""

_PARTIAL_SUFFIX = ".part"
_LOCK_NAME = "lock"

_CACHE_FILE = re.compile(r".+\.[0-9a-f]{16}(\.part)?", re.DOTALL)
"""The names of cached files. No other file is counted or evicted."""


@final
class FileCache:
    """A local cache of whole remote files, limited in size.

    A source with a cache downloads a file when it first reads from it, and reads the copy from then on. This suits
    small records in files of a few megabytes, read in an order that stays within a few files for a while, such as
    `HierarchicalSampler(source.unit_sizes, window_units=...)`. All sources and processes of a user may share a folder,
    if they use the same limit. Copies stay until their space is needed.

    Args:
        max_bytes: the limit of the size of all copies, at least the size of the largest file. With room for the files
            of two windows, each file is downloaded once per epoch.
        folder: the cache folder; None for the folder `files` in `$MILLSTREAM_CACHE`, else
            `$XDG_CACHE_HOME/millstream`, else `~/.cache/millstream`. It must belong to this user, and no other user may
            write to it.

    Attributes:
        max_bytes: the size limit.
        folder: the absolute path of the folder. It is created when it is first needed, with mode 0700.

    Raises:
        TypeError, ValueError: max_bytes is not a positive integer.

    Examples:
        >>> cache = millstream.FileCache(max_bytes=200 * 2**30, folder="/local/ssd")
        >>> source = millstream.JsonLinesDataSource("gs://my-bucket/train-*.jsonl", cache=cache)  # doctest: +SKIP
    """

    def __init__(self, max_bytes: int, folder: str | os.PathLike[str] | None = None) -> None:
        self.max_bytes = as_integer(max_bytes, "max_bytes", minimum=1)
        path = os.path.join(cache_folder(), "files") if folder is None else os.path.expanduser(folder)  # noqa: PTH111, PTH118
        self.folder = os.path.abspath(os.fspath(path))  # noqa: PTH100

    def __repr__(self) -> str:
        return f"FileCache({self.max_bytes:,} bytes in {self.folder!r})"

    def acquire(self, url: str, identity: FileIdentity, unpacked_size: int | None = None) -> "LocalCopy":
        """Returns a copy of an object, downloaded if it is not cached, and in use until released.

        Args:
            url: the URL of the object, or the path of a local file that is to be unpacked.
            identity: the version of the object.
            unpacked_size: the size of the content in bytes, if the object is compressed by Zstandard and the copy is to
                be its content; None to copy the object as it is.

        Raises:
            DataSourceError: the object cannot be read, the copy cannot be written, the folder belongs to another user,
                or a timeout expired while other processes used the whole cache or downloaded the same object.
            OSError: no descriptor is free.
        """
        path, copied = self._path_of(url, identity.version), identity
        if unpacked_size is not None:
            path = self._path_of(url, b"unpacked" + (identity.version or repr(identity.content_state).encode()))
            copied = identity._replace(size=unpacked_size)
        deadline = time.monotonic() + 2 * STALL_SECONDS + copied.size / SLOWEST_BYTES_PER_SECOND
        try:
            make_private_folder(self.folder)
            while True:
                with self._locked(deadline, url):
                    if (copy := _open_complete(path, copied)) is not None:
                        return copy
                    partial = self._reserve(path, copied.size)
                if partial is not None:
                    return self._download(partial, path, url, identity, copied)
                self._sleep(deadline, url)
        except DataSourceError:
            raise
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                raise
            raise DataSourceError(
                f"Cannot copy {url!r} to the cache in {self.folder!r}: {error.strerror}. Use another folder, or a "
                "smaller max_bytes if the disk is full."
            ) from error

    def _path_of(self, url: str, version: bytes) -> str:
        return os.path.join(self.folder, cached_name(url, version))  # noqa: PTH118

    def _reserve(self, path: str, size: int) -> int | None:
        """Returns the descriptor of a new partial file, locked, after evicting other files as needed.

        Returns None if files in use leave too little space, or another process is downloading the file.
        """
        with os.scandir(self.folder) as entries:
            files = [entry for entry in entries if _CACHE_FILE.fullmatch(entry.name)]
        sizes: dict[str, int] = {}
        last_used: dict[str, float] = {}
        for entry in files:
            with contextlib.suppress(FileNotFoundError):  # Its download has just failed.
                status = entry.stat(follow_symlinks=False)
                if is_private(status):
                    sizes[entry.path], last_used[entry.path] = status.st_size, status.st_atime
        for partial_path in [name for name in sizes if name.endswith(_PARTIAL_SUFFIX)]:
            if _evict(partial_path):  # Its process is gone.
                del sizes[partial_path]
        if path + _PARTIAL_SUFFIX in sizes:
            return None
        used = sum(sizes.values())
        for candidate in sorted(sizes, key=last_used.__getitem__):
            if used + size > self.max_bytes and _evict(candidate):
                used -= sizes[candidate]
        if used + size > self.max_bytes:
            return None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + _PARTIAL_SUFFIX)  # noqa: PTH108  (a link or the like)
        partial = open_private(path + _PARTIAL_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        with _removed_on_error(path, partial):
            fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(partial, size)
        return partial

    def _download(self, partial: int, path: str, url: str, identity: FileIdentity, copied: FileIdentity) -> "LocalCopy":
        """Fills the partial file, and renames it. The identity of the copy may have the size of unpacked content."""
        with _removed_on_error(path, partial):
            with contextlib.closing(open_stored(url, identity)) as file:
                blocks: Iterable[bytes] = (file.read(at, _CHUNK_BYTES) for at in range(0, identity.size, _CHUNK_BYTES))
                if copied is not identity:
                    blocks = unpacked_zstd(url, file.read, identity.size)
                _write_all(partial, url, blocks, copied.size)
            os.utime(partial, ns=(time.time_ns(), copied.modified))
            os.fsync(partial)
            with self._locked(time.monotonic() + STALL_SECONDS, url):
                fcntl.flock(partial, fcntl.LOCK_SH)
                os.rename(path + _PARTIAL_SUFFIX, path)  # noqa: PTH104
        return LocalCopy(path, partial, copied)

    @contextlib.contextmanager
    def _locked(self, deadline: float, url: str) -> Iterator[None]:
        """Holds the lock of the folder. No process holds it during a download."""
        descriptor = open_private(os.path.join(self.folder, _LOCK_NAME), os.O_RDWR | os.O_CREAT)  # noqa: PTH118
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._sleep(deadline, url)
            yield
        finally:
            os.close(descriptor)

    def _sleep(self, deadline: float, url: str) -> None:
        if time.monotonic() > deadline:
            raise DataSourceError(
                f"Timed out copying {url!r} to the cache in {self.folder!r}: other readers hold all "
                f"{self.max_bytes:,} bytes of it. Increase max_bytes, or check for a hung process."
            )
        time.sleep(_POLL_SECONDS)


@final
class LocalCopy:
    """A cached file. It is in use, and cannot be evicted, from construction until `release`."""

    def __init__(self, path: str, descriptor: int, identity: FileIdentity) -> None:
        self.path = path
        self._descriptor = descriptor
        self._identity = identity
        self._touched = 0.0
        self._touch()

    def reacquire(self) -> bool:
        """Puts a released copy in use again. Returns False if it was evicted."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False  # Another process is evicting it.
        if not _is_copy_of(os.fstat(self._descriptor), self._identity):
            return False
        self._touch()
        return True

    def release(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)

    def _touch(self) -> None:
        if time.monotonic() - self._touched >= _TOUCH_SECONDS:
            self._touched = time.monotonic()
            os.utime(self._descriptor, ns=(time.time_ns(), self._identity.modified))


@contextlib.contextmanager
def _removed_on_error(path: str, partial: int) -> Iterator[None]:
    """Removes the partial file of a path, and its lock, if the block raises: others would wait for it."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + _PARTIAL_SUFFIX)  # noqa: PTH108
        os.close(partial)
        raise


def _is_copy_of(status: os.stat_result, identity: FileIdentity) -> bool:
    """Returns True if a file is a complete, unmodified copy of this version."""
    # Some file systems store times in whole seconds.
    is_marked = status.st_mtime_ns // 10**9 == identity.modified // 10**9
    return is_private(status) and status.st_size == identity.size and is_marked


def _open_complete(path: str, identity: FileIdentity) -> LocalCopy | None:
    """Returns the complete copy at a path, in use, or None. The caller holds the folder's lock."""
    try:
        descriptor = open_private(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    except PermissionError:
        os.unlink(path)  # noqa: PTH108  (a link or the like, of which only the name is removed)
        return None
    if not _is_copy_of(os.fstat(descriptor), identity):
        os.close(descriptor)
        _evict(path)  # It was modified.
        return None
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return LocalCopy(path, descriptor, identity)


def _evict(path: str) -> bool:
    """Removes a file and frees its space. Returns False if it is in use. The caller holds the folder's lock."""
    try:
        descriptor = open_private(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)  # noqa: PTH108
        if os.fstat(descriptor).st_nlink == 0:  # Otherwise processes that have it open would keep its space.
            os.ftruncate(descriptor, 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _write_all(descriptor: int, url: str, blocks: Iterable[bytes], size: int) -> None:
    """Writes the content of a copy. Raises DataSourceError if it does not have the given size in bytes."""
    done = 0
    for content in blocks:
        if done + len(content) > size:
            # Not read to its end: a small file may unpack to a very large one.
            raise DataSourceError(f"The content of {url!r} has more than {size:,} bytes. Restore the file.")
        remaining = memoryview(content)
        while remaining:
            written = os.pwrite(descriptor, remaining, done)
            remaining, done = remaining[written:], done + written
    if done != size:
        raise DataSourceError(f"The content of {url!r} has {done:,} bytes instead of {size:,}. Restore the file.")
