"""Places where calls run: the consumer's thread, and threads of this process. `workers` has those in other processes.

A place computes `Plan.make(call.request)`, and knows no order, budget or other place. User code cannot tell which one
it got: it never sees settings that only the consumer's thread has (see `thread_settings`).

Guarantees:
    * Only the consumer's thread submits calls and completes them. Threads get closures through one queue and return
      results through another. They share nothing else, and keep nothing of the engine alive.
    * The consumer's wait is bounded. A call that finishes too late is an error, and its result is dropped.
    * Calls that have not begun are dropped by `close()`, and when the owner ends.
"""

import abc
import contextlib
import functools
import queue
import time
import weakref
from typing import Any, NamedTuple, final

from millstream.core.columnar import Allocate
from millstream.core.signals import is_from_signal_handler
from millstream.loader.engine.substreams import Sink
from millstream.loader.measuring import ExecutorStatus
from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.threads.shared_work import RecordTime, SharedWork
from millstream.loader.threads.thread_settings import ThreadSettings
from millstream.loader.threads.waiting import StallClock, TimedQueue, watched


class Place(abc.ABC):
    """A place outside of the consumer's thread. Except for `close`, `status` and `stacks`, that thread uses it."""

    @property
    @abc.abstractmethod
    def in_flight(self) -> int:
        """The number of calls submitted and not complete."""

    @abc.abstractmethod
    def submit(self, call: Call) -> None:
        """Begins a call."""

    @abc.abstractmethod
    def accept(self) -> None:
        """Completes the calls that have finished, without waiting."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Completes a call, after waiting for it for a bounded time. Reports a stall, and gives up its call."""

    @abc.abstractmethod
    def check_process(self) -> None:
        """Raises a RuntimeError in a forked process, which must not use the place."""

    @abc.abstractmethod
    def status(self, others: ExecutorStatus) -> ExecutorStatus:
        """Adds a snapshot of this place to that of others. Thread-safe."""

    def stacks(self) -> dict[int, str]:
        """Returns the stacks of worker processes by process ID, if they can be had here. Thread-safe."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Drops all calls. Idempotent and thread-safe."""


@final
class Here:
    """The consumer's thread, which completes a call before anything else happens.

    Attributes:
        may_work: the latest result of `check`.
        is_checked: True once this request has a result. The thread may have other settings in the next one.
    """

    def __init__(self, allocate: Allocate, stall_timeout: float) -> None:
        self._allocate = allocate
        self._stall_timeout = stall_timeout
        self._settings = ThreadSettings()
        self.may_work = True
        self.is_checked = False

    def check(self) -> bool:
        """Returns True if the thread may run user code in this request: it has no settings of its own."""
        if not self.is_checked:
            self.may_work, self.is_checked = self._settings.are_neutral(), True
        return self.may_work

    def run(self, plan: Plan, call: Call, sink: Sink) -> None:
        """Runs a call. The watcher logs one that hangs.

        An exception of a signal handler is raised, because it concerns this moment. A record's error is delivered in
        order.
        """
        start = time.perf_counter()
        request = call.request
        elements = watched(
            functools.partial(plan.make, request, self._allocate),
            functools.partial(plan.describe, request),
            self._stall_timeout,
        )
        seconds = time.perf_counter() - start
        if elements.error is not None and is_from_signal_handler(elements.error):
            raise elements.error
        sink.complete(call, elements, seconds, is_here=True)


class _Finished(NamedTuple):
    """The result of a call."""

    call: Call
    elements: Elements
    seconds: float  # The time that a single thread would have needed.


@final
class Threads(Place):
    """Runs calls of one plan in threads that may be shared.

    Args:
        owner: the engine, with which the calls end.
    """

    def __init__(
        self, plan: Plan, readers: ReaderThreads, allocate: Allocate, owner: Any, sink: Sink, *, stall_timeout: float
    ) -> None:
        self._in_flight: dict[Call, None] = {}
        self._stall_timeout = stall_timeout
        self._plan = plan
        self._allocate = allocate
        self.readers = readers
        self._record_time = RecordTime()
        self._owner = weakref.ref(owner)
        self._sink = sink
        # Not empty once it is closed.
        self._closed: list[None] = []
        self._finished: TimedQueue[_Finished | None] = TimedQueue()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, call: Call) -> None:
        """Submits a call to the threads. Several threads share reads that are made one by one or of several sources."""
        plan, readers, owner, closed, finished = self._plan, self.readers, self._owner, self._closed, self._finished
        work = SharedWork(readers, self._record_time)
        prepare_blocks = None if plan.batched_source else functools.partial(work.prepare_blocks, plan)
        # Now: a call that stalls is completed, and has another request then.
        make = functools.partial(plan.make, call.request, self._allocate, prepare_blocks)

        def run_call() -> None:
            if closed or owner() is None:
                return
            # Slices are shared already.
            with work.for_sources() if prepare_blocks is None else contextlib.nullcontext():
                elements, seconds = readers.run_timed(make, Elements.failed)
            finished.put(_Finished(call, elements, seconds + work.helper_seconds))

        self._in_flight[call] = None
        readers.submit(run_call)

    def accept(self) -> None:
        while self.accept_one():
            pass

    def accept_one(self) -> bool:
        """Completes a call that has finished, without waiting. Returns False if there is none."""
        while self._finished:
            if self._complete(self._finished.get(timeout=0.0)):
                return True
        return False

    def wait(self) -> None:
        """Completes a call. If none finishes in time, the oldest one becomes an error."""
        clock = StallClock(self._stall_timeout)
        while self._in_flight:
            try:
                finished = self._finished.take(clock)
            except queue.Empty:
                oldest = next(iter(self._in_flight))
                error = clock.stall_of(self._plan.describe(oldest.request), self.readers.busy_threads)
                if error is None:
                    continue
                finished = _Finished(oldest, Elements.failed(error), 0.0)
            if self._complete(finished):
                return

    def _complete(self, finished: _Finished | None) -> bool:
        """Completes a call. Returns False if it stalled, because it was completed as an error before."""
        if finished is None:
            raise ValueError(
                "The read-ahead threads have stopped because the iterator was closed, possibly by another thread."
            )
        is_wanted = finished.call in self._in_flight
        if is_wanted:
            del self._in_flight[finished.call]
            self._sink.complete(*finished)
        return is_wanted

    def check_process(self) -> None:
        self.readers.check_process()

    def status(self, others: ExecutorStatus) -> ExecutorStatus:
        return others._replace(
            ready=others.ready + len(self._finished),
            max_threads=self.readers.size,
            busy_threads=self.readers.num_busy,
        )

    def close(self) -> None:
        self._closed.append(None)
        # Wakes a thread that waits for a call.
        self._finished.put(None)
