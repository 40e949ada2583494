"""Executors in this process: the consumer's own thread, and threads that read ahead.

Guarantees:
    * Outputs leave in the order of the schedule, whatever finishes first; an error leaves at its turn.
    * The schedule and everything else of an executor is touched by the consumer's thread only. Threads get closures
      through one queue and hand results back through another; they share nothing else.
    * The user's code never sees settings that the consumer's thread alone has: where it has any, threads of the
      library make every call, without read-ahead too (see `thread_settings`).
    * What a signal's handler raises in the consumer's thread leaves `next_run` at once, as it is. The executor is of no
      use then: its owner closes it and begins with another.
    * The threads end with the executor: `close()`, or the end of the executor's life, stops them (see `crew`).
"""

import abc
import math
import queue
import time
from typing import TypeAlias, final

from millstream.columnar import Allocate
from millstream.loader.concurrency import Concurrency
from millstream.loader.crew import CLOSE_SECONDS, Crew, SlicedPreparation
from millstream.loader.elements import Elements
from millstream.loader.interruptions import is_from_signal_handler
from millstream.loader.memory_budget import affordable_threads
from millstream.loader.options import ReadOptions
from millstream.loader.plan import Plan
from millstream.loader.recycled_memory import RecycledMemory
from millstream.loader.runs import Cursor, Run
from millstream.loader.schedule import Call, Schedule, UnitCall
from millstream.loader.thread_settings import ThreadSettings

HAND_OVER_SECONDS = 0.001
"""A call that takes less is made by the consumer's thread: handing it over would cost a tenth of it or more."""

SOLO_CALLS = 3
"""How many calls are made one at a time, to learn what one takes: side by side, threads wait for each other, too."""

SOLO_SECONDS = 0.004
"""A call that takes longer is worth handing over for certain: no more has to be learned."""


LEAST_AHEAD = 2
"""How many blocks may be ready or in work, however large: with one alone, nobody works while it waits to be taken."""


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
    """Everything happens when the consumer asks: in its thread, or in one other where its settings would be seen."""

    def __init__(self, plan: Plan, cursor: Cursor) -> None:
        self._plan = plan
        self._schedule = Schedule(plan, cursor)
        self._memory = RecycledMemory()
        self._settings = ThreadSettings()
        self._crew = Crew(1)
        self._crew.end_with(self)
        self._results: Results = queue.SimpleQueue()

    def next_run(self) -> Run | None:
        """Returns the next outputs in order, None at the end."""
        self._crew.check_process()
        is_neutral = self._settings.are_neutral()
        while (run := self._schedule.pop()) is None:
            call = self._schedule.take()
            if call is None:
                return None
            if is_neutral:
                run_here(self._plan, self._schedule, call, self._memory.allocate)
            else:
                hand_out(self._plan, call, self._memory.allocate, self._crew, self._results)
                self._schedule.complete(*received(self._results))
        return run

    def start(self) -> None:
        """Does nothing: there is no one to work ahead."""

    def close(self) -> None:
        """Stops the thread, if there is one, waiting at most CLOSE_SECONDS for it if it is inside user code."""
        self._crew.stop()
        self._results.put(None)
        self._crew.join(CLOSE_SECONDS)


def run_here(plan: Plan, schedule: Schedule, call: Call, allocate: Allocate) -> float:
    """Runs a call in this thread, completes it and returns the seconds it took.

    Raises:
        Exception: what a signal's handler raised meanwhile. It is about this moment, not about a record, whose error
            would come at its turn.
    """
    start = time.perf_counter()
    elements = perform(plan, call, allocate)
    seconds = time.perf_counter() - start
    if elements.error is not None and is_from_signal_handler(elements.error):
        raise elements.error
    schedule.complete(call, elements, seconds)
    return seconds


def perform(plan: Plan, call: Call, allocate: Allocate) -> Elements:
    """Returns the outputs of one call, batches in memory from `allocate`."""
    return plan.make(call.request, allocate)


Results: TypeAlias = "queue.SimpleQueue[tuple[Call, Elements, float] | None]"
"""What came of calls that were handed out, and in how many seconds; None once the threads are stopped."""


def hand_out(plan: Plan, call: Call, allocate: Allocate, crew: Crew, results: Results) -> None:
    """Has a crew run a call: as a whole, where the source reads many records at once; else it shares the reading."""
    if plan.batched_source or not isinstance(call, UnitCall):
        crew.submit(lambda: results.put((call, *crew.timed(lambda: perform(plan, call, allocate)))))
        return

    def finish(prepared: tuple[Elements, float]) -> None:
        elements, seconds = crew.timed(lambda: plan.finish(prepared[0], allocate))
        results.put((call, elements, prepared[1] + seconds))

    crew.submit(SlicedPreparation(plan, call.request, crew, finish).begin)


def received(results: Results) -> tuple[Call, Elements, float]:
    """Returns the next result, having waited for it.

    Raises:
        ValueError: the executor was closed meanwhile.
    """
    result = results.get()
    if result is None:
        raise ValueError("The read-ahead threads were stopped: the iterator was closed, perhaps by another thread.")
    return result


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
        self._crew.end_with(self)
        self._results: Results = queue.SimpleQueue()
        self._settings = ThreadSettings()
        self._may_work_here = True
        self._solo_calls = SOLO_CALLS
        self._calls_ahead = 1
        self._most_calls = max(options.prefetch_buffer_size, LEAST_AHEAD)
        self._concurrency = Concurrency(num_threads)
        self._seconds = [math.inf for _ in plan.phases]

    def next_run(self) -> Run | None:
        """Returns the next outputs in order, None at the end."""
        self._crew.check_process()
        self._may_work_here = self._settings.are_neutral()
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
        # A later phase may have a cheap call ready, for the consumer to make when its turn comes. What must be read
        # for those after it does not wait for that.
        for phase in reversed(range(len(self._plan.phases))):
            while not self._is_cheap(phase) and self._may_begin(phase) and (call := self._schedule.take(phase)):
                hand_out(self._plan, call, self._memory.allocate, self._crew, self._results)

    def close(self) -> None:
        """Stops the threads, waiting at most CLOSE_SECONDS for those inside user code."""
        self._crew.stop()
        # Another thread may wait in `next` for what is now dropped.
        self._results.put(None)
        self._crew.join(CLOSE_SECONDS)

    def _is_cheap(self, phase: int) -> bool:
        """Whether the next call of this phase is one for the consumer's thread: too short to be worth handing over."""
        if not self._may_work_here:
            return False
        size = self._schedule.next_units if phase == 0 else 1
        return self._seconds[phase] * size < HAND_OVER_SECONDS

    def _may_begin(self, phase: int) -> bool:
        """Whether the next call of this phase may begin: later phases only use up what is there already."""
        if phase > 0:
            return True
        begun = self._schedule.backlog
        if begun >= self._calls_ahead:
            return False
        return begun < LEAST_AHEAD or self._schedule.records_ahead < self._options.prefetch_buffer_size

    def _run_one_here(self) -> None:
        call = self._schedule.take()
        if call is not None:
            seconds = run_here(self._plan, self._schedule, call, self._memory.allocate)
            self._note_seconds(call, seconds, made_here=True)

    def _receive_finished(self) -> None:
        while not self._results.empty():
            self._receive_next()

    def _receive_next(self) -> None:
        call, elements, seconds = received(self._results)
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
