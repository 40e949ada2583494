"""Writable views of Ray's object store for the consumer's arrays.

Ray maps objects read-only, because any number of processes may read one. The objects here have one reader, the trainer.
It holds the only reference to each, and drops it once it has the memory. Afterwards no other process can reach the
object: Ray spills only objects that are not mapped, and forgets an object whose last reference has ended.

Guarantees:
    * Memory is written to only if the system reports that it is mapped for writing. Otherwise arrays are copies.
    * The memory of an object is returned to Ray with the last array on it.
    * Arrays that the consumer keeps never fill the store. Beyond a share of it, arrays are copies.
"""

import bisect
import contextlib
import re
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.transport.arena import LARGE_LEAF_BYTES
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.element_columns import to_elements
from millstream.loader.transport.payload import COPIED_BYTES, copied

INLINE_BYTES = 100 << 10
"""Ray sends smaller results with the answer, and not through the object store."""

_WRITABLE_MAP = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) rw.s")


@final
class ObjectMemory:
    """The memory of the object store that this process's arrays hold.

    Args:
        max_bytes: the maximum number of bytes that arrays may hold.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        # Finalizers may run at any moment, so they only append to this queue.
        self._ended: deque[int] = deque()
        self._writable: list[tuple[int, int]] = []

    @property
    def held(self) -> int:
        """The number of bytes of the store that arrays hold."""
        while self._ended:
            self._held -= self._ended.popleft()
        return self._held

    def unpack(self, packed: tuple[Any, list[Any]], classes: ClassTable) -> Elements:
        """Returns outputs that an actor has packed. Large arrays are views of the object store.

        Raises:
            Exception: a class of the user raises when unpickled.
        """
        body, buffers = packed
        columns, origins = classes.loads(body, self._arrays(buffers))
        values = to_elements(columns)
        return Elements(values, Origins.from_bytes(origins, len(values)))

    def _arrays(self, buffers: Sequence[Any]) -> list[NDArray[np.uint8]]:
        """Returns the memory of a message's arrays, writable."""
        arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        num_bytes = sum(array.nbytes for array in arrays)
        is_too_much = self.held + num_bytes > self._max_bytes
        if num_bytes < INLINE_BYTES or is_too_much or not all(map(self._is_writable, arrays)):
            return [copied(array) for array in arrays]
        copies = sum(array.nbytes for array in arrays if array.nbytes < LARGE_LEAF_BYTES) <= COPIED_BYTES
        hold = _Hold()
        weakref.finalize(hold, self._ended.append, num_bytes).atexit = False
        self._held += num_bytes
        return [
            copied(array) if copies and array.nbytes < LARGE_LEAF_BYTES else np.asarray(_Writable(array, hold))
            for array in arrays
        ]

    def _is_writable(self, array: NDArray[np.uint8]) -> bool:
        """Returns True if an array's memory is shared and mapped for writing, as the object store is."""
        address = int(array.__array_interface__["data"][0])
        if not self._covers(address, array.nbytes):
            # The first check, or the store has grown.
            with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as lines:  # noqa: PTH123
                found = map(_WRITABLE_MAP.match, lines.read().splitlines())
                self._writable = [(int(line[1], 16), int(line[2], 16)) for line in found if line]
        return self._covers(address, array.nbytes)

    def _covers(self, address: int, num_bytes: int) -> bool:
        number = bisect.bisect_right(self._writable, (address, address + num_bytes)) - 1
        found = self._writable[max(0, number) : number + 2]
        return any(start <= address and address + num_bytes <= stop for start, stop in found)


class _Hold:
    """Lives as long as any array of a message."""

    __slots__ = ("__weakref__",)


class _Writable:
    """Presents memory of Ray to NumPy as writable, and keeps it alive as long as the array."""

    __slots__ = ("__array_interface__", "_array", "_hold")

    def __init__(self, array: NDArray[np.uint8], hold: _Hold) -> None:
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {"data": (address, False), "shape": array.shape, "typestr": "|u1", "version": 3}
        self._array = array
        self._hold = hold
