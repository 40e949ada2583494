"""What the system offers to hold on to processes, and to end them with all that they have started."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator

LOOK_SECONDS = 0.05
"""How long one look takes at most, where the end of a process is waited for."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def looks(seconds: float) -> Iterator[float]:
    """Yields how long to wait, a look at a time, until this many seconds have been waited for.

    A look that takes longer than that counts for no more: this process was suspended meanwhile, and others with it.
    """
    while seconds > 0:
        look, begin = min(seconds, LOOK_SECONDS), time.monotonic()
        yield look
        seconds -= min(look, time.monotonic() - begin)


def open_handle(pid: int) -> int | None:
    """Returns the descriptor of a process's handle (pidfd), to be polled for its end; None where there are none.

    macOS has none, nor has Linux before 5.3, and some sandboxes forbid them.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def kill_group(pid: int) -> None:
    """Kills a worker and what it has started; before it has a group of its own, just the worker."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_session(leader: int, members: Iterable[int]) -> None:
    """Kills the processes of a session, while its leader's number is still its own.

    Args:
        leader: the process that began the session, dead perhaps, but only just taken note of.
        members: processes that may be in it, where the system does not list all that there are.
    """
    # To list them takes a descriptor, and there may be none left.
    with contextlib.suppress(OSError):
        # Not pathlib: it takes long to import, and workers start with this module.
        members = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    for pid in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent, a process of one thread, dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of what its descendants leave behind, where the system can: on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Returns the children of this process, which has one thread; none where the system does not list them."""
    try:
        # Not pathlib: it takes long to import, and workers start with this module.
        with open("/proc/thread-self/children", encoding="ascii") as file:  # noqa: PTH123
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def name_process(name: str) -> None:
    """Sets the name that `ps` and `top` show."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])
