"""The engine of worker_count="auto": it begins in this process, and moves to workers and back while it runs.

Guarantees:
    * One schedule has the calls of all places, so moving loses, repeats and reorders none. A call that has begun in one
      place is completed there, and the next ones begin in the other.
    * No worker starts before the first outputs were delivered, unless idle ones are there from an earlier pass.
    * Workers get calls once all of them are ready. Until then, this process works as if there were none.
    * If workers cannot start or go on, for instance because an operation cannot be pickled or the system has no process
      left, this process does all work from then on, and one line in the log has the reason.
    * Each change of the number of workers is a line in the log, of level INFO, with the measurements that decided it.
"""

import time
from typing import TYPE_CHECKING, Any, Protocol, final

from millstream.core.signals import is_from_signal_handler
from millstream.core.warn import log_info, log_warning
from millstream.loader.engine.engine import Budget, Engine, GivenUp, ReadAhead
from millstream.loader.engine.worker_choice import Window, Windows, WorkerChoice
from millstream.loader.measuring import ExecutorStatus, Profiler, Scheduling, scheduling_of_threads
from millstream.loader.pipeline.calls import Outputs, Position
from millstream.loader.pipeline.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.loader.engine.crew import WorkerSlots


class StartWorkers(Protocol):
    """Returns a function that takes workers for an engine, or None with `only_idle` if none are idle."""

    def __call__(self, *, only_idle: bool) -> "Callable[[Engine], WorkerSlots] | None": ...


