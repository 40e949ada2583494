"""Files and folders that only this user can have written: the cache folder, and files that are new or complete.

The cache folder is `$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else `~/.cache/millstream`. It holds index
files, and by default the copies of a `FileCache` in the subfolder `files`. Index files that were not used for 90 days
are removed when a process writes its first index there.

A folder that another user can write to may contain links to any file, and files with any content. Therefore folders are
checked once, and files when they are opened.
"""

import contextlib
import errno
import functools
import os
import re
import stat
import time
from collections.abc import Iterator
from typing import BinaryIO

from millstream.sources.digests import digest
from millstream.sources.remote.urls import is_url, without_query

_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags that follow no link, and do not wait for the other end of a pipe."""


def make_private_folder(folder: str) -> None:
    """Creates a folder and its missing parents with mode 0700, and checks that the folder is private."""
    missing = []
    path = folder
    while path and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)  # noqa: PTH120  (paths are strings throughout)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # Another process has created it meanwhile.
            os.mkdir(path, 0o700)  # noqa: PTH102
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_private(descriptor, folder, f"Use a folder of your own, or run `chmod 700 {folder}` if it is")
    finally:
        os.close(descriptor)


def check_private(descriptor: int, folder: str, remedy: str) -> None:
    """Raises PermissionError unless an open folder belongs to this user, and no other user may write to it.

    `remedy` is the last sentence of the error, without its full stop.
    """
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"The folder belongs to another user. {remedy}", folder)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, f"Other users may write to the folder. {remedy}", folder)


def open_trusted(path: str, owner: int) -> int:
    """Returns the descriptor of a regular file that this user, root or the owner of the data wrote.

    Any other file is a PermissionError. No link is followed, and no pipe is waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOCTTY | _OPEN_FLAGS)
    status = os.fstat(descriptor)
    is_trusted = status.st_uid in (os.geteuid(), 0, owner) and not status.st_mode & stat.S_IWOTH
    if stat.S_ISREG(status.st_mode) and is_trusted:
        return descriptor
    os.close(descriptor)
    raise PermissionError(0, "it is not a regular file, or another user could have written it", path)


def open_private(path: str, flags: int) -> int:
    """Returns the descriptor of a regular file of this user with a single name. A new file has mode 0600.

    A link, a pipe, another user's file, or a file with a second name is a PermissionError.
    """
    try:
        descriptor = os.open(path, flags | _OPEN_FLAGS, 0o600)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.EMLINK}:  # A link, a socket, a link on FreeBSD.
            raise _foreign(path) from None
        raise
    if is_private(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    raise _foreign(path)


def is_private(status: os.stat_result) -> bool:
    """Returns True if a file is a regular one of this user with a single name."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1


def _foreign(path: str) -> PermissionError:
    return PermissionError(errno.EPERM, "This must be a regular file of this user with a single name. Remove it", path)


@contextlib.contextmanager
def full_disk_named(path: str) -> Iterator[None]:
    """Adds a path to the error of a write for which there is no room. The system names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            error.filename = path
        raise


@contextlib.contextmanager
def new_file(path: str, *, mode: int | None = None, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Opens a new file for writing, which is renamed to `path` at the end of the block.

    Until then it has a temporary name in the same folder, which begins with a dot. If the block raises, it is removed.
    A file that is synced survives a power failure.
    """
    folder, name = os.path.split(path)
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)  # Raises immediately if the name is too long.
    temporary = os.path.join(folder, f".{name.lstrip('.')[:100]}.{os.urandom(6).hex()}.part")  # noqa: PTH118
    file = open(temporary, "x+b", opener=functools.partial(os.open, mode=0o666))  # noqa: SIM115
    try:
        with file, full_disk_named(path):
            if mode is not None:
                with contextlib.suppress(OSError):  # Not all file systems have permissions.
                    os.fchmod(file.fileno(), mode)  # The umask could make it unreadable.
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # noqa: PTH108


_INDEX_FILE = re.compile(r".+\.[0-9a-f]{16}\.[a-z-]+-index|\..+-index\.[0-9a-f]{12}\.part", re.DOTALL)
"""The names of index files in the cache, and those of incomplete ones, which killed processes leave."""

UNUSED_DAYS = 90
_DAY_SECONDS = 86_400.0
_MAX_NAME = 60
"""Limit of the part of a cached file's name that is taken from the original name."""


def cache_folder() -> str:
    if own := os.environ.get("MILLSTREAM_CACHE"):
        return os.path.abspath(own)  # noqa: PTH100  (paths are strings throughout)
    # The XDG Base Directory Specification says to ignore a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # noqa: PTH117
        base = os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118
    return os.path.join(base, "millstream")  # noqa: PTH118


def cached_name(path: str, version: bytes = b"") -> str:
    """Returns the name in the cache for a file, or for one version of an object: readable, and unique by a digest."""
    plain = without_query(path) if is_url(path) else path
    return f"{plain.rpartition('/')[2][:_MAX_NAME] or 'records'}.{digest(8, os.fsencode(plain), version).hex()}"


def mark_used(descriptor: int) -> None:
    """Sets the modification time of an open index file, its time of last use, unless that is less than a day ago."""
    with contextlib.suppress(OSError):  # It may belong to another user.
        if time.time() - os.fstat(descriptor).st_mtime > _DAY_SECONDS:
            os.utime(descriptor)


def prepare_cache_folder() -> None:
    """Creates the cache folder, and once per process removes index files that were not used for `UNUSED_DAYS`."""
    folder = cache_folder()
    os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103
    _remove_unused(folder)


@functools.cache
def _remove_unused(folder: str) -> None:
    limit = time.time() - UNUSED_DAYS * _DAY_SECONDS
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _INDEX_FILE.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_mtime < limit:
                        os.unlink(entry.path)  # noqa: PTH108
