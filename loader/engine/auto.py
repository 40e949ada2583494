"""Engines of "auto": they begin in this process, and move to workers and back while they run.

    the trainer's requests ──▶ crew: measures them, and starts, adds and ends workers
                                │
                                ▼
                               engines: one, or those of all streams of a chain with joins

Guarantees:
    * One schedule has the calls of an engine in all places, so moving loses, repeats and reorders none. A call that has
      begun in one place is completed there, and the next ones begin in the other.
    * All engines of a crew move together, between two requests. One that is created later begins in their place.
    * No worker starts before the first outputs were delivered, unless idle ones are there from an earlier pass.
    * Workers get calls once all of them are ready. Until then, this process works as if there were none.
    * If workers cannot start or go on, for instance because an operation cannot be pickled or the system has no process
      left, this process does all work from then on, and one line in the log has the reason.
    * Each change of the number of workers is a line in the log, of level INFO, with the measurements that decided it.
"""

import functools
import time
import weakref
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, final

from millstream.core.signals import is_from_signal_handler
from millstream.core.warn import log_info, log_warning
from millstream.loader.engine.crew import Crew, Joined, WorkerSlots
from millstream.loader.engine.engine import Budget, Engine, GivenUp, ReadAhead
from millstream.loader.engine.staffing import ChosenWorkers
from millstream.loader.engine.worker_choice import Window, Windows, WorkerChoice, widened
from millstream.loader.measuring import ExecutorStatus, Profiler, Scheduling, scheduling_of_threads
from millstream.loader.pipeline.calls import Outputs, Position
from millstream.loader.pipeline.elements import Awaited
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.options import ReadOptions
from millstream.loader.workers.process_settings import check_places_agree

if TYPE_CHECKING:
    from millstream.loader.engine.workers import Workers


class Request(NamedTuple):
    """A request of the trainer that is measured: the times when it began."""

    begun: float
    computed: float


