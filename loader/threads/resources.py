"""Budgets: memory for batches, and threads that read them.

Limits are also those of this process's control groups, such as those of a container or a batch job. Files are read
without pathlib, which is slow to import, and the first batch of a loader with workers waits for this module.
"""

import contextlib
import math
import os
import resource
import sys
from collections.abc import Iterator

ROOT = ""
"""The folder that contains `proc` and `sys`, without its slash."""

MEMORY_SHARE = 0.5
"""The share of the available memory for batches in flight and batches kept by the consumer."""

BUFFER_SHARE = 0.25
"""The share of the available memory for elements read in advance."""

FLIGHT_BYTES = 256 << 20
"""The total size of batches that workers have in flight beyond their buffers, unless `max_buffer_bytes` is given."""

THREAD_BYTES = 160 << 20
"""Upper bound on the address space of a thread: its stack, and an arena of the C library with room to align it."""


def memory_budget() -> int:
    """Returns the total size of all arenas in bytes, a share of the memory that is available now.

    If this is little, batches cross as private copies, which take memory only while they exist.
    """
    return int(MEMORY_SHARE * memory_available())


def buffer_budget(max_bytes: int | None) -> int:
    """Returns the budget for elements read in advance, in bytes. With None, it is a share of the available memory."""
    return int(BUFFER_SHARE * memory_available()) if max_bytes is None else max_bytes


def flight_budget(max_bytes: int | None) -> int:
    """Returns the size in bytes up to which workers have more calls in flight than their buffers hold."""
    return FLIGHT_BYTES if max_bytes is None else max_bytes


def memory_available() -> int:
    """Returns the number of bytes that this process can still allocate, as far as the system reports it.

    It is the minimum of the machine's available memory, the memory left below the limits of its control groups (such as
    a container's; above them the system kills instead of refusing), and the address space left.
    """
    return min(_machine_memory(), address_space_left(), _memory_left_in_groups())


def address_space_left() -> int:
    """Returns the number of bytes that this process can still map, or `sys.maxsize` without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        mapped = int(_text_of(f"{ROOT}/proc/self/statm").split()[0]) * resource.getpagesize()
    except OSError:
        mapped = 0
    return max(0, limit - mapped)


def affordable_threads(num_threads: int) -> int:
    """Returns the number of threads, up to `num_threads`, that the limit of address space allows, but at least one.

    They may take half of the address space left. With more, the next array would raise MemoryError, however small.
    """
    return min(num_threads, max(1, address_space_left() // 2 // THREAD_BYTES))


def _machine_memory() -> int:
    try:
        lines = _text_of(f"{ROOT}/proc/meminfo").splitlines()
    except OSError:
        return 1 << 33
    fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _memory_left_in_groups() -> int:
    """Returns the number of bytes that this process's groups may still use, or `sys.maxsize` without a limit.

    File pages that the kernel can reclaim immediately do not count as used. The limits of all enclosing groups apply.
    """
    left = sys.maxsize
    for group in _groups("memory"):
        # Above `high`, the kernel throttles a process until it hardly runs.
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):
                limit = int(_text_of(f"{group}/{limit_name}"))
                left = min(left, max(0, limit - int(_text_of(f"{group}/{usage_name}")) + _reclaimable(group)))
    return left


def cores_of_groups() -> int:
    """Returns the number of cores that this process's groups may use, rounded up, or `sys.maxsize` without a limit."""
    fewest = sys.maxsize
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = _text_of(f"{group}/cpu.max").split()
            fewest = min(fewest, _rounded_up(quota, period))
        with contextlib.suppress(OSError, ValueError):
            quota, period = _text_of(f"{group}/cpu.cfs_quota_us"), _text_of(f"{group}/cpu.cfs_period_us")
            fewest = min(fewest, _rounded_up(quota, period))
    return fewest


def _rounded_up(quota: str, period: str) -> int:
    """Returns a quota as a number of cores, or raises a ValueError without one: it is "max" or negative."""
    if int(quota) <= 0 or int(period) <= 0:
        raise ValueError(f"no limit: {quota}")
    return max(1, math.ceil(int(quota) / int(period)))


def _reclaimable(group: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in _text_of(f"{group}/memory.stat").splitlines())
        # Version 1 counts nested groups under separate names.
        prefix = "total_" if "total_inactive_file" in fields else ""
        return int(fields[f"{prefix}inactive_file"]) + int(fields[f"{prefix}active_file"])
    return 0


def _groups(controller: str) -> Iterator[str]:
    """Yields the folders of this process's groups and of all enclosing groups.

    A container may see the names that its groups have outside. Only the outermost folder, its own, then exists.
    """
    mount = f"{ROOT}/sys/fs/cgroup"
    try:
        lines = _text_of(f"{ROOT}/proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # Version 2, alone or next to version 1.
            mounts = [mount, f"{mount}/unified"]
        elif controller in controllers.split(","):
            mounts = [f"{mount}/{controller}", f"{mount}/{controllers}"]
        else:
            continue
        for top in mounts:
            group = f"{top}/{path}".rstrip("/")
            yield group
            while len(group) > len(top):
                group = os.path.dirname(group)  # noqa: PTH120
                yield group


def _text_of(path: str) -> str:
    with open(path) as file:  # noqa: PTH123  (see above)
        return file.read()
