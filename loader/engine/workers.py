"""Places in other processes: calls are sent to workers, and their results are taken, wherever the workers run.

Guarantees:
    * Each worker has as many calls as its buffer allows: one in work, and finished ones. If reads wait, it has further
      ones in work (see `ReadsInFlight`), as long as all of them together take few bytes.
    * The calls of a worker that dies are sent again. A call that kills its worker twice becomes an error that names its
      records (see `assignments`). So does a call for which the consumer has waited for the stall timeout.
    * Workers that repeatedly die while they start are an error, because all would.
"""

import abc
import functools
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, final

from millstream.core.signals import is_from_signal_handler
from millstream.core.warn import log_warning
from millstream.errors import WorkerDiedError, WorkerStalledError
from millstream.loader.engine.places import Here, Place
from millstream.loader.engine.substreams import Substream, Substreams
from millstream.loader.measuring import ExecutorStatus, Profiler, WorkerStatus
from millstream.loader.pipeline.calls import Blocks, Call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.assignments import Assignments
from millstream.loader.threads import waiting
from millstream.loader.threads.options import MultiprocessingOptions
from millstream.loader.threads.shared_threads import Concurrency
from millstream.loader.transport.payload import dump_request, unpack_failure, unpack_failures
from millstream.loader.workers.call_runner import CallResult
from millstream.loader.workers.pools import Pool, WarmPools, WorkerT, release

if TYPE_CHECKING:
    from millstream.loader.engine.engine import Engine


IDLE_CALLS = 4
"""After this many consecutive calls that mostly waited for storage, a worker gets several reads in flight."""

IDLE_SHARE = 0.5
"""A call mostly waits if its worker is idle for more than this share of its time, and for at least IDLE_SECONDS."""

IDLE_SECONDS = 0.004
"""A shorter wait is not worth another thread, and may be a wait for a core."""

MAX_DEATHS_AT_START = 8
"""Limit for consecutive deaths of new workers before a call, in addition to the number of workers."""


@final
class ReadsInFlight:
    """Begins with one read, because several cost memory. Searches for the best `number` once reads wait.

    Attributes:
        number: the number of reads in flight per worker.
        waited: the seconds that the consumer has waited since the last outputs were delivered.
    """

    def __init__(self, limit: int) -> None:
        self._concurrency = Concurrency(limit)
        self._idle_calls = 0
        self.waited = 0.0
        self._num_calls = self._num_blocks = 0
        self.number = 1

    def record(self, num_blocks: int, seconds: float, idle_seconds: float) -> None:
        """Records a call: its blocks, its duration, and the part of it in which the worker did not compute."""
        self._num_calls += 1
        self._num_blocks += num_blocks
        if self._idle_calls < IDLE_CALLS:
            is_idle = idle_seconds > max(IDLE_SECONDS, IDLE_SHARE * seconds)
            self._idle_calls = self._idle_calls + 1 if is_idle else 0
            if self._idle_calls == IDLE_CALLS:
                self.number = self._concurrency.level

    def delivered(self, now: float, num_workers: int) -> None:
        """Records that these outputs were delivered at time `now`, in seconds, and the present number of workers."""
        if self._idle_calls >= IDLE_CALLS:
            # Each worker has this number in flight.
            self._concurrency.delivered(now, self.waited, self._num_calls / max(1, num_workers), self._num_blocks)
            self.number = self._concurrency.level
        self.waited, self._num_calls, self._num_blocks = 0.0, 0, 0


@final
class DeathsAtStart:
    """The number of new workers that have died before their first call, since one has produced a result."""

    def __init__(self, num_workers: int) -> None:
        self.count = 0
        self._limit = MAX_DEATHS_AT_START + num_workers
        self._last_number = -1

    def record_life(self, number: int) -> None:
        """Resets the count. The result of a worker older than the last dead one proves nothing."""
        if number > self._last_number:
            self.count = 0

    def record_death(self, number: int, text: str) -> None:
        """Counts a death of a worker that was not idle. Too many are a WorkerDiedError with this text."""
        self.count += 1
        self._last_number = number
        if self.count >= self._limit:
            raise WorkerDiedError(text)


