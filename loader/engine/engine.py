"""The engine: the one loop that runs the calls of a plan. It delivers outputs, works here, issues calls, or waits.

    places ──▶ schedule.complete ──▶ schedule.pop ──▶ the consumer
                       │ take
                       ▼
    budget ──▶ here, or ahead: threads, worker processes, actors          local operations ──▶ here, or threads

Guarantees:
    * Outputs leave in the order of the schedule, whichever call finishes first. An error is delivered in order.
    * Only the consumer's thread uses the schedule and all other state of an engine (see `places`).
    * User code never sees settings that only the consumer's thread has. If it has any, threads of the library run every
      call (see `thread_settings`).
    * An exception of a signal handler in the consumer's thread leaves `next_outputs` immediately and unchanged.
    * The stream depends on no place, and on no budget.
"""

import abc
import math
import time
from typing import TYPE_CHECKING, Any, Protocol

from millstream.loader.engine.budget import Budget, LocalAhead, OnDemand, ReadAhead, WorkerSlots
from millstream.loader.engine.places import Here, Threads
from millstream.loader.engine.substreams import Sink, taken_call
from millstream.loader.pipeline.calls import Call, Outputs, Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.scheduling.schedule import Schedule
from millstream.loader.threads.options import ReadOptions
from millstream.loader.threads.reader_threads import CLOSE_SECONDS, ReaderThreads
from millstream.loader.threads.shared_threads import SharedThreads

if TYPE_CHECKING:
    from millstream.loader.engine.workers import Workers
    from millstream.loader.scheduling.feed import Feed
    from millstream.loader.scheduling.status import ExecutorStatus


class GivenUp(Exception):  # noqa: N818  (internal)
    """An engine cannot go on. Another one at the same position does."""


class Executor(abc.ABC):
    """Runs the calls of one pass over a stream from a position on. Except for `close`, it is used by one thread."""

    def __init__(self, plan: Plan, position: Position, feed: "Feed | None" = None) -> None:
        self._plan = plan
        self._schedule = Schedule(plan, position, feed)
        self.failures = self._schedule.failures

    @abc.abstractmethod
    def next_outputs(self) -> Outputs | None:
        """Returns the next outputs in order, or None at the end.

        Exceptions raised here concern the executor, not a record, whose error is part of its outputs. The owner must
        then close the executor.
        """

    @property
    @abc.abstractmethod
    def is_orphaned(self) -> bool:
        """True if it makes no progress any more. Its owner then begins another one at the same position."""

    @property
    @abc.abstractmethod
    def runs_user_code_here(self) -> bool:
        """True if the consumer's thread may run code of the user."""

    def status(self) -> "ExecutorStatus":
        """Returns a snapshot of the work in progress. Thread-safe: it may be slightly outdated."""
        from millstream.loader.scheduling.status import ExecutorStatus  # noqa: PLC0415  (lazy: only monitoring needs it)

        return ExecutorStatus(self._schedule.backlog, self._schedule.ready)

    def stacks(self) -> dict[int, str]:
        """Returns the stacks of worker processes by process ID. The default is none. Thread-safe."""
        return {}

    @abc.abstractmethod
    def start(self) -> None:
        """Starts to work ahead, if the executor can."""

    def pause(self) -> None:
        """Stops working for this iterator, but keeps resources for the next one. The default closes the executor."""
        self.close()

    @abc.abstractmethod
    def close(self, deadline: float | None = None) -> None:
        """Stops all work. Idempotent and thread-safe.

        `deadline` is the time of `time.monotonic` until which it waits for user code in threads; None for its own.
        """


class TakeWorkers(Protocol):
    """Takes workers from a pool. They return to it when the owner ends."""

    def __call__(
        self, plan: Plan, schedule: Schedule, owner: "Engine", *, is_fed: bool, max_bytes: int
    ) -> "Workers[Any]": ...


