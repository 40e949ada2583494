"""The end of what is idle: pools of workers and fork servers are kept for a minute, for the next user."""

import contextlib
import queue
import threading
import weakref
from typing import Protocol, TypeVar, final

IDLE_SECONDS = 60.0
"""The time for which idle pools and fork servers are kept."""

Removed = TypeVar("Removed")


class Keeper(Protocol):
    """Keeps what is idle for its next use."""

    def retire(self, retirement: "Retirement") -> None:
        """Ends what has been idle for IDLE_SECONDS, unless it has been used since."""


@final
class Retirement:
    """The scheduled end of a pool, or of a fork server, that is idle, and the thread that waits for it."""

    def __init__(self, keeper: "weakref.ref[Keeper]", idle: object, thread_name: str) -> None:
        self._keeper = keeper
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
            if (keeper := self._keeper()) is not None:
                keeper.retire(self)


def removed(objects: list[Removed], one: Removed) -> bool:
    """Removes an object from a list. Returns False if another thread has removed it."""
    try:
        objects.remove(one)
    except ValueError:
        return False
    return True
