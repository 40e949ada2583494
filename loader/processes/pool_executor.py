"""The executor that has worker processes make the calls.

Guarantees:
    * User code runs in the workers only. The consumer's thread copies elements into regrouped batches, where a stage
      is no more than that, and nothing else.
    * The calls of a worker that dies go to another one. A call that kills its worker twice is an error which names its
      records (see `assignments`), and so is one for which the consumer has waited longer than the stall timeout.
"""

import logging
import weakref
from typing import final

from millstream.errors import WorkerDiedError, WorkerStalledError
from millstream.interruptions import is_from_signal_handler
from millstream.loader.pipeline.assignments import Assignments
from millstream.loader.pipeline.calls import BlockCall, Call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.executor import Executor
from millstream.loader.pipeline.feed import Feed
from millstream.loader.pipeline.outputs import Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.pipeline.requests import Blocks
from millstream.loader.processes.crash_log import read_call, read_stacks, wait_for_stacks
from millstream.loader.processes.limits import describe_limits, explain_limit
from millstream.loader.processes.messages import Exited, PipelineFailed, Result, Task
from millstream.loader.processes.pool import Event, ForkServerDied, Worker
from millstream.loader.processes.process_report import describe_exit, describe_process
from millstream.loader.processes.warm_pools import WarmPools, give_back
from millstream.loader.threads.call_size import CallSize
from millstream.loader.threads.inline_executor import run_here
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.profiler import HAND_OVER, Profiler
from millstream.loader.transport.payload import release, unpack, unpack_failure

STALL_WARNING_SECONDS = 30.0
"""A worker that makes one call for this long is reported in the log."""

LOOK_SECONDS = 1.0
"""How long to wait at once. If a look takes longer, all of us were suspended: that is not a stall of the workers."""

RECORDS_PER_MESSAGE = 2048
"""A call of many small blocks has this many records at most: enough to make its message cheap for each."""

MOST_DEATHS_OF_FORK_SERVER = 2
"""A pool is given up when its fork server has died this often, with nothing made."""

MOST_DEATHS_AT_START = 8
"""A pool is given up when this many new workers, plus as many as it has, died in a row without beginning a call."""

logger = logging.getLogger("millstream")


