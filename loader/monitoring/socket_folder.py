"""Where trainers that can be looked at have their sockets: one folder of each user's own, one socket a process.

Guarantees:
    * The folder belongs to this user and nobody else may enter it, or it is not used. It is looked at once and then
      used by its descriptor: what is put in its place later is not used.
    * A socket has its name, `PID.sock`, from when it listens until the trainer ends. One that refuses a connection is
      what is left of a process that was killed, and is removed by whoever meets it.
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
"""How long a trainer may take to answer: one that is in C code with the interpreter's lock answers afterwards."""


def server_folder() -> Path:
    """Returns where a trainer puts its socket: in `$XDG_RUNTIME_DIR`, else in a temporary folder of the user."""
    return folders()[0]


def folders() -> list[Path]:
    """Returns where trainers of this user may have put sockets, whatever session or job they run in."""
    user, runtime = os.geteuid(), os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(runtime) / "millstream"] if runtime else []
    temporary = [Path(folder) / f"millstream-{user}" for folder in (tempfile.gettempdir(), "/tmp")]  # noqa: S108
    return list(dict.fromkeys([*found, *temporary, Path(f"/run/user/{user}/millstream")]))


@contextlib.contextmanager
def private_folder(folder: Path, *, make: bool = False) -> Iterator[int]:
    """Yields the descriptor of a folder that only this user may enter.

    Args:
        folder: where it is.
        make: whether to make it if it is not there.

    Raises:
        PermissionError: it is somebody else's, or others may enter it.
        OSError: it is not there, or cannot be made.
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
    """Returns the address of a socket in a folder. The path of a socket has 107 bytes at most: this one is short."""
    return f"/proc/self/fd/{descriptor}/{name}"


def socket_name(pid: int) -> str:
    """Returns what the socket of a process is called."""
    return f"{pid}{SUFFIX}"


def peer_user(connection: socket.socket) -> int:
    """Returns the number of the user at the other end of a connection, as the kernel has it."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(user)


def is_own_user(user: int) -> bool:
    """Returns whether a user is the one that this process runs as. Nobody else may look, root neither."""
    return user == os.geteuid()


def connected(folder: int, name: str) -> socket.socket | None:
    """Returns a connection to a socket in a folder; None where no one listens any more: then the name is removed.

    Raises:
        OSError: it cannot be reached.
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
