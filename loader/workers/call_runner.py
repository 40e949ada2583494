"""Calls in a worker: their outputs are computed, and serialized for the parent.

Guarantees:
    * All outputs of a call are pickled before any is announced. A worker never sends a result and then fails.
    * A process that user code has forked never answers for the worker. It ends when user code returns.
    * Operations run in the thread that calls `make`, unless the source reads record by record. Only reads overlap.
"""

import dataclasses
import functools
import os
import queue
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, final

from millstream.core.columnar import Allocate
from millstream.loader.measuring import HAND_OVER, Profiler
from millstream.loader.pipeline.calls import Blocks
from millstream.loader.pipeline.elements import Elements, FailedRecord, Location, describe_origin
from millstream.loader.pipeline.pipeline import Pipeline, Variant
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.threads.shared_work import RecordTime, SharedWork
from millstream.loader.transport.payload import Failure, load_request, pack_failure, unpicklable_leaves
from millstream.loader.transport.pickling import ClassTable

Packed = TypeVar("Packed")
PrepareBlocks = Callable[..., Elements]

MAX_EPOCHS = 2
"""The maximum number of epochs of a pipeline whose plans a worker keeps."""


class CallResult(NamedTuple, Generic[Packed]):
    """The outputs of a call, and the error in place of the next output, if any.

    Attributes:
        packed: the serialized values and origins.
        seconds: the duration of the call, without a read in advance.
        idle_seconds: the part of it in which no thread of the process computed, probably because a read waited.
        read_seconds: the duration of the read in advance; 0 without one.
        stages: the part of `seconds` that each stage took, in the order of the profiler.
        begun: the start of the call on the clock of `time.perf_counter`, which all processes of a machine share.
        failures: the records that failed and were skipped or replaced, with serialized errors.
    """

    packed: Packed
    failure: Failure | None
    seconds: float
    idle_seconds: float
    read_seconds: float
    stages: tuple[float, ...]
    begun: float
    failures: tuple[FailedRecord, ...]


@final
class AdvanceRead:
    """The records of a call, read by another thread before the call runs."""

    def __init__(self) -> None:
        # None before the read ends, and if it failed for a range of several blocks: the call reads again, and reports
        # the error of the right block.
        self.records: Elements | None = None
        self.seconds = 0.0
        self.is_done = False


@final
@dataclasses.dataclass(eq=False)
class CallRunner(Generic[Packed]):
    """Computes the outputs of calls in this process."""

    plan: Plan
    profiler: Profiler
    classes: ClassTable
    readers: ReaderThreads
    allocate: Allocate
    pack: Callable[[Elements], Packed]
    record_time: RecordTime = dataclasses.field(default_factory=RecordTime)
    process: int = dataclasses.field(default_factory=os.getpid)

    def read(self, message: tuple[int, int, int], done: Callable[[], object]) -> AdvanceRead:
        """Starts reading the records of a call in another thread, which calls `done` at the end."""
        reading = AdvanceRead()

        def job() -> None:
            read = functools.partial(self._read_in_advance, *message)
            reading.records, reading.seconds = self.readers.run_timed(read, Elements.failed)
            reading.is_done = True
            done()

        self.readers.submit(job)
        return reading

    def make(self, message: tuple[int, int, int] | bytes, reading: AdvanceRead | None = None) -> CallResult[Packed]:
        """Computes the outputs of a call, of which the records may have been read in advance.

        The message is the first block, the block after the last, and the logical shard; or a pickled `Group`.
        """
        start, start_use = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        try:
            run = self._perform(message, None if reading is None else reading.records)
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001  (any error reaches the consumer in order)
            run = Elements.failed(error)
        leave_if_forked(self.process, status=int(run.error is not None))
        if isinstance(run.error, SystemExit):
            # Raised in a reader thread. It ends the process, whichever thread runs user code.
            raise run.error
        if run.error is not None:
            explain_debugger(run.error)
        begin = time.perf_counter()
        try:
            packed = self.pack(run)
        except Exception as error:  # noqa: BLE001  (pickling user objects may raise anything)
            failed, run = run.failures, without_unpicklable(run, error)
            run.failures = failed
            packed = self.pack(run)
        failure = None if run.error is None else pack_failure(run.error, self.classes)._replace(at=run.at)
        failures = tuple(failed._replace(error=pack_failure(failed.error, self.classes)) for failed in run.failures)
        end = time.perf_counter()
        self.profiler.add(HAND_OVER, end - begin)
        idle = _idle_seconds(end - start, start_use, resource.getrusage(resource.RUSAGE_SELF))
        read_seconds = 0.0 if reading is None else reading.seconds
        return CallResult(packed, failure, end - start, idle, read_seconds, self.profiler.take(), start, failures)

    def _read_in_advance(self, start: int, stop: int, shard: int) -> Elements | None:
        work = SharedWork(self.readers, self.record_time)
        if not self.plan.batched_source:
            return work.prepare_blocks(self.plan, start, stop, shard)
        try:
            with work.for_sources():
                return self.plan.read_blocks(start, stop, shard)
        except Exception:  # noqa: BLE001  (of the sampler)
            return None

    def _perform(self, message: tuple[int, int, int] | bytes, records: Elements | None) -> Elements:
        request = load_request(message, self.classes) if isinstance(message, bytes) else Blocks(*message)
        if records is not None:
            prepared = self.plan.run_record_steps(records) if self.plan.batched_source else records
            return self.plan.make(request, self.allocate, lambda *_: prepared)
        if self.readers.size == 0:
            return self.plan.make(request, self.allocate)
        work = SharedWork(self.readers, self.record_time)
        if self.plan.batched_source:
            with work.for_sources():
                return self.plan.make(request, self.allocate)
        prepare_blocks: PrepareBlocks = functools.partial(work.prepare_blocks, self.plan)
        if self.plan.source_may_depend_on_thread:
            prepare_blocks = functools.partial(_in_thread_of, self.readers, prepare_blocks)
        return self.plan.make(request, self.allocate, prepare_blocks)


