"""Executors in this process: the consumer's own thread, and threads that read ahead.

Guarantees:
    * Outputs leave in the order of the schedule, whatever finishes first; an error leaves at its turn.
    * The schedule and everything else of an executor is touched by the consumer's thread only. Threads get closures
      through one queue and hand results back through another; they share nothing else.
    * The threads end with the executor: `close()`, or the end of the executor's life, stops them (see `crew`).
"""

import abc
import math
import queue
import time
import weakref
from typing import final

from millstream.columnar import Allocate
from millstream.loader.concurrency import Concurrency
from millstream.loader.crew import CLOSE_SECONDS, Crew, SlicedPreparation
from millstream.loader.elements import Elements
from millstream.loader.memory_budget import affordable_threads
from millstream.loader.options import ReadOptions
from millstream.loader.plan import Plan
from millstream.loader.recycled_memory import RecycledMemory
from millstream.loader.schedule import Call, Cursor, Run, Schedule, UnitCall

HAND_OVER_SECONDS = 0.001
"""A call that takes less is made by the consumer's thread: handing it over would cost a tenth of it or more."""

SOLO_CALLS = 3
"""How many calls are made one at a time, to learn what one takes: side by side, threads wait for each other, too."""

SOLO_SECONDS = 0.004
"""A call that takes longer is worth handing over for certain: no more has to be learned."""


class Executor(abc.ABC):
    """Runs the calls of one schedule."""

    @abc.abstractmethod
    def next_run(self) -> Run | None:
        """Returns the next outputs in order, None at the end."""

    @abc.abstractmethod
    def start(self) -> None:
        """Begins to work ahead, where the executor can."""

    def pause(self) -> None:
        """Stops working for this iterator, but keeps what can serve the next one: by default, nothing can."""
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Stops all work. Idempotent."""


@final
class InlineExecutor(Executor):
    """Everything happens in the consumer's thread, when it asks."""

    def __init__(self, plan: Plan, cursor: Cursor) -> None:
        self._plan = plan
        self._schedule = Schedule(plan, cursor)
        self._memory = RecycledMemory()

    def next_run(self) -> Run | None:
        """Returns the next outputs in order, None at the end."""
        while (run := self._schedule.pop()) is None:
            call = self._schedule.take()
            if call is None:
                return None
            run_here(self._plan, self._schedule, call, self._memory.allocate)
        return run

    def start(self) -> None:
        """Does nothing: there is no one to work ahead."""

    def close(self) -> None:
        """Does nothing: there is nothing to stop."""


def run_here(plan: Plan, schedule: Schedule, call: Call, allocate: Allocate) -> float:
    """Runs a call in this thread, completes it and returns the seconds it took."""
    start = time.perf_counter()
    elements = perform(plan, call, allocate)
    seconds = time.perf_counter() - start
    schedule.complete(call, elements, seconds)
    return seconds


def perform(plan: Plan, call: Call, allocate: Allocate) -> Elements:
    """Returns the outputs of one call, batches in memory from `allocate`."""
    return plan.make(call.request, allocate)