@final
class PoolExecutor(Executor):
    """Worker processes make the calls."""

    def __init__(
        self,
        plan: Plan,
        position: Position,
        *,
        profiler: Profiler,
        pools: WarmPools,
        workers: MultiprocessingOptions,
        reading: ReadOptions,
        feed: Feed | None = None,
    ) -> None:
        super().__init__(plan, position, feed)
        self._profiler = profiler
        self._size = CallSize(plan, RECORDS_PER_MESSAGE)
        self._unpack = profiler.timed(HAND_OVER, unpack)
        self._memory = RecycledMemory()
        self._pool = pools.take(plan.pipeline, workers, reading)
        # A loop that is left by `break` drops its iterator: the next one finds the workers warm.
        self._returning = weakref.finalize(self, give_back, weakref.ref(pools), weakref.ref(self._pool))
        self._returning.atexit = False
        self._options = workers
        self._assignments = Assignments(plan, self._schedule, self._pool.call_numbers)
        self._deaths_at_start = 0
        self._last_dead_at_start = -1
        self._deaths_of_fork_server = 0

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

    def _begin(self) -> None:
        self._check_process()
        self._receive(0.0)
        self._hand_out()

    def _advance(self) -> None:
        self._receive(self._seconds_to_next_look())
        self._look_for_stalls()
        self._hand_out()

    def _end(self) -> None:
        self._hand_out()

    def _check_process(self) -> None:
        if not self._pool.is_ours:
            raise RuntimeError(
                "This iterator belongs to the process that made it, and its worker processes too. "
                "Call iter(loader) in the forked process."
            )

    def _hand_out(self) -> None:
        """Gives calls to the workers that have room for them, lost ones first."""
        while (worker := self._free_worker()) is not None and (lost := self._assignments.next_lost()) is not None:
            self._give(worker, *lost)
        while (stage := self._schedule.next_stage) is not None:
            if not self._plan.stages[stage].runs_user_code:
                self._make_here(stage)
                continue
            worker = self._free_worker()
            if worker is None or (stage == 0 and self._schedule.backlog >= self._most_calls * len(self._pool.workers)):
                return
            call = self._schedule.take(stage, self._size.blocks)
            if call is not None:
                self._give(worker, self._assignments.assign(call), call)

    def _make_here(self, stage: int) -> None:
        call = self._schedule.take(stage)
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

    def _give(self, worker: Worker, number: int, call: Call) -> None:
        request = call.request
        if not isinstance(request, Blocks):
            try:
                message: tuple[int, int, int] | bytes = self._pool.classes.dumps(request)
            except Exception as error:  # noqa: BLE001  (what came from a worker need not be fit for the way to another)
                error.add_note(
                    f"millstream: while it was pickled for a worker process, from {self._plan.describe(request)}."
                )
                self._assignments.complete(number, Elements.failed(error))
                return
        else:
            message = request.start, request.stop, request.shard
        worker.give(Task(number, worker.arena.take_released(), message))

    def _receive(self, seconds: float) -> None:
        """Takes what has happened, having waited for something for at most so long."""
        try:
            for worker, event in self._pool.wait(seconds):
                self._take(worker, event)
        except ForkServerDied:
            # No worker is to blame: all their calls are simply made again.
            self._deaths_of_fork_server += 1
            if self._deaths_of_fork_server >= MOST_DEATHS_OF_FORK_SERVER:
                raise WorkerDiedError(
                    f"The fork server died {self._deaths_of_fork_server} times before any worker produced a result; "
                    f"what it printed is above.{describe_limits()}"
                ) from None
            logger.warning("millstream: the fork server is gone. It is started again, and all workers with it.")
            lost = [number for worker in self._pool.workers for number in worker.calls]
            self._pool.restart()
            self._assignments.lose(lost)
            self._hand_out()

    def _take(self, worker: Worker, event: Event) -> None:
        if isinstance(event, Result):
            self._deaths_of_fork_server = 0
            if worker.number > self._last_dead_at_start:
                # Workers can start, then. One that has been there for long says nothing of that.
                self._deaths_at_start = 0
            self._take_result(worker, event)
        elif isinstance(event, PipelineFailed):
            error = unpack_failure(event.failure, self._pool.classes)
            error.add_note("millstream: a worker process raised this while it unpickled the pipeline.")
            explain_limit(error, self._options.num_workers)
            raise error
        else:
            self._take_death(worker, event.exited)

    def _take_result(self, worker: Worker, result: Result) -> None:
        """Completes a call; what cannot be unpickled here is an error at its turn, as any other."""
        call = self._assignments.call(result.call)
        blocks = call.request if isinstance(call, BlockCall) else None
        self._profiler.called(worker.pid, result.begun, result.seconds, blocks, result.stages)
        if call is None:
            release(result.payload, worker.arena)
            return
        try:
            values, origins = self._unpack(result.payload, worker.arena, self._pool.classes)
            failure = None if result.failure is None else unpack_failure(result.failure, self._pool.classes)
            outputs = Elements(values, origins, failure)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            if self._assignments.split(result.call):
                # Which of the blocks it is will show, and those before it will be delivered.
                return
            where = self._assignments.describe(result.call)
            error.add_note(f"millstream: while an output of a worker process was unpickled, from {where}.")
            outputs = Elements.failed(error)
        self._size.note(call, result.seconds)
        self._assignments.complete(result.call, outputs)

    def _take_death(self, worker: Worker, exited: Exited | None) -> None:
        """Has the calls of a dead worker made by others; the one it died in only if it is for the first time."""
        lost, begun = list(worker.calls), read_call(worker.crash_log)
        cause = describe_exit(exited, read_stacks(worker.crash_log))
        self._profiler.died(f"Worker process {worker.pid} {cause}")
        if begun is None and (lost or not worker.is_ready):
            # Deaths of idle workers are not counted.
            self._deaths_at_start += 1
            self._last_dead_at_start = worker.number
            if self._deaths_at_start >= MOST_DEATHS_AT_START + self._options.num_workers:
                raise WorkerDiedError(f"Worker processes die while they start: the last one {cause}{describe_limits()}")
        self._assignments.lose(number for number in lost if number != begun)
        if begun is not None and begun in lost:
            self._assignments.blame(
                begun,
                lambda deaths, records: WorkerDiedError(
                    f"{deaths} worker processes died while making the same outputs, from {records}. "
                    f"The last one {cause}"
                ),
            )
        logger.warning("millstream: worker process %s %s It is replaced.", worker.pid, cause)
        self._pool.replace(worker)
        self._hand_out()

    def _seconds_to_next_look(self) -> float:
        """Returns the seconds until some worker may have to be reported or given up, at most LOOK_SECONDS."""
        left = [
            (self._options.stall_timeout if worker.warned else self._warning_seconds) - worker.waited
            for worker in self._pool.workers
            if worker.calls
        ]
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
                self._profiler.stalled(f"Worker process {worker.pid} made no progress for {worker.waited:.1f} s.")
                logger.warning(
                    "millstream: worker process %s has been busy for %.1f s with %s; it is %s. "
                    "After %g s this becomes an error (stall_timeout).",
                    worker.pid,
                    worker.waited,
                    self._assignments.describe(worker.calls[0]),
                    describe_process(worker.pid),
                    self._options.stall_timeout,
                )

    def _give_up(self, worker: Worker) -> None:
        first, *lost = worker.calls
        self._profiler.stalled(
            f"Worker process {worker.pid} was given up after {worker.waited:.1f} s.", is_known=worker.warned
        )
        error = WorkerStalledError(
            f"Worker process {worker.pid} has made no progress for {worker.waited:.1f} s (stall_timeout), with "
            f"{self._assignments.describe(first)}. It is {describe_process(worker.pid)}. "
            f"Stacks:\n{self._stacks_of(worker)}"
        )
        self._pool.replace(worker)
        self._assignments.complete(first, Elements.failed(error))
        self._assignments.lose(lost)
        self._hand_out()

    def _stacks_of(self, worker: Worker) -> str:
        """Returns the stacks of a living worker: it writes them when signalled, even from inside C code."""
        if worker.pid is None or not worker.is_ready:
            return "(not there yet: it is still starting)"
        worker.ask_for_stacks()
        return wait_for_stacks(worker.crash_log) or "(it does not answer: it is stopped, or waits for a device)"
