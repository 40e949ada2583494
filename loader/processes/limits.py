"""The limits of this process (`ulimit`) that worker processes meet: which of them it was, and what can be done.

Workers have the limits of the process that starts them, so what one of them met is explained here as well.
"""

import contextlib
import errno
import mmap
import os
import resource
from collections.abc import Iterator

DESCRIPTORS_PER_WORKER = 3
"""What a worker costs the parent: its channel, process handle and last words."""

SMALLEST_ARENA_BYTES = 1 << 20
"""In less memory than that, hardly any batch could cross."""


@contextlib.contextmanager
def explained_limits(num_workers: int) -> Iterator[None]:
    """Adds to an error that comes from a limit its name, what this many workers need, and what can be done."""
    try:
        yield
    except (OSError, MemoryError) as error:
        explain_limit(error, num_workers)
        raise


def explain_limit(error: BaseException, num_workers: int) -> None:
    """Adds to an error that comes from a limit its name, what this many workers need, and what can be done."""
    code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    needs = "a worker process needs" if num_workers == 1 else f"{num_workers} worker processes need"
    text = None
    if code in (errno.EMFILE, errno.ENFILE):
        text = (
            f"{needs} some {DESCRIPTORS_PER_WORKER * num_workers} open files of the "
            f"{_limit(resource.RLIMIT_NOFILE)} that this process may have. "
            "Raise the limit (`ulimit -n`) or use fewer workers."
        )
    elif code == errno.EFBIG:
        text = (
            f"{needs} files in memory, for the pipeline and for batches, larger than the "
            f"{_limit(resource.RLIMIT_FSIZE)} bytes that a file of this process may have. "
            "Raise the limit (`ulimit -f`) or use no worker processes."
        )
    elif code == errno.EAGAIN:
        text = (
            f"{needs} {num_workers + 1} more processes. Of all processes and threads of this user, there may be "
            f"{_limit(resource.RLIMIT_NPROC)}; a container may have a limit of its own (pids.max). "
            "Raise the limit (`ulimit -u`) or use fewer workers."
        )
    elif code == errno.ENOMEM and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        text = (
            f"{needs} address space: {_limit(resource.RLIMIT_AS)} bytes are all that a process may have. "
            "Raise the limit (`ulimit -v`), or use fewer workers and fewer threads (ReadOptions.num_threads)."
        )
    if text is not None:
        error.add_note(f"millstream: {text}")


def arena_size(budget: int, num_workers: int) -> int:
    """Returns how many bytes the arena of each worker may have, whole pages.

    Args:
        budget: what all of them may have together.
        num_workers: how many there are.

    Raises:
        OSError: a file may not be large enough for an arena to be of use.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    wanted = budget // num_workers
    if limit != resource.RLIM_INFINITY:
        if limit < SMALLEST_ARENA_BYTES:
            error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            explain_limit(error, num_workers)
            raise error
        wanted = min(wanted, limit)
    return max(1, wanted // mmap.PAGESIZE) * mmap.PAGESIZE


def describe_limits() -> str:
    """Returns a sentence about the limits that may keep processes from starting, empty if none is set."""
    names = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA, "-f": resource.RLIMIT_FSIZE}
    found = [f"`ulimit {name}` is {_limit(kind)} bytes" for name, kind in names.items() if _limit(kind) != "unlimited"]
    return f" It may be a limit of this process: {', '.join(found)}." if found else ""


def _limit(kind: int) -> str:
    limit, _ = resource.getrlimit(kind)
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
