"""Budgets: memory for batches, and threads that read them."""

import resource
import sys
from typing import TYPE_CHECKING

from millstream.loader.threads import control_groups

if TYPE_CHECKING:
    from pathlib import Path

MEMORY_SHARE = 0.5
"""The share of the available memory for batches in flight and batches kept by the consumer."""

BUFFER_SHARE = 0.25
"""The share of the available memory for elements read in advance."""

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


def memory_available(root: "str | Path" = control_groups.ROOT) -> int:
    """Returns the number of bytes that this process can still allocate, as far as the system reports it.

    It is the minimum of the machine's available memory, the memory left below the limits of its control groups (such as
    a container's; above them the system kills instead of refusing), and the address space left.
    """
    return min(_machine_memory(root), address_space_left(root), control_groups.memory_left(root))


def address_space_left(root: "str | Path" = control_groups.ROOT) -> int:
    """Returns the number of bytes that this process can still map, or `sys.maxsize` without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        mapped = int(control_groups.text_of(root, "proc/self/statm").split()[0]) * resource.getpagesize()
    except OSError:
        mapped = 0
    return max(0, limit - mapped)


def affordable_threads(num_threads: int) -> int:
    """Returns the number of threads, up to `num_threads`, that the limit of address space allows, but at least one.

    They may take half of the address space left. With more, the next array would raise MemoryError, however small.
    """
    return min(num_threads, max(1, address_space_left() // 2 // THREAD_BYTES))


def _machine_memory(root: "str | Path") -> int:
    try:
        lines = control_groups.text_of(root, "proc/meminfo").splitlines()
    except OSError:
        return 1 << 33
    fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
