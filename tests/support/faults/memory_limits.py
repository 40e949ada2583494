"""Limits of memory, descriptors, threads and file sizes, and the peak of what Python allocates."""

import contextlib
import resource
import threading
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from millstream.loader.processes.fork_servers import FORK_SERVERS
from support.faults.user_faults import WAIT_SECONDS


class MemoryLimit:
    """A control group with a limit; without one, where this user may make none, it limits nothing."""

    def __init__(self, num_bytes: int) -> None:
        name = f"millstream-test-{uuid.uuid4().hex}"
        self.group: Path | None = None
        for parent in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
            with contextlib.suppress(OSError):
                (parent / name).mkdir()
                self.group = parent / name
                break
        for limit in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max"):
            if self.group is not None and (self.group / limit).exists():
                (self.group / limit).write_text(str(num_bytes))

    def apply(self, pid: int) -> None:
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(pid))

    def num_kills(self) -> int | None:
        """Returns how many processes were killed for lack of memory; None where there is no limit."""
        if self.group is None:
            return None
        file = next(
            self.group / name for name in ("memory.oom_control", "memory.events") if (self.group / name).exists()
        )
        return int(dict(line.split() for line in file.read_text().splitlines())["oom_kill"])


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Iterator[MemoryLimit]:
    """Yields a limit; all that it was applied to must have ended when it ends, but for an idle fork server."""
    limit = MemoryLimit(num_bytes)
    yield limit
    FORK_SERVERS.end_idle()
    if limit.group is not None:
        deadline = time.monotonic() + WAIT_SECONDS
        while (limit.group / "cgroup.procs").read_text():
            assert time.monotonic() < deadline
        limit.group.rmdir()


@contextlib.contextmanager
def measured_peak() -> Iterator[Callable[[], int]]:
    """Yields a function that returns how many bytes Python has allocated at most since the block began, or in it."""
    peak = 0
    tracemalloc.start()
    try:
        yield lambda: peak or tracemalloc.get_traced_memory()[1]
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


@contextlib.contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    """Sets a limit of this process, such as `resource.RLIMIT_NOFILE`, for the length of a block."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Makes the start of every thread fail: none can have a stack of this size."""
    previous = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(previous)