@final
class ThreadExecutor(Executor):
    """Threads run the calls to come while the consumer works."""

    def __init__(self, plan: Plan, cursor: Cursor, options: ReadOptions) -> None:
        self._plan = plan
        self._schedule = Schedule(plan, cursor)
        self._memory = RecycledMemory()
        self._options = options
        num_threads = affordable_threads(options.num_threads)
        self._crew = Crew(num_threads)
        self._results: queue.SimpleQueue[tuple[Call, Elements, float] | None] = queue.SimpleQueue()
        self._solo_calls = SOLO_CALLS
        self._calls_ahead = 1
        self._most_calls = max(options.prefetch_buffer_size, num_threads)
        self._concurrency = Concurrency(num_threads)
        self._seconds = [math.inf for _ in plan.phases]
        self._finalizer = weakref.finalize(self, Crew.stop, self._crew)

    def next_run(self) -> Run | None:
        """Returns the next outputs in order, None at the end."""
        self._crew.check_process()
        self._receive_finished()
        waited = 0.0
        while (run := self._schedule.pop()) is None:
            if self._schedule.exhausted:
                return None
            phase = self._schedule.next_phase
            if phase is not None and self._may_begin(phase) and self._is_cheap(phase):
                self._run_one_here()
                continue
            self.start()
            start = time.perf_counter()
            self._receive_next()
            waited += time.perf_counter() - start
            # The consumer waited: more has to be in work at once.
            if self._solo_calls <= 0:
                self._calls_ahead = min(4 * self._calls_ahead, self._most_calls)
            self._receive_finished()
        if self._calls_ahead == self._most_calls:
            self._concurrency.delivered(time.perf_counter(), waited)
            self._crew.resize(self._concurrency.level)
        self.start()
        return run

    def start(self) -> None:
        """Hands out calls, as far ahead as the options and the consumer's waiting allow."""
        self._crew.check_process()
        while (phase := self._schedule.next_phase) is not None:
            if not self._may_begin(phase) or self._is_cheap(phase) or (call := self._schedule.take()) is None:
                return
            self._hand_out(call)

    def close(self) -> None:
        """Stops the threads, waiting at most CLOSE_SECONDS for those inside user code."""
        self._finalizer()
        # Another thread may wait in `next` for what is now dropped.
        self._results.put(None)
        self._crew.join(CLOSE_SECONDS)

    def _is_cheap(self, phase: int) -> bool:
        """Whether the next call, which is of this phase, is too short to be worth handing over."""
        size = self._schedule.next_units if phase == 0 else 1
        return self._seconds[phase] * size < HAND_OVER_SECONDS

    def _may_begin(self, phase: int) -> bool:
        """Whether the next call, which is of this phase, may begin: later phases only use up what is there already."""
        if phase > 0:
            return True
        limit = math.ceil(self._options.prefetch_buffer_size / (self._schedule.next_units * self._plan.deal.unit))
        if self._plan.batched_source:
            limit = max(limit, self._options.num_threads)
        return self._schedule.backlog < min(limit, self._calls_ahead)

    def _run_one_here(self) -> None:
        call = self._schedule.take()
        if call is not None:
            seconds = run_here(self._plan, self._schedule, call, self._memory.allocate)
            self._note_seconds(call, seconds, made_here=True)

    def _receive_finished(self) -> None:
        while not self._results.empty():
            self._receive_next()

    def _receive_next(self) -> None:
        result = self._results.get()
        if result is None:
            raise ValueError("The threads that read are stopped: the iterator was closed, perhaps by another thread.")
        call, elements, seconds = result
        self._note_seconds(call, seconds, made_here=False)
        self._schedule.complete(call, elements, seconds)

    def _note_seconds(self, call: Call, seconds: float, *, made_here: bool) -> None:
        """Keeps an estimate of the seconds that a unit or group of each phase takes.

        It follows slowly, so that one late block does not change who works. What a thread measures can only be too
        long, by its waits for the lock and for a core: there, short times count for more than long ones.
        """
        phase, latest = 0, seconds
        if isinstance(call, UnitCall):
            latest = seconds / (call.stop - call.start)
        else:
            phase = call.phase
        known = self._seconds[phase]
        if self._solo_calls > 0 or math.isinf(known):
            self._seconds[phase] = min(known, latest)
            # The first calls find nothing ready, so they take longer than most. But what takes that long is not cheap.
            self._solo_calls = 0 if seconds > SOLO_SECONDS else self._solo_calls - 1
            return
        weight = 0.1 if made_here else 0.25 if latest < known else 0.05
        self._seconds[phase] = known + weight * (min(latest, known + HAND_OVER_SECONDS) - known)

    def _hand_out(self, call: Call) -> None:
        results, plan, crew, allocate = self._results, self._plan, self._crew, self._memory.allocate
        if plan.batched_source or not isinstance(call, UnitCall):
            crew.submit(lambda: results.put((call, *crew.timed(lambda: perform(plan, call, allocate)))))
            return

        def finish(prepared: tuple[Elements, float]) -> None:
            elements, seconds = crew.timed(lambda: plan.finish(prepared[0], allocate))
            results.put((call, elements, prepared[1] + seconds))

        crew.submit(SlicedPreparation(plan, call.request, crew, finish).begin)
