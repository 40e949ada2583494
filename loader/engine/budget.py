"""Budgets: which calls of a stream may begin now, in which place, and how far ahead of the consumer.

`OnDemand` begins nothing ahead. `ReadAhead` has a share of a buffer of records and bytes for threads, and grows while
the consumer has to wait. `WorkerSlots` has the calls that workers accept, within bytes. `LocalAhead` has the records
and bytes of operations that run in this process after the workers. They have an interface in common, and no algorithm.
"""

import sys
import time
from typing import TYPE_CHECKING, Any, Protocol, final

from millstream.loader.engine import policy
from millstream.loader.engine.places import Here, Threads
from millstream.loader.engine.policy import RECORDS_PER_CALL, CallSize, Costs, cautious_estimate
from millstream.loader.engine.substreams import Substream, taken_call
from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.scheduling.schedule import Schedule
from millstream.loader.threads.options import ReadOptions, buffer_budget
from millstream.loader.threads.shared_threads import MIN_AHEAD, SharedThreads
from millstream.sources.source_checks import is_in_memory

if TYPE_CHECKING:
    from millstream.loader.engine.places import Place
    from millstream.loader.engine.workers import Workers


class Budget(Protocol):
    """A rule for the calls that may begin.

    Attributes:
        substream: the stream that the consumer waits for, and the estimates of its calls.
        place: the place of the calls that run ahead of the consumer; None if none do.
    """

    substream: Substream

    @property
    def place(self) -> "Place | None": ...

    def call_here(self) -> Call | None:
        """Takes the call that the consumer's thread should run now, because the consumer waits for it, if any."""

    def begin(self) -> None:
        """Begins a request of the consumer, without waiting: completes the calls that have finished ahead."""

    def accept(self) -> None:
        """Completes the calls that have finished since then."""

    def issue(self) -> None:
        """Begins the calls that the budget allows."""

    def wait(self) -> None:
        """Completes a call that runs ahead, after waiting for it for a bounded time."""

    def end(self) -> None:
        """Ends a request of the consumer, who has got outputs. The budget may change."""

    def pause(self) -> None:
        """Stops all work, but keeps resources for the next iterator."""

    def close(self, deadline: float | None) -> None:
        """Stops all work. Idempotent and thread-safe. See `Executor.close`."""


@final
class OnDemand:
    """Runs each call when the consumer waits for it, in its thread."""

    place = None

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.substream = Substream(plan, schedule, CallSize(plan))

    def call_here(self) -> Call | None:
        schedule = self.substream.schedule
        stage = schedule.next_stage
        return None if stage is None else taken_call(schedule, stage, self.substream.size.blocks)

    def begin(self) -> None:
        """Does nothing, like all that follows: no call runs ahead."""

    def accept(self) -> None: ...

    def issue(self) -> None: ...

    def wait(self) -> None: ...

    def end(self) -> None: ...

    def pause(self) -> None: ...

    def close(self, deadline: float | None) -> None: ...


