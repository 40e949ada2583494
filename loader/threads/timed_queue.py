"""A queue that waits for a bounded time, whatever signal handlers do meanwhile.

`queue.SimpleQueue.get` of Python 3.11 and 3.12 does not: after a handler that runs past its timeout, it waits forever.
"""

import collections
import queue
import threading
import time
from typing import Generic, TypeVar, final

ItemT = TypeVar("ItemT")


@final
class TimedQueue(Generic[ItemT]):
    """Items in the order in which any threads put them. Where several threads wait, an item wakes one of them."""

    def __init__(self) -> None:
        self._items: collections.deque[ItemT] = collections.deque()
        # Taken unless an item has come since it was last taken.
        self._has_come = threading.Lock()
        self._has_come.acquire()

    def put(self, item: ItemT) -> None:
        """Adds an item."""
        self._items.append(item)
        if self._has_come.locked():
            try:
                self._has_come.release()
            except RuntimeError:
                # Another thread has put an item at the same time.
                return

    def get(self, timeout: float) -> ItemT:
        """Returns the next item and removes it.

        Args:
            timeout: how many seconds to wait for an item.

        Raises:
            queue.Empty: none came in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            if self._items:
                try:
                    return self._items.popleft()
                except IndexError:
                    # Another thread was quicker.
                    continue
            if (left := deadline - time.monotonic()) <= 0:
                raise queue.Empty
            self._has_come.acquire(timeout=left)

    def __len__(self) -> int:
        return len(self._items)
