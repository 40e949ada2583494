"""The engine: the one loop that runs the calls of a plan. It delivers outputs, works here, issues calls, or waits.

    places ──▶ schedule.complete ──▶ schedule.pop ──▶ the consumer
                       │ take
                       ▼
    budget ──▶ here, or ahead: threads, worker processes, actors          local operations ──▶ here, or threads

Guarantees:
    * Outputs leave in the order of the schedule, whichever call finishes first. An error is delivered in order.
    * Only the consumer's thread uses the schedule and all other state of an engine (see `places`).
    * User code never sees settings that only the consumer's thread has. If it has any, threads of the library run every
      call (see `thread_settings`).
    * An exception of a signal handler in the consumer's thread leaves `next_outputs` immediately and unchanged.
    * The stream depends on no place, and on no budget.
"""

import math
import sys
import time
import weakref
from typing import TYPE_CHECKING, final

from millstream.loader.engine import policy
from millstream.loader.engine.places import Here, Place, Threads
from millstream.loader.engine.policy import RECORDS_PER_CALL, CallSize, Costs, cautious_estimate
from millstream.loader.engine.substreams import Substream
from millstream.loader.measuring import ExecutorStatus
from millstream.loader.pipeline.calls import Call, Outputs, Position
from millstream.loader.pipeline.elements import Awaited, Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.scheduling.schedule import Schedule
from millstream.loader.threads.options import ReadOptions, buffer_budget
from millstream.loader.threads.reader_threads import CLOSE_SECONDS, ReaderThreads
from millstream.loader.threads.shared_threads import MIN_AHEAD, SharedThreads
from millstream.sources.source_checks import is_in_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.loader.scheduling.feed import Feed


class GivenUp(Exception):  # noqa: N818  (internal)
    """An engine cannot go on. Another one at the same position does.

    An exception, because the error that it replaces is raised far below `next_outputs`, which is called per batch.
    """


class Budget:
    """The calls that may begin, their place, and how far ahead of the consumer. This one begins none ahead.

    Args:
        engine: the engine, to which it keeps no reference.
        substream: the stream that the consumer waits for, with the estimates of its calls.

    Attributes:
        runs_ahead: True if calls may begin before the consumer waits for them.
        place: the place of these calls; None if it belongs to another engine, and without such calls.
    """

    runs_ahead = False
    place: Place | None = None

    def __init__(self, engine: "Engine", substream: Substream | None = None) -> None:
        self.substream = substream or Substream(engine.plan, engine.schedule, CallSize(engine.plan))

    @property
    def in_flight(self) -> int:
        """The number of calls of the stream that run ahead."""
        return 0 if self.place is None else self.place.in_flight

    @property
    def is_orphaned(self) -> bool:
        """True if no call makes progress any more."""
        return False

    @property
    def runs_user_code_here(self) -> bool:
        return True

    def call_here(self) -> Call | None:
        """Takes the call that the consumer's thread should run now, because the consumer waits for it, if any."""
        stage = self.substream.schedule.next_stage
        return None if stage is None else self.substream.take(stage)

    def accept(self) -> None:
        """Completes the calls that have finished ahead, without waiting."""
        if self.place is not None:
            self.place.check_process()
            self.place.accept()

    def issue(self) -> None:
        """Begins the calls that the budget allows."""

    def drain(self) -> None:
        """Begins no more calls until it issues again. Those in flight go on."""

    def wait(self) -> None:
        """Completes a call that runs ahead, after waiting for it for a bounded time."""

    def end(self, outputs: Outputs) -> None:
        """Ends a request of the consumer. The budget may change."""

    def start(self) -> None:
        """Begins calls before the first request."""
        if self.place is not None:
            self.place.check_process()
            self.issue()

    def pause(self) -> None:
        """Stops all work, but keeps resources for the next iterator."""
        self.close(None)

    def close(self, deadline: float | None) -> None:
        """Stops all work. Idempotent and thread-safe. See `Engine.close`."""


WIDE_WINDOWS = 16
"""The number of windows before the search for a smaller number of threads, after these have become more."""


