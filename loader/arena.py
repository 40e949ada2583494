"""Shared memory: one anonymous arena for each worker, written by the worker and read by the parent without a copy.

Guarantees:
    * An arena has no name: it goes with the last process or array that holds it, whatever dies, and how.
    * A chunk of it is written again only when no array on it is left, in the worker or in the parent. The parent's
      arrays hold the chunk through a base object whose end `weakref.finalize` reports; nothing is ever counted by
      batches. So batches that are kept, or that JAX has aliased, are never overwritten.
    * Nobody waits for memory: an arena that is full, or a machine that is, makes the worker send a private copy.

The arena is as large as it may ever get, but only virtually: pages are real from their first use on. Each worker hands
out its own arena's chunks (`Allocator`); the parent only views them (`ArenaView`) and sends back the offsets of those
that it no longer needs.
"""

import math
import mmap
import os
import sys
import weakref
from collections import deque
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.loader.recycled_memory import ALIGNMENT, round_up

LARGE_LEAF_BYTES = 1 << 15
"""A leaf of this size has a chunk, and so a lifetime, of its own; smaller leaves of one message share chunks."""

_GROWTH_BYTES = 1 << 26


def create_arena_file(num_bytes: int) -> int:
    """Returns the descriptor of anonymous memory of this size, of which no page is real yet.

    On Linux its size is sealed: a worker gone wrong cannot cut memory off from under the parent.
    """
    if not hasattr(os, "memfd_create"):
        import tempfile  # noqa: PLC0415  (takes long to import, and workers start with this module)

        with tempfile.TemporaryFile(prefix="millstream-") as file:
            descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, num_bytes)
        return descriptor
    import fcntl  # noqa: PLC0415  (the seals are Linux's)

    descriptor = os.memfd_create("millstream-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


@final
class Chunk:
    """A piece of the arena in use: which size it is kept under, and who holds it."""

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
        self._num_bytes = num_bytes
        self._map = mmap.mmap(descriptor, num_bytes)
        self._memory = np.frombuffer(self._map, dtype=np.uint8)
        self._start = int(self._memory.__array_interface__["data"][0])
        self._used = 0
        self._real = 0
        self._free: dict[int, list[int]] = {}
        self._chunks: dict[int, Chunk] = {}
        # Finalizers run at any moment, also in the middle of the methods here: they only leave a note.
        self._dropped: deque[int] = deque()
        self._fresh: list[int] = []
        self._shared: NDArray[np.uint8] | None = None
        self._shared_used = 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised array in the arena, or in private memory where the arena has no room."""
        dtype = np.dtype(dtype)
        num_bytes = dtype.itemsize * math.prod(shape)
        memory = self.bytes_for(num_bytes) if num_bytes else None
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

    def place_of(self, memory: NDArray[np.uint8]) -> tuple[int, int] | None:
        """Returns the chunk's offset and the offset in the chunk of some bytes.

        None if they are not in a chunk of this message: bytes of an earlier one, which user code may have kept and
        given out again, are the parent's already and must be copied.
        """
        offset = int(memory.__array_interface__["data"][0]) - self._start
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
        """Returns a whole chunk of at least so many bytes."""
        while self._dropped:
            chunk = self._chunks[self._dropped.popleft()]
            chunk.worker_holds = False
            self._free_if_unused(chunk)
        size = round_up(num_bytes)
        recycled = self._free.get(size)
        if recycled:
            offset = recycled.pop()
        else:
            offset = self._used
            if not self._make_real(offset + size):
                return None
            self._used += size
        self._chunks[offset] = Chunk(offset, size)
        self._fresh.append(offset)
        # The base whose end says that no array of the worker is left on the chunk.
        base = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=offset)
        weakref.finalize(base, self._dropped.append, offset).atexit = False
        return base

    def _make_real(self, end: int) -> bool:
        """Gets pages for the arena's first `end` bytes from the system now, rather than a fatal signal later."""
        if end > self._num_bytes:
            return False
        if end > self._real:
            wanted = min(self._num_bytes, max(end, self._real + min(max(self._real, 1 << 20), _GROWTH_BYTES)))
            if sys.platform == "linux":
                try:
                    os.posix_fallocate(self._descriptor, self._real, wanted - self._real)
                except OSError:
                    return False
            self._real = wanted
        return True

    def _free_if_unused(self, chunk: Chunk) -> None:
        if not chunk.worker_holds and not chunk.parent_holds:
            if chunk.offset in self._fresh:
                self._fresh.remove(chunk.offset)
            del self._chunks[chunk.offset]
            self._free.setdefault(chunk.size, []).append(chunk.offset)


@final
class ArenaView:
    """The parent's side of one worker's arena."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._map = mmap.mmap(descriptor, num_bytes)
        # Finalizers run in any thread at any moment: appending to a deque is all they do.
        self._released: deque[int] = deque()

    def lease(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Returns a chunk's bytes, shape `(num_bytes,)`, writable. When the last array on them ends, it is released."""
        base = np.frombuffer(self._map, dtype=np.uint8, count=num_bytes, offset=offset)
        weakref.finalize(base, self._released.append, offset).atexit = False
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
