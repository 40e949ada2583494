"""The executors of this process: calls on demand in the consumer's thread, or in threads ahead of the consumer.

Guarantees:
    * Outputs leave in the order of the schedule, whichever call finishes first. An error is delivered in order.
    * The consumer's thread runs calls that were quick, and reads only plain data in memory. The watcher logs one that
      hangs (see `waiting`).
    * Only the consumer's thread uses the schedule and all other state of an executor (see `threaded_calls`).
    * User code never sees settings that only the consumer's thread has. If it has any, threads of the library run every
      call (see `thread_settings`).
    * An exception of a signal handler in the consumer's thread leaves `next_outputs` immediately and unchanged.
"""

import dataclasses
import functools
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
from millstream.loader.scheduling.schedule import Schedule
from millstream.loader.threads.options import ReadOptions, buffer_budget
from millstream.loader.threads.reader_threads import CLOSE_SECONDS, ReaderThreads
from millstream.loader.threads.shared_threads import MIN_AHEAD, SharedThreads
from millstream.loader.threads.thread_settings import ThreadSettings
from millstream.loader.threads.threaded_calls import ThreadedCalls
from millstream.loader.threads.waiting import watched
from millstream.sources.source_checks import is_in_memory

if TYPE_CHECKING:
    from millstream.loader.scheduling.assignments import Wanting
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
        schedule: Schedule | None = None,
        stall_timeout: float = math.inf,
        threads: SharedThreads | None = None,
        local_reading: ReadOptions | None = None,
    ) -> None:
        super().__init__(plan, position, feed, schedule)
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

    def finish_call(self) -> bool:
        if not self._threads.in_flight:
            return False
        self._receive_next()
        return True

    def start(self) -> None:
        self._threads.readers.check_process()
        self._dispatch()

    def close(self, deadline: float | None = None) -> None:
        """Drops the calls. The last executor of the threads stops them (see `SharedThreads.leave`)."""
        self._threads.close()
        own = self._local.stop()
        self._shared.leave(self, deadline)
        self._local.join(own if deadline is None else deadline)

    def run_local(self) -> bool:
        ran = self._local.run_next(self._take_local)
        if ran is None:
            return False
        self._size.record(*ran)
        self._receive_finished()
        self._dispatch()
        return True

    def _take_local(self) -> Call | None:
        return taken_call(self._schedule, None, self._size.blocks)

    def begin_request(self) -> None:
        self._threads.readers.check_process()
        self._local.begin()
        self._waited, self._num_completed = 0.0, 0
        self._receive_finished()

    def advance(self) -> None:
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

    def end_request(self) -> None:
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


def run_here(plan: Plan, schedule: "Wanting", call: Call, allocate: Allocate, stall_timeout: float) -> float:
    """Runs a call in this thread, completes it and returns the seconds it took. The watcher logs one that hangs.

    An exception of a signal handler is raised, because it concerns this moment. A record's error is delivered in order.
    """
    start = time.perf_counter()
    request = call.request
    elements = watched(
        functools.partial(plan.make, request, allocate), functools.partial(plan.describe, request), stall_timeout
    )
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
        self,
        plan: Plan,
        position: Position,
        feed: "Feed | None" = None,
        *,
        schedule: Schedule | None = None,
        stall_timeout: float = math.inf,
    ) -> None:
        if plan.num_remote_stages < len(plan.stages):
            raise AssertionError("an executor without threads runs all operations in one place")
        super().__init__(plan, position, feed, schedule)
        self._size = CallSize(plan)
        self._calls = LocalCalls(plan, self._schedule, RecycledMemory().allocate, self, stall_timeout=stall_timeout)

    @property
    def is_orphaned(self) -> bool:
        return self._calls.is_stopped

    def close(self, deadline: float | None = None) -> None:
        self._calls.close(deadline)

    def begin_request(self) -> None:
        self._calls.begin()

    def advance(self) -> None:
        stage = self._schedule.next_stage
        call = None if stage is None else taken_call(self._schedule, stage, self._size.blocks)
        if call is not None:
            self._size.record(call, self._calls.run(call))

    def end_request(self) -> None:
        """Does nothing: no call runs in advance."""


CALL_SECONDS = 0.01
"""A call of several small blocks grows up to this duration: worth its overhead, and short enough to wait for."""

MAX_CALL_SECONDS = 0.5
"""A call that takes longer than half of this does not grow, however much cheaper a larger one would be."""

MAX_CALL_BYTES = 8 << 20
"""Upper bound on the estimated output of a call of several blocks, in bytes. Beyond it, copying dominates the cost."""

MAX_BATCHES_BYTES = 1 << 20
"""Upper bound on the estimated size of a call of several complete batches, in bytes: larger ones are worth a call each,
and each worker has several calls.
"""

CHEAPER = 0.8
"""A larger call is worth its wait if its time per block is at most this share of that of a call of half the size."""

NOT_CHEAPER = 0.95
"""A call shrinks if its time per block exceeds this share. It is above CHEAPER, so noise does not move the size."""

