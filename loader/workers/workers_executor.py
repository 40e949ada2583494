"""The executor whose calls are made by workers, wherever those run: what comes to whom, and what is done with answers.

Guarantees:
    * Calls are those of one pipeline, or of several, where one is fed with what the others make (see `crew`).
    * User code runs in the workers only. The consumer's thread copies elements into regrouped batches, where a stage
      is no more than that, and nothing else.
    * Each worker has as many calls as its buffer allows: those being read (see `reads_in_flight`), and finished ones.
    * The calls of a worker that dies go to another one. A call that kills its worker twice is an error which names its
      records (see `assignments`), and so is one for which the consumer has waited longer than the stall timeout.
    * Workers that die while they start, again and again, are an error.
"""

import abc
import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from millstream.errors import WorkerDiedError
from millstream.loader.pipeline.assignments import Assignments
from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.executor import Executor
from millstream.loader.pipeline.outputs import Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.pipeline.requests import Blocks
from millstream.loader.threads.inline_executor import run_here
from millstream.loader.threads.options import MultiprocessingOptions
from millstream.loader.threads.profiler import Profiler
from millstream.loader.transport.carried_elements import dump_request
from millstream.loader.workers.crew import Crew
from millstream.loader.workers.parts import Part, Parts
from millstream.loader.workers.reads_in_flight import ReadsInFlight
from millstream.loader.workers.warm_pools import WarmPools, give_back
from millstream.loader.workers.workers_pool import WorkersPool, WorkerT
from millstream.signal_exceptions import is_from_signal_handler

if TYPE_CHECKING:
    from millstream.loader.pipeline.feed import Feed
    from millstream.loader.pipeline.load import Load

STALL_WARNING_SECONDS = 30.0
"""A worker that makes one call for this long is reported in the log."""

LOOK_SECONDS = 1.0
"""How long to wait at once. If a look takes longer, all of us were suspended: that is not a stall of the workers."""

MOST_DEATHS_AT_START = 8
"""A pool is given up when this many new workers, plus as many as it has, died in a row without beginning a call."""

logger = logging.getLogger("millstream")


