"""The executor whose threads work ahead of the consumer.

Guarantees:
    * Outputs leave in the order of the schedule, whichever call finishes first. An error is delivered in order.
    * The consumer's thread runs calls that were quick, and reads only plain data in memory. The watcher logs one that
      hangs (see `watcher`).
    * Only the consumer's thread uses the schedule and all other state of an executor (see `threaded_calls`).
    * User code never sees settings that only the consumer's thread has. If it has any, the threads run every call (see
      `thread_settings`).
    * An exception of a signal handler in the consumer's thread leaves `next_outputs` immediately and unchanged.
"""

import dataclasses
import math
import time
from typing import TYPE_CHECKING, final

from millstream.loader.pipeline.calls import Call, Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.scheduling.executor import Executor
from millstream.loader.threads.call_size import RECORDS_PER_CALL, CallSize, taken_call
from millstream.loader.threads.local_calls import LocalCalls, run_here
from millstream.loader.threads.options import ReadOptions
from millstream.loader.threads.shared_threads import MIN_AHEAD, SharedThreads
from millstream.loader.threads.threaded_calls import ThreadedCalls
from millstream.sources.source_checks import is_in_memory

if TYPE_CHECKING:
    from millstream.loader.scheduling.feed import Feed
    from millstream.loader.scheduling.status import ExecutorStatus

HAND_OVER_SECONDS = 0.001
"""Shorter calls run in the consumer's thread, because a transfer would cost at least a tenth of their time."""

SOLO_CALLS = 3
"""The number of initial calls that run one at a time, to measure them: concurrent threads also wait for each other."""

SOLO_SECONDS = 0.004
"""A call that takes longer certainly justifies a transfer. No more measurements are needed."""


