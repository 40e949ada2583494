"""The executor of worker_count="auto": it begins in this process, and moves to workers and back while it runs.

Guarantees:
    * One schedule has the calls of all places, so moving loses, repeats and reorders none. A call that has begun in one
      place is completed there, and the next ones begin in the other.
    * No worker starts before the first outputs were delivered, unless idle ones are there from an earlier pass.
    * Workers get calls once all of them are ready. Until then, this process works as if there were none.
    * If workers cannot start or go on, for instance because an operation cannot be pickled or the system has no process
      left, this process does all work from then on, and one line in the log has the reason.
    * Each change of the number of workers is a line in the log, of level INFO, with the measurements that decided it.
"""

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any, Protocol, final

from millstream.core.signals import is_from_signal_handler
from millstream.core.warn import log_info, log_warning
from millstream.loader.measuring import Profiler, Scheduling, scheduling_of_threads
from millstream.loader.pipeline.calls import Outputs, Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.executor import Executor, GivenUp
from millstream.loader.scheduling.schedule import Schedule
from millstream.loader.workers.worker_choice import Window, WorkerChoice

if TYPE_CHECKING:
    from millstream.loader.scheduling.status import ExecutorStatus
    from millstream.loader.workers.workers_executor import WorkersExecutor

WINDOW_SECONDS = 0.1
MAX_WINDOW_SECONDS = 1.0
"""The choice is considered at most this often: first soon, and less and less often while nothing changes."""

QUICK_SECONDS = 2e-4
"""Measuring shorter requests would take a noticeable part of them. So it rests between two windows."""

REST_SECONDS = 1.0
"""The time of such a rest."""


MIN_SLICE_SECONDS = 1e-4
"""Threads that compute have a core for longer than this when they get one, on average: 115 to 360 µs while they also
wait for each other, on a machine whose cores each had some eight processes ready. Threads that sleep had 18 to 76 µs.
"""


class MakeExecutor(Protocol):
    """Returns an executor in this process that shares a schedule."""

    def __call__(self, plan: Plan, position: Position, *, schedule: Schedule) -> Executor: ...


class StartWorkers(Protocol):
    """Returns an executor with workers that shares a schedule. It may take idle ones; with `only_idle`, or None."""

    def __call__(self, position: Position, schedule: Schedule, *, only_idle: bool) -> "WorkersExecutor[Any] | None": ...


