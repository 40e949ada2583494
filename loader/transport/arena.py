"""Shared memory: one anonymous arena for each worker, written by the worker and read by the parent without a copy.

Guarantees:
    * An arena has no name: it goes with the last process or array that holds it, whatever dies, and how.
    * A chunk of it is written again only when no array on it is left, in the worker or in the parent. The parent's
      arrays hold the chunk through a base object whose end `weakref.finalize` reports; nothing is ever counted by
      batches. So batches that are kept, or that JAX has aliased, are never overwritten.
    * Nobody waits for memory: an arena that is full, or a machine that is, makes the worker send a private copy.
    * What is kept pins itself alone. While its worker lives, free chunks serve arrays of any size, and pages far beyond
      what was lately in use go back to the system. Once the worker is gone, the arena keeps the pages of chunks that
      arrays are on, until they end, and no descriptor. (Elsewhere than on Linux, pages go back with the whole arena.)

The arena is as large as it may ever get, but only virtually: pages are real from their first use on. Each worker hands
out its own arena's chunks (`Allocator`); the parent only views them (`ArenaView`) and sends back the offsets of those
that it no longer needs.
"""

import contextlib
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
from millstream.loader.transport.free_space import FreeSpace
from millstream.loader.transport.mapped_memory import MappedMemory

LARGE_LEAF_BYTES = 1 << 15
"""A leaf of this size has a chunk, and so a lifetime, of its own; smaller leaves of one message share chunks."""

INLINE_BYTES = 1 << 12
"""Smaller arrays are none of the arena: they travel in the message, since a place would cost more than the copy."""

MOST_REAL = 1.5
"""An arena has at most this many times the memory that was lately in use at once, and SPARE_BYTES more."""

SPARE_BYTES = 1 << 24

LATELY_MESSAGES = 64
"""Memory is in use lately if it was during this many messages, or this many before them."""

_REFUSED = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL})
"""The errors of a system or a sandbox that does not have, or does not allow, anonymous files."""

_GROWTH_BYTES = 1 << 20
"""Pages become real this many bytes at a time, at least."""


def create_arena_file(num_bytes: int) -> int:
    """Returns the descriptor of anonymous memory of this size, of which no page is real yet.

    On Linux its size is sealed: a worker gone wrong cannot cut memory off from under the parent.
    """
    descriptor = create_anonymous_file("millstream-arena")
    os.ftruncate(descriptor, num_bytes)
    import fcntl  # noqa: PLC0415  (the seals are Linux's)

    with contextlib.suppress(AttributeError, OSError):  # A temporary file has no seals.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def create_anonymous_file(name: str) -> int:
    """Returns the descriptor of an empty file in memory; of one on a disk where the system has or allows no other."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:  # macOS has no such call, and a sandbox may refuse it.
        if isinstance(error, OSError) and error.errno not in _REFUSED:
            raise
    import tempfile  # noqa: PLC0415  (takes long to import, and workers start with this module)

    with tempfile.TemporaryFile(prefix=f"{name}-") as file:
        return os.dup(file.fileno())


def whole_pages(num_bytes: int) -> int:
    """Returns the bytes of the pages that this many bytes take."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@final
class Chunk:
    """A piece of the arena in use, and who holds it."""

    __slots__ = ("offset", "parent_holds", "size", "worker_holds")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.worker_holds = True
        self.parent_holds = False


