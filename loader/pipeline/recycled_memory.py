"""Memory for batches that is used again: its pages are real already, and a new page costs more than filling it.

Guarantees:
    * Memory is given out again only when no array is left on it: a base object under each array reports its end through
      `weakref.finalize`. Batches that are kept, or that JAX has taken as they are, are never overwritten.
    * What lies idle has MOST_IDLE_BYTES at most, or is a single piece.
    * Any thread may allocate, and arrays may end in any thread at any moment: each step is one operation on a dict or
      a deque. Two that end at the same moment may exceed the bound by one piece.
"""

import contextlib
import math
import weakref
from collections import deque
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes at whose multiples large leaves begin: JAX takes such an array on the CPU as it is."""

SMALLEST_BYTES = 1 << 18
"""Smaller arrays come from the system's allocator, which keeps pages of that size itself."""

_PAGE_BYTES = 4096

MOST_IDLE_BYTES = 1 << 28


@final
class RecycledMemory:
    """Allocates the arrays that batches are stacked into, in this process."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[NDArray[np.uint8]]] = {}

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised array; large ones at a multiple of 64 bytes, which JAX takes without a copy."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < SMALLEST_BYTES:
            return np.empty(shape, dtype)
        size = round_up(num_bytes + ALIGNMENT)
        memory = self._take_idle(size)
        if memory is None:
            memory = np.empty(size, dtype=np.uint8)
        # Of its buffer: NumPy lets a view of a view refer to the first array in the chain, which must be this one.
        base = np.frombuffer(memory.data, dtype=np.uint8)
        weakref.finalize(base, _give_back, weakref.ref(self), memory).atexit = False
        start = -int(base.__array_interface__["data"][0]) % ALIGNMENT
        return base[start : start + num_bytes].view(dtype).reshape(shape)

    def _take_idle(self, size: int) -> NDArray[np.uint8] | None:
        """Returns an idle piece of at least this size and at most twice as large, the smallest one; None without."""
        sizes = [size] if self._idle.get(size) else sorted(self._idle.copy())
        for other in sizes:
            if size <= other <= 2 * size:
                # Another thread may have taken it meanwhile.
                with contextlib.suppress(IndexError):
                    return self._idle[other].pop()
        return None

    def keep(self, memory: NDArray[np.uint8]) -> None:
        """Keeps a piece for the next array. Drops all others where there is no room for them: sizes have changed."""
        idle = self._idle.copy()
        if sum(size * len(pieces) for size, pieces in idle.items()) + len(memory) > MOST_IDLE_BYTES:
            for pieces in idle.values():
                pieces.clear()
        self._idle.setdefault(len(memory), deque()).append(memory)


def _give_back(owner: "weakref.ref[RecycledMemory]", memory: NDArray[np.uint8]) -> None:
    """Gives a piece back to who made it. Arrays that are kept do not keep its other pieces."""
    if (recycled := owner()) is not None:
        recycled.keep(memory)


def round_up(num_bytes: int) -> int:
    """Returns the size that a chunk of this many bytes is kept under: few sizes, so that chunks serve again.

    Whole pages, of which the largest three bits count: at most a quarter is left unused.
    """
    pages = -(-num_bytes // _PAGE_BYTES)
    step = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // step) * step * _PAGE_BYTES
