"""Measurements of a pipeline: the seconds of each stage, summed up per block, and several counters.

Guarantees:
    * Any thread may add, and a signal handler may read whatever it has interrupted. There is no lock. An addition is
      one statement without a call, during which CPython does not switch threads. Free-threaded Python may lose an
      addition now and then, which is less than the time that a lock would take.
    * A worker process has its own profiler, and sends the measurements with each result.
    * A stage costs less than a microsecond per block, so the profiler is always on.
"""

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, final

from millstream.loader.measuring.recorder import STARTS, TRAINS, WAITS, Recorder
from millstream.loader.pipeline.calls import Blocks, num_bytes
from millstream.loader.pipeline.plan import KEYS, READ

if TYPE_CHECKING:
    from millstream.loader.measuring.costs import CostMeter

Result = TypeVar("Result")
Times: TypeAlias = Sequence[Any]
"""The seconds of all stages in order, the processor time, the time without a core, and the costs if measured."""

HAND_OVER = "hand-over"
NEXT = "next"
CONSUMER = "consumer"

MAX_EVENTS = 200
MAX_WAITS = 1_000
DELAY_SECONDS = 1.0
"""The time between two measurements of the time without a core, which read a file per thread."""


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
        # A packer has two functions under one label, and the last one returns its elements.
        self._last: dict[str, Callable[..., Any]] = {}
        if measures_costs:
            self.measure_costs()

    def measure_costs(self) -> None:
        """Measures the costs of each node from now on: of the functions that are timed after this call."""
        if self.costs is None:
            from millstream.loader.measuring.costs import CostMeter  # noqa: PLC0415  (lazy: off by default)

            self.costs = CostMeter()

    def add(self, stage: str, seconds: float) -> None:
        self._seconds[stage] += seconds

    def timed(self, stage: str, function: Callable[..., Result]) -> Callable[..., Result]:
        recorder = self.recorder

        @functools.wraps(function)
        def call(*arguments: Any) -> Result:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                stop = time.perf_counter()
                self._seconds[stage] += stop - start
                if threading.get_ident() == self._consumer:
                    self._consumer_seconds[stage] += stop - start
                if recorder is not None:
                    recorder.record_stage(stage, start, stop, arguments)

        return call if self.costs is None else self._with_costs(stage, call, self.costs)

    def _with_costs(self, stage: str, function: Callable[..., Result], costs: "CostMeter") -> Callable[..., Result]:
        from millstream.loader.measuring.costs import observed  # noqa: PLC0415  (lazy, as above)

        self._last[stage] = function

        @functools.wraps(function)
        def call(*arguments: Any) -> Result:
            with observed(costs.add):
                start = time.perf_counter()
                result = function(*arguments)
                seconds = time.perf_counter() - start
            if self._last[stage] is function:
                values = getattr(result, "values", ())
                costs.add((0, stage), seconds, values if isinstance(values, Sequence) else ())
            return result

        return call

    def returned(self, left_at: float | None, now: float) -> None:
        """Records that the consumer asks for outputs, after the time away since it left."""
        self.timed_outputs = self.outputs
        self._consumer = threading.get_ident()
        self._cores_before_wait, self._delays_before_wait = self.core_seconds, self.delay_seconds
        if left_at is not None:
            self._seconds[CONSUMER] += now - left_at
        if self.recorder is not None:
            self.recorder.will_work()
            if left_at is not None:
                self.recorder.record_trainer(TRAINS, left_at, now)

    def waited(self, start: float, stop: float, *, is_first: bool) -> None:
        """Records a wait of the consumer, the first one if no work had begun before."""
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

    def waited_often(
        self, left_at: float | None, waits: Sequence[tuple[float, float]], total: int, *, is_first: bool
    ) -> None:
        """Records several waits for one output each, in order, and the time between them.

        `left_at` is the end of the wait before, if any, and `total` the number of all waits so far.
        """
        self._consumer = threading.get_ident()
        seconds = [stop - start for start, stop in waits]
        self._seconds[NEXT] += sum(seconds)
        self._seconds[CONSUMER] += waits[-1][1] - (waits[0][0] if left_at is None else left_at) - sum(seconds)
        self.first_seconds += seconds.pop(0) if is_first else 0.0
        self.waits.extend(seconds)
        # The time after the last output is not known yet; the end of a stream is waited for, too.
        self.timed_outputs = min(self.outputs, total - 1)

    def delivered(self, outputs: int, records: int) -> None:
        self.outputs += outputs
        self.records += records

    def came(self, output: Any) -> None:
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
        self.add_all(stages)
        if self.recorder is not None and process is not None:
            span = None if blocks is None else (blocks.start, blocks.stop - 1)
            spent = tuple(zip(self._names, stages, strict=False))
            self.recorder.record_call(process, begun, seconds, span, spent, actor=actor)

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
        since, self._delays_at, self._delays_since = self._delays_since, now, _delay_seconds()
        # The time of a thread that has ended is no longer reported.
        return max(0.0, self._delays_since - since)

    def add_all(self, seconds: Times) -> None:
        """Adds the result of `take` in another process with the same pipeline."""
        if self.costs is not None:
            *seconds, costs = seconds
            self.costs.merge(costs)
        *stages, with_core, without_core = seconds
        for stage, spent in zip(self._names, stages, strict=True):
            self.add(stage, spent)
        self.core_seconds += with_core
        self.delay_seconds += without_core


def _delay_seconds() -> float:
    """Returns the time that all threads of this process were ready to run and had no core, as far as Linux reports it.

    Source: Documentation/scheduler/sched-stats.rst of Linux.
    """
    total = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Without pathlib, which a worker would have to import before its first batch.
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
            with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:  # noqa: PTH123
                total += int(file.read().split()[1])
    return total / 1e9