class Workers(Place, Generic[WorkerT]):
    """Runs calls of one or several streams in the workers of a pool.

    Args:
        owner: the object with which this place ends. The workers then return to their pools, unless a request was
            interrupted.
        requests: not empty during a request, and after one that was interrupted.
        here: the consumer's thread, which copies elements into regrouped batches if a stage does no more than that.
        returns: False for workers that no other iterator can use.

    Attributes:
        substreams: the streams whose calls run here.
        reads: the number of reads in flight per worker.
    """

    _are_local: ClassVar[bool]  # True if the workers are processes of this machine.
    _noun: ClassVar[str]  # For log and errors.

    def __init__(
        self,
        owner: Any,
        requests: list[None],
        here: Here,
        *,
        profiler: Profiler,
        pools: WarmPools[Any],
        options: MultiprocessingOptions,
        returns: bool = True,
    ) -> None:
        self._here = here
        self._profiler = profiler
        self._pool: Pool[WorkerT] = pools.take()
        # `break` in a loop drops its iterator. The next one finds the workers warm.
        self._release = functools.partial(release, weakref.ref(pools), weakref.ref(self._pool), requests)
        self._returning = weakref.finalize(owner, self._release)
        self._returning.atexit = False
        if not returns:
            self._returning.detach()
        self._options = options
        self.substreams = Substreams(self._pool.max_bytes, self._pool.flight_bytes)
        self._assignments = Assignments(self.substreams, self._pool.call_numbers)
        self._is_issuing = False
        self.reads = ReadsInFlight(self._pool.max_reads)
        self._deaths_at_start = DeathsAtStart(options.num_workers)

    @property
    def in_flight(self) -> int:
        return len(self._assignments)

    @property
    def num_workers(self) -> int:
        return len(self._pool.workers)

    def admitted(
        self, engine: "Engine", name: Hashable, profiler: Profiler | None = None, *, is_last: bool = False
    ) -> Substream:
        """Returns the stream of an engine, whose calls run here from now on, given the name of its pipeline.

        `is_last` is true for the stream whose outputs the trainer gets.
        """
        substream = Substream.in_workers(
            engine.plan,
            engine.schedule,
            profiler or self._profiler,
            max_bytes=min(self._pool.max_bytes, engine.local.max_bytes),
        )
        substream.pipeline = self._load(name, substream.plan)
        self.substreams.add(substream, is_last=is_last)
        return substream

    @property
    def are_usable(self) -> bool:
        """True in the process that started the workers, until they are closed."""
        return self._pool.is_usable

    @property
    def are_ready(self) -> bool:
        """True if all workers are there, and wait for calls."""
        raise AssertionError("only the number of processes changes")

    def resize(self, num_workers: int) -> None:
        """Changes the number of workers. Raises an OSError if the system has no process left."""
        raise AssertionError(f"only the number of processes changes: {num_workers}")

    def check_process(self) -> None:
        if not self._pool.is_ours:
            raise RuntimeError(
                "This iterator and its worker processes belong to the process that created them. Call iter(loader) in "
                "the forked process."
            )

    def submit(self, call: Call) -> None:
        """Sends a call to a worker. Without room, it is sent later, before others."""
        worker = self.free_worker()
        if worker is None:
            self._assignments.postpone(call)
        else:
            self._send(worker, self._assignments.assign(call), call)

    def submit_lost(self) -> bool:
        """Sends calls again whose workers have died. Returns False if other calls have to wait."""
        while self._assignments.lost and (worker := self.free_worker()) is not None:
            if (lost := self._assignments.next_lost()) is not None:
                self._send(worker, *lost)
        return True

    def issue(self, waited_for: Substream | None = None) -> None:
        """Begins the calls that workers accept, first those of a stream that is waited for."""
        if self._is_issuing:
            # A stream that is drawn from, in the loop below, which continues with the others.
            if waited_for is not None and not self._issue_from(waited_for):
                self.substreams.wake(waited_for)
            return
        self._is_issuing = True
        try:
            # If other calls have to wait, no stream is due.
            for substream in self.substreams.by_urgency(waited_for) if self.submit_lost() else ():
                if not self._issue_from(substream):
                    self.substreams.wake(substream)
                    return
        finally:
            self._is_issuing = False

    def accept(self) -> None:
        self._receive(0.0)

    def wait(self) -> None:
        """Waits for a sign of life, for a bounded time. Workers that give none are reported, and given up."""
        self._receive(min([waiting.SLICE_SECONDS, *[one.clock.seconds for one in self._pool.workers if one.calls]]))
        self._check_stalls()
        self.submit_lost()

    def status(self, others: ExecutorStatus) -> ExecutorStatus:
        # Until the consumer asks for outputs, a finished call is recognised by the call that its worker began next.
        workers, finished = [], 0
        for worker in list(self._pool.workers):
            calls, begun = worker.calls.copy(), self._current_call(worker)
            finished += calls.index(begun) if begun in calls else 0
            call = self._assignments.call(begun) if begun is not None and begun in calls else None
            text = None if call is None else self.substreams.blocks_text(call)
            workers.append(WorkerStatus(worker.number, worker.pid, self._are_local, len(calls), text))
        return others._replace(ready=others.ready + finished, workers=tuple(workers))

    def pause(self) -> None:
        """Releases the pool to the next iterator, with warm workers. Calls in work are finished and dropped."""
        self._returning.detach()
        self._release()

    def close(self) -> None:
        self._returning.detach()
        self._pool.stop()

    @abc.abstractmethod
    def _load(self, name: Hashable, plan: Plan) -> int:
        """Returns the number of a pipeline in the workers, which get it if they lack it."""

    @abc.abstractmethod
    def _send(self, worker: WorkerT, number: int, call: Call) -> None:
        """Sends a call to a worker. A call that cannot be sent is completed with an error."""

    @abc.abstractmethod
    def _receive(self, seconds: float) -> None:
        """Waits up to `seconds` for events, and processes all that have arrived."""

    @abc.abstractmethod
    def _explain_stall(self, worker: WorkerT) -> str:
        """Returns the last sentences of the error of a stalled worker: where to find its stacks."""

    def _state_of(self, worker: WorkerT) -> str:  # noqa: ARG002  (some workers can tell)
        return ""

    def _current_call(self, worker: WorkerT) -> int | None:  # noqa: ARG002  (some workers can tell)
        """Returns the number of the call that a worker is computing, or None if that is unknown. Thread-safe."""
        return None

    def _issue_from(self, substream: Substream) -> bool:
        """Returns False if no worker accepts more."""
        while (stage := substream.schedule.next_stage) is not None:
            runs_there = substream.plan.stages[stage].runs_user_code
            if runs_there and self.free_worker() is None:
                return False
            if stage == 0:
                num_workers, buffer = self.num_workers, self._options.per_worker_buffer_size
                num_calls = (self.reads.number + buffer) * num_workers
                if not self.substreams.may_begin(substream, num_calls, (1 + buffer) * num_workers):
                    return True
            if (call := substream.take(stage)) is None:
                continue
            substream.in_flight += 1
            if runs_there:
                self.submit(call)
            else:
                self._here.run(substream.plan, call, self.substreams)
        return True

    def free_worker(self) -> WorkerT | None:
        """Returns the worker with the fewest calls. None if all have enough."""
        free, fewest = None, self.reads.number + self._options.per_worker_buffer_size
        for worker in self._pool.workers:
            if len(worker.calls) < fewest and worker.accepts_calls:
                free, fewest = worker, len(worker.calls)
        return free

    def _message_of(self, number: int, call: Call) -> tuple[int, int, int] | bytes | None:
        """Returns the message of a call, or None if it cannot be pickled. The call is then completed with an error."""
        request = call.first_request
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
            if made.failures:
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
        self.submit_lost()
