"""The memory of an arena: the pages of a file, mapped as a whole and freed in parts, and the free extents in it.

Python's `mmap` keeps a descriptor and its whole address space for as long as anything refers to the memory. A user may
keep a single array for the rest of a run, which must keep neither.

Guarantees:
    * Memory below a view is never unmapped. `truncate` frees the rest, and the last view frees the memory before it.
    * `discard` and the end of the last view are plain system calls, so finalizers may make them at any moment, in any
      thread.
"""

import bisect
import ctypes
import mmap
import os
import sys
import weakref
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_FAILED = ctypes.c_void_p(-1).value


@final
class MappedMemory:
    """The first bytes of a file, shared with all processes that map them. It keeps no descriptor.

    Raises:
        OSError: the limits of this process do not allow a map of this size.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        address = _library.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), f"Cannot map {num_bytes} bytes: {os.strerror(ctypes.get_errno())}")
        self.address = int(address)
        self._num_bytes = num_bytes
        # The base of all views: the memory is unmapped when it ends.
        self._memory: Any = (ctypes.c_ubyte * num_bytes).from_address(self.address)
        self._end = self._unmap_at_end()

    def view(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Returns bytes as a new writable array of shape `(num_bytes,)`. A finalizer on it observes its end."""
        return np.frombuffer(self._memory, dtype=np.uint8, count=num_bytes, offset=offset)

    def discard(self, start: int, stop: int) -> None:
        """Returns the pages from `start` to `stop` to the system. They then read as zeros and take no memory.

        Both numbers are multiples of the page size. Only Linux can do this (it punches a hole into the file). On other
        systems, the pages stay until the memory ends.
        """
        if sys.platform == "linux" and start < stop:
            # Some sandboxes refuse this. The pages then stay.
            _library.madvise(self.address + start, stop - start, mmap.MADV_REMOVE)

    def truncate(self, num_bytes: int) -> None:
        """Frees the address space after `num_bytes`, a multiple of the page size. No view may use it."""
        if num_bytes < self._num_bytes and self._end.detach():
            _library.munmap(self.address + num_bytes, self._num_bytes - num_bytes)
            self._num_bytes = num_bytes
            self._end = self._unmap_at_end()

    def _unmap_at_end(self) -> "weakref.finalize[[int, int], Any]":
        finalizer = weakref.finalize(self._memory, _library.munmap, self.address, self._num_bytes)
        finalizer.atexit = False
        return finalizer


@final
class FreeSpace:
    """A set of free extents. Adjacent extents are merged, so that small chunks become room for large ones.

    Each operation takes time logarithmic in the number of extents.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._by_size: list[tuple[int, int]] = []
        self._size_of: dict[int, int] = {}
        self._ending_at: dict[int, int] = {}

    def add(self, start: int, num_bytes: int) -> None:
        stop = start + num_bytes
        before, after = self._ending_at.get(start), self._size_of.get(stop)
        if before is not None:
            self._remove(before)
            start = before
        if after is not None:
            self._remove(stop)
            stop += after
        self._size_of[start] = stop - start
        self._ending_at[stop] = start
        bisect.insort(self._by_size, (stop - start, start))
        self.num_bytes += stop - start

    def take(self, num_bytes: int) -> int | None:
        # From the smallest extent that is large enough.
        found = bisect.bisect_left(self._by_size, (num_bytes, 0))
        if found == len(self._by_size):
            return None
        size, start = self._by_size[found]
        self._remove(start)
        if size > num_bytes:
            self.add(start + num_bytes, size - num_bytes)
        return start

    def take_largest(self) -> tuple[int, int]:
        """Takes the largest extent, and returns its start and size. There must be at least one."""
        size, start = self._by_size[-1]
        self._remove(start)
        return start, size

    def _remove(self, start: int) -> None:
        size = self._size_of.pop(start)
        del self._ending_at[start + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]
        self.num_bytes -= size
