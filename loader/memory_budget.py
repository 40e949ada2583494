"""How much shared memory all arenas together may take."""

import contextlib
import resource
import sys
from pathlib import Path

MEMORY_SHARE = 0.5
"""The part of the memory available that batches in flight, and batches kept by the consumer, may take."""

_SMALLEST_BUDGET = 1 << 28


def memory_budget() -> int:
    """Returns a number of bytes: half of what is available to this process, at least 256 MiB.

    The container's limit counts as well as the machine's memory: beyond it the system does not refuse, it kills.
    """
    return max(_SMALLEST_BUDGET, int(MEMORY_SHARE * memory_available()))


def memory_available() -> int:
    """Returns how many bytes this process may use, as far as the system tells."""
    return min(_machine_memory(), _address_space_left(), *_container_limits())


def _machine_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 33
    fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _address_space_left() -> int:
    """Returns how much more this process may map: batch systems limit it (`ulimit -v`), and arenas are mapped whole."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        mapped = 0
    return max(0, limit - mapped)


def _container_limits() -> list[int]:
    """Returns the limits of the control groups that this process is in: a container's, or a batch system's job's."""
    limits = [sys.maxsize]
    for folder, name in _control_groups():
        for group in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return limits


def _control_groups() -> list[tuple[Path, str]]:
    """Returns the folder of each control group of this process, and the name of the file with its limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups.append((Path(f"/sys/fs/cgroup{path}"), "memory.max"))
        elif "memory" in controllers.split(","):
            groups.append((Path(f"/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"))
    return groups
