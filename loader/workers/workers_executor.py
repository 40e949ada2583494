"""The base of executors with workers: it dispatches calls and processes results, wherever the workers run.

Guarantees:
    * Calls belong to one pipeline, or to several of which one is fed by the others (see `SharedWorkers`).
    * User code runs in workers only, except for local operations (see `Pipeline.num_local`). The consumer's thread also
      copies elements into regrouped batches, if a stage does no more than that.
    * Each worker has as many calls as its buffer allows: one in work, and finished ones. If reads wait, it has further
      ones in work (see `ReadsInFlight`), as long as all of them together take few bytes.
    * The calls of a worker that dies are dispatched again. A call that kills its worker twice becomes an error that
      names its records (see `assignments`). So does a call for which the consumer has waited for the stall timeout.
    * Workers that repeatedly die while they start are an error, because all would.
"""

import abc
import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, final

from millstream.core.signals import interrupts, is_from_signal_handler
from millstream.core.warn import log_warning
from millstream.errors import WorkerStalledError
from millstream.loader.measuring import Profiler
from millstream.loader.pipeline.calls import Blocks, Call, Outputs, Position
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.scheduling.assignments import Assignments
from millstream.loader.scheduling.executor import Executor
from millstream.loader.scheduling.schedule import Schedule
from millstream.loader.threads import waiting
from millstream.loader.threads.executors import LocalCalls, run_here
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.transport.payload import dump_request, unpack_failure, unpack_failures
from millstream.loader.workers.any_worker import DeathsAtStart, ReadsInFlight, WorkerT
from millstream.loader.workers.call_runner import CallResult
from millstream.loader.workers.substreams import Substream, Substreams
from millstream.loader.workers.warm_pools import Pool, WarmPools, check_process, release

if TYPE_CHECKING:
    from millstream.loader.scheduling.feed import Feed
    from millstream.loader.scheduling.status import ExecutorStatus


@final
class SharedWorkers:
    """The pipelines that a set of workers starts with, and the executor that dispatches their calls."""

    def __init__(self) -> None:
        self._pipelines: dict[Hashable, Pipeline] | None = {}
        self._leader: weakref.ref[WorkersExecutor[Any]] | None = None
        self._start_leader: weakref.WeakMethod[Callable[[], None]] | None = None

    def register(self, name: Hashable, pipeline: Pipeline) -> None:
        """Adds a pipeline that the workers start with. They get those of iterators that are opened later on demand."""
        if self._pipelines is not None:
            self._pipelines.setdefault(name, pipeline)

    def take_pipelines(self, name: Hashable, first: Pipeline) -> dict[Hashable, Pipeline]:
        """Returns all pipelines that were registered, by name, after that of the leader."""
        others, self._pipelines = self._pipelines or {}, None
        return {name: first, **others}

    def start_on_demand(self, start_leader: Callable[[], None]) -> None:
        """Sets a method that starts the leader. A leader that draws all elements needs none. It is not kept alive."""
        self._start_leader = weakref.WeakMethod(start_leader)

    def lead(self, leader: "WorkersExecutor[Any]") -> None:
        """Makes an executor the leader, which dispatches the calls from now on."""
        self._leader = weakref.ref(leader)

    @property
    def has_led(self) -> bool:
        return self._leader is not None

    def fail(self, error: BaseException) -> None:
        """Ends the leader if an error may have left it in any state. One that draws elements handles most errors."""
        leader = self.current_leader
        if leader is not None and (self._start_leader is not None or interrupts(error)):
            leader.close()

    @property
    def current_leader(self) -> "WorkersExecutor[Any] | None":
        leader = None if self._leader is None else self._leader()
        return None if leader is None or leader.is_orphaned else leader

    @property
    def leader(self) -> "WorkersExecutor[Any]":
        """The executor of the consumer's pipeline, which dispatches all calls. It is started on demand."""
        start = None if self._start_leader is None else self._start_leader()
        if self.current_leader is None and start is not None:
            start()
        leader = self.current_leader
        if leader is None:
            raise AssertionError("the leader draws all elements")
        return leader