@final
class Allocator:
    """The worker's side of its arena."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._memory = MappedMemory(descriptor, num_bytes)
        # What is free: pages that are real, so that they cost nothing, and those that are not, or no longer.
        self._warm, self._cold = FreeSpace(), FreeSpace()
        self._cold.add(0, num_bytes)
        self._chunks: dict[int, Chunk] = {}
        self._in_use = 0
        self._peak, self._peak_before, self._messages = 0, 0, 0
        # Finalizers run at any moment, also in the middle of the methods here: they only leave a note.
        self._dropped: deque[int] = deque()
        self._fresh: list[int] = []
        self._shared: NDArray[np.uint8] | None = None
        self._shared_used = 0

    @property
    def real_bytes(self) -> int:
        """How much memory the arena has."""
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
        """Returns aligned, uninitialised bytes of the arena, None where it has no room."""
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
        """Says that what comes next belongs to another message: chunks are not shared between messages."""
        self._shared, self._shared_used = None, 0
        self._fresh.clear()
        self._messages += 1
        if self._messages % LATELY_MESSAGES == 0:
            self._peak, self._peak_before = self._in_use, self._peak
        most = int(MOST_REAL * max(self._peak, self._peak_before)) + SPARE_BYTES
        while (excess := min(self.real_bytes - most, self._warm.num_bytes)) > 0:
            offset, size = self._warm.take_largest()
            stays = max(0, size - whole_pages(excess))
            if stays:
                self._warm.add(offset, stays)
            self._cool(offset + stays, size - stays)

    def place_of(self, memory: NDArray[np.uint8]) -> tuple[int, int] | None:
        """Returns the chunk's offset and the offset in the chunk of some bytes.

        None if they are not in a chunk of this message: bytes of an earlier one, which user code may have kept and
        given out again, are the parent's already and must be copied.
        """
        offset = int(memory.__array_interface__["data"][0]) - self._memory.address
        for start in self._fresh:
            if start <= offset < start + self._chunks[start].size:
                return start, offset - start
        return None

    def hand_over(self, offset: int) -> None:
        """Notes that the parent holds a chunk from now on."""
        self._chunks[offset].parent_holds = True

    def take_back(self, offset: int) -> None:
        """Notes that the parent no longer holds a chunk."""
        self._chunks[offset].parent_holds = False
        self._free_if_unused(self._chunks[offset])

    def _take(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """Returns a whole chunk of at least this many bytes."""
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
        # The base whose end says that no array of the worker is left on the chunk.
        base = self._memory.view(offset, size)
        weakref.finalize(base, self._dropped.append, offset).atexit = False
        return base

    def _warm_up(self, size: int) -> int | None:
        """Returns the offset of a piece whose pages were not real, and are now; None where there is no room for it."""
        wanted = max(size, _GROWTH_BYTES)
        offset = self._cold.take(wanted)
        if offset is None:
            wanted = size
            offset = self._cold.take(wanted)
        if offset is None and self._warm.num_bytes + self._cold.num_bytes >= size:
            # There may be room across what is warm and what is cold.
            while self._warm.num_bytes:
                self._cool(*self._warm.take_largest())
            offset = self._cold.take(wanted)
        if offset is None:
            return None
        # Pages are asked of the system now: where there are none, it is a fatal signal later.
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
        """Gives pages that are free back to the system."""
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
        # Finalizers run in any thread at any moment, retiring may be another thread's, and neither may wait for a
        # lock: each step is one operation on a dict or a deque, and their order is what matters. Retiring first says
        # so, then looks which leases are noted, and leaves these mapped. A lease is noted before it is asked whether
        # the arena is retired, and when it ends in a retired one, its pages are given back before it is forgotten. So
        # none is given back too early, or where it is no longer mapped. One that ends in the very moment of retiring
        # may leave its pages to the end of the last one.
        self._leased: dict[int, int] = {}
        self._released: deque[int] = deque()
        self._is_retired = False

    def lease(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Returns a chunk's bytes, shape `(num_bytes,)`, writable. When the last array on them ends, it is released.

        Raises:
            ValueError: the arena is retired.
        """
        self._leased[offset] = num_bytes
        if self._is_retired:
            # Its place may be unmapped already, and somebody else's by now: nothing to give back.
            del self._leased[offset]
            raise ValueError("The worker process is stopped: the iterator was closed, perhaps by another thread.")
        base = self._memory.view(offset, num_bytes)
        weakref.finalize(base, self._end_lease, offset).atexit = False
        return base

    def release(self, offset: int) -> None:
        """Releases a chunk that was never leased."""
        self._released.append(offset)

    def take_released(self) -> list[int]:
        """Returns the chunks that were released since last asked: the worker may use them again."""
        released = []
        while self._released:
            released.append(self._released.popleft())
        return released

    def retire(self) -> None:
        """Gives everything back that no array is on, now, and the rest when the arrays end. The worker is gone."""
        self._is_retired = True
        start = 0
        for offset, num_bytes in sorted(self._leased.copy().items()):
            self._memory.discard(start, offset)
            start = offset + whole_pages(num_bytes)
        self._memory.discard(start, self._num_bytes)
        self._memory.cut(start)

    def _end_lease(self, offset: int) -> None:
        if not self._is_retired:
            del self._leased[offset]
            self._released.append(offset)
            return
        if self._owner == os.getpid():
            # A forked process has copies of the arrays, and shares the pages: they are not its own to give back.
            self._memory.discard(offset, offset + whole_pages(self._leased[offset]))
        del self._leased[offset]
