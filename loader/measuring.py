"""Measurements of a running pipeline: the seconds of each stage, summed up per block, waits, costs and spans.

Guarantees:
    * Any thread may add, and a signal handler may read whatever it has interrupted. There is no lock but a reentrant
      one for costs, and no user code runs while it is held. An addition is one statement without a call, during which
      CPython does not switch threads. Free-threaded Python may lose an addition now and then, which is less than
      the time that a lock would take. A recording is one append to a deque, which drops the oldest entries.
    * A worker process has its own profiler, and sends the measurements with each result.
    * A stage costs less than a microsecond per block, so the profiler is always on. Costs of nodes and recordings, for
      the execution summary and for timelines, are off unless requested. Recordings never inspect elements.
"""

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

from millstream.core.signals import SignalSafeLock
from millstream.core.trace_annotations import annotated
from millstream.loader.pipeline.calls import Blocks, num_bytes
from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.plan import KEYS, READ


class Frontend(NamedTuple):
    """The API with which a pipeline was built.

    Attributes:
        worker: the name of one worker, such as `worker process`.
        workers: the argument that sets the number of workers, with {} for the number.
        buffers: the argument that sets the finished batches per worker, with {buffer} for their number and {workers}
            for that of workers.
        reading: the argument that sets threads, with {} for the `ReadOptions`.
        is_fed: True if elements come from a stream, which is not read by position.
        is_on_cluster: True if the workers run on other machines, so that this machine's cores are irrelevant.
        is_debugging: True if nothing of this has an effect, because everything runs in one thread.
    """

    worker: str = "worker process"
    workers: str = "worker_count={}"
    buffers: str = "worker_buffer_size={buffer}"
    reading: str = "read_options={}"
    is_fed: bool = False
    is_on_cluster: bool = False
    is_debugging: bool = False


LOADER = Frontend()
"""A `DataLoader`, or the result of `load`."""

ACTORS = Frontend(worker="Ray actor", workers="workers=RayWorkers(num_workers={})", is_on_cluster=True)
"""A `DataLoader` with Ray actors."""

DEBUGGED = Frontend(is_debugging=True)
"""A `DataLoader` with `debug=True`."""

_MORE_READY = "MultiprocessingOptions({workers}, per_worker_buffer_size={buffer})"

CHAIN = Frontend(workers=".mp_prefetch({})", buffers=f".mp_prefetch({_MORE_READY})", reading=".to_iter_dataset({})")
"""A chain that begins with a `MapDataset`."""

MIXED_CHAIN = CHAIN._replace(reading=".prefetch({})")
"""A chain after a mixture of such chains."""

FED_CHAIN = CHAIN._replace(is_fed=True)
"""A chain after a stream. What reads is below the stream, in threads of its own."""

ELASTIC = Frontend(
    workers="multiprocessing_options=MultiprocessingOptions({})", buffers=f"multiprocessing_options={_MORE_READY}"
)
"""An `ElasticIterator`."""


MAX_SPANS = 20_000
"""The number of spans kept, a few megabytes."""

SAMPLE_SECONDS = 0.25
MAX_SAMPLES = 4_000
TRAINER = "trainer"
"""The name of the thread that calls `next`."""

STARTS = "starts"
"""The trainer's wait for the first batch of a pass, while threads and workers start."""

WAITS = "waits"
"""The trainer's wait in `next` for any other batch, unless it works there itself."""

TRAINS = "trains"
"""The trainer's time outside `next`."""


class Span(NamedTuple):
    """An interval of work, on the clock of `time.perf_counter`."""

    who: str  # The trainer, the name of a thread, or a worker.
    process: int | None  # The process ID of a worker, or the number of an actor; None in the trainer's process.
    what: str  # The label of a stage; for a worker, its complete call.
    start: float
    stop: float
    blocks: tuple[int, int] | None = None  # The first and the last block; None without blocks.
    stages: tuple[tuple[str, float], ...] = ()  # The seconds of each stage of a worker's call.


class Sample(NamedTuple):
    """The memory of a process at one time, in bytes."""

    at: float
    who: str
    num_bytes: int


