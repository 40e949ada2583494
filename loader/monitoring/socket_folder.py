"""The folder for sockets of trainers: one folder per user, one socket per process.

Guarantees:
    * A folder is used only if it belongs to this user and no other user may enter it. It is checked once and then used
      by its descriptor, so replacing it later has no effect.
    * A socket is called `PID.sock` from when it listens until the trainer ends. A socket that refuses a connection was
      left by a killed process, and whichever process finds it removes it.
"""

import contextlib
import errno
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".sock"

CONNECT_SECONDS = 5.0
"""Timeout for an answer. A trainer in C code that holds the interpreter's lock answers after it."""


def folders() -> list[Path]:
    """Returns the folders that may have sockets of this user's trainers, of any session or job.

    The first, in `$XDG_RUNTIME_DIR` or else a temporary folder, is that for a socket of this process.
    """
    user, runtime = os.geteuid(), os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(runtime) / "millstream"] if runtime else []
    temporary = [Path(folder) / f"millstream-{user}" for folder in (tempfile.gettempdir(), "/tmp")]  # noqa: S108
    return list(dict.fromkeys([*found, *temporary, Path(f"/run/user/{user}/millstream")]))


@contextlib.contextmanager
def private_folder(folder: Path, *, make: bool = False) -> Iterator[int]:
    """Yields the descriptor of a folder that only this user may enter.

    Raises:
        PermissionError: it belongs to another user, or other users may enter it.
        OSError: it does not exist, or cannot be created.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(
                errno.EPERM,
                f"A folder for sockets must belong to this user, {os.geteuid()}, with the mode 0700; it belongs to "
                f"{status.st_uid}, with the mode {stat.S_IMODE(status.st_mode):04o}",
                str(folder),
            )
        yield descriptor
    finally:
        os.close(descriptor)


def address_in(descriptor: int, name: str) -> str:
    """Returns a short address of a socket in a folder, because a socket's path has at most 107 bytes."""
    return f"/proc/self/fd/{descriptor}/{name}"


def socket_name(pid: int) -> str:
    """Returns the name of a process's socket."""
    return f"{pid}{SUFFIX}"


def is_of_own_user(connection: socket.socket) -> bool:
    """Returns True if the other end belongs to this user, according to the kernel. Not even root is answered."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def connected(folder: int, name: str) -> socket.socket | None:
    """Returns a connection to a socket, or None if no process listens; then the socket is removed.

    Raises:
        OSError: the connection failed for another reason.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(address_in(folder, name))
    except FileNotFoundError:
        connection.close()
        return None
    except ConnectionRefusedError:
        connection.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        return None
    except BaseException:
        connection.close()
        raise
    return connection
