"""The processes that this one has started, and the descriptors that it has open.

An idle fork server, which waits for the next loader, is not among them, nor are its descriptor and the thread that will
end it. One that serves is.
"""

import contextlib
import os
import sys
import threading
import time

import psutil

from millstream.loader.processes.fork_servers import FORK_SERVERS
from support.faults.user_faults import WAIT_SECONDS

SETTLE_SECONDS = 5.0
"""Time limit for descriptors that are open for a moment: several times a minute, threads of Ray open a socket, also
after the cluster has ended."""


def processes_below(*, recursive: bool = True) -> list[psutil.Process]:
    """Returns the processes below this one, or its children alone.

    Python's own tracker of shared memory, which stays until the end, is not among them.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []  # It is quicker to ask than to list all processes of the machine.
    idle = {server.process.pid for server in FORK_SERVERS.idle}
    found = [process for process in psutil.Process().children(recursive=recursive) if process.pid not in idle]
    return [process for process in found if not is_named(process, "multiprocessing.resource_tracker")]


def our_threads() -> list[threading.Thread]:
    """Returns the threads of the library that still run, without the one that waits for the end of a fork server."""
    waiting = {server.retirement and server.retirement.thread for server in FORK_SERVERS.idle}
    running = {thread for thread in threading.enumerate() if thread.name.startswith("millstream")}
    return list(running - waiting)


def worker_pids() -> set[int]:
    """Returns the worker processes of all fork servers of this process."""
    found: set[int] = set()
    for server in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # Another process may end at any moment.
            found.update(worker.pid for worker in server.children())
    return found


def settled_workers(number: int) -> set[int]:
    """Returns the worker processes of this process as soon as there are so many.

    Others work before the last has started, and while one that is not needed ends.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while len(workers := worker_pids()) != number:
        assert time.monotonic() < deadline, workers
    return workers


def open_descriptors() -> set[str]:
    """Returns this process's open descriptors and their targets, without that of Python's own resource tracker."""
    found = set()
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    ignored = {str(server._control.fileno()) for server in FORK_SERVERS.idle}
    if tracker is not None:
        ignored.add(str(tracker._resource_tracker._fd))
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208  (the names are wanted)
        if descriptor in ignored:
            continue
        try:
            found.add(f"{descriptor} -> {os.readlink(f'/proc/self/fd/{descriptor}')}")  # noqa: PTH115
        except FileNotFoundError:
            continue  # The descriptor of the listing itself.
    return found


def settled_descriptors(expected: int) -> set[str]:
    """Returns the open descriptors, once they are as many as expected, or after SETTLE_SECONDS."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while len(found := open_descriptors()) != expected and time.monotonic() < deadline:
        continue
    return found


def is_named(process: psutil.Process, name: str) -> bool:
    """Returns whether a process has a name in its command."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(name in word for word in process.cmdline())
    return False