def runner_of_epochs(
    complete: Pipeline,
    classes: ClassTable,
    *,
    readers: ReaderThreads,
    allocate: Allocate,
    pack: Callable[[Elements], Packed],
) -> Callable[[Variant], CallRunner[Packed]]:
    """Returns a function from an epoch or changes, or None for the complete order, to its call runner.

    That of None exists already.

    `classes` have crossed by value with the pipeline. `pack` raises if outputs cannot be pickled.
    """
    profiler = Profiler(complete.labels, measures_costs=complete.measures_costs)

    @functools.lru_cache(maxsize=1 + MAX_EPOCHS)
    def runner_of(variant: Variant) -> CallRunner[Packed]:
        plan = Plan(complete.of_variant(variant), profiler.timed)
        return CallRunner(plan, profiler, classes, readers, allocate, pack)

    runner_of(None)
    return runner_of


def _idle_seconds(seconds: float, start: resource.struct_rusage, end: resource.struct_rusage) -> float:
    """Returns the seconds in which this process waited for something other than a core.

    A process that is only preempted never gives up a core voluntarily. On a busy machine, a call that computes is
    therefore not mistaken for one that waits for storage.
    """
    if end.ru_nvcsw == start.ru_nvcsw:
        return 0.0
    return max(0.0, seconds - (end.ru_utime - start.ru_utime) - (end.ru_stime - start.ru_stime))


def _in_thread_of(readers: ReaderThreads, prepare_blocks: PrepareBlocks, *blocks: Any) -> Elements:
    """Prepares blocks in a reader thread, because the source may depend on the thread that reads it."""
    outcome: queue.SimpleQueue[Elements] = queue.SimpleQueue()
    readers.submit(lambda: outcome.put(readers.run_timed(lambda: prepare_blocks(*blocks), Elements.failed)[0]))
    return outcome.get()


def leave_if_forked(owner: int, status: int = 0) -> None:
    """Ends a process that user code has forked. Only the worker answers its parent."""
    if os.getpid() != owner:
        os._exit(status)


def explain_debugger(error: BaseException) -> None:
    debugger = sys.modules.get("bdb")
    if debugger is not None and isinstance(error, debugger.BdbQuit):
        error.add_note(
            "millstream: a worker process has no terminal for a debugger. To debug, pass debug=True to the DataLoader; "
            "in a chain, omit mp_prefetch and use to_iter_dataset(ReadOptions(num_threads=0))."
        )


def without_unpicklable(run: Elements, error: BaseException) -> Elements:
    """Returns a run up to its first element that cannot be pickled, with an error that names the unpicklable leaves."""
    for row, value in enumerate(run.values):
        if leaves := unpicklable_leaves(value):
            refusal = TypeError(
                "The pipeline's output cannot be sent from a worker process, because parts of it cannot be pickled: "
                f"{'; '.join(leaves)}. "
                "Convert them to arrays, numbers or strings in an operation, or use no workers."
            )
            refusal.add_note(f"millstream: at {describe_origin(run.origins, row)}.")
            return Elements(run.values[:row], run.origins.take(slice(row)), refusal, Location.of(run.origins, row))
    return Elements.failed(error)
