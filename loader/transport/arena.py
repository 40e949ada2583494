"""Shared memory: one anonymous arena per worker, written by the worker and read by the parent without a copy.

Guarantees:
    * An arena has no name. It is freed with the last process or array that holds it, however a process dies.
    * A chunk is reused only when no array on it is left, in the worker or in the parent. The parent's arrays refer to
      the chunk through a base object that `weakref.finalize` observes. Batches are never counted, so a batch that is
      kept, or that JAX has aliased, is never overwritten.
    * No process waits for memory. If the arena or the machine is full, the worker sends a private copy.
    * An array that is kept pins its own chunk only. While the worker lives, free chunks serve arrays of any size, and
      pages far beyond the recent use are returned to the system. When the worker is gone, the arena keeps only the
      pages below arrays, until these end, and no descriptor. (On Linux only. Other systems free the whole arena.)
    * Memory below a view is never unmapped. Returning pages, and the end of the last view, are plain system calls, so
      finalizers may make them at any moment, in any thread.

An arena has its maximum size from the start, but only virtually: the system allocates a page when it is first used.
The worker allocates chunks (`Allocator`). The parent only views them (`ArenaView`) and sends back the offsets of the
chunks that it no longer needs. Both map the file by `MappedMemory`: Python's `mmap` would keep a descriptor and the
complete address space for as long as anything refers to the memory.
"""

import bisect
import contextlib
import ctypes
import dataclasses
import errno
import math
import mmap
import os
import sys
import weakref
from collections import deque
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.loader.pipeline.recycled_memory import ALIGNMENT

_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_FAILED = ctypes.c_void_p(-1).value


@final
class MappedMemory:
    """The first bytes of a file, shared with all processes that map them. It keeps no descriptor.

    Args:
        is_shared: False to copy each page that this process writes to; the file and other processes then keep theirs.

    Raises:
        OSError: the limits of this process do not allow a map of this size.
    """

    def __init__(self, descriptor: int, num_bytes: int, *, is_shared: bool = True) -> None:
        kind = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
        address = _library.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, descriptor, 0)
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


LARGE_LEAF_BYTES = 1 << 15
"""A leaf of this size has a chunk of its own, and so its own lifetime. Smaller leaves of one message share chunks."""

INLINE_BYTES = 1 << 12
"""Smaller arrays travel in the message, because describing a span would cost more than the copy."""

MAX_RESIDENT_RATIO = 1.5
"""Upper bound on the arena's resident memory, as a multiple of its recent peak use. SPARE_BYTES are added to it."""

SPARE_BYTES = 1 << 24
"""The memory that may stay resident in addition to MAX_RESIDENT_RATIO times the recent peak."""

PEAK_MESSAGES = 64
"""The recent peak is taken over the current interval of this many messages and the one before."""

_REFUSED = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL})
"""Errors of a system or sandbox that lacks or forbids anonymous files."""

_GROWTH_BYTES = 1 << 20


