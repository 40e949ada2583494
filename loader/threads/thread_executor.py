"""The executor whose threads work ahead of the consumer.

Guarantees:
    * Outputs leave in the order of the schedule, whatever finishes first; an error leaves at its turn.
    * The schedule and everything else of an executor is touched by the consumer's thread only (see `threaded_calls`).
    * The user's code never sees settings that the consumer's thread alone has: where it has any, the threads make every
      call (see `thread_settings`).
    * What a signal's handler raises in the consumer's thread leaves `next_outputs` at once, as it is.
"""

import dataclasses
import math
import time
from typing import TYPE_CHECKING, final

from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.executor import Executor
from millstream.loader.pipeline.outputs import Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.threads.call_size import RECORDS_PER_CALL, CallSize, taken_call
from millstream.loader.threads.inline_executor import run_here
from millstream.loader.threads.options import ReadOptions
from millstream.loader.threads.shared_threads import LEAST_AHEAD, SharedThreads
from millstream.loader.threads.thread_settings import ThreadSettings
from millstream.loader.threads.threaded_calls import ThreadedCalls

if TYPE_CHECKING:
    from millstream.loader.pipeline.feed import Feed
    from millstream.loader.pipeline.load import Load

HAND_OVER_SECONDS = 0.001
"""A call that takes less is made by the consumer's thread: handing it over would cost a tenth of it or more."""

SOLO_CALLS = 3
"""How many calls are made one at a time, to learn what one takes: side by side, threads wait for each other, too."""

SOLO_SECONDS = 0.004
"""A call that takes longer is worth handing over for certain: no more has to be learned."""