@final
class AutoExecutor(Executor):
    """Runs calls here, until the choice is that workers run them.

    Args:
        make_here: creates the executor in this process.
        start_workers: creates the executor with workers.
        choice: the number of workers, which all passes of the loader share.
    """

    def __init__(
        self,
        plan: Plan,
        position: Position,
        *,
        make_here: MakeExecutor,
        start_workers: StartWorkers,
        choice: WorkerChoice,
        profiler: Profiler,
    ) -> None:
        super().__init__(plan, position)
        self._here = self._active = make_here(plan, position, schedule=self._schedule)
        self._start_workers = functools.partial(start_workers, position, self._schedule)
        self._choice = choice
        self._profiler = profiler
        self._workers: WorkersExecutor[Any] | None = None
        # The executor that has the calls from before the last move; None once they are complete.
        self._before: Executor | None = None
        self._is_closed = False
        # The measurements so far, since a time, at which the workers had used this processor time. None before outputs.
        self._window = Window()
        self._since: float | None = None
        self._worked = self._resumes_at = 0.0
        self._length = WINDOW_SECONDS
        # That when the window began; None if it is not needed, because reading it takes long.
        self._scheduling: Scheduling | None = None
        if choice.num_workers:
            self._start(only_idle=True)

    @property
    def is_orphaned(self) -> bool:
        return self._here.is_orphaned or (self._workers is not None and self._workers.is_orphaned)

    def next_outputs(self) -> Outputs | None:
        begin = time.perf_counter()
        is_measured = begin >= self._resumes_at and not self._choice.is_final
        computed = time.process_time() if is_measured else 0.0
        if (workers := self._workers) is None:
            outputs = super().next_outputs()
        else:
            workers.requests.append(None)
            try:
                outputs = super().next_outputs()
            except Exception as error:
                if self._is_closed or not workers.is_ours or is_from_signal_handler(error):
                    raise
                self._stay(error)
                raise GivenUp from error
            workers.requests.clear()
        if is_measured and outputs is not None:
            now = time.perf_counter()
            count = len(outputs.values) - outputs.first
            self._record(now, Window(0.0, count, now - begin, time.process_time() - computed))
        return outputs

    def status(self) -> "ExecutorStatus":
        here, workers = self._here.status(), self._workers
        if workers is None:
            return here
        there = workers.status()
        return dataclasses.replace(here, ready=here.ready + there.ready - self._schedule.ready, workers=there.workers)

    def stacks(self) -> dict[int, str]:
        return {} if self._workers is None else self._workers.stacks()

    def start(self) -> None:
        self._active.start()

    def pause(self) -> None:
        self._here.close()
        if (workers := self._workers) is None:
            return
        if self._choice.num_workers:
            workers.pause()
        else:
            workers.close()

    def close(self, deadline: float | None = None) -> None:
        # First: another thread may be starting workers.
        self._is_closed = True
        self._here.close(deadline)
        if (workers := self._workers) is not None:
            workers.close(deadline)

    def begin_request(self) -> None:
        workers = self._workers
        if workers is not None and self._active is not workers and self._before is None:
            workers.receive_arrived()
            if workers.are_ready:
                if self._window.batches:
                    self._choice.record_start(self._window)
                self._move(workers)
        self._active.begin_request()

    def advance(self) -> None:
        if self._before is not None:
            if self._before.finish_call():
                return
            before, self._before = self._before, None
            if before is self._workers:
                self._workers = None
                before.close()
        self._active.advance()

    def end_request(self) -> None:
        self._active.end_request()

    def _record(self, now: float, request: Window) -> None:
        """Adds a request that has ended now. Moves, starts or ends workers if the choice has changed."""
        if self._since is None:
            # The first outputs are late, because nothing was ready, and user code loads what it needs.
            self._begin_window(now)
            if self._choice.num_workers and self._workers is None:
                # This loader had them in earlier passes.
                self._start()
            return
        self._window += request
        seconds = now - self._since
        if seconds < self._length or not self._window.batches:
            return
        workers = self._workers
        window = self._window._replace(seconds=seconds, worked=max(0.0, self._profiler.core_seconds - self._worked))
        if workers is None:
            window = self._with_delays(window)
            self._choice.record(window)
            self._length = min(2 * self._length, MAX_WINDOW_SECONDS)
            if self._choice.num_workers:
                self._start()
            elif window.wait_per_batch < QUICK_SECONDS:
                self._resumes_at, self._since = now + REST_SECONDS, None
                return
        elif self._active is not workers:
            # They start: `begin_request` needs the measurements.
            return
        elif self._before is None and workers.are_ready:
            self._choose(workers, window)
        self._begin_window(time.perf_counter())

    def _with_delays(self, window: Window) -> Window:
        """Returns a window with the time in which threads that compute had no core, if that matters and is known.

        Threads that wait for something else have one for moments only, and may be late at each of them.
        """
        before, self._scheduling = self._scheduling, scheduling_of_threads() if window.seems_to_wait else None
        if before is None or self._scheduling is None:
            return window
        computed, delayed, slices = (now - then for now, then in zip(self._scheduling, before, strict=True))
        return window._replace(delayed=max(0.0, delayed)) if computed > MIN_SLICE_SECONDS * slices else window

    def _begin_window(self, now: float) -> None:
        self._window, self._since, self._worked = Window(), now, self._profiler.core_seconds

    def _choose(self, workers: "WorkersExecutor[Any]", window: Window) -> None:
        """Changes the number of workers that run."""
        before = self._choice.num_workers
        self._choice.record(window)
        number = self._choice.num_workers
        if not number:
            self._move(self._here)
        elif number != before:
            try:
                workers.resize(number)
                self._log_choice()
            except OSError as error:
                self._choice.keep(before, f"the system allows no more: {error}")

    def _move(self, executor: Executor) -> None:
        self._before, self._active = self._active, executor
        self._length, self._scheduling = WINDOW_SECONDS, None
        self._begin_window(time.perf_counter())
        self._log_choice()

    def _log_choice(self) -> None:
        log_info(f'worker_count="auto" chose {self._choice.text}')

    def _start(self, *, only_idle: bool = False) -> None:
        try:
            workers = self._start_workers(only_idle=only_idle)
            if workers is not None:
                # Idle ones may be of another number.
                workers.resize(self._choice.num_workers)
        except Exception as error:
            if self._is_closed or is_from_signal_handler(error):
                raise
            self._stay(error)
            return
        self._workers = workers
        if self._is_closed and workers is not None:
            # Closed by another thread, which did not see them.
            workers.close()

    def _stay(self, error: Exception) -> None:
        """Ends the choice because workers cannot start or go on."""
        reason = " ".join(str(error).split()) or type(error).__name__
        self._choice.stay(reason)
        log_warning(f'"auto" chose no worker processes: {reason}')