RETRY_CALLS = 64
"""The number of calls after which a size that was not cheaper is tried again, because storage and records change."""

RECORDS_PER_CALL = 256
"""The default for the maximum number of records per call of several blocks."""

MIN_RECORDS = 64
"""The number of records that such a call may have even with many logical shards, so that it is worth its overhead."""

_WEIGHT = 0.25


def cautious_estimate(known: float, latest: float) -> float:
    """Returns a running estimate, weighted towards the largest values, because memory has to hold them as well."""
    return max(latest, known + _WEIGHT * (latest - known))


def taken_call(schedule: Schedule, stage: int | None, max_blocks: int) -> Call | None:
    """Takes the next call of a stage (None for local operations), if any, and records the seconds that this took."""
    begin = time.perf_counter()
    call = schedule.take_local(max_blocks) if stage is None else schedule.take(stage, max_blocks)
    if call is not None:
        call.seconds_before += time.perf_counter() - begin
    return call


@final
class CallSize:
    """Begins with one block, doubles while a larger call is cheaper per block, and halves when it no longer is.

    The time for a batched read of a remote store hardly depends on the number of records, so its calls grow up to the
    limit, although none of them is short. The time for records that are read or computed one by one is proportional to
    their number, so their calls stay short. So do calls of several complete batches, which only workers get, because a
    message costs more than a small batch.
    """

    def __init__(
        self,
        plan: Plan,
        max_records: int = RECORDS_PER_CALL,
        max_bytes: int = sys.maxsize,
        *,
        are_messages: bool = False,
    ) -> None:
        self._plan = plan
        self._max_bytes = max_bytes  # Of all calls together.
        self._max_call_bytes = MAX_BATCHES_BYTES if plan.waits_for_calls else MAX_CALL_BYTES
        self.blocks = 1
        # Each logical shard buffers its own records, and the buffers of all shards add up.
        records = max(max_records // len(plan.shards), MIN_RECORDS)
        limit = max(1, records // plan.partition.block)
        self._max_blocks = limit if plan.max_blocks_per_call is None else min(limit, plan.max_blocks_per_call)
        if plan.waits_for_calls and not are_messages:
            self._max_blocks = 1
        # The time per block in a call of each size.
        self._seconds: dict[int, float] = {}
        self.block_bytes = 0.0  # The estimated size of a block; 0 before it is known.
        self._calls_to_retry = 0

    def record(self, call: Call, seconds: float) -> None:
        """Records the duration of a call, or of its operations before the local ones.

        The time for drawing its elements counts as well, because a consumer that has asked for one waits for all.
        """
        size = call.num_blocks
        seconds += call.seconds_before
        if call.outputs is None:
            call.seconds_before = seconds
            return
        if not size:
            return
        block_bytes = call.outputs.num_bytes / size
        self.block_bytes = cautious_estimate(self.block_bytes, block_bytes)
        if self.block_bytes > self._max_bytes:
            self._plan.warn_once(
                "budget",
                f"a block takes about {self.block_bytes:,.0f} bytes, more than max_buffer_bytes={self._max_bytes:,}. "
                "One block is computed at a time. Increase ReadOptions.max_buffer_bytes to several blocks.",
            )
        if self._max_blocks == 1:
            return
        latest = seconds / size
        known = self._seconds.get(size, latest)
        self._seconds[size] = known + _WEIGHT * (latest - known)
        if size == self.blocks:
            self._choose(seconds)
        self.blocks = min(self.blocks, self._affordable_blocks)

    @property
    def _affordable_blocks(self) -> int:
        limit_bytes = min(self._max_call_bytes, self._max_bytes // 2)
        fitting = limit_bytes / self.block_bytes if self.block_bytes else self._max_blocks
        limit = int(max(1, min(self._max_blocks, fitting)))
        # A power of two, unless it is the given limit, because sizes are compared with their halves.
        return limit if limit == self._max_blocks else 1 << (limit.bit_length() - 1)

    def _choose(self, seconds: float) -> None:
        is_short = seconds * 2 < CALL_SECONDS
        ratio = self._ratio
        self._calls_to_retry -= 1
        if not is_short and (ratio > NOT_CHEAPER or seconds > MAX_CALL_SECONDS) and self.blocks > 1:
            self.blocks = self._half
            self._calls_to_retry = RETRY_CALLS
        elif is_short or (
            not self._plan.waits_for_calls
            and seconds * 2 <= MAX_CALL_SECONDS
            and (ratio <= CHEAPER or self.blocks == 1)
            and self._calls_to_retry <= 0
        ):
            self.blocks = min(self.blocks * 2, self._max_blocks)

    @property
    def _ratio(self) -> float:
        """The time per block in a call of the current size, relative to one of half the size."""
        half = self._seconds.get(self._half)
        return self._seconds[self.blocks] / half if half else 0.0

    @property
    def _half(self) -> int:
        """The largest power of two below the current size."""
        return 1 << max(0, (self.blocks - 1).bit_length() - 1)
