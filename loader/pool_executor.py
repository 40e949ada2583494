"""The executor that has worker processes make the calls.

Guarantees:
    * A call is answered once: by its outputs, or by an error. Calls whose worker has died go to another one; answers
      to calls that nobody waits for any more are dropped.
    * User code runs in the workers only. The consumer's thread copies elements into regrouped batches, where a phase
      is no more than that, and nothing else.
    * A call that kills its worker twice is an error which names its records, and so is one for which the consumer has
      waited longer than the stall timeout: the stream never waits without end.
"""

import dataclasses
import logging
import weakref
from collections import deque
from typing import final

from millstream.errors import WorkerDiedError, WorkerStalledError
from millstream.loader.elements import Elements
from millstream.loader.executors import Executor, run_here
from millstream.loader.interruptions import is_from_signal_handler
from millstream.loader.last_words import read_call, read_stacks, wait_for_stacks
from millstream.loader.limits import describe_limits, explain_limit
from millstream.loader.messages import Broken, Exited, Made, MakeGroup, MakeUnits
from millstream.loader.options import MultiprocessingOptions, ReadOptions
from millstream.loader.plan import Plan
from millstream.loader.pool import Event, Worker, ZygoteDied
from millstream.loader.process_state import describe_exit, describe_process
from millstream.loader.recycled_memory import RecycledMemory
from millstream.loader.runs import Cursor, Run
from millstream.loader.schedule import Call, Schedule, UnitCall, makes_several
from millstream.loader.stage_clock import HAND_OVER
from millstream.loader.transport import release, unpack, unpack_failure
from millstream.loader.warm_pools import WarmPools, give_back

STALL_WARNING_SECONDS = 30.0
"""A worker that makes one call for this long is reported in the log."""

LOOK_SECONDS = 1.0
"""How long to wait at once. If a look takes longer, all of us were suspended: that is not a stall of the workers."""

RECORDS_PER_MESSAGE = 2048
"""A call of many small units has this many records at most: enough to make its message cheap for each."""

MOST_DEATHS = 2
"""A call in which this many workers died is given up, and so is a pool whose zygote did, with nothing made."""

MOST_DEATHS_AT_START = 8
"""A pool is given up when this many new workers, plus as many as it has, died in a row without beginning a call."""

logger = logging.getLogger("millstream")


@dataclasses.dataclass(eq=False, slots=True)
class _Assigned:
    """A call in the hands of the workers."""

    call: Call
    deaths: int = 0


