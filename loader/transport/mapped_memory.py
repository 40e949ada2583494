"""The memory of a file in this process, mapped whole and given up in parts.

Python's `mmap` keeps a descriptor open for as long as anything refers to the memory, and keeps its whole address space.
A user may keep a single array for the rest of a run: it must not hold either.

Guarantees:
    * Nothing that a view covers is ever unmapped: `cut` is told how much to keep, and the rest goes with the last view.
    * `discard` and the end of the last view are system calls and nothing else, so finalizers may make them at any
      moment in any thread.
"""

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
    """The first bytes of a file, shared with all who map them. It keeps no descriptor.

    Raises:
        OSError: this process may not map so much.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        address = _library.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: {num_bytes} bytes to map")
        self.address = int(address)
        self._num_bytes = num_bytes
        # What the arrays refer to: when this ends, none is left.
        self._memory: Any = (ctypes.c_ubyte * num_bytes).from_address(self.address)
        self._end = self._unmap_at_end()

    def view(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Returns some bytes, shape `(num_bytes,)`, writable: an array of its own, whose end can be noticed."""
        return np.frombuffer(self._memory, dtype=np.uint8, count=num_bytes, offset=offset)

    def discard(self, start: int, stop: int) -> None:
        """Gives the pages from `start` to `stop` back to the system: they read as zeros and take no memory.

        Only Linux can (it punches a hole into the file); elsewhere the pages stay until the memory ends. Both numbers
        are multiples of the page size.
        """
        if sys.platform == "linux" and start < stop:
            # It may fail, in some sandboxes: then the pages stay, too.
            _library.madvise(self.address + start, stop - start, mmap.MADV_REMOVE)

    def cut(self, num_bytes: int) -> None:
        """Gives up the address space from `num_bytes` on, a multiple of the page size. Nothing there may be in use."""
        if num_bytes < self._num_bytes and self._end.detach():
            _library.munmap(self.address + num_bytes, self._num_bytes - num_bytes)
            self._num_bytes = num_bytes
            self._end = self._unmap_at_end()

    def _unmap_at_end(self) -> "weakref.finalize[[int, int], Any]":
        finalizer = weakref.finalize(self._memory, _library.munmap, self.address, self._num_bytes)
        finalizer.atexit = False
        return finalizer