@final
class AutoCrew(Crew):
    """A crew whose number of workers is chosen by the waits of the trainer.

    Args:
        chosen: the number of workers, and the idle ones, which all passes share.

    Attributes:
        chosen: these workers.
    """

    choice: WorkerChoice

    def __init__(self, chosen: ChosenWorkers) -> None:
        super().__init__()
        self.chosen = chosen
        self.choice = chosen.choice
        self._engines: weakref.WeakValueDictionary[int, MovingEngine] = weakref.WeakValueDictionary()
        self._own: Mapping[Hashable, Pipeline] = {}
        self._profiler = Profiler(())
        self._reset()

    @property
    def as_auto(self) -> Self:
        return self

    def _reset(self) -> None:
        # True if workers have the calls; and if they complete those that they have, and then end.
        self._is_on = self._are_leaving = False
        self._windows = Windows()
        # The processor time of the workers when the window began.
        self._worked = 0.0
        # The scheduling when the window began; None if it is not needed, because reading it takes long.
        self._scheduling: Scheduling | None = None

    def lead(self, profiler: Profiler, stall_timeout: float, pipelines: Mapping[Hashable, Pipeline]) -> None:
        """Sets the measurements of the workers, and the pipelines that they start with besides those registered."""
        self._profiler, self._stall_timeout, self._own = profiler, stall_timeout, pipelines

    def forbid(self, reason: str) -> None:
        """Ends the choice because workers might compute other bytes than this process."""
        self.chosen.forbid(reason)
        self.close()

    def add(self, engine: "MovingEngine") -> None:
        """Adds an engine, which begins in the place of the others."""
        self.chosen.log_reason()
        self._engines[id(engine)] = engine
        if self.choice.reading is not None:
            engine.widen()
        if self._is_on:
            self._moved(engine)

    def leave(self, engine: "MovingEngine") -> None:
        self._engines.pop(id(engine), None)

    def begin_request(self) -> Request | None:
        now = time.perf_counter()
        if not self._is_on:
            self._follow()
        is_measured = self._windows.are_due(now) and not self.choice.is_final
        return Request(now, time.process_time()) if is_measured else None

    def end_request(self, request: Request | None, num_outputs: int) -> None:
        if request is None:
            return
        now = time.perf_counter()
        computed = time.process_time() - request.computed
        self.requests.append(None)
        self._record(now, Window(0.0, num_outputs, now - request.begun, computed))
        self.requests.clear()

    def gives_up(self, error: BaseException) -> bool:
        """Returns True if workers have failed, and all work is done in this process from now on."""
        if not isinstance(error, Exception) or is_from_signal_handler(error):
            return False
        workers = self.current
        if workers is None or not workers.are_usable:
            # Another engine has given up in this request, or another thread has closed the iterator.
            return self.choice.is_final
        self.close()
        self._stay(error)
        return True

    def pause(self) -> None:
        self._reset()
        if self.choice.num_workers:
            super().pause()
        else:
            super().close()

    def close(self) -> None:
        self._reset()
        super().close()

    def end(self) -> None:
        super().end()
        self.chosen.stop_idle()

    def _living(self) -> "list[MovingEngine]":
        return [engine for reference in self._engines.valuerefs() if (engine := reference()) is not None]

    def _follow(self) -> None:
        """Lets workers have the calls once they are ready. Ends them once they have completed the last ones."""
        if self.current is None and self.choice.num_workers and not self._windows.have_begun:
            self._start(only_idle=True)
        if (workers := self.current) is None:
            return
        self.requests.append(None)
        try:
            workers.accept()
            if workers.are_ready and not self._are_leaving:
                self._go_to_workers()
            elif self._are_leaving and not workers.substreams.in_flight:
                self._end_leaving()
        except Exception as error:
            if not self.gives_up(error):
                raise
        self.requests.clear()

    def _go_to_workers(self) -> None:
        self._is_on = True
        for engine in self._living():
            # False once one cannot move.
            if self._is_on:
                self._moved(engine)
        if self._is_on:
            self._begin_move()

    def _go_here(self) -> None:
        self._is_on, self._are_leaving = False, True
        for engine in self._living():
            engine.move_here()
        self._begin_move()

    def _end_leaving(self) -> None:
        for engine in self._living():
            engine.settle()
        self._are_leaving = False
        # The windows go on.
        super().close()

    def _moved(self, engine: "MovingEngine") -> None:
        try:
            engine.move_to_workers()
        except Exception as error:
            if not self.gives_up(error):
                raise

    def _record(self, now: float, request: Window) -> None:
        """Adds a request that has ended now. Moves, starts or ends workers if the choice has changed."""
        if not self._windows.have_begun:
            # The first outputs are late, because nothing was ready, and user code loads what it needs.
            if request.batches:
                self._scheduling = scheduling_of_threads()
                self._begin_window(now)
            return
        window = self._windows.add(now, request)
        workers = self.current
        if window is None or (workers is not None and not self._is_on):
            # What is measured while workers start counts for nothing: that takes cores, too.
            return
        window = window._replace(worked=max(0.0, self._profiler.core_seconds - self._worked))
        if workers is None:
            # There may have been some in earlier passes.
            if not self.choice.num_workers and (known := self._with_delays(window)) is not None:
                self.choice.record(known)
                self._widen()
            if self.choice.num_workers:
                self._start()
        elif workers.are_ready:
            self._choose(workers, window)
        self._begin_window(time.perf_counter(), rests=self.choice.rests_after(window))

    def _widen(self) -> None:
        """Lets more threads of this process read, if that was chosen."""
        if self.choice.reading is not None:
            for engine in self._living():
                engine.widen()

    def _with_delays(self, window: Window) -> Window | None:
        """Returns a window with the time in which threads had no core; None if that matters and is not known yet."""
        before, self._scheduling = self._scheduling, scheduling_of_threads() if window.seems_to_wait else None
        if self._scheduling is None:
            return window
        return None if before is None else window.with_scheduling(before, self._scheduling)

    def _begin_window(self, now: float, *, rests: bool = False) -> None:
        self._windows.begin(now, rests=rests)
        self._worked = self._profiler.core_seconds

    def _choose(self, workers: "Workers[Any]", window: Window) -> None:
        """Changes the number of workers that run."""
        before = self.choice.num_workers
        self.choice.record(window)
        number = self.choice.num_workers
        if not number:
            self._go_here()
        elif number != before:
            try:
                workers.resize(number)
                self._log_choice()
            except OSError as error:
                self.choice.keep(before, f"the system allows no more: {error}")

    def _begin_move(self) -> None:
        self._windows, self._scheduling = Windows(), None
        self._begin_window(time.perf_counter())
        self._log_choice()

    def _log_choice(self) -> None:
        if news := self.choice.take_news():
            log_info(f'"auto" chose {news}')

    def _start(self, *, only_idle: bool = False) -> None:
        if only_idle and not self.chosen.are_idle:
            return
        from millstream.loader.engine.processes import Processes  # noqa: PLC0415  (lazy: slow to import)

        workers = None
        try:
            pools = self.chosen.pools_of(lambda: {**self._own, **self.pipelines()})
            options: dict[str, Any] = {"profiler": self._profiler, "pools": pools, "options": self.chosen.options}
            self.staff(functools.partial(Processes, **options), self._stall_timeout)
            workers = self.start()
            # Idle ones may be of another number.
            workers.resize(self.choice.num_workers)
        except Exception as error:
            is_closed = self._is_ended or (workers is not None and not workers.are_usable)
            if is_closed or is_from_signal_handler(error):
                raise
            self.close()
            self._stay(error)

    def _stay(self, error: Exception) -> None:
        """Ends the choice because workers cannot start or go on."""
        reason = " ".join(str(error).split()) or type(error).__name__
        self.choice.stay(reason)
        log_warning(f'"auto" chose no worker processes: {reason}')