@final
class ThreadExecutor(Executor):
    """Threads run the calls to come while the consumer works.

    Args:
        plan: what makes the outputs.
        position: where the pass begins.
        options: the number of threads and the size of the buffer.
        feed: where the elements of stage 0 come from; None where they are read.
        stall_timeout: for how many seconds the consumer waits while no call finishes.
        threads: the threads, if other executors have them, too; None for its own.
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
    ) -> None:
        super().__init__(plan, position, feed)
        self._memory = RecycledMemory()
        self._shared = SharedThreads() if threads is None else threads
        readers = self._shared.enter(self, options)
        max_records = min(RECORDS_PER_CALL, max(1, options.prefetch_buffer_size // LEAST_AHEAD))
        self._size = CallSize(plan, max_records, self._shared.max_bytes)
        self._threads = ThreadedCalls(plan, readers, self._memory.allocate, self, stall_timeout)
        self._settings = ThreadSettings()
        self._may_work_here = True
        kind = type(plan.pipeline.source), len(plan.stages)
        self._kinds = [(kind, stage) for stage in range(len(plan.stages))]
        # The first calls of a kind that the others know show nothing new.
        self._solo_calls = 0 if self._kinds[0] in self._shared.typical_seconds else SOLO_CALLS
        self._most_calls = max(options.prefetch_buffer_size, self._shared.least_ahead)
        # Where the consumer has had to wait for the others, it would have to wait for this one, too.
        self._calls_ahead = min(self._shared.calls_ahead, self._most_calls)
        self._seconds = [math.inf for _ in plan.stages]
        self._waited = 0.0

    def load(self) -> "Load":
        """Returns what there is to do now, and how many threads are at it."""
        made = super().load()
        threads = self._threads
        return dataclasses.replace(
            made,
            ready=made.ready + threads.num_finished,
            most_threads=self._shared.level,
            busy_threads=threads.num_busy,
        )

    def start(self) -> None:
        """Hands out calls, as far ahead as the options and the consumer's waiting allow."""
        self._threads.check_process()
        self._hand_out()

    def close(self) -> None:
        """Drops the calls; the last executor of the threads stops them (see `SharedThreads.leave`)."""
        self._threads.close()
        self._shared.leave(self)

    def _begin(self) -> None:
        self._threads.check_process()
        self._may_work_here = self._settings.are_neutral()
        self._receive_finished()
        self._waited = 0.0

    def _advance(self) -> None:
        stage = self._schedule.next_stage
        if stage is not None and self._may_begin(stage) and self._is_cheap(stage):
            self._run_one_here(stage)
            return
        self._hand_out()
        if not self._threads.in_work:
            # There was nothing to hand out: what feeds the plan has just ended.
            return
        start = time.perf_counter()
        self._receive_next()
        self._waited += time.perf_counter() - start
        # The consumer waited: more has to be in work at once.
        if self._solo_calls <= 0:
            self._calls_ahead = min(4 * self._calls_ahead, self._most_calls)
            self._shared.calls_ahead = max(self._shared.calls_ahead, self._calls_ahead)
        self._receive_finished()

    def _end(self) -> None:
        if self._calls_ahead == self._most_calls and not self._plan.source_is_stream:
            self._shared.delivered(time.perf_counter(), self._waited)
        self._hand_out()

    def _hand_out(self) -> None:
        # A later stage may have a cheap call ready, for the consumer to make when its turn comes. What must be read
        # for those after it does not wait for that.
        for stage in reversed(range(len(self._plan.stages))):
            while not self._is_cheap(stage) and self._may_begin(stage):
                if (call := taken_call(self._schedule, stage, self._most_blocks)) is None:
                    break
                self._threads.hand_out(call)

    def _is_cheap(self, stage: int) -> bool:
        """Whether the next call of this stage is one for the consumer's thread: too short to be worth handing over."""
        if not self._may_work_here or (stage == 0 and self._plan.source_knows_threads):
            return False
        size = self._schedule.next_blocks(self._size.blocks) if stage == 0 else 1
        seconds = self._seconds[stage]
        if math.isinf(seconds):
            seconds = self._shared.typical_seconds.get(self._kinds[stage], seconds)
        return seconds * size < HAND_OVER_SECONDS

    def _may_begin(self, stage: int) -> bool:
        """Whether the next call of this stage may begin: later stages only use up what is there already."""
        if stage > 0:
            return True
        begun = self._schedule.backlog
        if begun >= self._calls_ahead:
            return False
        if begun >= self._shared.least_ahead and self._schedule.records_ahead >= self._shared.records_ahead(self):
            return False
        # With nothing begun, the next call is made whatever the budget: the consumer waits for it.
        size = self._size
        held = self._schedule.bytes_ahead(size.block_bytes) if begun else 0.0
        return not begun or held + size.blocks * size.block_bytes <= self._shared.bytes_ahead(self)

    @property
    def _most_blocks(self) -> int:
        """The number of blocks that a call for a thread may make: several executors share the buffer."""
        if self._shared.is_single:
            return self._size.blocks
        records = self._shared.records_ahead(self) - self._schedule.records_ahead
        return max(1, min(self._size.blocks, records // self._plan.partition.block))

    def _run_one_here(self, stage: int) -> None:
        call = taken_call(self._schedule, stage, self._size.blocks)
        if call is not None:
            seconds = run_here(self._plan, self._schedule, call, self._memory.allocate)
            self._note_seconds(call, seconds, made_here=True)

    def _receive_finished(self) -> None:
        while self._threads.any_finished:
            self._receive_next()

    def _receive_next(self) -> None:
        call, elements, seconds = self._threads.receive()
        self._schedule.complete(call, elements)
        self._note_seconds(call, seconds, made_here=False)

    def _note_seconds(self, call: Call, seconds: float, *, made_here: bool) -> None:
        """Keeps an estimate of the seconds that a block or group of each stage takes.

        It follows slowly, so that one late block does not change who works. What a thread measures can only be too
        long, by its waits for the lock and for a core: there, short times count for more than long ones.
        """
        self._size.note(call, seconds)
        if call.stage == 0:
            self._shared.note_read(self, call.num_records)
        self._follow(call, seconds, made_here=made_here)
        self._shared.typical_seconds[self._kinds[call.stage]] = self._seconds[call.stage]

    def _follow(self, call: Call, seconds: float, *, made_here: bool) -> None:
        latest, known = seconds / (call.num_blocks or 1), self._seconds[call.stage]
        if self._solo_calls > 0 or math.isinf(known):
            self._seconds[call.stage] = min(known, latest)
            # The first calls find nothing ready, so they take longer than most. But what takes that long is not cheap.
            self._solo_calls = 0 if seconds > SOLO_SECONDS else self._solo_calls - 1
            return
        weight = 0.1 if made_here else 0.25 if latest < known else 0.05
        self._seconds[call.stage] = known + weight * (min(latest, known + HAND_OVER_SECONDS) - known)