@final
class Recorder:
    """Keeps the most recent spans and samples."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self.memory: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._workers: set[int] = set()
        self._sampled_at = -SAMPLE_SECONDS

    def record_stage(
        self, stage: str, start: float, stop: float, arguments: tuple[Any, ...], *, is_trainer: bool
    ) -> None:
        """Records work of this thread, of this process.

        Its first argument is elements or origins, or the first block, before the block after the last.
        """
        who = TRAINER if is_trainer else threading.current_thread().name
        self.spans.append(Span(who, None, stage, start, stop, _blocks_of(arguments)))

    def record_call(
        self,
        process: int,
        start: float,
        seconds: float,
        blocks: tuple[int, int] | None,
        stages: tuple[tuple[str, float], ...],
        *,
        actor: str | None = None,
    ) -> None:
        """Records the call of a worker. Memory is sampled only for processes of this machine."""
        if actor is None:
            self._workers.add(process)
        spent = tuple((stage, spent) for stage, spent in stages if spent)
        who = f"worker {process}" if actor is None else actor
        self.spans.append(Span(who, process, "call", start, start + seconds, blocks, spent))

    def record_trainer(self, what: str, start: float, stop: float) -> None:
        """Records a span of the trainer (STARTS, WAITS or TRAINS), and samples memory if it is time."""
        self.spans.append(Span(TRAINER, None, what, start, stop))
        if stop - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at = stop
            self._sample(stop)

    def _sample(self, now: float) -> None:
        for who, process in [
            (TRAINER, os.getpid()),
            *((f"worker {number}", number) for number in sorted(self._workers)),
        ]:
            with contextlib.suppress(OSError, ValueError, IndexError):
                # Without pathlib, which a worker would have to import before its first batch.
                with open(f"/proc/{process}/statm", encoding="ascii") as file:  # noqa: PTH123
                    pages = int(file.read().split()[1])
                self.memory.append(Sample(now, who, pages * os.sysconf("SC_PAGE_SIZE")))
                continue
            self._workers.discard(process)


def _blocks_of(arguments: tuple[Any, ...]) -> tuple[int, int] | None:
    first = arguments[0]
    if isinstance(first, Elements):
        first = first.origins
    if isinstance(first, Origins):
        return (int(first.block[0]), int(first.block[-1])) if len(first) else None
    return (first, arguments[1] - 1) if isinstance(first, int) else None


Node: TypeAlias = tuple[int, str]
"""A node: 0 and the label of a stage; or of a MapDataset's node, the number of nodes above it, from 1, and its text."""


class Cost(NamedTuple):
    """The cost of one node."""

    seconds: float = 0.0  # Of all its calls, over all threads and workers.
    min_seconds: float = math.inf  # Per element of a call, as the next one.
    max_seconds: float = 0.0
    elements: int = 0
    max_bytes: int = 0  # The elements of its largest call, as if each were as large as the first one.


@final
class CostMeter:
    """Adds up the costs of nodes."""

    def __init__(self) -> None:
        self._lock = SignalSafeLock(threading.RLock())
        self._costs: dict[Node, Cost] = {}

    def add(self, node: Node, seconds: float, values: Any) -> None:
        """Adds a call of a node, with the elements that it returned."""
        count = len(values)
        if count:
            each = seconds / count
            self.merge({node: Cost(seconds, each, each, count, num_bytes(values[:1]) * count)})

    def merge(self, costs: Mapping[Node, Cost]) -> None:
        with self._lock:
            for node, (seconds, least, most, elements, size) in costs.items():
                old = self._costs.get(node, Cost())
                self._costs[node] = Cost(
                    old.seconds + seconds,
                    min(old.min_seconds, least),
                    max(old.max_seconds, most),
                    old.elements + elements,
                    max(old.max_bytes, size),
                )

    def read(self) -> dict[Node, Cost]:
        return dict(self._costs)

    def take(self) -> dict[Node, Cost]:
        """Returns the costs so far, and begins at zero again."""
        with self._lock:
            taken, self._costs = self._costs, {}
        return taken


Observe: TypeAlias = Callable[[Node, float, Any], None]
_local = threading.local()


def observer() -> Observe | None:
    """Returns the function to call with the costs of nodes in this thread; None if they are not measured."""
    return getattr(_local, "observe", None)


@contextlib.contextmanager
def observed(observe: Observe) -> Iterator[None]:
    """Measures the nodes of a MapDataset that this thread computes meanwhile."""
    before = observer()
    _local.observe = observe
    try:
        yield
    finally:
        _local.observe = before


ResultT = TypeVar("ResultT")
Times: TypeAlias = Sequence[Any]
"""The seconds of all stages in order, the processor time, the time without a core, and the costs if measured."""

HAND_OVER = "hand-over"
NEXT = "next"
CONSUMER = "consumer"

MAX_EVENTS = 200
MAX_WAITS = 1_000
DELAY_SECONDS = 1.0
"""The time between two measurements of the time without a core, which read a file per thread."""


class Waiter:
    """The place at which the trainer waits: its outermost iterator.

    Attributes:
        asked_at: the time since which the trainer is inside `next`; None while it is not.
        returned_at: the time at which it left `next` last; None before.
    """

    asked_at: float | None = None
    returned_at: float | None = None


class Event(NamedTuple):
    """A failure, with its time and a sentence about it."""

    at: float
    text: str