@final
class AutoEngine(Engine):
    """Runs calls here, until the choice is that workers run them.

    Args:
        start_workers: finds the workers.
        choice: the number of workers, which all passes of the loader share.
        options: those of an `Engine`.
    """

    def __init__(
        self,
        plan: Plan,
        position: Position,
        *,
        start_workers: StartWorkers,
        choice: WorkerChoice,
        profiler: Profiler,
        **options: Any,
    ) -> None:
        super().__init__(plan, position, **options)
        self._budget_here = self.budget
        self._workers: WorkerSlots | None = None
        # The budget that has the calls from before the last move; None once they are complete.
        self._before: Budget | None = None
        self._start_workers = start_workers
        self._choice = choice
        self._profiler = profiler
        self._is_closed = False
        self._has_more_reads = False
        self._widen()
        self._windows = Windows()
        # The processor time of the workers when the window began.
        self._worked = 0.0
        # The scheduling when the window began; None if it is not needed, because reading it takes long.
        self._scheduling: Scheduling | None = None
        if choice.num_workers:
            self._start(only_idle=True)

    @property
    def runs_user_code_here(self) -> bool:
        return True

    def next_outputs(self) -> Outputs | None:
        begin = time.perf_counter()
        is_measured = self._windows.are_due(begin) and not self._choice.is_final
        computed = time.process_time() if is_measured else 0.0
        try:
            outputs = super().next_outputs()
        except Exception as error:
            workers = self._workers
            if workers is None or self._is_closed or not workers.place.is_ours or is_from_signal_handler(error):
                raise
            self._stay(error)
            raise GivenUp from error
        if is_measured and outputs is not None:
            now = time.perf_counter()
            self._record(now, Window(0.0, len(outputs.values), now - begin, time.process_time() - computed))
        return outputs

    def poll(self) -> Outputs | None:
        """Returns the next outputs as `next_outputs` does, after waiting for them: its waits are measured."""
        return self.next_outputs()

    def status(self) -> ExecutorStatus:
        status = ExecutorStatus(self.schedule.backlog, self.schedule.ready)
        for budget in (self._budget_here, self._workers):
            if budget is not None and (place := budget.place) is not None:
                status = place.status(status)
        return status

    def stacks(self) -> dict[int, str]:
        return {} if self._workers is None else self._workers.place.stacks()

    def pause(self) -> None:
        workers, self.budget = self._workers, self._budget_here
        super().pause()
        if workers is not None and self._choice.num_workers:
            workers.pause()
        elif workers is not None:
            workers.close(None)

    def close(self, deadline: float | None = None) -> None:
        # First: another thread may be starting workers.
        self._is_closed = True
        super().close(deadline)
        for budget in (self._budget_here, self._workers):
            if budget is not None:
                budget.close(deadline)

    def _begin(self) -> None:
        workers = self._workers
        if workers is not None and self.budget is not workers and self._before is None:
            workers.accept()
            if workers.place.are_ready:
                self._choice.record_start(self._windows.window)
                self._move(workers)
        super()._begin()

    def _work_here(self) -> bool:
        # The calls from before the last move are older than those that the budget has.
        return self._before is None and super()._work_here()

    def _wait(self) -> None:
        if self._before is None:
            super()._wait()
        elif (place := self._before.place) is not None and place.in_flight:
            place.check_process()
            place.wait()
        else:
            before, self._before = self._before, None
            if before is self._workers:
                self._workers = None
                before.close(None)

    def _record(self, now: float, request: Window) -> None:
        """Adds a request that has ended now. Moves, starts or ends workers if the choice has changed."""
        if not self._windows.have_begun:
            # The first outputs are late, because nothing was ready, and user code loads what it needs.
            self._scheduling = scheduling_of_threads()
            self._begin_window(now)
            return
        window = self._windows.add(now, request)
        workers = self._workers
        if window is None or (workers is not None and self.budget is not workers):
            # While workers start, the window goes on: `_begin` needs the measurements.
            return
        window = window._replace(worked=max(0.0, self._profiler.core_seconds - self._worked))
        if workers is None:
            # The loader may have had some in earlier passes.
            if not self._choice.num_workers and (known := self._with_delays(window)) is not None:
                self._choice.record(known)
                self._widen()
            if self._choice.num_workers:
                self._start()
        elif self._before is None and workers.place.are_ready:
            self._choose(workers, window)
        self._begin_window(time.perf_counter(), rests=self._choice.rests_after(window))

    def _widen(self) -> None:
        """Lets more threads of this process read, if that was chosen."""
        reading, budget = self._choice.reading, self._budget_here
        if reading is not None and not self._has_more_reads and isinstance(budget, ReadAhead):
            self._has_more_reads = True
            budget.widen(reading)

    def _with_delays(self, window: Window) -> Window | None:
        """Returns a window with the time in which threads had no core; None if that matters and is not known yet."""
        before, self._scheduling = self._scheduling, scheduling_of_threads() if window.seems_to_wait else None
        if self._scheduling is None:
            return window
        return None if before is None else window.with_scheduling(before, self._scheduling)

    def _begin_window(self, now: float, *, rests: bool = False) -> None:
        self._windows.begin(now, rests=rests)
        self._worked = self._profiler.core_seconds

    def _choose(self, workers: "WorkerSlots", window: Window) -> None:
        """Changes the number of workers that run."""
        before = self._choice.num_workers
        self._choice.record(window)
        number = self._choice.num_workers
        if not number:
            self._move(self._budget_here)
        elif number != before:
            try:
                workers.place.resize(number)
                self._log_choice()
            except OSError as error:
                self._choice.keep(before, f"the system allows no more: {error}")

    def _move(self, budget: Budget) -> None:
        """Begins the next calls in another place. The budget before completes those that have begun."""
        self._before, self.budget = self.budget, budget
        self.local.substream = budget.substream
        self._windows, self._scheduling = Windows(), None
        self._begin_window(time.perf_counter())
        self._log_choice()

    def _log_choice(self) -> None:
        if news := self._choice.take_news():
            log_info(f'"auto" chose {news}')

    def _start(self, *, only_idle: bool = False) -> None:
        workers = None
        try:
            if (begin := self._start_workers(only_idle=only_idle)) is None:
                return
            workers = begin(self)
            # Idle ones may be of another number.
            workers.place.resize(self._choice.num_workers)
        except Exception as error:
            if self._is_closed or is_from_signal_handler(error):
                raise
            if workers is not None:
                workers.close(None)
            self._stay(error)
            return
        self._workers = workers
        if self._is_closed:
            # Closed by another thread, which did not see them.
            workers.close(None)

    def _stay(self, error: Exception) -> None:
        """Ends the choice because workers cannot start or go on."""
        reason = " ".join(str(error).split()) or type(error).__name__
        self._choice.stay(reason)
        log_warning(f'"auto" chose no worker processes: {reason}')