class Engine(Executor):
    """Runs calls in the consumer's thread, in threads ahead of it, or in workers.

    Args:
        feed: the source of the elements of stage 0; None if they are read.
        reading: the threads that work ahead, unless workers do.
        stall_timeout: the number of seconds that the consumer waits while no call finishes.
        threads: the threads if they are shared with other engines; None for its own.
        local_reading: the threads of this process that run local operations in advance; None to run them on demand.
        workers: takes the workers that run all calls, given plan, schedule and owner.

    Attributes:
        requests: not empty during a request, and after one that was interrupted: a message may have been sent half.
    """

    def __init__(
        self,
        plan: Plan,
        position: Position,
        feed: "Feed | None" = None,
        *,
        reading: ReadOptions | None = None,
        stall_timeout: float = math.inf,
        threads: SharedThreads | None = None,
        local_reading: ReadOptions | None = None,
        workers: "TakeWorkers | None" = None,
    ) -> None:
        super().__init__(plan, position, feed)
        self.requests: list[None] = []
        memory = RecycledMemory()
        self._here = Here(memory.allocate, stall_timeout)
        self._local = LocalAhead(local_reading)
        readers = ReaderThreads(self._local.num_threads)
        readers.end_with(self)
        # The threads for local operations, and for calls that the consumer's thread should run, but may not.
        self._aside = Threads(plan, readers, memory.allocate, self, self._local, stall_timeout=stall_timeout)
        self._has_local = plan.num_remote_stages < len(plan.stages)
        self._budget: Budget
        if workers is not None:
            place = workers(plan, self._schedule, self, is_fed=feed is not None, max_bytes=self._local.max_bytes)
            self._budget = WorkerSlots(place, self._here)
        elif reading is not None and reading.reads_ahead:
            self._budget = ReadAhead(
                plan,
                self._schedule,
                reading,
                self._here,
                self,
                shared=threads,
                is_fed=feed is not None,
                max_bytes=self._local.max_bytes,
                stall_timeout=stall_timeout,
                memory=memory,
            )
        else:
            self._budget = OnDemand(plan, self._schedule)
        self._local.substream = self._budget.substream
        # False if a change may allow further calls.
        self._is_issued = False
        # True if local operations have run in this request.
        self._has_run_local = False

    def next_outputs(self) -> Outputs | None:
        self.requests.append(None)
        schedule = self._schedule
        self._begin()
        while (outputs := schedule.pop()) is None:
            if schedule.exhausted:
                self.requests.clear()
                return None
            if not self._work_here() and not self._issue():
                self._wait()
        if self._budget.place is not None or self._has_local:
            self._end()
        self.requests.clear()
        return outputs

    @property
    def is_orphaned(self) -> bool:
        """True after `close`, and at the interpreter's exit, which ends all threads and workers of the library.

        Functions that were registered for the exit before the library's own run later, and may need a new engine.
        """
        return self._aside.readers.is_stopped

    @property
    def runs_user_code_here(self) -> bool:
        return self.slots is None or self.slots.substream.is_fed or self._has_local

    @property
    def slots(self) -> WorkerSlots | None:
        """The budget of the workers that run all calls; None without workers."""
        return self._budget if isinstance(self._budget, WorkerSlots) else None

    def status(self) -> "ExecutorStatus":
        status, place = super().status(), self._budget.place
        return status if place is None else place.status(status)

    def stacks(self) -> dict[int, str]:
        return {} if self.slots is None else self.slots.place.stacks()

    def start(self) -> None:
        if (place := self._budget.place) is not None:
            place.check_process()
            self.requests.append(None)
            self._budget.issue()
            self.requests.clear()

    def pause(self) -> None:
        # First: after an interruption, nothing else would end its threads.
        self._close_aside(None)
        self._budget.pause()

    def close(self, deadline: float | None = None) -> None:
        own = self._stop_aside()
        self._budget.close(deadline)
        self._aside.readers.join((own if deadline is None else deadline) - time.monotonic())

    def _begin(self) -> None:
        self._here.begin()
        if self._local.runs_ahead:
            self._aside.check_process()
        self._budget.begin()
        self._is_issued = self._has_run_local = False

    def _accept(self) -> None:
        """Completes the calls that have finished ahead."""
        self._budget.accept()
        self._is_issued = False

    def _work_here(self) -> bool:
        """Runs a call that the consumer's thread should run now. Returns False if there is none."""
        if self._has_local and self._run_local():
            return True
        if (call := self._budget.call_here()) is None:
            return False
        self._run(call, self._budget.substream)
        self._is_issued = False
        return True

    def _run_local(self) -> bool:
        """Completes a call of local operations. Returns False if there is none."""
        if self._has_run_local:
            self._accept()
        self._issue()
        self._issue_local()
        if self._aside.in_flight:
            self._aside.wait()
        elif (call := self._take_local()) is not None:
            self._run(call, self._local)
        else:
            return False
        self._has_run_local, self._is_issued = True, False
        return True

    def _run(self, call: Call, sink: Sink) -> None:
        if self._here.check():
            self._here.run(self._plan, call, sink)
            return
        self._aside.check_process()
        self._local.begun(call)
        self._aside.submit(call)
        self._aside.wait()

    def _issue(self) -> bool:
        """Begins the calls that run ahead. Returns False if nothing has changed since the last time."""
        if self._is_issued:
            return False
        self._is_issued = True
        self._budget.issue()
        return True

    def _issue_local(self) -> None:
        while self._local.allows(self._aside.in_flight) and (call := self._take_local()) is not None:
            self._local.begun(call)
            self._aside.submit(call)

    def _take_local(self) -> Call | None:
        return taken_call(self._schedule, None, self._budget.substream.size.blocks)

    def _wait(self) -> None:
        self._budget.wait()
        self._is_issued = False

    def _end(self) -> None:
        """Ensures that work continues while the consumer is away, without waiting."""
        self._budget.end()
        self._is_issued = True
        self._budget.issue()
        if self._has_local:
            self._issue_local()

    def _stop_aside(self) -> float:
        """Drops calls. Returns the time of `time.monotonic` until which user code may take to end."""
        self._aside.readers.stop()
        self._aside.close()
        return time.monotonic() + CLOSE_SECONDS

    def _close_aside(self, deadline: float | None) -> None:
        own = self._stop_aside()
        self._aside.readers.join((own if deadline is None else deadline) - time.monotonic())