@final
class Profiler:
    """Sums up seconds by stage, and counts the outputs of the consumer.

    `operations` are the labels of the operations' stages, in order.

    Attributes:
        outputs: the number of outputs that the consumer got.
        records: the number of records in them, if the pipeline is 1:1.
        timed_outputs: the number of these when it last asked for more. The seconds cover them, and no later ones.
        first_seconds: the seconds that it waited for the first outputs of all passes.
        output_bytes: the estimated size of the very first output; None before.
        core_seconds: the processor time of worker processes, except while the consumer waited for a first output. It
            is less than their working time if they waited.
        delay_seconds: the time that their threads were ready to run and had no core, measured once a second. 0 on
            systems that do not report it.
        deaths: the number of worker processes that died.
        stalls: the number of reported stalls.
        events: the most recent deaths and stalls.
        waits: the seconds of the consumer's most recent waits, except those for first outputs.
        costs: the costs of each node; None if they are not measured.
        on_wait: called after each wait of the consumer; None for nothing.
        last_position: step and epoch of the iterator that was collected last; None before.
        reader: the process of this host that reads and computes for this one; None if this one does.
    """

    def __init__(
        self, operations: Sequence[str], recorder: Recorder | None = None, *, measures_costs: bool = False
    ) -> None:
        self._names = (KEYS, READ, *operations, HAND_OVER, NEXT, CONSUMER)
        self._seconds = dict.fromkeys(self._names, 0.0)
        self.outputs = self.records = 0
        self.timed_outputs = 0
        self.first_seconds = 0.0
        self.output_bytes: int | None = None
        self.core_seconds = self.delay_seconds = 0.0
        self._cores_since = time.process_time()
        self._delays_at, self._delays_since = time.perf_counter(), 0.0
        self._cores_before_wait = self._delays_before_wait = 0.0
        self._consumer: int | None = None
        self._consumer_seconds = dict.fromkeys(self._names, 0.0)
        self.deaths = 0
        self.stalls = 0
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.waits: deque[float] = deque(maxlen=MAX_WAITS)
        self.recorder = recorder
        self.costs: CostMeter | None = None
        self.on_wait: Callable[[], object] | None = None
        self.last_position: tuple[int, int | None] | None = None
        self.reader: int | None = None
        # A packer has two functions under one label, and the last one returns its elements.
        self._last: dict[str, Callable[..., Any]] = {}
        if measures_costs:
            self.measure_costs()

    def measure_costs(self) -> None:
        """Measures the costs of each node from now on: of the functions that are timed after this call."""
        if self.costs is None:
            self.costs = CostMeter()

    def add(self, stage: str, seconds: float) -> None:
        self._seconds[stage] += seconds

    def timed(self, stage: str, function: Callable[..., ResultT]) -> Callable[..., ResultT]:
        recorder = self.recorder
        if recorder is not None:
            function = annotated(stage, function)
        # Local names, because this runs several times per block.
        clock, this_thread = time.perf_counter, threading.get_ident

        def run_measured(*arguments: Any) -> ResultT:
            start = clock()
            try:
                return function(*arguments)
            finally:
                stop = clock()
                self._seconds[stage] += stop - start
                if is_consumer := this_thread() == self._consumer:
                    self._consumer_seconds[stage] += stop - start
                if recorder is not None:
                    recorder.record_stage(stage, start, stop, arguments, is_trainer=is_consumer)

        return run_measured if self.costs is None else self._with_costs(stage, run_measured, self.costs)

    def _with_costs(self, stage: str, function: Callable[..., ResultT], costs: CostMeter) -> Callable[..., ResultT]:

        self._last[stage] = function

        def run_with_costs(*arguments: Any) -> ResultT:
            with observed(costs.add):
                start = time.perf_counter()
                result = function(*arguments)
                seconds = time.perf_counter() - start
            if self._last[stage] is function:
                values = getattr(result, "values", ())
                costs.add((0, stage), seconds, values if isinstance(values, Sequence) else ())
            return result

        return run_with_costs

    def begin_wait(self, waiter: Waiter) -> float:
        """Records that the consumer asks for outputs, after its time outside `next`. Returns the time."""
        waiter.asked_at = now = time.perf_counter()
        returned_at = waiter.returned_at
        self.timed_outputs = self.outputs
        self._consumer = threading.get_ident()
        self._cores_before_wait, self._delays_before_wait = self.core_seconds, self.delay_seconds
        if returned_at is not None:
            self._seconds[CONSUMER] += now - returned_at
            if self.recorder is not None:
                self.recorder.record_trainer(TRAINS, returned_at, now)
        return now

    def end_wait(self, waiter: Waiter, start: float, *, is_first: bool) -> None:
        """Records a wait that began at `start`, the first one if no work had begun before."""
        waiter.asked_at, waiter.returned_at = None, (stop := time.perf_counter())
        self._seconds[NEXT] += stop - start
        if self.recorder is not None:
            self.recorder.record_trainer(STARTS if is_first else WAITS, start, stop)
        if is_first:
            self.first_seconds += stop - start
            self.core_seconds, self.delay_seconds = self._cores_before_wait, self._delays_before_wait
        else:
            self.waits.append(stop - start)
        if self.on_wait is not None:
            self.on_wait()

    def delivered(self, outputs: int, records: int) -> None:
        self.outputs += outputs
        self.records += records

    def record_first_size(self, output: Any) -> None:
        if self.output_bytes is None:
            self.output_bytes = num_bytes([output])

    def called(
        self,
        process: int | None,
        begun: float,
        seconds: float,
        blocks: Blocks | None,
        stages: Times,
        *,
        actor: str | None = None,
    ) -> None:
        """Records the call of a worker, an `actor` or a process of this machine, whose clock it shares.

        `blocks` is None for a group, or if the call is no longer wanted. `stages` is the result of `take` there.
        """
        if self.costs is not None:
            *stages, costs = stages
            self.costs.merge(costs)
        *spent, with_core, without_core = stages
        for name, of_stage in zip(self._names, spent, strict=True):
            self._seconds[name] += of_stage
        self.core_seconds += with_core
        self.delay_seconds += without_core
        if self.recorder is not None and process is not None:
            span = None if blocks is None else (blocks.start, blocks.stop - 1)
            self.recorder.record_call(
                process, begun, seconds, span, tuple(zip(self._names, spent, strict=True)), actor=actor
            )

    def died(self, text: str) -> None:
        self.deaths += 1
        self._record(text)

    def stalled(self, text: str, *, is_known: bool = False) -> None:
        """Counts a stall, unless it was reported before, and keeps the description."""
        self.stalls += not is_known
        self._record(text)

    def _record(self, text: str) -> None:
        self.events.append(Event(time.perf_counter(), text))

    def read(self) -> dict[str, float]:
        return dict(self._seconds)

    def is_run_by_consumer(self, stage: str) -> bool:
        """Returns True if the consumer's thread has spent more time in a stage than all other threads together."""
        return 2 * self._consumer_seconds[stage] > self._seconds[stage]

    def take(self) -> tuple[Any, ...]:
        """Returns the seconds of all stages in order, the processor time and any costs, and resets them."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._names, 0.0)
        now = time.process_time()
        since, self._cores_since = self._cores_since, now
        costs = [] if self.costs is None else [self.costs.take()]
        return *taken.values(), now - since, self._take_delay(), *costs

    def _take_delay(self) -> float:
        """Returns the time without a core since the previous measurement, or 0 if that is less than a second ago."""
        now = time.perf_counter()
        if now - self._delays_at < DELAY_SECONDS:
            return 0.0
        since, self._delays_at, self._delays_since = self._delays_since, now, scheduling_of_threads().delayed
        # The time of a thread that has ended is no longer reported.
        return max(0.0, self._delays_since - since)


class Scheduling(NamedTuple):
    """The time of all threads of this process so far, as far as Linux reports it.

    Attributes:
        computed: the seconds that they had a core.
        delayed: the seconds that they were ready to run, and had none.
        slices: the number of times that they got one.
    """

    computed: float
    delayed: float
    slices: int


def scheduling_of_threads() -> Scheduling:
    """Source: Documentation/scheduler/sched-stats.rst of Linux."""
    computed = delayed = slices = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Without pathlib, which a worker would have to import before its first batch.
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
            with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:  # noqa: PTH123
                numbers = [int(number) for number in file.read().split()]
            computed, delayed, slices = computed + numbers[0], delayed + numbers[1], slices + numbers[2]
    return Scheduling(computed / 1e9, delayed / 1e9, slices)


class WorkerStatus(NamedTuple):
    """A snapshot of a worker."""

    number: int
    pid: int | None  # None until it is known.
    is_here: bool  # True if the process runs on this machine.
    calls: int  # The number of unanswered calls.
    begun: str | None  # A description of the call that it began last; None if that is unknown.


class ExecutorStatus(NamedTuple):
    """A snapshot of an engine."""

    begun: int  # The number of calls that have begun, can begin, or have outputs that were not delivered.
    ready: int  # The number of these calls that are complete.
    max_threads: int = 0
    busy_threads: int = 0
    workers: tuple[WorkerStatus, ...] = ()


class PipelineStatus(NamedTuple):
    """A snapshot of the iterators of a pipeline."""

    lifecycle: str  # That of the newest one: idle, running or closed.
    waits_for: float | None  # Seconds that the trainer has been inside `next`; None if it is not.
    num_ready: int  # The number of outputs that `next` can return immediately.
    loads: tuple[ExecutorStatus, ...]  # The engines, also those below.
