"""The processes that this one has started."""

import contextlib
import os
import sys

import psutil


def processes_below(*, recursive: bool = True) -> list[psutil.Process]:
    """Returns the processes below this one, or its children alone.

    Python's own tracker, which tqdm starts from Python 3.14 on, is not among them.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []  # It is quicker to ask than to list all processes of the machine.
    found: list[psutil.Process] = psutil.Process().children(recursive=recursive)
    if sys.hexversion < 0x30E0000:
        return found
    return [process for process in found if not is_named(process, "multiprocessing.resource_tracker")]


def worker_pids() -> set[int]:
    """Returns the worker processes of all fork servers of this process."""
    return {worker.pid for server in psutil.Process().children() for worker in server.children()}


def is_named(process: psutil.Process, name: str) -> bool:
    """Returns whether a process has a name in its command."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(name in word for word in process.cmdline())
    return False