@final
class ThreadExecutor(Executor):
    """Runs calls in threads, ahead of the consumer.

    Args:
        stall_timeout: the number of seconds that the consumer waits while no call finishes.
        threads: the threads if they are shared with other executors; None for its own.
        local_reading: other threads that run local operations in advance; None to run them on demand.
    """

    def __init__(
        self,
        plan: Plan,
        position: Position,
        options: ReadOptions,
        feed: "Feed | None" = None,
        *,
        stall_timeout: float = math.inf,
        threads: SharedThreads | None = None,
        local_reading: ReadOptions | None = None,
    ) -> None:
        super().__init__(plan, position, feed)
        # A read that waits for a disk, a network or the user's code could hang, and nothing would end it.
        self._may_read_here = feed is not None or is_in_memory(plan.pipeline.source)
        self._memory = RecycledMemory()
        self._shared = SharedThreads() if threads is None else threads
        readers = self._shared.enter(self, options)
        max_records = min(RECORDS_PER_CALL, max(1, options.prefetch_buffer_size // MIN_AHEAD))
        self._min_records = max_records // 4
        self._threads = ThreadedCalls(plan, readers, self._memory.allocate, self, stall_timeout)
        self._local = LocalCalls(
            plan, self._schedule, self._memory.allocate, self, reading=local_reading, stall_timeout=stall_timeout
        )
        self._size = CallSize(plan, max_records, min(self._shared.max_bytes, self._local.max_bytes))
        kind = type(plan.pipeline.source), len(plan.stages)
        self._kinds = [(kind, stage) for stage in range(len(plan.stages))]
        # Other executors have measured calls of this kind.
        self._solo_calls = 0 if self._kinds[0] in self._shared.typical_seconds else SOLO_CALLS
        self._max_calls = max(options.prefetch_buffer_size, self._shared.min_ahead)
        # If consumers of the others have had to wait, this one's would have to as well.
        self._calls_ahead = min(self._shared.calls_ahead, self._max_calls)
        self._seconds = [math.inf for _ in plan.stages]
        self._waited = 0.0
        # The number of blocks completed since the previous outputs.
        self._num_completed = 0

    def status(self) -> "ExecutorStatus":
        made, threads = super().status(), self._threads
        return dataclasses.replace(
            made,
            ready=made.ready + threads.num_finished,
            max_threads=self._shared.level,
            busy_threads=threads.readers.num_busy,
        )

    @property
    def is_orphaned(self) -> bool:
        return self._local.is_stopped

    def start(self) -> None:
        self._threads.readers.check_process()
        self._dispatch()

    def close(self, deadline: float | None = None) -> None:
        """Drops the calls. The last executor of the threads stops them (see `SharedThreads.leave`)."""
        self._threads.close()
        own = self._local.stop()
        self._shared.leave(self, deadline)
        self._local.join(own if deadline is None else deadline)

    def _run_local(self) -> bool:
        ran = self._local.run_next(self._take_local)
        if ran is None:
            return False
        self._size.record(*ran)
        self._receive_finished()
        self._dispatch()
        return True

    def _take_local(self) -> Call | None:
        return taken_call(self._schedule, None, self._size.blocks)

    def _begin(self) -> None:
        self._threads.readers.check_process()
        self._local.begin()
        self._waited, self._num_completed = 0.0, 0
        self._receive_finished()

    def _advance(self) -> None:
        stage = self._schedule.next_stage
        if stage is not None and self._may_begin(stage) and self._is_cheap(stage) and self._local.check_here():
            if (call := taken_call(self._schedule, stage, self._size.blocks)) is not None:
                seconds = run_here(self._plan, self._schedule, call, self._memory.allocate, self._local.stall_timeout)
                self._record_seconds(call, seconds, is_local=True)
            return
        self._dispatch()
        if not self._threads.in_flight:
            # There is no call left, because the feed has just ended.
            return
        start = time.perf_counter()
        self._receive_next()
        self._waited += time.perf_counter() - start
        # The consumer waited, so more calls have to be in flight.
        if self._solo_calls <= 0:
            self._calls_ahead = min(4 * self._calls_ahead, self._max_calls)
            self._shared.calls_ahead = max(self._shared.calls_ahead, self._calls_ahead)
        self._receive_finished()

    def _end(self) -> None:
        if self._calls_ahead == self._max_calls and not self._plan.source_is_stream:
            self._shared.delivered(time.perf_counter(), self._waited, self._num_completed)
        self._dispatch()
        self._local.submit(self._take_local)

    def _dispatch(self) -> None:
        # A later stage may have a cheap call, which the consumer runs when it is needed. The reads for the calls after
        # it do not wait for that.
        for stage in reversed(range(self._schedule.num_stages)):
            while not self._is_cheap(stage) and self._may_begin(stage):
                if (call := taken_call(self._schedule, stage, self._max_blocks)) is None:
                    break
                self._threads.submit(call)

    def _is_cheap(self, stage: int) -> bool:
        if not self._local.may_work_here or (stage == 0 and not self._may_read_here):
            return False
        size = self._schedule.next_blocks(self._size.blocks) if stage == 0 else 1
        seconds = self._seconds[stage]
        if math.isinf(seconds):
            seconds = self._shared.typical_seconds.get(self._kinds[stage], seconds)
        return seconds * size < HAND_OVER_SECONDS

    def _may_begin(self, stage: int) -> bool:
        """Returns True if the next call of a stage may begin. Later stages only consume elements that exist."""
        if stage > 0:
            return True
        begun = self._schedule.backlog
        if begun >= self._calls_ahead:
            return False
        if begun >= self._shared.min_ahead and self._schedule.records_ahead >= self._shared.records_ahead(self):
            return False
        # If nothing has begun, the next call runs whatever the budget, because the consumer waits for it.
        size = self._size
        held = self._schedule.bytes_ahead(size.block_bytes) if begun else 0.0
        return not begun or held + size.blocks * size.block_bytes <= self._shared.bytes_ahead(self)

    @property
    def _max_blocks(self) -> int:
        if self._shared.is_single:
            return self._size.blocks
        # Several executors share the buffer.
        records = self._shared.records_ahead(self) - self._schedule.records_ahead
        # A small share must not make calls so short that their transfer takes longer.
        worthwhile = min(self._min_records, self._plan.partition.block * HAND_OVER_SECONDS / (self._seconds[0] or 1e-9))
        return max(1, min(self._size.blocks, int(max(records, worthwhile)) // self._plan.partition.block))

    def _receive_finished(self) -> None:
        while self._threads.num_finished:
            self._receive_next()

    def _receive_next(self) -> None:
        call, elements, seconds = self._threads.receive()
        self._schedule.complete(call, elements)
        self._record_seconds(call, seconds, is_local=False)

    def _record_seconds(self, call: Call, seconds: float, *, is_local: bool) -> None:
        """Updates the estimated duration of a block or group of each stage.

        It changes slowly, so that one late block does not change who works. A measurement in a thread can only be too
        long, because of waits for the interpreter's lock and for a core, so short times get more weight there.
        """
        self._size.record(call, seconds)
        self._num_completed += call.num_blocks
        if call.stage == 0:
            self._shared.record_read(self, call.num_records)
        latest, known = seconds / (call.num_blocks or 1), self._seconds[call.stage]
        if self._solo_calls > 0 or math.isinf(known):
            estimate = min(known, latest)
            # The first calls are slow, because nothing is cached. But a call that takes this long is not cheap.
            self._solo_calls = 0 if seconds > SOLO_SECONDS else self._solo_calls - 1
        else:
            weight = 0.1 if is_local else 0.25 if latest < known else 0.05
            estimate = known + weight * (min(latest, known + HAND_OVER_SECONDS) - known)
        self._seconds[call.stage] = self._shared.typical_seconds[self._kinds[call.stage]] = estimate
