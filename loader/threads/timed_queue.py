"""A queue whose waits are bounded, whatever signal handlers do.

`queue.SimpleQueue.get` of Python 3.11 and 3.12 waits forever after a handler that outlasts its timeout.
"""

import collections
import queue
import threading
import time
from typing import Generic, TypeVar, final

ItemT = TypeVar("ItemT")


@final
class TimedQueue(Generic[ItemT]):
    """A first-in, first-out queue for any number of threads. An item wakes one of the threads that wait."""

    def __init__(self) -> None:
        self._items: collections.deque[ItemT] = collections.deque()
        # Locked unless an item has arrived since it was last acquired.
        self._has_come = threading.Lock()
        self._has_come.acquire()

    def put(self, item: ItemT) -> None:
        """Adds an item."""
        self._items.append(item)
        if self._has_come.locked():
            try:
                self._has_come.release()
            except RuntimeError:
                # Another thread has put an item at the same moment.
                return

    def get(self, timeout: float) -> ItemT:
        """Returns the next item and removes it.

        Raises:
            queue.Empty: no item arrived in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            if self._items:
                try:
                    return self._items.popleft()
                except IndexError:
                    # Another thread has taken it.
                    continue
            if (left := deadline - time.monotonic()) <= 0:
                raise queue.Empty
            self._has_come.acquire(timeout=left)

    def __len__(self) -> int:
        return len(self._items)
