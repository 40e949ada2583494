"""Calls that threads of the library run for the consumer's thread.

Guarantees:
    * Only the consumer's thread submits calls and receives their results. The threads get closures through one queue
      and return results through another. They share nothing else.
    * The consumer's wait is bounded. A call that finishes too late is an error, and its result is dropped.
    * Calls that have not begun are dropped by `close()`, and when the owner ends.
"""

import contextlib
import functools
import queue
import weakref
from typing import Any, NamedTuple, final

from millstream.core.columnar import Allocate
from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.threads.shared_work import SharedWork
from millstream.loader.threads.waiting import TimedQueue, Wait


class Finished(NamedTuple):
    """The result of a call."""

    call: Call
    elements: Elements
    seconds: float  # The time that a single thread would have needed.


@final
class ThreadedCalls:
    """Runs calls of one plan in threads that may be shared, for the executor that owns this."""

    def __init__(
        self, plan: Plan, readers: ReaderThreads, allocate: Allocate, owner: Any, stall_timeout: float
    ) -> None:
        self._in_flight: dict[Call, None] = {}
        self._stall_timeout = stall_timeout
        self._plan = plan
        self._allocate = allocate
        self.readers = readers
        self._owner = weakref.ref(owner)
        self._is_closed = False
        self._finished: TimedQueue[Finished | None] = TimedQueue()

    @property
    def in_flight(self) -> int:
        """The number of calls submitted and not received."""
        return len(self._in_flight)

    @property
    def num_finished(self) -> int:
        """The number of calls finished and not received. Thread-safe."""
        return len(self._finished)

    def submit(self, call: Call) -> None:
        """Submits a call to the threads. Several threads share reads that are made one by one or of several sources."""
        work = SharedWork(self.readers)
        prepare_blocks = None if self._plan.batched_source else functools.partial(work.prepare_blocks, self._plan)
        request = call.request  # Now: a call that stalls is completed, and has another one then.

        def job() -> None:
            if self._is_closed or self._owner() is None:
                return
            make = functools.partial(self._plan.make, request, self._allocate, prepare_blocks)
            # Slices are shared already.
            with work.for_sources() if prepare_blocks is None else contextlib.nullcontext():
                elements, seconds = self.readers.timed(make, Elements.failed)
            self._finished.put(Finished(call, elements, seconds + work.seconds_of_others))

        self._in_flight[call] = None
        self.readers.submit(job)

    def receive(self) -> Finished:
        """Waits for the result of a call. If no call finishes in time, the oldest one becomes an error."""
        wait = Wait(self._stall_timeout)
        while True:
            try:
                finished = self._finished.get(timeout=wait.seconds)
            except queue.Empty:
                oldest = next(iter(self._in_flight))
                error = wait.timed_out(self._plan.describe(oldest.request), self.readers.busy_threads)
                if error is None:
                    continue
                finished = Finished(oldest, Elements.failed(error), 0.0)
            if finished is None:
                raise ValueError(
                    "The read-ahead threads have stopped because the iterator was closed, possibly by another thread."
                )
            # A call that stalled was received as an error before.
            if finished.call in self._in_flight:
                del self._in_flight[finished.call]
                return finished

    def close(self) -> None:
        """Drops the calls that have not begun. Idempotent."""
        self._is_closed = True
        # Wakes a thread that waits for one of these.
        self._finished.put(None)
