"""Calls that threads of the library make for the thread that consumes their outputs.

Guarantees:
    * The consumer's thread alone hands calls out and receives what came of them. The threads get closures through one
      queue and hand results back through another; they share nothing else.
    * The consumer waits for a bounded time: a call that finishes too late is an error, and its outcome is dropped.
    * Calls that no thread has begun are dropped by `close()`, and at the end of the owner's life.
"""

import functools
import math
import queue
import weakref
from typing import Any, NamedTuple, final

from millstream.columnar import Allocate
from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.threads.sliced_reading import SlicedReading
from millstream.loader.threads.timed_queue import TimedQueue
from millstream.loader.threads.waiting import Wait


class Finished(NamedTuple):
    """What came of a call.

    Attributes:
        call: which one.
        elements: its outputs.
        seconds: how long one thread alone would have worked for them.
    """

    call: Call
    elements: Elements
    seconds: float


@final
class ThreadedCalls:
    """Hands out calls of one plan.

    Args:
        plan: what makes the outputs.
        readers: the threads, which may work for others, too.
        allocate: where batches are made.
        owner: the executor that receives the outputs.
        stall_timeout: for how many seconds the consumer waits while no call finishes.
    """

    def __init__(
        self, plan: Plan, readers: ReaderThreads, allocate: Allocate, owner: Any, stall_timeout: float = math.inf
    ) -> None:
        self._in_work: dict[Call, None] = {}
        self._stall_timeout = stall_timeout
        self._plan = plan
        self._allocate = allocate
        self._readers = readers
        self._owner = weakref.ref(owner)
        self._is_closed = False
        self._finished: TimedQueue[Finished | None] = TimedQueue()

    @property
    def in_work(self) -> int:
        """The number of calls that were handed out and not received."""
        return len(self._in_work)

    @property
    def num_finished(self) -> int:
        """How many calls have finished that were not received. Any thread may ask."""
        return len(self._finished)

    @property
    def num_busy(self) -> int:
        """How many threads make a call. Any thread may ask."""
        return self._readers.num_busy

    @property
    def any_finished(self) -> bool:
        """Whether `receive` would not wait."""
        return len(self._finished) > 0

    def check_process(self) -> None:
        """Raises a RuntimeError in a process that was forked since: the threads are not there."""
        self._readers.check_process()

    def hand_out(self, call: Call) -> None:
        """Has a thread make a call; where the source reads record by record, the others may help it."""
        reading = SlicedReading(self._plan, self._readers)
        prepare_blocks = None if self._plan.batched_source else reading.prepare_blocks

        def job() -> None:
            if self._is_closed or self._owner() is None:
                return
            make = functools.partial(self._plan.make, call.request, self._allocate, prepare_blocks)
            elements, seconds = self._readers.timed(make)
            self._finished.put(Finished(call, elements, seconds + reading.seconds_of_others))

        self._in_work[call] = None
        self._readers.submit(job)

    def receive(self) -> Finished:
        """Returns what came of a call, having waited for it; the oldest one is an error when it stalls.

        Raises:
            ValueError: the iterator was closed meanwhile.
        """
        wait = Wait(self._stall_timeout)
        while True:
            try:
                finished = self._finished.get(timeout=wait.seconds)
            except queue.Empty:
                oldest = next(iter(self._in_work))
                error = wait.was_in_vain(self._plan.describe(oldest.request), self._readers.busy_threads)
                if error is None:
                    continue
                finished = Finished(oldest, Elements.failed(error), 0.0)
            if finished is None:
                raise ValueError(
                    "The read-ahead threads were stopped: the iterator was closed, perhaps by another thread."
                )
            # One that had stalled was received as an error.
            if finished.call in self._in_work:
                del self._in_work[finished.call]
                return finished

    def close(self) -> None:
        """Drops the calls that no thread has begun. Idempotent."""
        self._is_closed = True
        # Another thread may wait for what is dropped now.
        self._finished.put(None)