@final
class MovingEngine(Engine):
    """Runs calls here, or in the workers of a crew.

    Args:
        crew: the crew, which decides where.
        name: the name of the pipeline in the workers.
        profiler: the measurements of the pipeline.
        reading: the threads of this process.
        is_last: True if the trainer gets the outputs, so that its waits for them are measured.
        options: those of an `Engine`.
    """

    def __init__(
        self,
        plan: Plan,
        position: Position,
        *arguments: Any,
        crew: AutoCrew,
        name: Hashable,
        profiler: Profiler,
        reading: ReadOptions,
        is_last: bool,
        **options: Any,
    ) -> None:
        super().__init__(plan, position, *arguments, requests=crew.requests if is_last else None, **options)
        self._here = self.budget
        # The budgets that have calls from before a move.
        self._before: list[Budget] = []
        self._crew = crew
        self._name, self._profiler = name, profiler
        self._more_reads = widened(reading)
        self._is_last = is_last
        self._is_closed = False
        crew.add(self)

    @property
    def runs_user_code_here(self) -> bool:
        return True

    @property
    def is_orphaned(self) -> bool:
        return super().is_orphaned or any(before.is_orphaned for before in self._before)

    def next_outputs(self) -> Outputs | None:
        crew, is_last = self._crew, self._is_last
        request = crew.begin_request() if is_last else None
        try:
            outputs = super().next_outputs()
        except Exception as error:  # noqa: BLE001  (raised again)
            self._fail(error)
        if is_last and outputs is not None:
            self._end_request(request, len(outputs.values))
        return outputs

    def poll(self) -> Outputs | Awaited | None:
        request = self._crew.begin_request() if self._is_last else None
        try:
            found = super().poll()
        except Exception as error:  # noqa: BLE001  (raised again)
            self._fail(error)
        if self._is_last and found is not None:
            self._end_request(request, len(found.values) if isinstance(found, Outputs) else 0)
        return found

    def start(self) -> None:
        try:
            super().start()
        except Exception as error:
            if not self._gives_up(error):
                raise

    def status(self) -> ExecutorStatus:
        status = ExecutorStatus(self.schedule.backlog, self.schedule.ready)
        for place in (self._here.place, self._crew.current):
            if place is not None:
                status = place.status(status)
        return status

    def stacks(self) -> dict[int, str]:
        workers = self._crew.current
        return {} if workers is None else workers.stacks()

    def pause(self) -> None:
        moved, self.budget = [*self._before, self.budget], self._here
        super().pause()
        self._crew.leave(self)
        if self._is_last:
            self._crew.pause()
            return
        for budget in moved:
            budget.close(None)

    def close(self, deadline: float | None = None) -> None:
        # First: another thread may be starting workers.
        self._is_closed = True
        super().close(deadline)
        self._crew.leave(self)
        for budget in (*self._before, self._here):
            budget.close(deadline)
        if self._is_last:
            self._crew.close()

    def widen(self) -> None:
        """Lets more threads of this process read, unless they do, or the user gave a number of them."""
        reading, self._more_reads = self._more_reads, None
        if reading is not None and isinstance(self._here, ReadAhead):
            self._here.widen(reading)

    def move_to_workers(self) -> None:
        """Begins the next calls in the workers. Raises an error if they cannot have the pipeline."""
        check_places_agree([self.plan.pipeline])
        crew, name = self._crew, self._name
        self._move(WorkerSlots(self, crew, name) if self._is_last else Joined(self, crew, name, self._profiler))

    def move_here(self) -> None:
        """Begins the next calls in this process. The workers complete theirs."""
        self.budget.drain()
        self._move(self._here)

    def _move(self, budget: Budget) -> None:
        self._before.append(self.budget)
        self.budget = budget
        self.settle()
        self.local.substream = budget.substream
        self._is_issued = False

    def settle(self) -> None:
        """Forgets the budgets whose calls are complete."""
        self._before = [before for before in self._before if before.in_flight and before is not self.budget]

    def _begin(self) -> None:
        super()._begin()
        if self._before:
            for before in self._before:
                before.accept()
            self.settle()

    def _work_here(self) -> bool:
        # The calls from before the last move are older than those that the budget has.
        return not self._before and super()._work_here()

    def _advance(self) -> Outputs | Awaited | None:
        found = super()._advance()
        return found if not self._before or found is None or isinstance(found, Outputs) else self

    def _wait(self) -> None:
        if not self._before:
            super()._wait()
            return
        # Another engine of the crew may have completed its calls.
        self.settle()
        if self._before and (place := self._before[0].place) is not None:
            place.check_process()
            place.wait()
            self.settle()

    def _end_request(self, request: Request | None, num_outputs: int) -> None:
        self._crew.end_request(request, num_outputs)
        if self._is_closed:
            # By another thread, which did not see the workers that have started.
            self._crew.close()

    def _fail(self, error: Exception) -> NoReturn:
        if self._gives_up(error):
            raise GivenUp from error
        raise error

    def _gives_up(self, error: Exception) -> bool:
        is_here = all(budget is self._here for budget in (self.budget, *self._before))
        return not (self._is_closed or is_here) and self._crew.gives_up(error)