@final
class ReadAhead:
    """A share of the buffer of threads, in proportion to demand. The number of calls grows while the consumer waits.

    The consumer's thread runs calls that were quick, and reads only plain data in memory.

    Attributes:
        calls_ahead: the maximum number of calls in the backlog.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        options: ReadOptions,
        here: Here,
        owner: Any,
        *,
        shared: SharedThreads | None,
        is_fed: bool,
        max_bytes: int,
        stall_timeout: float,
        memory: RecycledMemory,
    ) -> None:
        self._plan = plan
        self._schedule = schedule
        self._here = here
        # A read that waits for a disk, a network or the user's code could hang, and nothing would end it.
        self._may_read_here = is_fed or is_in_memory(plan.pipeline.source)
        self._shared = shared = SharedThreads() if shared is None else shared
        self._costs = costs = Costs(plan, shared)
        readers = shared.enter(costs, options)
        max_records = min(RECORDS_PER_CALL, max(1, options.prefetch_buffer_size // MIN_AHEAD))
        self._min_records = max_records // 4
        size = CallSize(plan, max_records, min(shared.max_bytes, max_bytes))
        self.substream = Substream(plan, schedule, size, costs, is_fed=is_fed)
        self.place = Threads(plan, readers, memory.allocate, owner, self.substream, stall_timeout=stall_timeout)
        self._max_calls = max(options.prefetch_buffer_size, shared.min_ahead)
        # If consumers of the others have had to wait, this one's would have to as well.
        self.calls_ahead = min(shared.calls_ahead, self._max_calls)
        self._waited = 0.0

    def call_here(self) -> Call | None:
        stage = self._schedule.next_stage
        if stage is None or not self._allows(stage) or not self._is_quick(stage) or not self._here.check():
            return None
        return taken_call(self._schedule, stage, self.substream.size.blocks)

    def begin(self) -> None:
        self.place.check_process()
        self._waited, self._costs.num_completed = 0.0, 0
        self.place.accept()

    def accept(self) -> None:
        self.place.accept()

    def issue(self) -> None:
        # A later stage may have a quick call, which the consumer runs when it is needed. The reads for the calls after
        # it do not wait for that.
        for stage in reversed(range(self._schedule.num_stages)):
            while not self._is_quick(stage) and self._allows(stage):
                if (call := taken_call(self._schedule, stage, self._max_blocks)) is None:
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

    def end(self) -> None:
        if self.calls_ahead == self._max_calls and not self._plan.source_is_stream:
            self._shared.delivered(time.perf_counter(), self._waited, self._costs.num_completed)

    def pause(self) -> None:
        self.close(None)

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
class WorkerSlots:
    """The calls that workers accept, of one stream or of several, within bytes.

    User code runs in workers only. The consumer's thread also copies elements into regrouped batches, if a stage does
    no more than that.
    """

    def __init__(self, place: "Workers[Any]", here: Here) -> None:
        self.substreams = place.substreams
        self.substream = place.substreams.own
        self.place = place
        self._here = here

    def call_here(self) -> None:
        """Returns None: what runs here begins like the other calls."""

    def begin(self) -> None:
        self.place.check_process()
        self.place.accept()

    def accept(self) -> None:
        self.place.accept()

    def issue(self) -> None:
        if self.place.submit_lost():
            for substream in self.substreams.by_urgency():
                if not self._issue_from(substream):
                    self.substreams.wake(substream)
                    return

    def wait(self) -> None:
        start = time.perf_counter()
        self.place.wait()
        self.place.reads.waited(time.perf_counter() - start)

    def end(self) -> None:
        self.place.reads.delivered(time.perf_counter())

    def pause(self) -> None:
        self.place.pause()

    def close(self, deadline: float | None) -> None:  # noqa: ARG002  (it waits for nothing)
        self.place.close()

    def work_for(self, substream: Substream) -> None:
        """Works for an iterator that draws from another stream, until something has changed."""
        with self.substreams.waiting_for(substream):
            self.issue()
            if substream.in_flight or not self.place.has_room:
                self.place.wait()

    def work_ahead(self) -> None:
        """Begins the next calls of other streams, if no outputs of its own will be requested."""
        if self.substream.schedule.exhausted:
            self.place.accept()
            self.issue()

    def _issue_from(self, substream: Substream) -> bool:
        """Returns False if no worker accepts more."""
        place = self.place
        while (stage := substream.schedule.next_stage) is not None:
            if not substream.plan.stages[stage].runs_user_code:
                if (call := substream.take(stage)) is not None:
                    self._here.run(substream.plan, call, self.substreams)
                continue
            if not place.has_room:
                return False
            if stage == 0 and not self.substreams.may_begin(substream, place.max_calls, place.buffered_calls):
                return True
            # Drawing may begin other calls meanwhile, or a worker may die.
            call = substream.take(stage)
            if call is not None:
                place.submit(call)
        return True


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
