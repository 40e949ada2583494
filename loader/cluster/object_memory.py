"""The consumer's arrays in Ray's object store: the very memory that Ray has them in, and they can be written to.

Ray shows objects read-only, since any number of processes may read one. These are read by one alone, the trainer,
which has the only reference to each, and drops it when it has the memory. Then nobody else can come by the object: what
Ray may move to a disk is what nobody has mapped, and it forgets an object whose last reference is gone.

Guarantees:
    * Memory is written to only where the system says that it is mapped for writing. Elsewhere arrays are copies.
    * An object's memory goes back to Ray with the last array on it.
    * Arrays that the consumer keeps never fill the store: beyond a part of it, they are copies.
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
"""Ray sends what is smaller beside the answer, and not through the object store."""

_WRITABLE_MAP = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) rw.s")


@final
class ObjectMemory:
    """What one process has mapped of the object store.

    Args:
        most_bytes: how much of it arrays may hold.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held = 0
        # Finalizers run at any moment: they only leave a note.
        self._ended: deque[int] = deque()
        self._writable: list[tuple[int, int]] = []

    @property
    def held(self) -> int:
        """How many bytes of the store arrays hold."""
        while self._ended:
            self._held -= self._ended.popleft()
        return self._held

    def unpack(self, packed: tuple[Any, list[Any]], classes: ClassTable) -> Elements:
        """Returns outputs as an actor has packed them; large arrays are views of the object store.

        Raises:
            Exception: whatever the user's classes raise when unpickled.
        """
        body, buffers = packed
        columns, origins = classes.loads(body, self._arrays(buffers))
        values = to_elements(columns)
        return Elements(values, Origins.from_bytes(origins, len(values)))

    def _arrays(self, buffers: Sequence[Any]) -> list[NDArray[np.uint8]]:
        """Returns the memory of a message's arrays, writable."""
        arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        whole = sum(array.nbytes for array in arrays)
        if whole < INLINE_BYTES or self.held + whole > self._most_bytes or not all(map(self._is_writable, arrays)):
            return [copied(array) for array in arrays]
        few = sum(array.nbytes for array in arrays if array.nbytes < LARGE_LEAF_BYTES) <= COPIED_BYTES
        hold = _Hold()
        weakref.finalize(hold, self._ended.append, whole).atexit = False
        self._held += whole
        return [
            copied(array) if few and array.nbytes < LARGE_LEAF_BYTES else np.asarray(_Writable(array, hold))
            for array in arrays
        ]

    def _is_writable(self, array: NDArray[np.uint8]) -> bool:
        """Returns whether an array's memory is mapped for writing, and shared: a part of the object store."""
        address = int(array.__array_interface__["data"][0])
        if not self._covers(address, array.nbytes):
            # The store has grown, or this is the first look at it.
            with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as lines:  # noqa: PTH123
                found = map(_WRITABLE_MAP.match, lines.read().splitlines())
                self._writable = [(int(line[1], 16), int(line[2], 16)) for line in found if line]
        return self._covers(address, array.nbytes)

    def _covers(self, address: int, num_bytes: int) -> bool:
        number = bisect.bisect_right(self._writable, (address, address + num_bytes)) - 1
        found = self._writable[max(0, number) : number + 2]
        return any(start <= address and address + num_bytes <= stop for start, stop in found)


class _Hold:
    """Is there as long as an array of a message is."""

    __slots__ = ("__weakref__",)


class _Writable:
    """Shows NumPy some memory as writable, and keeps it, which is Ray's, from ending before the array does."""

    __slots__ = ("__array_interface__", "_array", "_hold")

    def __init__(self, array: NDArray[np.uint8], hold: _Hold) -> None:
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {"data": (address, False), "shape": array.shape, "typestr": "|u1", "version": 3}
        self._array = array
        self._hold = hold
