"""The end of what is idle: pools of workers and fork servers are kept for a minute, for the next user."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar, final

IDLE_SECONDS = 60.0
"""The time for which idle pools and fork servers are kept."""

IdleT = TypeVar("IdleT")


@final
class Retirement(Generic[IdleT]):
    """The scheduled end of a pool, or of a fork server, that is idle, and the thread that waits for it.

    Args:
        end: a method that ends the idle object, unless it is in use again. Neither is kept alive.
    """

    def __init__(self, end: Callable[[IdleT], None], idle: IdleT, thread_name: str) -> None:
        self._end = weakref.WeakMethod(end)
        self._idle = weakref.ref(idle)
        self.thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
        # Gets an item to cancel it: `put` never waits, in a finalizer or a signal handler either.
        self._cancelled: queue.SimpleQueue[None] = queue.SimpleQueue()
        # A pool may end with the loader. The thread then stops waiting.
        self._ending = weakref.finalize(idle, self._cancelled.put, None)

    def begin(self) -> None:
        """Starts the thread that waits. If the system has no thread left, a pool stays as long as the loader."""
        with contextlib.suppress(RuntimeError, MemoryError):
            self.thread.start()

    def cancel(self) -> None:
        """Keeps the idle object alive. Idempotent. After an interrupt, the thread ends with the object."""
        self._cancelled.put(None)
        self._ending.detach()

    def _run(self) -> None:
        try:
            self._cancelled.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            end, idle = self._end(), self._idle()
            if end is not None and idle is not None:
                end(idle)
