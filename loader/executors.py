"""Executors in this process: the consumer's own thread, and threads that read ahead.

Guarantees:
    * Outputs leave in the order of the schedule, whatever finishes first; an error leaves at its turn.
    * The schedule and everything else of an executor is touched by the consumer's thread only. Threads get closures
      through one queue and hand results back through another; they share nothing else.
    * No thread outlives the executor: `close()`, or the end of the executor's life, stops them. Python cannot end a
      thread inside user code, so `close()` waits for at most CLOSE_SECONDS, and such a thread ends with its call.
    * No thread meets the end of the interpreter, which waits for the calls at hand, for at most CLOSE_SECONDS: a
      thread that comes back from C++ into an interpreter that has ended aborts the process.
"""

import abc
import atexit
import functools
import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, final


from millstream.columnar import Allocate
from millstream.loader.elements import Elements, Origins
from millstream.loader.options import ReadOptions
from millstream.loader.plan import Plan
from millstream.loader.recycled_memory import RecycledMemory
from millstream.loader.schedule import Call, Cursor, Run, Schedule, UnitCall

CLOSE_SECONDS = 2.0
"""How long `close()`, and the interpreter at its end, wait for threads that are inside user code."""

HAND_OVER_SECONDS = 0.001
"""A call that takes less is made by the consumer's thread: handing it over would cost a tenth of it or more."""

SLICE_SECONDS = 0.002
"""Reading record by record, a block is cut into slices of at least this length, for several threads to work on."""

SOLO_SECONDS = 0.004
SOLO_CALLS = 3
"""How many calls are made one at a time, to learn what one takes: side by side, threads wait for each other, too."""


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
    if isinstance(call, UnitCall):
        return plan.finish(plan.prepare_units(call.start, call.stop), allocate)
    return plan.follow(call.phase, call.group, allocate)


@final
class ThreadExecutor(Executor):
    """Threads run the calls to come while the consumer works."""

    def __init__(self, plan: Plan, cursor: Cursor, options: ReadOptions) -> None:
        self._plan = plan
        self._schedule = Schedule(plan, cursor)
        self._memory = RecycledMemory()
        self._options = options
        self._crew = Crew(options.num_threads)
        self._results: queue.SimpleQueue[tuple[Call, Elements, float]] = queue.SimpleQueue()
        self._solo_calls = SOLO_CALLS
        self._calls_ahead = 1
        self._most_calls = max(options.prefetch_buffer_size, options.num_threads)
        self._seconds = [math.inf for _ in plan.phases]
        self._finalizer = weakref.finalize(self, Crew.stop, self._crew)

    def next_run(self) -> Run | None:
        """Returns the next outputs in order, None at the end."""
        self._receive_finished()
        while (run := self._schedule.pop()) is None:
            if self._schedule.exhausted:
                return None
            phase = self._schedule.next_phase
            if phase is not None and self._may_begin(phase) and self._is_cheap(phase):
                self._run_one_here()
                continue
            self.start()
            self._receive(*self._results.get())
            # The consumer waited: more has to be in work at once.
            if self._solo_calls <= 0:
                self._calls_ahead = min(4 * self._calls_ahead, self._most_calls)
            self._receive_finished()
        self.start()
        return run

    def start(self) -> None:
        """Hands out calls, as far ahead as the options and the consumer's waiting allow."""
        while (phase := self._schedule.next_phase) is not None:
            if not self._may_begin(phase) or self._is_cheap(phase) or (call := self._schedule.take()) is None:
                return
            self._hand_out(call)

    def close(self) -> None:
        """Stops the threads, waiting at most CLOSE_SECONDS for those inside user code."""
        self._finalizer()
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
            self._receive(*self._results.get())

    def _receive(self, call: Call, elements: Elements, seconds: float) -> None:
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

        def begin() -> None:
            try:
                origins = plan.locate(call.start, call.stop)
            except BaseException:  # noqa: BLE001  (the plan finds out at which unit, and makes it the outcome)
                finish(crew.timed(lambda: plan.prepare_units(call.start, call.stop)))
            else:
                SlicedPreparation(plan, origins, crew, finish).begin()

        crew.submit(begin)


