"""Explanations of errors caused by the limits of this process (`ulimit`).

Workers inherit the limits of the process that starts them, so their errors are explained here as well.
"""

import contextlib
import errno
import mmap
import os
import resource
from collections.abc import Iterator

DESCRIPTORS_PER_WORKER = 3
"""The parent's descriptors per worker: channel, process handle and crash log."""

MIN_ARENA_BYTES = 1 << 20
"""With less memory, hardly any batch could be transferred."""


@contextlib.contextmanager
def explained_limits(num_workers: int) -> Iterator[None]:
    """Explains errors in its block that come from a limit: the limit, the need of this many workers, and a remedy."""
    try:
        yield
    except (OSError, MemoryError) as error:
        explain_limit(error, num_workers)
        raise


def explain_limit(error: BaseException, num_workers: int) -> None:
    """Adds the note of `explained_limits` to an error, if it comes from a limit."""
    code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    needs = "a worker process needs" if num_workers == 1 else f"{num_workers} worker processes need"
    text = None
    if code in (errno.EMFILE, errno.ENFILE):
        text = (
            f"{needs} {DESCRIPTORS_PER_WORKER * num_workers} open files of the "
            f"{_limit(resource.RLIMIT_NOFILE)} that this process may have. "
            "Raise the limit (`ulimit -n`) or use fewer workers."
        )
    elif code == errno.EFBIG:
        text = (
            f"{needs} files in memory, for the pipeline and for batches, larger than the "
            f"{_limit(resource.RLIMIT_FSIZE)} bytes that this process may write to a file. "
            "Raise the limit (`ulimit -f`) or use no worker processes."
        )
    elif code == errno.EAGAIN:
        text = (
            f"{needs} {num_workers + 1} more processes. All processes and threads of this user are limited to "
            f"{_limit(resource.RLIMIT_NPROC)}; a container may have its own limit (pids.max). "
            "Raise the limit (`ulimit -u`) or use fewer workers."
        )
    elif code == errno.ENOMEM and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        text = (
            f"{needs} address space, and a process is limited to {_limit(resource.RLIMIT_AS)} bytes. "
            "Raise the limit (`ulimit -v`), or use fewer workers and fewer threads (ReadOptions.num_threads)."
        )
    if text is not None:
        error.add_note(f"millstream: {text}")


def arena_size(budget: int, num_workers: int) -> int:
    """Returns the size of each worker's arena, in whole pages, from the total number of bytes.

    A limit of file sizes below MIN_ARENA_BYTES is an OSError.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    wanted = budget // num_workers
    if limit != resource.RLIM_INFINITY:
        if limit < MIN_ARENA_BYTES:
            error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            explain_limit(error, num_workers)
            raise error
        wanted = min(wanted, limit)
    return max(1, wanted // mmap.PAGESIZE) * mmap.PAGESIZE


def describe_limits() -> str:
    """Returns a sentence about limits that may keep processes from starting, or "" if none is set."""
    names = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA, "-f": resource.RLIMIT_FSIZE}
    found = [f"`ulimit {name}` is {_limit(kind)} bytes" for name, kind in names.items() if _limit(kind) != "unlimited"]
    return f" It may be a limit of this process: {', '.join(found)}." if found else ""


def _limit(kind: int) -> str:
    limit, _ = resource.getrlimit(kind)
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
