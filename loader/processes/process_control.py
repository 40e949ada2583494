"""System calls about processes: handles, groups, sessions, those left behind, and the one at the end of a socket."""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator

SLICE_SECONDS = 0.05
"""The longest slice of a wait for the end of a process."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def wait_slices(seconds: float) -> Iterator[float]:
    """Yields the slices of a wait of up to `seconds`. The caller waits for each slice.

    A slice that takes longer than asked does not count for more: the machine was suspended meanwhile.
    """
    while seconds > 0:
        current, begin = min(seconds, SLICE_SECONDS), time.monotonic()
        yield current
        seconds -= min(current, time.monotonic() - begin)


def open_handle(pid: int) -> int | None:
    """Returns the descriptor of a process handle (pidfd) that can be polled for the process's end, or None.

    macOS has no handles, Linux has them since 5.3, and some sandboxes forbid them.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def kill_group(pid: int) -> None:
    """Kills a worker and its process group, or just the worker if it has no group yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_session(leader: int, members: Iterable[int]) -> None:
    """Kills the processes of a session, or those of these members if the system does not list its processes.

    The leader must not have been reaped long ago: its ID could be reused.
    """
    # Listing takes a descriptor, and none may be left.
    with contextlib.suppress(OSError):
        # Not pathlib, which is slow to import, and workers start with this module.
        members = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    for pid in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent, which has one thread, dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def ignore_termination() -> None:
    """Makes this process, and those forked by it, ignore SIGTERM, but not the programs that they start."""
    # Programs would inherit SIG_IGN. With a handler, they begin with the default.
    signal.signal(signal.SIGTERM, _ignore)
    signal.siginterrupt(signal.SIGTERM, False)


def let_children_terminate() -> None:
    """Lets SIGTERM end the processes that this process forks from now on: `multiprocessing.Pool` ends its own by it."""
    masks: list[set[int | signal.Signals]] = []

    def restore() -> None:
        if signal.getsignal(signal.SIGTERM) is _ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    def block() -> None:
        # A signal to the new process waits until it can end that.
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]))

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)


def _ignore(_: int, __: object) -> None:
    """Handles a signal by doing nothing."""


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans. Has an effect on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Returns the children of this process, which has one thread, or none if the system does not list them."""
    try:
        # Not pathlib, as above.
        with open("/proc/thread-self/children", encoding="ascii") as file:  # noqa: PTH123
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def keep_tracker(descriptor: int) -> None:
    """Imports the module that `share_tracker` needs, before any fork."""
    from multiprocessing import resource_tracker  # noqa: F401, PLC0415  (lazy: slow to import, and rarely needed)

    os.set_inheritable(descriptor, False)


def share_tracker(descriptor: int) -> None:
    """Makes this process use the resource tracker of another one.

    Called after the fork: Python 3.14 closes the descriptor of its known tracker in a forked process, which would then
    start its own.
    """
    from multiprocessing import resource_tracker  # noqa: PLC0415  (lazy, as above)

    resource_tracker._resource_tracker._fd = descriptor  # type: ignore[attr-defined]  # noqa: SLF001


def worker_name(number: int) -> str:
    return f"millstream-w{number}"


def name_process(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def is_of_own_user(connection: socket.socket) -> bool:
    """Returns True if the other end belongs to this user, according to the kernel. Not even root is answered."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())