def create_arena_file(num_bytes: int) -> int:
    """Returns the descriptor of anonymous memory of the given size, without resident pages.

    On Linux the size is sealed, so a faulty worker cannot truncate memory that the parent reads.
    """
    descriptor = create_anonymous_file("millstream-arena")
    try:
        os.ftruncate(descriptor, num_bytes)
    except BaseException:  # A limit of file sizes, or a signal handler.
        os.close(descriptor)
        raise
    import fcntl  # noqa: PLC0415  (lazy: only creating an arena needs it)

    with contextlib.suppress(AttributeError, OSError):  # A temporary file has no seals.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def create_anonymous_file(name: str) -> int:
    """Returns the descriptor of an empty file in memory, or on disk if the system lacks or forbids memory files."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:  # macOS has no such call, and a sandbox may refuse it.
        if isinstance(error, OSError) and error.errno not in _REFUSED:
            raise
    import tempfile  # noqa: PLC0415  (lazy: slow to import, and workers start with this module)

    with tempfile.TemporaryFile(prefix=f"{name}-") as file:
        return os.dup(file.fileno())


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclasses.dataclass(slots=True)
class Chunk:
    """A chunk of the arena in use, and its holders."""

    offset: int
    size: int
    worker_holds: bool = True
    parent_holds: bool = False


@final
class Allocator:
    """The worker's side of its arena."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._memory = MappedMemory(descriptor, num_bytes)
        # Free chunks with resident pages (warm, no cost to use) and without (cold).
        self._warm, self._cold = FreeSpace(), FreeSpace()
        self._cold.add(0, num_bytes)
        self._chunks: dict[int, Chunk] = {}
        self._in_use = 0
        self._peak, self._peak_before, self._messages = 0, 0, 0
        # Finalizers may run at any moment, also within the methods here, so they only append to this queue.
        self._dropped: deque[int] = deque()
        self._fresh: list[int] = []
        self._shared: NDArray[np.uint8] | None = None
        self._shared_used = 0

    @property
    def real_bytes(self) -> int:
        return self._in_use + self._warm.num_bytes

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised array in the arena, or in private memory if it is small or the arena has no room."""
        dtype = np.dtype(dtype)
        num_bytes = dtype.itemsize * math.prod(shape)
        memory = self.bytes_for(num_bytes) if num_bytes >= INLINE_BYTES else None
        if memory is None:
            return np.empty(shape, dtype)
        return memory.view(dtype).reshape(shape)

    def bytes_for(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """Returns aligned, uninitialised bytes of the arena, or None if it has no room."""
        if num_bytes >= LARGE_LEAF_BYTES:
            memory = self._take(num_bytes)
            return None if memory is None else memory[:num_bytes]
        start = -(-self._shared_used // ALIGNMENT) * ALIGNMENT
        if self._shared is None or start + num_bytes > len(self._shared):
            self._shared, start = self._take(2 * LARGE_LEAF_BYTES), 0
            if self._shared is None:
                return None
        self._shared_used = start + num_bytes
        return self._shared[start : self._shared_used]

    def end_message(self) -> None:
        """Ends the current message. Chunks are not shared between messages."""
        self._shared, self._shared_used = None, 0
        self._fresh.clear()
        self._messages += 1
        if self._messages % PEAK_MESSAGES == 0:
            self._peak, self._peak_before = self._in_use, self._peak
        limit = int(MAX_RESIDENT_RATIO * max(self._peak, self._peak_before)) + SPARE_BYTES
        while (excess := min(self.real_bytes - limit, self._warm.num_bytes)) > 0:
            offset, size = self._warm.take_largest()
            stays = max(0, size - whole_pages(excess))
            if stays:
                self._warm.add(offset, stays)
            self._cool(offset + stays, size - stays)

    def locate(self, memory: NDArray[np.uint8]) -> tuple[int, int] | None:
        """Returns the offset of the chunk that contains the given bytes, and their offset in the chunk.

        Returns None if they are not in a chunk of the current message. Bytes of an earlier message, which user code may
        have kept and returned again, belong to the parent already and must be copied.
        """
        offset = int(memory.__array_interface__["data"][0]) - self._memory.address
        for start in self._fresh:
            if start <= offset < start + self._chunks[start].size:
                return start, offset - start
        return None

    def lend(self, offset: int) -> None:
        self._chunks[offset].parent_holds = True

    def take_back(self, offset: int) -> None:
        self._chunks[offset].parent_holds = False
        self._free_if_unused(self._chunks[offset])

    def _take(self, num_bytes: int) -> NDArray[np.uint8] | None:
        while self._dropped:
            chunk = self._chunks[self._dropped.popleft()]
            chunk.worker_holds = False
            self._free_if_unused(chunk)
        size = whole_pages(num_bytes)
        offset = self._warm.take(size)
        if offset is None:
            offset = self._warm_up(size)
        if offset is None:
            return None
        self._chunks[offset] = Chunk(offset, size)
        self._fresh.append(offset)
        self._in_use += size
        self._peak = max(self._peak, self._in_use)
        # No array of the worker is left on the chunk when this base object ends.
        base = self._memory.view(offset, size)
        weakref.finalize(base, self._dropped.append, offset).atexit = False
        return base

    def _warm_up(self, size: int) -> int | None:
        """Makes pages resident, and returns their offset. Returns None if there is no room."""
        wanted = max(size, _GROWTH_BYTES)
        offset = self._cold.take(wanted)
        if offset is None:
            wanted = size
            offset = self._cold.take(wanted)
        if offset is None and self._warm.num_bytes + self._cold.num_bytes >= size:
            # A chunk may fit across warm and cold memory.
            while self._warm.num_bytes:
                self._cool(*self._warm.take_largest())
            offset = self._cold.take(wanted)
        if offset is None:
            return None
        # Allocate the pages now: a lack of memory would be a fatal signal later.
        if sys.platform == "linux":
            try:
                os.posix_fallocate(self._descriptor, offset, wanted)
            except OSError:
                self._cold.add(offset, wanted)
                return None
        if wanted > size:
            self._warm.add(offset + size, wanted - size)
        return offset

    def _cool(self, offset: int, size: int) -> None:
        self._memory.discard(offset, offset + size)
        self._cold.add(offset, size)

    def _free_if_unused(self, chunk: Chunk) -> None:
        if not chunk.worker_holds and not chunk.parent_holds:
            if chunk.offset in self._fresh:
                self._fresh.remove(chunk.offset)
            del self._chunks[chunk.offset]
            self._in_use -= chunk.size
            self._warm.add(chunk.offset, chunk.size)


@final
class ArenaView:
    """The parent's side of one worker's arena."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._memory = MappedMemory(descriptor, num_bytes)
        self._num_bytes = num_bytes
        self._owner = os.getpid()
        # A finalizer may run at any moment, in any thread, and another thread may retire the arena. Neither may wait
        # for a lock, so each step is a single operation on a dict or a deque, and their order matters. `retire` sets
        # the flag first, then reads the recorded leases and leaves their pages mapped. `lease` records the lease
        # before it checks the flag. A lease that ends in a retired arena discards its pages before it is forgotten. So
        # no page is discarded too early, or after it was unmapped. A lease that ends at the very moment of `retire` may
        # keep its pages until the last lease ends.
        self._leased: dict[int, int] = {}
        self._released: deque[int] = deque()
        self._is_retired = False

    def lease(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Returns a chunk's bytes, shape `(num_bytes,)`, writable, until the last array on them ends."""
        self._leased[offset] = num_bytes
        if self._is_retired:
            # The address may be unmapped already, and reused by another mapping: nothing to discard.
            del self._leased[offset]
            raise ValueError(
                "The worker process has stopped because the iterator was closed, possibly by another thread."
            )
        base = self._memory.view(offset, num_bytes)
        weakref.finalize(base, self._end_lease, offset).atexit = False
        return base

    def release(self, offset: int) -> None:
        self._released.append(offset)

    def take_released(self) -> list[int]:
        """Returns the chunks released since the last call. The worker may use them again."""
        released = []
        while self._released:
            released.append(self._released.popleft())
        return released

    def retire(self) -> None:
        """Frees all memory below no array now, and the rest as arrays end. The worker must have exited."""
        self._is_retired = True
        start = 0
        for offset, num_bytes in sorted(self._leased.copy().items()):
            self._memory.discard(start, offset)
            start = offset + whole_pages(num_bytes)
        self._memory.discard(start, self._num_bytes)
        self._memory.truncate(start)

    def _end_lease(self, offset: int) -> None:
        if not self._is_retired:
            del self._leased[offset]
            self._released.append(offset)
            return
        if self._owner == os.getpid():
            # A forked process has copies of the arrays, but shares the pages: it must not discard them.
            self._memory.discard(offset, offset + whole_pages(self._leased[offset]))
        del self._leased[offset]