class WorkersExecutor(Executor, Generic[WorkerT]):
    """Dispatches calls to workers.

    Args:
        feed: the source of the elements of stage 0; None if they are read.
        shared_workers: the pipelines of the workers if they have several. This executor becomes their leader.
        local_reading: the threads of this process that run local operations in advance; None to run them on demand.

    Attributes:
        requests: not empty during a request, and after one that was interrupted: a message may have been sent half.
    """

    _are_local: ClassVar[bool]  # True if the workers are processes of this machine.
    _noun: ClassVar[str]  # For log and errors.

    def __init__(
        self,
        plan: Plan,
        position: Position,
        *,
        profiler: Profiler,
        pools: WarmPools[Any],
        options: MultiprocessingOptions,
        feed: "Feed | None" = None,
        schedule: Schedule | None = None,
        shared_workers: SharedWorkers | None = None,
        local_reading: ReadOptions | None = None,
    ) -> None:
        super().__init__(plan, position, feed, schedule)
        self._profiler = profiler
        self._memory = RecycledMemory()
        allocate, stall = self._memory.allocate, options.stall_timeout
        self._local = LocalCalls(plan, self._schedule, allocate, self, reading=local_reading, stall_timeout=stall)
        self._pool: Pool[WorkerT] = pools.take()
        self.requests: list[None] = []
        # `break` in a loop drops its iterator. The next one finds the workers warm.
        self._release = functools.partial(release, weakref.ref(pools), weakref.ref(self._pool), self.requests)
        self._returning = weakref.finalize(self, self._release)
        self._returning.atexit = False
        if plan.source_is_stream:
            # The next iterator has to find the beginning of the stream that these workers have read from.
            self._returning.detach()
        self._options = options
        max_bytes = min(self._pool.max_bytes, self._local.max_bytes)
        self._own = Substream(plan, self._schedule, profiler, is_fed=feed is not None, max_bytes=max_bytes)
        self._take_local = functools.partial(self._own.take, None)
        self.substreams = Substreams(self._own, self._pool.max_bytes, self._pool.flight_bytes)
        self._assignments = Assignments(self.substreams, self._pool.call_numbers)
        self._reads = ReadsInFlight(self._pool.max_reads)
        self._deaths_at_start = DeathsAtStart(options.num_workers)
        if shared_workers is not None:
            shared_workers.lead(self)

    @property
    def is_orphaned(self) -> bool:
        return self._local.is_stopped

    @property
    def runs_user_code_here(self) -> bool:
        return self._own.is_fed or self._plan.pipeline.num_local > 0

    def next_outputs(self) -> Outputs | None:
        self.requests.append(None)
        outputs = super().next_outputs()
        self.requests.clear()
        return outputs

    def admit(self, substream: Substream, name: Hashable) -> None:
        """Adds a substream whose calls this executor dispatches from now on, given the name of its pipeline."""
        raise AssertionError(f"only worker processes run several pipelines: {substream}, {name}")

    def work_for(self, substream: Substream) -> None:
        with self.substreams.waiting_for(substream):
            self._dispatch()
            if substream.in_flight or self._free_worker() is None:
                self._receive(self._seconds_to_next_check())
                self._check_stalls()

    def work_ahead(self) -> None:
        """Dispatches the next calls of other substreams, if no outputs of its own will be requested."""
        if self._schedule.exhausted:
            self._receive(0.0)
            self._dispatch()

    @property
    def is_ours(self) -> bool:
        """True in the process that started the workers."""
        return self._pool.is_ours

    @property
    def are_ready(self) -> bool:
        """True if all workers are there, and wait for calls."""
        raise AssertionError("only the number of processes changes")

    def resize(self, num_workers: int) -> None:
        """Changes the number of workers. Raises an OSError if the system has no process left."""
        raise AssertionError(f"only the number of processes changes: {num_workers}")

    def receive_arrived(self) -> None:
        """Processes what workers have sent, without waiting."""
        check_process(self._pool)
        self._receive(0.0)

    def finish_call(self) -> bool:
        if not self._assignments:
            return False
        check_process(self._pool)
        self._receive(self._seconds_to_next_check())
        self._check_stalls()
        self._dispatch_lost()
        return True

    def status(self) -> "ExecutorStatus":
        # Until the consumer asks for outputs, a finished call is recognised by the call that its worker began next.
        from millstream.loader.scheduling.status import WorkerStatus  # noqa: PLC0415  (lazy: only reports need it)

        workers, finished, made = [], 0, super().status()
        for worker in list(self._pool.workers):
            calls, begun = worker.calls.copy(), self._current_call(worker)
            finished += calls.index(begun) if begun in calls else 0
            call = self._assignments.call(begun) if begun is not None and begun in calls else None
            text = None if call is None else self.substreams.blocks_text(call)
            workers.append(
                WorkerStatus(worker.number, worker.pid, self._are_local, len(calls), text, worker.clock.waited)
            )
        return dataclasses.replace(made, ready=made.ready + finished, workers=tuple(workers))

    def start(self) -> None:
        check_process(self._pool)
        self.requests.append(None)
        self._dispatch()
        self.requests.clear()

    def pause(self) -> None:
        """Releases the pool to the next iterator, with warm workers. Calls in work are finished and dropped."""
        self._local.close()  # First: after an interruption, nothing else would end its threads.
        self._returning.detach()
        self._release()

    def close(self, deadline: float | None = None) -> None:
        own = self._local.stop()
        self._returning.detach()
        self._pool.stop()
        self._local.join(own if deadline is None else deadline)

    @abc.abstractmethod
    def _submit(self, worker: WorkerT, number: int, call: Call) -> None:
        """Sends a call to a worker. A call that cannot be sent is completed with an error."""

    @abc.abstractmethod
    def _receive(self, seconds: float) -> None:
        """Waits up to `seconds` for events, and processes all that have arrived."""

    @abc.abstractmethod
    def _explain_stall(self, worker: WorkerT) -> str:
        """Returns the last sentences of the error of a stalled worker: where to find its stacks."""

    def _state_of(self, worker: WorkerT) -> str:  # noqa: ARG002  (some workers can tell)
        return ""

    def begin_request(self) -> None:
        check_process(self._pool)
        self._receive(0.0)
        self._dispatch()
        self._local.begin()
        self._has_run_local = False

    def run_local(self) -> bool:
        ran = self._local.run_next(self._take_local)
        if ran is None:
            return False
        self._own.size.record(*ran)
        if self._has_run_local:
            self._receive(0.0)
            self._dispatch()
        self._has_run_local = True
        return True

    def advance(self) -> None:
        start = time.perf_counter()
        self._receive(self._seconds_to_next_check())
        self._reads.waited(time.perf_counter() - start)
        self._check_stalls()
        self._dispatch()

    def end_request(self) -> None:
        self._reads.delivered(time.perf_counter())
        self._dispatch()
        self._local.submit(self._take_local)

    def _current_call(self, worker: WorkerT) -> int | None:  # noqa: ARG002  (some workers can tell)
        """Returns the number of the call that a worker is computing, or None if that is unknown. Thread-safe."""
        return None

    def _dispatch(self) -> None:
        if self._dispatch_lost():
            for substream in self.substreams.by_urgency():
                if not self._dispatch_from(substream):
                    self.substreams.wake(substream)
                    return

    def _dispatch_from(self, substream: Substream) -> bool:
        """Returns False if no worker accepts more."""
        while (stage := substream.schedule.next_stage) is not None:
            if not substream.plan.stages[stage].runs_user_code:
                if (call := substream.take(stage)) is not None:
                    run_here(substream.plan, self.substreams, call, self._memory.allocate, self._local.stall_timeout)
                continue
            worker = self._free_worker()
            if worker is None:
                return False
            if stage == 0 and not self._may_begin(substream):
                return True
            call = substream.take(stage)
            if call is None:
                continue
            if substream.is_fed and stage == 0:
                # Drawing may have dispatched other calls meanwhile, or the worker may have died.
                worker = self._free_worker()
            if worker is None:
                self._assignments.postpone(call)
                return False
            self._submit(worker, self._assignments.assign(call), call)
        return True

    def _may_begin(self, substream: Substream) -> bool:
        buffered = 1 + self._options.per_worker_buffer_size
        count = len(self._pool.workers)
        return self.substreams.may_begin(substream, self._max_calls * count, buffered * count)

    def _dispatch_lost(self) -> bool:
        """Returns False if new calls have to wait."""
        while self._assignments.has_lost and (worker := self._free_worker()) is not None:
            if (lost := self._assignments.next_lost()) is not None:
                self._submit(worker, *lost)
        return True

    @property
    def _max_calls(self) -> int:
        return self._reads.number + self._options.per_worker_buffer_size

    def _free_worker(self) -> WorkerT | None:
        """Returns the worker with the fewest calls. None if all have enough."""
        free, fewest = None, self._max_calls
        for worker in self._pool.workers:
            if len(worker.calls) < fewest and worker.accepts_calls:
                free, fewest = worker, len(worker.calls)
        return free

    def _message_of(self, number: int, call: Call) -> tuple[int, int, int] | bytes | None:
        """Returns the message of a call, or None if it cannot be pickled. The call is then completed with an error."""
        request = call.request
        if isinstance(request, Blocks):
            return request.start, request.stop, request.shard
        try:
            return dump_request(request, self._pool.classes)  # type: ignore[arg-type]  # Local operations run here.
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            # Elements that came from one worker may still fail on their way to another.
            where = self.substreams.describe(call)
            error.add_note(f"millstream: while it was pickled for a worker process, from {where}.")
            self._assignments.complete(number, Elements.failed(error))
            return None

    def _complete(self, number: int, call: Call, made: CallResult[Any], unpack: Callable[[], Elements]) -> None:
        """Completes a call. If its outputs cannot be unpickled, the consumer gets that error in order."""
        try:
            outputs = unpack()
            if (failure := made.failure) is not None:
                outputs.error, outputs.at = unpack_failure(failure, self._pool.classes), failure.at
            outputs.failures = unpack_failures(made.failures, self._pool.classes)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            if self._assignments.split(number):
                # Each block is computed again, so that only the faulty one fails.
                return
            where = self._assignments.describe(number)
            error.add_note(f"millstream: while an output of a worker process was unpickled, from {where}.")
            outputs = Elements.failed(error)
        self._assignments.complete(number, outputs)
        if (substream := self.substreams.find(call)) is not None:
            substream.size.record(call, made.seconds + made.read_seconds)

    def _seconds_to_next_check(self) -> float:
        """Returns the seconds until a worker may have to be reported or given up, at most a slice of the wait."""
        return min([waiting.SLICE_SECONDS, *[worker.clock.seconds for worker in self._pool.workers if worker.calls]])

    def _check_stalls(self) -> None:
        for worker in [worker for worker in self._pool.workers if worker.calls]:
            if worker.clock.is_over:
                self._give_up(worker)
            elif worker.clock.is_due():
                self._profiler.stalled(f"Worker {worker.pid} made no progress for {worker.clock.waited:.1f} s.")
                what = f"{self._assignments.describe(worker.calls[0])}{self._state_of(worker)}"
                log_warning(
                    f"{self._noun} {worker.pid} has been busy for {worker.clock.waited:.1f} s with {what}. "
                    f"{self._options.stall_limit}"
                )

    def _give_up(self, worker: WorkerT) -> None:
        waited, (first, *lost) = worker.clock.waited, worker.calls
        name = f"{self._noun.capitalize()} {worker.pid}"
        self._profiler.stalled(f"{name} was given up after {waited:.1f} s.", is_known=worker.clock.is_reported)
        error = WorkerStalledError(
            f"{name} has made no progress for {waited:.1f} s (stall_timeout), with "
            f"{self._assignments.describe(first)}. {self._explain_stall(worker)}"
        )
        # First, because a replacement may fail, and another one may succeed later.
        self._assignments.complete(first, Elements.failed(error))
        self._assignments.lose(lost)
        self._pool.replace(worker)
        self._dispatch_lost()


