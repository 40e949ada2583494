"""Checks that other users cannot have written a file or folder.

A folder that another user can write to may contain links to any file, and files with any content. Therefore folders are
checked once, and files when they are opened.
"""

import contextlib
import errno
import os
import stat

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
