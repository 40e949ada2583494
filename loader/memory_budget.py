"""How much shared memory all arenas together may take."""

import sys
from pathlib import Path

MEMORY_SHARE = 0.5
"""The part of the memory available that batches in flight, and batches kept by the consumer, may take."""

_SMALLEST_BUDGET = 1 << 28
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_budget() -> int:
    """Returns a number of bytes: half of what is available to this process, at least 256 MiB.

    The container's limit counts as well as the machine's memory: beyond it the system does not refuse, it kills.
    """
    return max(_SMALLEST_BUDGET, int(MEMORY_SHARE * memory_available()))


def memory_available() -> int:
    """Returns how many bytes this process may use, as far as the system tells."""
    return min(_machine_memory(), *_container_limits())


def _machine_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 33
    fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _container_limits() -> list[int]:
    limits = [sys.maxsize]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return limits
