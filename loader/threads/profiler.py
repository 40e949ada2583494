"""Where the time goes: the seconds that the stages of a pipeline take, added up a block at a time.

Guarantees:
    * Any thread may add, and a signal's handler may read, whatever it interrupted: there is no lock. To add is one
      statement without a call, in which CPython does not change threads; one without the interpreter's lock may lose
      an addition now and then, which is no more than the time that a lock would take.
    * A worker process adds to a profiler of its own, and sends what it shows with each answer.
    * It costs less than a microsecond for each stage of a block, and is always on.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

from millstream.loader.pipeline.plan import KEYS, READ

Result = TypeVar("Result")

HAND_OVER = "hand-over"
NEXT = "next"
CONSUMER = "consumer"


@final
class Profiler:
    """Adds up seconds by stage.

    Args:
        operations: what the stages of the operations are called, in order.
    """

    def __init__(self, operations: Sequence[str]) -> None:
        self._names = (KEYS, READ, *operations, HAND_OVER, NEXT, CONSUMER)
        self._seconds = dict.fromkeys(self._names, 0.0)

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
                self.add(stage, time.perf_counter() - start)

        return call

    def read(self) -> dict[str, float]:
        """Returns the seconds of all stages."""
        return dict(self._seconds)

    def take(self) -> tuple[float, ...]:
        """Returns the seconds of all stages in order, and begins at zero again."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._names, 0.0)
        return tuple(taken.values())

    def add_all(self, seconds: Sequence[float]) -> None:
        """Adds what `take` has returned, in another process, of the same pipeline."""
        for stage, spent in zip(self._names, seconds, strict=True):
            self.add(stage, spent)
