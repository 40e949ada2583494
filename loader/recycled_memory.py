"""Memory for batches that is used again: its pages are real already, and a new page costs more than filling it.

Guarantees:
    * Memory is given out again only when no array is left on it: a base object under each array reports its end through
      `weakref.finalize`. Batches that are kept, or that JAX has taken as they are, are never overwritten.
    * What lies idle is bounded: MOST_IDLE pieces of each of MOST_SIZES sizes.
    * Any thread may allocate, and arrays may end in any thread at any moment: each step is one operation on a deque.
"""

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

MOST_IDLE = 16
MOST_SIZES = 16


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
        if size not in self._idle and len(self._idle) == MOST_SIZES:
            self._idle.clear()
        idle = self._idle.setdefault(size, deque(maxlen=MOST_IDLE))
        try:
            memory = idle.pop()
        except IndexError:
            memory = np.empty(size, dtype=np.uint8)
        # Of its buffer: NumPy lets a view of a view refer to the first array in the chain, which must be this one.
        base = np.frombuffer(memory.data, dtype=np.uint8)
        weakref.finalize(base, idle.append, memory).atexit = False
        start = -int(base.__array_interface__["data"][0]) % ALIGNMENT
        return base[start : start + num_bytes].view(dtype).reshape(shape)


def round_up(num_bytes: int) -> int:
    """Returns the size that a chunk of this many bytes is kept under: few sizes, so that chunks serve again.

    Whole pages, of which the largest three bits count: at most a quarter is left unused.
    """
    pages = -(-num_bytes // _PAGE_BYTES)
    step = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // step) * step * _PAGE_BYTES
