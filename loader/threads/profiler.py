"""Where the time goes: the seconds that the stages of a pipeline take, added up a block at a time, and some counts.

Guarantees:
    * Any thread may add, and a signal's handler may read, whatever it interrupted: there is no lock. To add is one
      statement without a call, in which CPython does not change threads; one without the interpreter's lock may lose
      an addition now and then, which is no more than the time that a lock would take.
    * A worker process adds to a profiler of its own, and sends what it shows with each answer.
    * It costs less than a microsecond for each stage of a block, and is always on.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, final

import numpy as np

from millstream import tree
from millstream.loader.pipeline.plan import KEYS, READ
from millstream.loader.pipeline.requests import Blocks
from millstream.signal_exceptions import is_from_signal_handler

if TYPE_CHECKING:
    from millstream.loader.threads.recorder import Recorder

Result = TypeVar("Result")
Times: TypeAlias = Sequence[float]
"""The seconds of all stages, in their order, and those in which the process had a core."""

HAND_OVER = "hand-over"
NEXT = "next"
CONSUMER = "consumer"

MAX_EVENTS = 200
"""The number of deaths and stalls that are kept."""

MAX_WAITS = 1_000
"""The number of waits that are kept."""


class Event(NamedTuple):
    """Something that went wrong: when, and what, as a sentence."""

    at: float
    text: str


@final
class Profiler:
    """Adds up seconds by stage, and counts what the consumer got.

    Args:
        operations: what the stages of the operations are called, in order.
        recorder: who is told of each piece of work; None for nobody.

    Attributes:
        outputs: how many outputs the consumer got.
        first_seconds: how long it waited for the first ones of each pass.
        output_bytes: how large the arrays of the very first one were; None before.
        core_seconds: the seconds in which worker processes had a core; less than they worked if they waited or slept.
        deaths: how many worker processes died.
        stalls: how often one made no progress for so long that it was reported.
        events: the last of these.
        waits: the seconds of the consumer's last waits, except those for first outputs.
    """

    def __init__(self, operations: Sequence[str], recorder: "Recorder | None" = None) -> None:
        self._names = (KEYS, READ, *operations, HAND_OVER, NEXT, CONSUMER)
        self._seconds = dict.fromkeys(self._names, 0.0)
        self.outputs = 0
        self.first_seconds = 0.0
        self.output_bytes: int | None = None
        self.core_seconds = 0.0
        self._cores_since = time.process_time()
        self.deaths = 0
        self.stalls = 0
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.waits: deque[float] = deque(maxlen=MAX_WAITS)
        self.recorder = recorder

    def add(self, stage: str, seconds: float) -> None:
        """Adds to one stage."""
        self._seconds[stage] += seconds

    def timed(self, stage: str, function: Callable[..., Result]) -> Callable[..., Result]:
        """Returns the function with the time of each call added to a stage."""

        @functools.wraps(function)
        def call(*arguments: Any) -> Result:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                seconds = time.perf_counter() - start
                self._seconds[stage] += seconds

        recorder = self.recorder
        if recorder is None:
            return call

        @functools.wraps(function)
        def recorded_call(*arguments: Any) -> Result:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                recorder.note_stage(stage, start, time.perf_counter(), arguments)

        return recorded_call

    def returned(self, left_at: float | None, now: float) -> None:
        """Takes note that the consumer asks for outputs, having been away since it left."""
        if left_at is not None:
            self._seconds[CONSUMER] += now - left_at
        if self.recorder is not None:
            self.recorder.will_work()
            if left_at is not None:
                self.recorder.note_training(left_at, now)

    def waited(self, start: float, stop: float, *, is_first: bool) -> None:
        """Records a wait of the consumer.

        Args:
            start: since when.
            stop: until when.
            is_first: True if nothing was begun when it came.
        """
        self._seconds[NEXT] += stop - start
        if self.recorder is not None:
            self.recorder.note_wait(start, stop, is_first=is_first)
        if is_first:
            self.first_seconds += stop - start
        else:
            self.waits.append(stop - start)

    def delivered(self, count: int) -> None:
        """Counts outputs that the consumer got."""
        self.outputs += count

    def came(self, output: Any) -> None:
        """Measures the first output of all."""
        if self.output_bytes is None:
            self.output_bytes = _array_bytes(output)

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
        """Takes note of a call that a worker has made.

        Args:
            process: its number.
            begun: when it began, on the clock that all processes of a machine share.
            seconds: how long it took.
            blocks: which blocks it made; None for a group, or what is no longer wanted.
            stages: what `take` returned there.
            actor: what the worker is called, if it is not a process of this machine.
        """
        self.add_all(stages)
        if self.recorder is not None and process is not None:
            span = None if blocks is None else (blocks.start, blocks.stop - 1)
            spent = tuple(zip(self._names, stages, strict=False))
            self.recorder.note_call(process, begun, seconds, span, spent, actor=actor)

    def died(self, text: str) -> None:
        """Counts a worker that died, and keeps what is said about it."""
        self.deaths += 1
        self._note(text)

    def stalled(self, text: str, *, is_known: bool = False) -> None:
        """Counts a worker that makes no progress, unless it is known, and keeps what is said about it."""
        self.stalls += not is_known
        self._note(text)

    def _note(self, text: str) -> None:
        self.events.append(Event(time.perf_counter(), text))

    def read(self) -> dict[str, float]:
        """Returns the seconds of all stages."""
        return dict(self._seconds)

    def take(self) -> tuple[float, ...]:
        """Returns the seconds of all stages in order, and those with a core, and begins at zero again."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._names, 0.0)
        now = time.process_time()
        since, self._cores_since = self._cores_since, now
        return *taken.values(), now - since

    def add_all(self, seconds: Sequence[float]) -> None:
        """Adds what `take` has returned, in another process, of the same pipeline."""
        *stages, with_core = seconds
        for stage, spent in zip(self._names, stages, strict=True):
            self.add(stage, spent)
        self.core_seconds += with_core


def _array_bytes(value: Any) -> int:
    """Returns how large the arrays in a value are."""
    try:
        return sum(leaf.nbytes for _, leaf in tree.leaves(value) if isinstance(leaf, np.ndarray | np.generic))
    except Exception as error:
        # An object of the user's may refuse to be looked at.
        if is_from_signal_handler(error):
            raise
        return 0