class WorkersExecutor(Executor, Generic[WorkerT]):
    """Workers make the calls.

    Args:
        plan: what makes the outputs.
        position: where the pass begins.
        profiler: adds up what the workers measure.
        pools: has, or starts, the workers.
        options: how many workers the pool has, how much they may have ready, and when they stall.
        feed: where the elements of stage 0 come from; None where they are read.
        crew: which pipelines the workers have, where they have several; this is then its leader.
        pipeline: the number of the plan's own among them.

    Attributes:
        parts: what the workers work for.
    """

    _are_here: ClassVar[bool]
    """Whether the workers are processes of this machine."""

    def __init__(
        self,
        plan: Plan,
        position: Position,
        *,
        profiler: Profiler,
        pools: WarmPools[Any],
        options: MultiprocessingOptions,
        feed: "Feed | None" = None,
        crew: Crew | None = None,
        pipeline: int = 0,
    ) -> None:
        super().__init__(plan, position, feed)
        self._profiler = profiler
        self._memory = RecycledMemory()
        self._pool: WorkersPool[WorkerT] = pools.take()
        # A loop that is left by `break` drops its iterator: the next one finds the workers warm.
        self._give_back = functools.partial(give_back, weakref.ref(pools), weakref.ref(self._pool))
        self._returning = weakref.finalize(self, self._give_back)
        self._returning.atexit = False
        if plan.source_is_stream:
            # The next one is to find the beginning of the stream, which these have read from: they end instead.
            self._returning.detach()
        self._options = options
        self._own = Part(plan, self._schedule, profiler, pipeline, feed is not None, self._pool.max_bytes)
        self.parts = Parts(self._own, self._pool.max_bytes)
        self._assignments = Assignments(self.parts, self._pool.call_numbers)
        self._reads = ReadsInFlight(self._pool.max_reads)
        self._deaths_at_start = 0
        self._last_dead_at_start = -1
        if crew is not None:
            crew.follow(self)

    def work_for(self, part: Part) -> None:
        """Brings the outputs of another part nearer, which somebody waits for."""
        with self.parts.waiting_for(part):
            self._hand_out()
            if part.in_work or self._free_worker() is None:
                self._receive(self._seconds_to_next_look())
                self._look_for_stalls()

    def load(self) -> "Load":
        """Returns what there is to do now, and what each worker does.

        What workers have finished is taken when the consumer asks for outputs; until then it shows in what they began
        after it.
        """
        from millstream.loader.pipeline.load import WorkerLoad  # noqa: PLC0415  (for those who look)

        made = super().load()
        workers, finished = [], 0
        for worker in list(self._pool.workers):
            calls, begun = worker.calls.copy(), self._present_call(worker)
            finished += calls.index(begun) if begun in calls else 0
            text = self._blocks_text(begun) if begun in calls else None
            workers.append(WorkerLoad(worker.number, worker.pid, self._are_here, len(calls), text, worker.waited))
        return dataclasses.replace(made, ready=made.ready + finished, workers=tuple(workers))

    def start(self) -> None:
        """Gives the workers their first calls: they begin to read at once."""
        self._check_process()
        self._hand_out()

    def pause(self) -> None:
        """Leaves the pool to the next iterator, its workers warm. Calls in work are finished and dropped."""
        self._returning.detach()
        self._give_back()

    def close(self) -> None:
        """Ends the workers."""
        self._returning.detach()
        self._pool.stop()

    @abc.abstractmethod
    def _give(self, worker: WorkerT, number: int, call: Call) -> None:
        """Sends a call to a worker; one that cannot be sent is completed with an error instead."""

    @abc.abstractmethod
    def _receive(self, seconds: float) -> None:
        """Takes what has happened, having waited for something for at most this many seconds."""

    @abc.abstractmethod
    def _warn_of_stall(self, worker: WorkerT) -> None:
        """Reports a worker that is at one call for long in the log."""

    @abc.abstractmethod
    def _give_up(self, worker: WorkerT) -> None:
        """Ends a worker that is at one call for too long, and makes that call an error."""

    def _begin(self) -> None:
        self._check_process()
        self._receive(0.0)
        self._hand_out()

    def _advance(self) -> None:
        start = time.perf_counter()
        self._receive(self._seconds_to_next_look())
        self._reads.waited(time.perf_counter() - start)
        self._look_for_stalls()
        self._hand_out()

    def _end(self) -> None:
        self._reads.delivered(time.perf_counter())
        self._hand_out()

    def _present_call(self, worker: WorkerT) -> int | None:  # noqa: ARG002  (of those that can tell)
        """Returns the number of the call that a worker is at; None where that is not known. For any thread."""
        return None

    def _blocks_text(self, number: int | None) -> str | None:
        """Returns which blocks a call makes: no more, since the keys of records are the sampler's to say."""
        call = None if number is None else self._assignments.call(number)
        if call is None:
            return None
        if not isinstance(call.request, Blocks):
            return "a group"
        first, last = call.request.start, call.request.stop - 1
        part = self.parts.of(call)
        noun = "batch" if part is not None and part.plan.blocks_are_batches else "block"
        if first == last:
            return f"{noun} {first:,}"
        return f"{'batches' if noun == 'batch' else 'blocks'} {first:,} to {last:,}"

    def _check_process(self) -> None:
        if not self._pool.is_ours:
            raise RuntimeError(
                "This iterator belongs to the process that made it, and its worker processes too. "
                "Call iter(loader) in the forked process."
            )

    def _hand_out(self) -> None:
        """Gives calls to the workers that have room for them, lost ones first."""
        if self._hand_out_lost():
            for part in self.parts.in_turn():
                if not self._hand_out_of(part):
                    self.parts.stir(part)
                    return

    def _hand_out_of(self, part: Part) -> bool:
        """Gives calls of one part to workers; says whether any worker has room left."""
        while (stage := part.schedule.next_stage) is not None:
            if not part.plan.stages[stage].runs_user_code:
                self._make_here(part, stage)
                continue
            worker = self._free_worker()
            if worker is None:
                return False
            if stage == 0 and not self.parts.may_begin(part, self._most_calls * len(self._pool.workers)):
                return True
            call = part.take(stage)
            if call is None:
                continue
            if part.is_fed and stage == 0:
                # Those that it was drawn from may have taken the place meanwhile, or the worker may have died.
                worker = self._free_worker()
            if worker is None:
                self._assignments.postpone(call)
                return False
            self._give(worker, self._assignments.assign(call), call)
        return True

    def _hand_out_lost(self) -> bool:
        """Gives lost calls to workers; says whether new ones may follow."""
        while (worker := self._free_worker()) is not None and (lost := self._assignments.next_lost()) is not None:
            self._give(worker, *lost)
        return True

    def _make_here(self, part: Part, stage: int) -> None:
        call = part.take(stage)
        if call is not None:
            run_here(part.plan, self.parts, call, self._memory.allocate)

    @property
    def _most_calls(self) -> int:
        """How many calls a worker may have: one in work for each read in flight, and finished ones ahead."""
        return self._reads.number + self._options.per_worker_buffer_size

    def _free_worker(self) -> WorkerT | None:
        """Returns the worker with the fewest calls, None if all have enough."""
        takers = (worker for worker in self._pool.workers if worker.takes_calls)
        worker = min(takers, key=lambda worker: len(worker.calls), default=None)
        return worker if worker is not None and len(worker.calls) < self._most_calls else None

    def _message_of(self, number: int, call: Call) -> tuple[int, int, int] | bytes | None:
        """Returns what to send of a call; None where it cannot be sent, and is completed with an error."""
        request = call.request
        if isinstance(request, Blocks):
            return request.start, request.stop, request.shard
        try:
            return dump_request(request, self._pool.classes)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            # What came from a worker need not be fit for the way to another.
            error.add_note(f"millstream: while it was pickled for a worker process, from {self.parts.describe(call)}.")
            self._assignments.complete(number, Elements.failed(error))
            return None

    def _complete(self, number: int, call: Call, seconds: float, unpack: Callable[[], Elements]) -> None:
        """Completes a call; what cannot be unpickled here is an error at its turn, as any other."""
        try:
            outputs = unpack()
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            if self._assignments.split(number):
                # Which of the blocks it is will show, and those before it will be delivered.
                return
            where = self._assignments.describe(number)
            error.add_note(f"millstream: while an output of a worker process was unpickled, from {where}.")
            outputs = Elements.failed(error)
        self._assignments.complete(number, outputs)
        if (part := self.parts.of(call)) is not None:
            part.size.note(call, seconds)

    def _note_life(self, worker: WorkerT) -> None:
        """Takes note that a worker has made something: workers can start, unless it has been there for long."""
        if worker.number > self._last_dead_at_start:
            self._deaths_at_start = 0

    def _note_death_at_start(self, worker: WorkerT, text: str) -> None:
        """Takes note that a worker has died before it began a call; deaths of idle workers are not counted.

        Raises:
            WorkerDiedError: too many have.
        """
        self._deaths_at_start += 1
        self._last_dead_at_start = worker.number
        if self._deaths_at_start >= MOST_DEATHS_AT_START + self._options.num_workers:
            raise WorkerDiedError(text)

    def _seconds_to_next_look(self) -> float:
        """Returns the seconds until some worker may have to be reported or given up, at most LOOK_SECONDS."""
        left = [
            (self._options.stall_timeout if worker.warned else self._warning_seconds) - worker.waited
            for worker in self._pool.workers
            if worker.calls
        ]
        return min([LOOK_SECONDS, *left])

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
                self._profiler.stalled(f"Worker {worker.pid} made no progress for {worker.waited:.1f} s.")
                self._warn_of_stall(worker)