@final
class ReadAhead(Budget):
    """A share of the buffer of threads, in proportion to demand. The number of calls grows while the consumer waits.

    The consumer's thread runs calls that were quick, and reads only plain data in memory.

    Attributes:
        calls_ahead: the maximum number of calls in the backlog.
    """

    runs_ahead = True
    place: Threads

    def __init__(self, engine: "Engine", options: ReadOptions, shared: SharedThreads | None = None) -> None:
        self._plan = plan = engine.plan
        self._schedule = engine.schedule
        self._here = engine.here
        # A read that waits for a disk, a network or the user's code could hang, and nothing would end it.
        self._may_read_here = engine.feed is not None or is_in_memory(plan.pipeline.source)
        self._shared = shared = SharedThreads() if shared is None else shared
        self._costs = costs = Costs(plan, shared)
        readers = shared.enter(costs, options)
        max_records = min(RECORDS_PER_CALL, max(1, options.prefetch_buffer_size // MIN_AHEAD))
        self._min_records = max_records // 4
        size = CallSize(plan, max_records, min(shared.max_bytes, engine.local.max_bytes))
        size.sharers = shared.engines
        super().__init__(engine, Substream(plan, engine.schedule, size, costs))
        sink, timeout = self.substream, engine.stall_timeout
        self.place = Threads(plan, readers, engine.allocate, engine, sink, stall_timeout=timeout)
        self._max_calls = max(options.prefetch_buffer_size, shared.min_ahead)
        # If consumers of the others have had to wait, this one's would have to as well.
        self.calls_ahead = min(shared.calls_ahead, self._max_calls)
        self._waited = 0.0

    def widen(self, options: ReadOptions) -> None:
        """Lets more threads read, further ahead. All of them do for some time, because the reads wait."""
        self._shared.enter(self._costs, options, settled=WIDE_WINDOWS)
        self._max_calls = max(self._max_calls, options.prefetch_buffer_size)

    def call_here(self) -> Call | None:
        stage = self._schedule.next_stage
        if stage is None or not self._allows(stage) or not self._is_quick(stage) or not self._here.check():
            return None
        return self.substream.take(stage)

    def issue(self) -> None:
        # A later stage may have a quick call, which the consumer runs when it is needed. The reads for the calls after
        # it do not wait for that.
        for stage in reversed(range(self._schedule.num_stages)):
            while not self._is_quick(stage) and self._allows(stage):
                if (call := self.substream.take(stage, self._max_blocks)) is None:
                    break
                self.place.submit(call)

    def wait(self) -> None:
        if not self.place.in_flight:
            # There is no call left, because the feed has just ended.
            return
        start = time.perf_counter()
        self.place.wait()
        self._waited += time.perf_counter() - start
        # The consumer waited, so more calls have to be in flight.
        if self._costs.are_known:
            self.calls_ahead = min(4 * self.calls_ahead, self._max_calls)
            self._shared.calls_ahead = max(self._shared.calls_ahead, self.calls_ahead)
        self.place.accept()

    def end(self, outputs: Outputs) -> None:  # noqa: ARG002
        costs = self._costs
        if self.calls_ahead == self._max_calls and not self._plan.source_is_stream:
            self._shared.delivered(time.perf_counter(), self._waited, costs.num_calls, costs.num_blocks)
        self._waited = 0.0
        costs.num_calls = costs.num_blocks = 0

    def close(self, deadline: float | None) -> None:
        """Drops the calls. The last engine of the threads stops them (see `SharedThreads.leave`)."""
        self.place.close()
        self._shared.leave(self._costs, deadline)

    def _is_quick(self, stage: int) -> bool:
        if not self._here.may_work or (stage == 0 and not self._may_read_here):
            return False
        return self._costs.is_quick(stage, 1 if stage else self._schedule.next_blocks(self.substream.size.blocks))

    def _allows(self, stage: int) -> bool:
        """Returns True if the next call of a stage may begin. Later stages only consume elements that exist."""
        if stage > 0:
            return True
        begun = self._schedule.backlog
        if begun >= self.calls_ahead:
            return False
        if begun >= self._shared.min_ahead and self._schedule.records_ahead >= self._shared.records_ahead(self._costs):
            return False
        # If nothing has begun, the next call runs whatever the budget, because the consumer waits for it.
        return not begun or self.substream.bytes_ahead <= self._shared.bytes_ahead(self._costs)

    @property
    def _max_blocks(self) -> int:
        size = self.substream.size
        if self._shared.is_single:
            return size.blocks
        # Several streams share the buffer.
        block = self._plan.partition.block
        records = self._shared.records_ahead(self._costs) - self._schedule.records_ahead
        # A small share must not make calls so short that their transfer takes longer.
        worthwhile = min(self._min_records, block * policy.HAND_OVER_SECONDS / (self._costs.seconds[0] or 1e-9))
        return max(1, min(size.blocks, int(max(records, worthwhile)) // block))


@final
class LocalAhead:
    """The calls of local operations: a buffer of records and bytes in flight in threads, if any run ahead.

    Attributes:
        substream: the stream whose calls they are.
        runs_ahead: True if threads run calls before the consumer asks.
        num_threads: the number of threads.
        max_bytes: the maximum size of the outputs of calls that run ahead.
    """

    substream: Substream

    def __init__(self, reading: ReadOptions | None) -> None:
        options = reading if reading is not None and reading.reads_ahead else ReadOptions(1, 0)
        self.num_threads, self._max_records = options.num_threads, options.prefetch_buffer_size
        self.runs_ahead = options.reads_ahead
        self.max_bytes = buffer_budget(options.max_buffer_bytes) if self.runs_ahead else sys.maxsize
        # The records of the calls in flight and of the latest call, and the estimated size of the outputs of one.
        self._num_records, self._num_latest, self._record_bytes = 0, 0, 0.0

    def allows(self, in_flight: int) -> bool:
        """Returns True if another call may run ahead. One may whatever its size, two whatever their records."""
        if not in_flight:
            return self.runs_ahead
        records = self._num_records + self._num_latest
        return (in_flight == 1 or records <= self._max_records) and records * self._record_bytes <= self.max_bytes

    def begun(self, call: Call) -> None:
        self._num_latest = call.num_records
        self._num_records += call.num_records

    def complete(self, call: Call, elements: Elements, seconds: float, *, is_here: bool = False) -> None:
        self.substream.schedule.complete(call, elements)
        self.substream.size.record(call, seconds)
        if is_here:
            return
        self._num_records -= call.num_records
        if call.outputs is not None:
            latest = call.outputs.num_bytes / max(1, call.num_records)
            self._record_bytes = cautious_estimate(self._record_bytes, latest)


class Engine:
    """Runs the calls of one pass over a stream from a position on. Except for `close`, one thread uses it.

    Args:
        feed: the source of the elements of stage 0; None if they are read.
        budget_of: creates the budget of an engine.
        stall_timeout: the number of seconds that the consumer waits while no call finishes.
        local_reading: the threads of this process that run local operations in advance; None to run them on demand.
        requests: not empty during a request, and after one that was interrupted: a message may have been sent half.
            None for a list of its own.

    Attributes:
        failures: the failed records of the pass; None if the first error is raised.
    """

    def __init__(
        self,
        plan: Plan,
        position: Position,
        feed: "Feed | None" = None,
        budget_of: "Callable[[Engine], Budget]" = Budget,
        *,
        stall_timeout: float = math.inf,
        local_reading: ReadOptions | None = None,
        requests: list[None] | None = None,
    ) -> None:
        self.plan = plan
        # Workers refer to the schedule, and the streams that the feed draws from may refer to the same workers.
        self.schedule = Schedule(plan, position, None if feed is None else weakref.proxy(feed))
        self.feed = feed
        self.failures = self.schedule.failures
        self.stall_timeout = stall_timeout
        self.requests: list[None] = [] if requests is None else requests
        self.allocate = RecycledMemory().allocate
        self.here = Here(self.allocate, stall_timeout)
        self.local = LocalAhead(local_reading)
        readers = ReaderThreads(self.local.num_threads)
        readers.end_with(self)
        # The threads for local operations, and for calls that the consumer's thread should run, but may not.
        self._aside = Threads(plan, readers, self.allocate, self, self.local, stall_timeout=stall_timeout)
        self._has_local = plan.num_remote_stages < len(plan.stages)
        self.budget = budget_of(self)
        self.local.substream = self.budget.substream
        # True if the latest result of `poll` was this engine.
        self._is_awaited = False
        # False if a change may allow further calls.
        self._is_issued = False
        # True if local operations have run in this request.
        self._has_run_local = False

    def next_outputs(self) -> Outputs | None:
        """Returns the next outputs in order, or None at the end.

        Exceptions raised here concern the engine, not a record, whose error is part of its outputs. The owner must then
        close the engine.
        """
        self.requests.append(None)
        if self._is_awaited:
            # `poll` has just accepted all that has finished.
            self._is_awaited = False
        else:
            self._begin()
        while (found := self._advance()) is not None and not isinstance(found, Outputs):
            found.wait()
        self.requests.clear()
        return found

    def poll(self) -> Outputs | Awaited | None:
        """Returns the same without waiting. If there are none yet, it returns the object to wait for before a retry.

        That is this engine if it has calls in flight. Otherwise the feed waits for another one.
        """
        self.requests.append(None)
        self._begin()
        found = self._advance()
        self._is_awaited = found is self
        self.requests.clear()
        return found

    def _advance(self) -> Outputs | Awaited | None:
        schedule, feed = self.schedule, self.feed
        if feed is not None:
            feed.awaited = None
        while (outputs := schedule.pop()) is None:
            if schedule.exhausted:
                return None
            if not self._work_here() and not self._issue():
                if feed is None or feed.awaited is None or self._aside.in_flight or self.budget.in_flight:
                    return self
                return feed.awaited
        if feed is not None:
            feed.delivered(outputs)
        if self.budget.runs_ahead or self._has_local:
            # Work continues while the consumer is away.
            self.budget.end(outputs)
            self._is_issued = True
            self.budget.issue()
            if self._has_local:
                self._issue_local()
        return outputs

    def wait(self) -> None:
        """Waits for a call in flight, for a bounded time."""
        if self._aside.in_flight:
            self._aside.wait()
        else:
            self._wait()
        self._is_issued = False

    @property
    def is_orphaned(self) -> bool:
        """True if it makes no progress any more. Its owner then begins another one at the same position.

        That is after `close`, and at the interpreter's exit, which ends all threads and workers of the library.
        Functions that were registered for the exit before the library's own run later, and may need a new engine.
        """
        return self._aside.readers.is_stopped or self.budget.is_orphaned

    @property
    def runs_user_code_here(self) -> bool:
        """True if the consumer's thread may run code of the user."""
        return self._has_local or self.budget.runs_user_code_here

    def status(self) -> ExecutorStatus:
        """Returns a snapshot of the work in progress. Thread-safe: it may be slightly outdated."""
        status, place = ExecutorStatus(self.schedule.backlog, self.schedule.ready), self.budget.place
        return status if place is None else place.status(status)

    def stacks(self) -> dict[int, str]:
        """Returns the stacks of worker processes by process ID. Thread-safe."""
        return {} if self.budget.place is None else self.budget.place.stacks()

    def start(self) -> None:
        """Starts to work ahead, if the budget allows that."""
        self.requests.append(None)
        self.budget.start()
        self.requests.clear()

    def pause(self) -> None:
        """Stops working for this iterator, but keeps resources for the next one."""
        # First: after an interruption, nothing else would end its threads.
        self._stop_aside()
        self._join_aside(None)
        self.budget.pause()

    def close(self, deadline: float | None = None) -> None:
        """Stops all work. Idempotent and thread-safe.

        `deadline` is the time of `time.monotonic` until which it waits for user code in threads; None for its own.
        """
        self._stop_aside()
        own = time.monotonic() + CLOSE_SECONDS
        self.budget.close(deadline)
        self._join_aside(own if deadline is None else deadline)

    def _begin(self) -> None:
        self.here.is_checked = False
        if self.local.runs_ahead:
            self._aside.check_process()
        self._has_run_local = False
        self.budget.accept()
        self._is_issued = False

    def _work_here(self) -> bool:
        """Runs a call that the consumer's thread should run now. Returns False if there is none."""
        if self._has_local:
            if self._run_local():
                return True
            if self._aside.in_flight:
                return False
        if (call := self.budget.call_here()) is None:
            return False
        if self.here.check():
            self.here.run(self.plan, call, self.budget.substream)
        else:
            self._run_aside(call)
        self._is_issued = False
        return True

    def _run_local(self) -> bool:
        """Completes a call of local operations. Returns False if there is none, or if threads still run it."""
        if self._has_run_local:
            self.budget.accept()
            self._is_issued = False
        self._issue()
        self._issue_local()
        if self._aside.in_flight:
            # The others that have finished count as in flight.
            if not self._aside.accept_one():
                return False
        elif (call := self.budget.substream.take(None)) is not None:
            if self.here.check():
                self.here.run(self.plan, call, self.local)
            else:
                self._run_aside(call)
        else:
            return False
        self._has_run_local, self._is_issued = True, False
        return True

    def _run_aside(self, call: Call) -> None:
        """Completes a call that the consumer's thread should run, but may not."""
        self._aside.check_process()
        self.local.begun(call)
        self._aside.submit(call)
        self._aside.wait()

    def _issue(self) -> bool:
        """Begins the calls that run ahead. Returns False if nothing has changed since the last time."""
        if self._is_issued:
            return False
        self._is_issued = True
        self.budget.issue()
        return True

    def _issue_local(self) -> None:
        while self.local.allows(self._aside.in_flight) and (call := self.budget.substream.take(None)) is not None:
            self.local.begun(call)
            self._aside.submit(call)

    def _wait(self) -> None:
        self.budget.wait()

    def _stop_aside(self) -> None:
        self._aside.readers.stop()
        self._aside.close()

    def _join_aside(self, deadline: float | None) -> None:
        seconds = CLOSE_SECONDS if deadline is None else deadline - time.monotonic()
        self._aside.readers.join(seconds)
