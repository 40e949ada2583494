"""Calls that run in the consumer's process: one at a time when their outputs are needed, or in threads in advance.

Guarantees:
    * User code never sees settings that only the consumer's thread has. If it has any, a thread of the library runs the
      calls (see `thread_settings`).
    * An exception of a signal handler in the consumer's thread leaves `run` immediately and unchanged.
"""

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from millstream.core.columnar import Allocate
from millstream.core.signals import is_from_signal_handler
from millstream.loader.pipeline.calls import Call, Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.scheduling.executor import Executor
from millstream.loader.threads.call_size import CallSize, cautious_estimate, taken_call
from millstream.loader.threads.options import ReadOptions
from millstream.loader.threads.reader_threads import CLOSE_SECONDS, ReaderThreads
from millstream.loader.threads.resources import buffer_budget
from millstream.loader.threads.thread_settings import ThreadSettings
from millstream.loader.threads.threaded_calls import ThreadedCalls
from millstream.loader.threads.watcher import watched

if TYPE_CHECKING:
    from millstream.loader.scheduling.assignments import Wanting
    from millstream.loader.scheduling.feed import Feed


def run_here(plan: Plan, schedule: "Wanting", call: Call, allocate: Allocate, stall_timeout: float) -> float:
    """Runs a call in this thread, completes it and returns the seconds it took. The watcher logs one that hangs.

    An exception of a signal handler is raised, because it concerns this moment. A record's error is delivered in order.
    """
    start = time.perf_counter()
    request = call.request
    elements = watched(lambda: plan.make(request, allocate), lambda: plan.describe(request), stall_timeout)
    seconds = time.perf_counter() - start
    if elements.error is not None and is_from_signal_handler(elements.error):
        raise elements.error
    schedule.complete(call, elements)
    return seconds


@final
class LocalCalls:
    """Runs calls of one executor, and completes them in its schedule.

    The threads of `reading` run them in advance, if it is given, and end with `owner`, the executor.

    Attributes:
        may_work_here: True if the consumer's thread could run user code when it was last asked for (see `check_here`).
        max_bytes: the maximum size of the outputs of calls that run in advance.
        stall_timeout: the number of seconds after which a call in a thread is an error.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: "Wanting",
        allocate: Allocate,
        owner: Any,
        *,
        reading: ReadOptions | None = None,
        stall_timeout: float = math.inf,
    ) -> None:
        self._plan = plan
        self._schedule = schedule
        self._allocate = allocate
        self.stall_timeout = stall_timeout
        self._settings = ThreadSettings()
        self.may_work_here, self._is_checked = True, False
        options = reading if reading is not None and reading.reads_ahead else ReadOptions(1, 0)
        self._max_records, self._readers = options.prefetch_buffer_size, ReaderThreads(options.num_threads)
        self.max_bytes = buffer_budget(options.max_buffer_bytes) if self._max_records else sys.maxsize
        # The records of the calls in flight and of the latest call, and the estimated size of the outputs of one.
        self._num_records, self._num_latest, self._record_bytes = 0, 0, 0.0
        self._readers.end_with(owner)
        self._threads = ThreadedCalls(plan, self._readers, allocate, owner, stall_timeout)

    @property
    def is_stopped(self) -> bool:
        """True after `stop`, and at the interpreter's exit, which ends all threads and workers of the library.

        Functions that were registered for the exit before the library's own run later, and may need a new executor.
        """
        return self._readers.is_stopped

    def begin(self) -> None:
        """Begins a request of the consumer, whose thread may have other settings than at the last one."""
        self._is_checked = False
        if self._max_records:
            self._readers.check_process()

    def check_here(self) -> bool:
        """Returns True if the consumer's thread may run user code in this request: it has no settings of its own."""
        if not self._is_checked:
            self.may_work_here, self._is_checked = self._settings.are_neutral(), True
            if not self.may_work_here:
                self._readers.check_process()
        return self.may_work_here

    def run(self, call: Call) -> float:
        if self.check_here():
            return run_here(self._plan, self._schedule, call, self._allocate, self.stall_timeout)
        self._submit(call)
        return self._receive()[1]

    def run_next(self, take: Callable[[], Call | None]) -> tuple[Call, float] | None:
        """Completes a call. Returns it with the seconds it took, or None if there is none."""
        self.submit(take)
        if self._threads.in_flight:
            return self._receive()
        call = take()
        return None if call is None else (call, self.run(call))

    def submit(self, take: Callable[[], Call | None]) -> None:
        """Submits calls to the threads, if any run calls in advance."""
        while self._has_room and (call := take()) is not None:
            self._submit(call)

    def stop(self) -> float:
        """Drops the calls. Returns the time of `time.monotonic` until which `join` waits for user code."""
        self._readers.stop()
        self._threads.close()
        return time.monotonic() + CLOSE_SECONDS

    def join(self, deadline: float) -> None:
        self._readers.join(deadline - time.monotonic())

    def close(self, deadline: float | None = None) -> None:
        own = self.stop()
        self.join(own if deadline is None else deadline)

    @property
    def _has_room(self) -> bool:
        """True if threads may run another call in advance. One may whatever its size, two whatever their records."""
        in_flight = self._threads.in_flight
        if not in_flight:
            return self._max_records > 0
        records = self._num_records + self._num_latest
        return (in_flight == 1 or records <= self._max_records) and records * self._record_bytes <= self.max_bytes

    def _submit(self, call: Call) -> None:
        self._num_latest = call.num_records
        self._num_records += call.num_records
        self._threads.submit(call)

    def _receive(self) -> tuple[Call, float]:
        call, elements, seconds = self._threads.receive()
        self._schedule.complete(call, elements)
        self._num_records -= call.num_records
        if call.outputs is not None:
            latest = call.outputs.num_bytes / max(1, call.num_records)
            self._record_bytes = cautious_estimate(self._record_bytes, latest)
        return call, seconds


@final
class InlineExecutor(Executor):
    """Runs each call on demand: in the consumer's thread, or in another one if that has settings of its own."""

    def __init__(
        self, plan: Plan, position: Position, feed: "Feed | None" = None, *, stall_timeout: float = math.inf
    ) -> None:
        if plan.num_remote_stages < len(plan.stages):
            raise AssertionError("an executor without threads runs all operations in one place")
        super().__init__(plan, position, feed)
        self._size = CallSize(plan)
        self._calls = LocalCalls(plan, self._schedule, RecycledMemory().allocate, self, stall_timeout=stall_timeout)

    @property
    def is_orphaned(self) -> bool:
        return self._calls.is_stopped

    def close(self, deadline: float | None = None) -> None:
        self._calls.close(deadline)

    def _begin(self) -> None:
        self._calls.begin()

    def _advance(self) -> None:
        stage = self._schedule.next_stage
        call = None if stage is None else taken_call(self._schedule, stage, self._size.blocks)
        if call is not None:
            self._size.record(call, self._calls.run(call))

    def _end(self) -> None:
        """Does nothing: no call runs in advance."""