@final
class SubstreamExecutor(Executor):
    """Runs a pass over one of the other pipelines. The leader dispatches its calls."""

    def __init__(
        self,
        plan: Plan,
        position: Position,
        *,
        profiler: Profiler,
        shared_workers: SharedWorkers,
        name: Hashable,
        feed: "Feed | None",
    ) -> None:
        super().__init__(plan, position, feed)
        self._substream = Substream(plan, self._schedule, profiler, is_fed=feed is not None)
        self._name = name
        self._shared_workers = shared_workers
        self._admitted_by: weakref.ref[WorkersExecutor[Any]] | None = None

    @property
    def is_orphaned(self) -> bool:
        if self._admitted_by is None:
            return False
        leader = self._admitted_by()
        return leader is None or leader is not self._shared_workers.current_leader

    @property
    def runs_user_code_here(self) -> bool:
        return self._substream.is_fed

    def start(self) -> None:
        try:
            self.begin_request()
        except BaseException as error:
            self._shared_workers.fail(error)
            raise

    def next_outputs(self) -> Outputs | None:
        try:
            outputs = super().next_outputs()
            if outputs is not None:
                count = len(outputs.values) - outputs.first
                self._shared_workers.leader.substreams.record_drawn(self._substream, count)
        except BaseException as error:
            self._shared_workers.fail(error)
            raise
        return outputs

    def close(self, deadline: float | None = None) -> None:  # noqa: ARG002  (it waits for nothing)
        """Drops all work. The workers stay."""
        leader = None if self._admitted_by is None else self._admitted_by()
        if leader is not None:
            leader.substreams.remove(self._substream)

    def begin_request(self) -> None:
        leader = self._shared_workers.leader
        if self._admitted_by is None:
            leader.admit(self._substream, self._name)
            self._admitted_by = weakref.ref(leader)

    def advance(self) -> None:
        self._shared_workers.leader.work_for(self._substream)

    def end_request(self) -> None:
        self._shared_workers.leader.work_ahead()
