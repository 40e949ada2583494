"""Queries of running trainers of the same user, for `millstream top`, and the folder with their sockets.

Guarantees:
    * The folder is used only if it belongs to this user and no other user may enter it. It is checked once and then
      used by its descriptor, so replacing it later has no effect.
    * A socket is called `PID.sock` from when it listens until the trainer ends. A socket that refuses a connection was
      left by a killed process, and whichever process finds it removes it.
"""

import contextlib
import errno
import json
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIX = ".sock"

CONNECT_SECONDS = 5.0
"""Timeout for an answer. A trainer in C code that holds the interpreter's lock answers after it."""

FORMAT = 2
HOW_TO_SERVE = "Start it with MILLSTREAM_TOP=1 in its environment, or call loader.serve_top() in it."
NONE_SERVED = f"No running trainer of yours can be monitored. {HOW_TO_SERVE.replace('it', 'one', 1)}"


class NotServed(ValueError):  # noqa: N818  (the name is a sentence)
    """The process cannot be monitored. The text has the reason, and the remedy."""


def served_processes() -> list[int]:
    """Returns the processes of this user that can be monitored, and removes the sockets of dead ones."""
    found = set()
    for folder in folders():
        # A folder that does not exist or is not private has no socket to connect to.
        with contextlib.suppress(OSError), private_folder(folder) as descriptor:
            for name in os.listdir(descriptor):  # noqa: PTH208  (of a descriptor)
                number = name.removesuffix(SUFFIX)
                if not (name.endswith(SUFFIX) and number.isdecimal()):
                    continue
                # A process that is stopped may not accept a connection. The others are listed anyway.
                with contextlib.suppress(OSError):
                    if (there := connected(descriptor, name)) is not None:
                        there.close()
                        found.add(int(number))
    return sorted(found)


def query(pid: int, question: str) -> Any:
    """Returns the answer of a process to "snapshot" or "stacks".

    Raises:
        NotServed: it cannot be monitored, or has ended.
        OSError: it does not answer in time.
    """
    refused: OSError | None = None
    for folder in folders():
        try:
            with private_folder(folder) as descriptor:
                answer = _answer_in(descriptor, pid, question)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (TimeoutError, BlockingIOError):  # No answer, or too many questions wait.
            raise TimeoutError(
                f"Process {pid} does not answer: it is stopped, or runs C code that holds the interpreter's lock."
            ) from None
        except OSError as error:
            refused = error
            continue
        if answer is not None:
            return answer
    if refused is not None:
        raise refused
    if not Path(f"/proc/{pid}").exists():
        raise NotServed(f"There is no process {pid}. {_served_text()}")
    raise NotServed(f"Process {pid} cannot be monitored. {HOW_TO_SERVE}")


def _answer_in(folder: int, pid: int, question: str) -> Any:
    """Returns the answer of the process with a socket in a folder; None if there is no such socket."""
    connection = connected(folder, socket_name(pid))
    if connection is None:
        return None
    with connection:
        if not is_of_own_user(connection):
            raise PermissionError(f"Process {pid} does not belong to this user, {os.geteuid()}.")
        connection.sendall(f"{question}\n".encode())
        chunks = []
        while chunk := connection.recv(1 << 16):
            chunks.append(chunk)
    if not chunks:
        raise NotServed(f"Process {pid} has ended, or does not answer this user.")
    answer = json.loads(b"".join(chunks))
    if "error" in answer:
        raise NotServed(f"Process {pid} could not answer: {answer['error']}")
    if answer["format"] != FORMAT:
        raise NotServed(f"Process {pid} runs another version of millstream. Monitor it with that version.")
    return answer


def _served_text() -> str:
    served = served_processes()
    return f"These can be monitored: {', '.join(map(str, served))}." if served else NONE_SERVED


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
    """Yields the descriptor of a folder that only this user may enter; raises OSError if there is none."""
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
    return f"{pid}{SUFFIX}"


def is_of_own_user(connection: socket.socket) -> bool:
    """Returns True if the other end belongs to this user, according to the kernel. Not even root is answered."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def connected(folder: int, name: str) -> socket.socket | None:
    """Returns a connection to a socket, or None if no process listens; then the socket is removed."""
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
