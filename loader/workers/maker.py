"""What a worker does with a call: make its outputs, and see to it that they can be sent.

Guarantees:
    * What a call makes is pickled before anything of it is announced: a worker never sends an answer and then fails.
    * A process that user code has forked never answers in the worker's name: it ends when the user's code returns.
    * Operations run in the thread that calls `make`, unless the source reads record by record. Only reads overlap.
"""

import functools
import os
import queue
import resource
import sys
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar, final

from millstream.columnar import Allocate
from millstream.loader.pipeline.elements import Elements, FailedRecord, describe_origin
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.requests import Blocks
from millstream.loader.threads.profiler import HAND_OVER, Profiler
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.threads.sliced_reading import SlicedReading
from millstream.loader.transport.carried_elements import load_request
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.payload import Failure, pack_failure, unpicklable_leaves

Packed = TypeVar("Packed")
PrepareBlocks = Callable[[int, int, int], Elements]


class Made(NamedTuple, Generic[Packed]):
    """The outputs of a call, and what was raised instead of the next one, if anything.

    Attributes:
        packed: the values and origins.
        failure: the error at the end of the outputs.
        seconds: how long it took, without a read that was made in advance.
        idle_seconds: of these, how long no thread of the process computed: a read waited for storage, most likely.
        read_seconds: how long the read took that was made in advance; 0 without one.
        stages: of these, how long each part of the pipeline took, in the order of the profiler.
        begun: when it began, on the clock of `time.perf_counter`, which all processes of a machine share.
        failures: the records that failed, and were left out or replaced, with packed errors.
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
    """The records of a call, read by another thread before the call's turn.

    Attributes:
        records: the records; None before, and if the call has to find the sampler's error itself.
        seconds: how long the read took.
        is_done: whether it has ended.
    """

    def __init__(self) -> None:
        self.records: Elements | None = None
        self.seconds = 0.0
        self.is_done = False


@final
class Maker(Generic[Packed]):
    """Makes the outputs of calls in this process.

    Args:
        plan: what they are outputs of.
        profiler: measures the plan.
        classes: those that crossed by value with the pipeline.
        readers: the threads that may read.
        allocate: gives the memory for batches.
        pack: makes outputs ready to be sent; raises where they cannot be pickled.
    """

    def __init__(
        self,
        plan: Plan,
        profiler: Profiler,
        classes: ClassTable,
        *,
        readers: ReaderThreads,
        allocate: Allocate,
        pack: Callable[[Elements], Packed],
    ) -> None:
        self._plan = plan
        self._profiler = profiler
        self._classes = classes
        self._readers = readers
        self._allocate = allocate
        self._pack = pack
        self._process = os.getpid()

    def read(self, message: tuple[int, int, int], done: Callable[[], object]) -> AdvanceRead:
        """Begins to read the records of a call in another thread, which calls `done` afterwards."""
        reading = AdvanceRead()

        def read() -> Elements:
            return self._read_in_advance(*message)

        def job() -> None:
            records, reading.seconds = self._readers.timed(read)
            if not isinstance(records.error, _SamplerFailed):
                reading.records = records
            reading.is_done = True
            done()

        self._readers.submit(job)
        return reading

    def make(self, message: tuple[int, int, int] | bytes, reading: AdvanceRead | None = None) -> Made[Packed]:
        """Returns what comes of a call.

        Args:
            message: the first of its blocks, the one after the last, and of which logical shard; or a pickled
                `Group`.
            reading: its records, if they were read in advance.
        """
        start, start_use = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        try:
            run = self._perform(message, None if reading is None else reading.records)
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001  (whatever it is, the consumer gets it at its turn)
            run = Elements.failed(error)
        leave_if_forked(self._process, status=int(run.error is not None))
        if isinstance(run.error, SystemExit):
            # Caught in a read thread: to leave is to leave, whichever thread runs the user's code.
            raise run.error
        if run.error is not None:
            explain_debugger(run.error)
        begin = time.perf_counter()
        try:
            packed = self._pack(run)
        except Exception as error:  # noqa: BLE001  (user objects may do anything when pickled)
            failed, run = run.failures, without_unpicklable(run, error)
            run.failures = failed
            packed = self._pack(run)
        failure = None if run.error is None else pack_failure(run.error, self._classes)
        failures = tuple(one._replace(error=pack_failure(one.error, self._classes)) for one in run.failures)
        end = time.perf_counter()
        self._profiler.add(HAND_OVER, end - begin)
        idle = _idle_seconds(end - start, start_use, resource.getrusage(resource.RUSAGE_SELF))
        read_seconds = 0.0 if reading is None else reading.seconds
        return Made(packed, failure, end - start, idle, read_seconds, self._profiler.take(), start, failures)

    def _read_in_advance(self, start: int, stop: int, shard: int) -> Elements:
        if not self._plan.batched_source:
            return SlicedReading(self._plan, self._readers).prepare_blocks(start, stop, shard)
        try:
            return self._plan.read_blocks(start, stop, shard)
        except Exception:  # noqa: BLE001  (the call reads again, and makes it the outcome of the right block)
            return Elements.failed(_SamplerFailed())

    def _perform(self, message: tuple[int, int, int] | bytes, records: Elements | None) -> Elements:
        request = load_request(message, self._classes) if isinstance(message, bytes) else Blocks(*message)
        if records is not None:
            prepared = self._plan.work_on(records) if self._plan.batched_source else records
            return self._plan.make(request, self._allocate, lambda *_: prepared)
        in_one = self._readers.size == 0 or self._plan.batched_source
        prepare_blocks = None if in_one else SlicedReading(self._plan, self._readers).prepare_blocks
        if prepare_blocks is not None and self._plan.source_knows_threads:
            prepare_blocks = functools.partial(_in_thread_of, self._readers, prepare_blocks)
        return self._plan.make(request, self._allocate, prepare_blocks)


def _idle_seconds(seconds: float, start: resource.struct_rusage, end: resource.struct_rusage) -> float:
    """Returns for how much of some seconds this process has waited for something, a core excepted.

    A process that is only kept from a core never gives one up by itself: on a busy machine, a call that computes does
    not look like one that waits for storage.
    """
    if end.ru_nvcsw == start.ru_nvcsw:
        return 0.0
    return max(0.0, seconds - (end.ru_utime - start.ru_utime) - (end.ru_stime - start.ru_stime))


class _SamplerFailed(Exception):  # noqa: N818  (nobody sees it)
    """The sampler could not tell the records of several blocks."""


def _in_thread_of(readers: ReaderThreads, prepare_blocks: PrepareBlocks, start: int, stop: int, shard: int) -> Elements:
    """Returns the elements of blocks, read by one of the threads that are there for it, as in a process of its own."""
    outcome: queue.SimpleQueue[Elements] = queue.SimpleQueue()
    readers.submit(lambda: outcome.put(readers.timed(lambda: prepare_blocks(start, stop, shard))[0]))
    return outcome.get()


def leave_if_forked(owner: int, status: int = 0) -> None:
    """Ends a process that user code has forked, and that returned from it: the worker alone answers its parent."""
    if os.getpid() != owner:
        os._exit(status)


def explain_debugger(error: BaseException) -> None:
    """Adds to the error of a debugger that found no terminal how a pipeline can be debugged."""
    debugger = sys.modules.get("bdb")
    if debugger is not None and isinstance(error, debugger.BdbQuit):
        error.add_note(
            "millstream: a worker process has no terminal for a debugger. To debug, give the DataLoader debug=True; in "
            "a chain, leave out mp_prefetch, and write to_iter_dataset(ReadOptions(num_threads=0))."
        )


def without_unpicklable(run: Elements, error: BaseException) -> Elements:
    """Returns a run up to its first element that cannot be pickled, and an error that names what in it cannot."""
    for row, value in enumerate(run.values):
        if parts := unpicklable_leaves(value):
            refusal = TypeError(
                f"The pipeline's output cannot be sent from a worker process, since not all of it can be pickled: "
                f"{'; '.join(parts)}. "
                "Make it an array, a number or a string in an operation, or use no workers."
            )
            refusal.add_note(f"millstream: at {describe_origin(run.origins, row)}.")
            return Elements(run.values[:row], run.origins.take(slice(row)), refusal)
    return Elements.failed(error)
