"""A bounded wait for threads that run calls: first a warning, then an error with their stacks.

Only time that the consumer spends waiting counts. If a slice of the wait takes much longer than asked, the machine was
suspended, and the excess does not count.
"""

import collections
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Generic, TypeVar, final

from millstream.core.warn import log_warning
from millstream.errors import WorkerStalledError

STALL_WARNING_SECONDS = 30.0
"""Threads or workers that finish nothing for this long, while the consumer waits, are reported in the log."""

SLICE_SECONDS = 1.0
"""The longest single wait. If one takes longer, the whole machine was suspended, which is not a stall."""


@final
class Wait:
    """The consumer's wait for the next call to finish, an error after `stall_timeout` seconds."""

    def __init__(self, stall_timeout: float) -> None:
        self._timeout = stall_timeout
        self._waited = 0.0
        self._is_reported = False
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """The length of the next slice, at least 0."""
        self._since = time.monotonic()
        limit = self._timeout if self._is_reported else min(self._timeout, STALL_WARNING_SECONDS)
        return max(0.0, min(SLICE_SECONDS, limit - self._waited))

    def timed_out(self, records: str, threads: Iterable[threading.Thread]) -> WorkerStalledError | None:
        """Records that a slice has passed without a result. Warns once, and later returns an error.

        `records` describes the records of the oldest call, and `threads` run calls.
        """
        self._waited += min(SLICE_SECONDS, time.monotonic() - self._since)
        if self._waited >= self._timeout:
            return WorkerStalledError(
                f"The threads that read have finished nothing for {self._waited:.1f} s (stall_timeout), "
                f"with {records}. Stacks:\n{stacks_of(threads)}"
            )
        if self._waited >= STALL_WARNING_SECONDS and not self._is_reported:
            self._is_reported = True
            limit = "never" if math.isinf(self._timeout) else f"after {self._timeout:g} s"
            log_warning(
                f"the threads that read have finished nothing for {self._waited:.1f} s, with {records}. This becomes "
                f"an error {limit} (stall_timeout). Stacks:\n{stacks_of(threads)}"
            )
        return None


def stacks_of(threads: Iterable[threading.Thread]) -> str:
    frames = sys._current_frames()  # noqa: SLF001  (the only access to the stacks of other threads)
    stacks = [
        f"Thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    ]
    return "".join(stacks) or "(no thread is running)"


ItemT = TypeVar("ItemT")


@final
class TimedQueue(Generic[ItemT]):
    """A first-in, first-out queue for any number of threads. An item wakes one of the threads that wait.

    With several, one whose item comes together with another's may find it only at the end of its wait. All waits are
    bounded, whatever signal handlers do: `queue.SimpleQueue.get` of Python 3.11 and 3.12 waits forever
    after a handler that outlasts its timeout.
    """

    def __init__(self) -> None:
        self._items: collections.deque[ItemT] = collections.deque()
        # Locked unless an item has arrived since it was last acquired.
        self._has_come = threading.Lock()
        self._has_come.acquire()

    def put(self, item: ItemT) -> None:
        self._items.append(item)
        if self._has_come.locked():
            try:
                self._has_come.release()
            except RuntimeError:
                # Another thread has put an item at the same moment.
                return

    def get(self, timeout: float) -> ItemT:
        """Removes the next item and returns it. Raises queue.Empty if none arrives in time, in seconds."""
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
