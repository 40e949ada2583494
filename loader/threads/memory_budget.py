"""How much memory there is for batches, and how many threads for reading them."""

import resource
import sys
from typing import TYPE_CHECKING

from millstream.loader.threads import control_groups

if TYPE_CHECKING:
    from pathlib import Path

MEMORY_SHARE = 0.5
"""The part of the memory available that batches in flight, and batches kept by the consumer, may take."""

BUFFER_SHARE = 0.25
"""The part of the memory available that elements read in advance may take."""

THREAD_BYTES = 160 << 20
"""The address space that a thread may take: its stack, and an arena of the C library with room to align it."""


def memory_budget() -> int:
    """Returns how many bytes of shared memory all arenas together may take: half of what is available now.

    So it is never more than there is. Where it is little, batches cross as private copies, which need memory only
    while they are there.
    """
    return int(MEMORY_SHARE * memory_available())


def buffer_budget(max_bytes: int | None) -> int:
    """Returns how many bytes elements read in advance may take: the given number, or a share of what is available."""
    return int(BUFFER_SHARE * memory_available()) if max_bytes is None else max_bytes


def memory_available(root: "str | Path" = control_groups.ROOT) -> int:
    """Returns how many more bytes this process may use now, as far as the system tells.

    The least of: what the machine has left; what the limits of its control groups, a container's for example, leave
    beyond what is in use (above them the system does not refuse memory, it kills); and the address space left.

    Args:
        root: where `proc` and `sys` are.
    """
    return min(_machine_memory(root), address_space_left(root), control_groups.memory_left(root))


def address_space_left(root: "str | Path" = control_groups.ROOT) -> int:
    """Returns how many more bytes this process may map, `sys.maxsize` without a limit: batch systems set one.

    Args:
        root: where `proc` is.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        mapped = int(control_groups.text_of(root, "proc/self/statm").split()[0]) * resource.getpagesize()
    except OSError:
        mapped = 0
    return max(0, limit - mapped)


def affordable_threads(num_threads: int) -> int:
    """Returns how many of this many threads the limit of address space allows, at least one if any is wanted.

    They may take half of what is left. Beyond that, the next array would be a MemoryError, however small.
    """
    return min(num_threads, max(1, address_space_left() // 2 // THREAD_BYTES))


def _machine_memory(root: "str | Path") -> int:
    try:
        lines = control_groups.text_of(root, "proc/meminfo").splitlines()
    except OSError:
        return 1 << 33
    fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
