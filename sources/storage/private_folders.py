"""Folders and files that only this user can have written, so that their content can be trusted.

A folder that another user can write to may hold links that lead anywhere, and files with any content. So the folder is
checked once, and each file when it is opened.
"""

import contextlib
import errno
import os
import stat

_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No link is followed, and opening a pipe does not wait for its other end."""


def make_private_folder(folder: str) -> None:
    """Makes a folder with mode 0700, and all missing ones above it, and checks the folder.

    Raises:
        PermissionError: as `check_private`.
        OSError: it cannot be made.
    """
    missing = []
    path = folder
    while path and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)  # noqa: PTH120  (paths are strings throughout)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # Another process has made it meanwhile.
            os.mkdir(path, 0o700)  # noqa: PTH102
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_private(descriptor, folder, f"Use a folder of your own, or run `chmod 700 {folder}` if it is")
    finally:
        os.close(descriptor)


def check_private(descriptor: int, folder: str, remedy: str) -> None:
    """Checks that an open folder belongs to this user, and that no other user may write to it.

    Args:
        descriptor: the folder, open.
        folder: its path, for the error.
        remedy: the last sentence of the error, without its full stop.

    Raises:
        PermissionError: it is another user's, or others may write to it.
    """
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"The folder belongs to another user. {remedy}", folder)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, f"Other users may write to the folder. {remedy}", folder)


def open_private(path: str, flags: int, mode: int = 0o600) -> int:
    """Returns the descriptor of a regular file that belongs to this user and has no other name.

    Args:
        path: the file.
        flags: as of `os.open`.
        mode: the permissions of a new file.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: a link, a pipe, another user's file, or a file with a second name is at the path.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | _OPEN_FLAGS, mode)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.EMLINK}:  # A link; a socket; a link on FreeBSD.
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
    return PermissionError(
        errno.EPERM,
        "This must be a regular file of this user with a single name, and is something else. Remove it",
        path,
    )