@final
class SlicedPreparation:
    """The records of one call of phase 0, read one by one by the crew, in slices.

    The first record tells what the rest will take: a thread goes on alone, or shares the rest with the others. The
    one that finishes the last slice puts all together.

    Args:
        plan: what prepares the records.
        origins: the records.
        crew: who reads.
        deliver: gets the prepared elements and the seconds that all slices took together; runs in any of the threads.
    """

    def __init__(
        self, plan: Plan, origins: Origins, crew: "Crew", deliver: Callable[[tuple[Elements, float]], None]
    ) -> None:
        self._plan = plan
        self._origins = origins
        self._crew = crew
        self._deliver = deliver
        self._outcomes: list[tuple[Elements, float] | None] = []
        self._left = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Reads the first record, and gets the rest read."""
        origins = self._origins
        first = self._crew.timed(lambda: self._plan.prepare(origins.take(slice(1))))
        rest = 0 if first[0].error is not None else len(origins.position) - 1
        count = min(self._crew.size, rest, max(1, math.ceil(first[1] * rest / SLICE_SECONDS)))
        bounds = [1 + rest * i // max(1, count) for i in range(count + 1)]
        slices = [origins.take(slice(start, stop)) for start, stop in itertools.pairwise(bounds)]
        self._outcomes = [first] + [None] * count
        self._left = count
        for number, part in list(enumerate(slices, 1))[1:]:
            self._crew.submit(functools.partial(self._read, number, part))
        if slices:
            self._read(1, slices[0])
        else:
            self._put_together()

    def _read(self, number: int, origins: Origins) -> None:
        self._outcomes[number] = self._crew.timed(lambda: self._plan.prepare(origins))
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._put_together()

    def _put_together(self) -> None:
        outcomes = [outcome for outcome in self._outcomes if outcome is not None]
        prepared = Elements.concatenate([elements for elements, _ in outcomes])
        self._deliver((prepared, sum(spent for _, spent in outcomes)))


@final
class Crew:
    """Threads that run jobs in the order given; started when first needed. Jobs may submit jobs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopped = False
        self._busy: set[int] = set()
        self._lock = threading.Lock()
        _end_crews_at_exit()
        _crews.add(self)

    def submit(self, job: Callable[[], Any]) -> None:
        """Queues a job, which must not raise. Once stopped, it is dropped."""
        if self._stopped:
            return
        self._jobs.put(job)
        with self._lock:
            if len(self._threads) < self.size and not self._stopped:
                self._add_thread()

    def timed(self, work: Callable[[], Elements]) -> tuple[Elements, float]:
        """Returns the outcome of some work, and the seconds that it would take alone; what it raises is its error.

        The more threads work, the longer each of them waits for the interpreter's lock and for a core. That wait is no
        property of the work: only what exceeds the work of all of them, one after the other, is waiting for something
        else, a disk or a network.
        """
        start, start_work = time.perf_counter(), time.thread_time()
        try:
            elements = work()
        except BaseException as error:  # noqa: BLE001  (a thread has no one to raise to: the consumer gets it)
            elements = Elements.failed(error)
        seconds, working = time.perf_counter() - start, time.thread_time() - start_work
        return elements, working + max(0.0, seconds - working * max(1, len(self._busy)))

    def stop(self) -> None:
        """Tells the threads to end after the job at hand; jobs not begun are dropped. Idempotent.

        The garbage collector may call this in any thread, in the midst of `submit` too: so it takes no lock, and a
        single None goes from thread to thread, to those as well that are being started.
        """
        self._stopped = True
        self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Waits for the threads to end, at most so long for all of them."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _add_thread(self) -> None:
        # A daemon: a read that hangs must not keep the interpreter from leaving.
        thread = threading.Thread(target=self._work_off, name=f"millstream-read-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            # The system has no more threads to give: those that run do the work.
            self.size = len(self._threads)
        else:
            self._threads.append(thread)

    def _work_off(self) -> None:
        """Runs jobs until told to stop. A thread keeps its crew alive, and not the executor, whose end stops it."""
        while (job := self._jobs.get()) is not None:
            # Jobs dropped are taken out all the same: they refer to the crew, and would keep it.
            if not self._stopped:
                self._busy.add(threading.get_ident())
                job()
                self._busy.discard(threading.get_ident())
            del job
        self._jobs.put(None)


_crews: "weakref.WeakSet[Crew]" = weakref.WeakSet()


@functools.cache
def _end_crews_at_exit() -> None:
    """Makes the end of the interpreter wait for the crews. Done once, when there is a crew: not at import."""
    atexit.register(_end_crews)


def _end_crews() -> None:
    crews = list(_crews)
    for crew in crews:
        crew.stop()
    deadline = time.monotonic() + CLOSE_SECONDS
    for crew in crews:
        crew.join(deadline - time.monotonic())
