"""Asks a running trainer of this user, from another process."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from millstream.loader.monitoring.socket_folder import (
    SUFFIX,
    connected,
    folders,
    is_own_user,
    peer_user,
    private_folder,
    socket_name,
)

FORMAT = 1
"""Which form the answers have."""

HOW_TO_SERVE = "Start it with MILLSTREAM_TOP=1 in its environment, or call loader.serve_top() in it."


class NotServed(ValueError):  # noqa: N818  (it says so, and how to change it)
    """The process cannot be looked at; the text says why."""


def served_processes() -> list[int]:
    """Returns the processes of this user that can be looked at. What dead ones have left is removed."""
    found = set()
    for folder in folders():
        # A folder that is not there, or not private, has no socket that we would speak to.
        with contextlib.suppress(OSError), private_folder(folder) as descriptor:
            for name in os.listdir(descriptor):  # noqa: PTH208  (of a descriptor)
                number = name.removesuffix(SUFFIX)
                if name.endswith(SUFFIX) and number.isdecimal() and (there := connected(descriptor, name)):
                    there.close()
                    found.add(int(number))
    return sorted(found)


def asked(pid: int, question: str) -> Any:
    """Returns what a process answers.

    Args:
        pid: its number.
        question: "snapshot" or "stacks".

    Raises:
        NotServed: it cannot be looked at, or is gone.
        OSError: it does not answer.
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
                f"Process {pid} does not answer: it is stopped, or in C code that keeps the interpreter's lock."
            ) from None
        except OSError as error:
            refused = error
            continue
        if answer is not None:
            return answer
    if refused is not None:
        raise refused
    if not Path(f"/proc/{pid}").exists():
        raise NotServed(f"There is no process {pid}{_others()}")
    raise NotServed(f"Process {pid} serves no pipeline of this user. {HOW_TO_SERVE}")


def _answer_in(folder: int, pid: int, question: str) -> Any:
    """Returns what a process says whose socket is in a folder; None where there is none."""
    connection = connected(folder, socket_name(pid))
    if connection is None:
        return None
    with connection:
        if not is_own_user(peer_user(connection)):
            raise PermissionError(f"Process {pid} does not belong to this user, {os.geteuid()}.")
        connection.sendall(f"{question}\n".encode())
        pieces = []
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    if not pieces:
        raise NotServed(f"Process {pid} has ended, or does not answer this user.")
    answer = json.loads(b"".join(pieces))
    if "error" in answer:
        raise NotServed(f"Process {pid} could not answer: {answer['error']}")
    if answer["format"] != FORMAT:
        raise NotServed(f"Process {pid} has another version of millstream: look at it with that one.")
    return answer


def _others() -> str:
    served = served_processes()
    if not served:
        return f", and none that can be looked at. {HOW_TO_SERVE.replace('it', 'a trainer', 1)}"
    return f". There are: {', '.join(map(str, served))}."
