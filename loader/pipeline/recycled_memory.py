"""Recycled memory for batches, because allocating a page costs more than filling it.

Guarantees:
    * Memory is reused only when no array is left on it. `weakref.finalize` observes a base object below each array.
      Batches that are kept, or that JAX uses in place, are never overwritten.
    * Idle memory takes at most MAX_IDLE_BYTES, or is a single buffer.
    * Any thread may allocate, and arrays may end in any thread at any moment. Each step is a single operation on a dict
      or deque. Two arrays that end at the same moment may exceed the limit by one buffer.
"""

import contextlib
import math
import weakref
from collections import deque
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""The alignment of large leaves in bytes. JAX on the CPU uses such arrays in place."""

MIN_BYTES = 1 << 18
"""Smaller arrays come from the system's allocator, which recycles pages of that size itself."""

_PAGE_BYTES = 4096

MAX_IDLE_BYTES = 1 << 28


@final
class RecycledMemory:
    """Allocates the arrays that batches are stacked into, in this process."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[NDArray[np.uint8]]] = {}

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised array. Large ones are aligned to 64 bytes, so that JAX need not copy them."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < MIN_BYTES:
            return np.empty(shape, dtype)
        size = round_up(num_bytes + ALIGNMENT)
        memory = self._take_idle(size)
        if memory is None:
            memory = np.empty(size, dtype=np.uint8)
        # From the buffer: a view of a view would refer to the first array in the chain, which must be this one.
        base = np.frombuffer(memory.data, dtype=np.uint8)
        weakref.finalize(base, _return_buffer, weakref.ref(self), memory).atexit = False
        start = -int(base.__array_interface__["data"][0]) % ALIGNMENT
        return base[start : start + num_bytes].view(dtype).reshape(shape)

    def _take_idle(self, size: int) -> NDArray[np.uint8] | None:
        """Takes the smallest idle buffer of at least this size and at most twice as much, or returns None."""
        sizes = [size] if self._idle.get(size) else sorted(self._idle.copy())
        for other in sizes:
            if size <= other <= 2 * size:
                # Another thread may have taken it.
                with contextlib.suppress(IndexError):
                    return self._idle[other].pop()
        return None

    def keep(self, memory: NDArray[np.uint8]) -> None:
        """Keeps a buffer for the next array. Drops all others if there is no room, because sizes have changed."""
        idle = self._idle.copy()
        if sum(size * len(buffers) for size, buffers in idle.items()) + len(memory) > MAX_IDLE_BYTES:
            for buffers in idle.values():
                buffers.clear()
        self._idle.setdefault(len(memory), deque()).append(memory)


def _return_buffer(owner: weakref.ref[RecycledMemory], memory: NDArray[np.uint8]) -> None:
    """Returns a buffer to its owner. Arrays that are kept do not keep the owner's other buffers alive."""
    if (recycled := owner()) is not None:
        recycled.keep(memory)


def round_up(num_bytes: int) -> int:
    """Returns the size of the buffer for a number of bytes. There are few sizes, so that buffers can be reused.

    It is a number of pages with three significant bits, which leaves at most a quarter unused.
    """
    pages = -(-num_bytes // _PAGE_BYTES)
    step = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // step) * step * _PAGE_BYTES
