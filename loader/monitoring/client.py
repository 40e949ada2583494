"""The client of `millstream top`: queries a running trainer of the same user."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from millstream.loader.monitoring.socket_folder import (
    SUFFIX,
    connected,
    folders,
    is_of_own_user,
    private_folder,
    socket_name,
)

FORMAT = 1
"""Version of the answers' format."""

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
                if name.endswith(SUFFIX) and number.isdecimal() and (there := connected(descriptor, name)):
                    there.close()
                    found.add(int(number))
    return sorted(found)


def query(pid: int, question: str) -> Any:
    """Returns the answer of a process.

    Args:
        pid: the process.
        question: "snapshot" or "stacks".

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
        except TimeoutError:
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