@final
class PoolExecutor(Executor):
    """Worker processes make the calls."""

    def __init__(
        self,
        plan: Plan,
        cursor: Cursor,
        pools: WarmPools,
        workers: MultiprocessingOptions,
        reading: ReadOptions,
    ) -> None:
        self._plan = plan
        self._schedule = Schedule(plan, cursor, RECORDS_PER_MESSAGE)
        self._unpack = plan.clock.timed(HAND_OVER, unpack)
        self._memory = RecycledMemory()
        self._pool = pools.take(plan, workers, reading)
        # A loop that is left by `break` drops its iterator: the next one finds the workers warm.
        self._returning = weakref.finalize(self, give_back, weakref.ref(pools), weakref.ref(self._pool))
        self._returning.atexit = False
        self._options = workers
        self._assigned: dict[int, _Assigned] = {}
        self._lost: deque[tuple[int, _Assigned]] = deque()
        self._deaths_at_start = 0
        self._last_dead_at_start = -1
        self._deaths_of_zygote = 0

    def next_run(self) -> Run | None:
        """Returns the next outputs in order, None at the end."""
        self._check_process()
        self._hand_out()
        run = self._schedule.pop()
        if run is not None:
            self._receive(0.0)
        while run is None:
            if self._schedule.exhausted:
                return None
            self._receive(self._seconds_to_next_look())
            self._look_for_stalls()
            self._hand_out()
            run = self._schedule.pop()
        self._hand_out()
        return run

    def start(self) -> None:
        """Gives the workers their first calls: they begin to read at once."""
        self._check_process()
        self._hand_out()

    def pause(self) -> None:
        """Leaves the pool to the next iterator, its workers warm. Calls in work are finished and dropped."""
        self._returning()

    def close(self) -> None:
        """Ends the worker processes."""
        self._returning.detach()
        self._pool.stop()

    def _check_process(self) -> None:
        if not self._pool.is_ours:
            raise RuntimeError(
                "This iterator belongs to the process that made it, and its worker processes too. "
                "Call iter(loader) in the forked process."
            )

    def _hand_out(self) -> None:
        """Gives calls to the workers that have room for them, lost ones first."""
        while self._lost and (worker := self._free_worker()) is not None:
            number, assigned = self._lost.popleft()
            if self._schedule.wants(assigned.call):
                self._give(worker, number, assigned)
        while (phase := self._schedule.next_phase) is not None:
            if phase > 0 and self._plan.phases[phase].is_plain_stack:
                self._make_here()
                continue
            worker = self._free_worker()
            if worker is None or (phase == 0 and self._schedule.backlog >= self._most_calls * len(self._pool.workers)):
                return
            call = self._schedule.take()
            if call is not None:
                self._give(worker, next(self._pool.call_numbers), _Assigned(call))

    def _make_here(self) -> None:
        call = self._schedule.take()
        if call is not None:
            run_here(self._plan, self._schedule, call, self._memory.allocate)

    @property
    def _most_calls(self) -> int:
        """How many calls a worker may have: one in work, and finished ones ahead."""
        return 1 + self._options.per_worker_buffer_size

    def _free_worker(self) -> Worker | None:
        """Returns the worker with the fewest calls, None if all have enough."""
        worker = min(self._pool.workers, key=lambda worker: len(worker.calls))
        return worker if len(worker.calls) < self._most_calls else None

    def _give(self, worker: Worker, number: int, assigned: _Assigned) -> None:
        call = assigned.call
        elements = b""
        if not isinstance(call, UnitCall):
            try:
                elements = self._pool.classes.dumps(call.group)
            except Exception as error:  # noqa: BLE001  (what came from a worker need not be fit for the way to another)
                error.add_note(
                    f"millstream: while it was pickled for a worker process, from {self._plan.describe(call.request)}."
                )
                self._schedule.complete(call, Elements.failed(error), 0.0)
                return
        self._assigned[number] = assigned
        released = worker.arena.take_released()
        if isinstance(call, UnitCall):
            worker.give(MakeUnits(number, released, call.start, call.stop))
        else:
            worker.give(MakeGroup(number, released, call.phase, elements))

    def _receive(self, seconds: float) -> None:
        """Takes what has happened, having waited for something for at most so long."""
        try:
            for worker, event in self._pool.wait(seconds):
                self._take(worker, event)
        except ZygoteDied:
            # No worker is to blame: all their calls are simply made again.
            self._deaths_of_zygote += 1
            if self._deaths_of_zygote >= MOST_DEATHS:
                raise WorkerDiedError(
                    f"{self._deaths_of_zygote} times the process that forks the workers ended, or was killed, before "
                    f"they had made anything. If it failed, its errors are above.{describe_limits()}"
                ) from None
            logger.warning("millstream: the process that forks the workers is gone. All of them are started again.")
            lost = [number for worker in self._pool.workers for number in worker.calls]
            self._pool.restart()
            self._lose(lost)

    def _take(self, worker: Worker, event: Event) -> None:
        if isinstance(event, Made):
            self._deaths_of_zygote = 0
            if worker.number > self._last_dead_at_start:
                # Workers can start, then. One that has been there for long says nothing of that.
                self._deaths_at_start = 0
            self._take_made(worker, event)
        elif isinstance(event, Broken):
            error = unpack_failure(event.failure, self._pool.classes)
            error.add_note("millstream: a worker process raised this while it unpickled the pipeline.")
            explain_limit(error, self._options.num_workers)
            raise error
        else:
            self._take_death(worker, event.exited)

    def _take_made(self, worker: Worker, made: Made) -> None:
        """Completes a call; what cannot be unpickled here is an error at its turn, as any other."""
        self._plan.clock.add_all(made.stages)
        assigned = self._assigned.get(made.call)
        if assigned is None:
            release(made.parcel, worker.arena)
            return
        try:
            values, origins = self._unpack(made.parcel, worker.arena, self._pool.classes)
            failure = None if made.failure is None else unpack_failure(made.failure, self._pool.classes)
            outputs = Elements(values, origins, failure)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            if makes_several(assigned.call):
                # Which of them it is will show, and those before it will be delivered.
                self._split(made.call)
                return
            where = self._plan.describe(assigned.call.request)
            error.add_note(f"millstream: while an output of a worker process was unpickled, from {where}.")
            outputs = Elements.failed(error)
        del self._assigned[made.call]
        self._schedule.complete(assigned.call, outputs, made.seconds)

    def _take_death(self, worker: Worker, exited: Exited | None) -> None:
        """Gives the calls of a dead worker to a new one; the call it died in only if it is for the first time."""
        lost = list(worker.calls)
        begun = read_call(worker.last_words)
        cause = describe_exit(exited, read_stacks(worker.last_words))
        if begun is None and (lost or not worker.is_ready):
            # One that has nothing to do may be killed as often as anybody likes.
            self._deaths_at_start += 1
            self._last_dead_at_start = worker.number
            if self._deaths_at_start >= MOST_DEATHS_AT_START + self._options.num_workers:
                raise WorkerDiedError(f"Worker processes die while they start: the last one {cause}{describe_limits()}")
        elif begun in lost and begun in self._assigned:
            assigned = self._assigned[begun]
            assigned.deaths += 1
            if makes_several(assigned.call):
                lost.remove(begun)
                self._split(begun)
            elif assigned.deaths >= MOST_DEATHS:
                error = WorkerDiedError(
                    f"{assigned.deaths} worker processes died while making the same outputs, from "
                    f"{self._plan.describe(assigned.call.request)}. The last one {cause}"
                )
                lost.remove(begun)
                del self._assigned[begun]
                self._schedule.complete(assigned.call, Elements.failed(error), 0.0)
        logger.warning("millstream: worker process %s %s It is replaced.", worker.pid, cause)
        self._pool.replace(worker)
        self._lose(lost)

    def _split(self, number: int) -> None:
        """Puts each unit of a call back as a call of its own, each under suspicion."""
        assigned = self._assigned.pop(number)
        if isinstance(assigned.call, UnitCall):
            pieces = [_Assigned(piece, assigned.deaths) for piece in self._schedule.split(assigned.call)]
            self._lost.extendleft((next(self._pool.call_numbers), piece) for piece in reversed(pieces))

    def _lose(self, numbers: list[int]) -> None:
        """Puts calls back to be given out again, before all others; those that nobody waits for are forgotten."""
        for number in reversed(numbers):
            assigned = self._assigned.pop(number, None)
            if assigned is not None and self._schedule.wants(assigned.call):
                self._lost.appendleft((number, assigned))
        self._hand_out()

    def _seconds_to_next_look(self) -> float:
        """Returns the seconds until some worker may have to be reported or given up, at most LOOK_SECONDS."""
        limits = self._warning_seconds, self._options.stall_timeout
        left = [limits[worker.warned] - worker.waited for worker in self._pool.workers if worker.calls]
        return min(LOOK_SECONDS, *left)

    @property
    def _warning_seconds(self) -> float:
        return min(STALL_WARNING_SECONDS, self._options.stall_timeout)

    def _look_for_stalls(self) -> None:
        """Reports workers that are at one call for long, and gives up the call of one that is for too long."""
        for worker in [worker for worker in self._pool.workers if worker.calls]:
            if worker.waited >= self._options.stall_timeout:
                self._give_up(worker)
            elif worker.waited >= self._warning_seconds and not worker.warned:
                worker.warned = True
                logger.warning(
                    "millstream: worker process %s has been busy for %.1f s with %s; it is %s. "
                    "After %g s this becomes an error (stall_timeout).",
                    worker.pid,
                    worker.waited,
                    self._describe_number(worker.calls[0]),
                    describe_process(worker.pid),
                    self._options.stall_timeout,
                )

    def _give_up(self, worker: Worker) -> None:
        first, *lost = worker.calls
        error = WorkerStalledError(
            f"Worker process {worker.pid} has made no progress for {worker.waited:.1f} s (stall_timeout), with "
            f"{self._describe_number(first)}. It is {describe_process(worker.pid)}. Stacks:\n{self._stacks_of(worker)}"
        )
        self._pool.replace(worker)
        if (assigned := self._assigned.pop(first, None)) is not None:
            self._schedule.complete(assigned.call, Elements.failed(error), 0.0)
        self._lose(lost)

    def _stacks_of(self, worker: Worker) -> str:
        """Returns the stacks of a living worker: it writes them when signalled, even from inside C code."""
        if worker.pid is None or not worker.is_ready:
            return "(not there yet: it is still starting)"
        worker.ask_for_stacks()
        return wait_for_stacks(worker.last_words) or "(it does not answer: it is stopped, or waits for a device)"

    def _describe_number(self, number: int) -> str:
        assigned = self._assigned.get(number)
        return (
            "outputs that nobody waits for any more" if assigned is None else self._plan.describe(assigned.call.request)
        )
