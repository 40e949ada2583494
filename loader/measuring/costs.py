"""Time, elements and memory of each node of a pipeline, measured for the execution summary of the debug mode.

Guarantees:
    * Any thread may add, a signal handler too: the lock is reentrant, and no user code runs while it is held.
    * A worker sends the costs of a call with its result, and begins at zero again.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, final

from millstream.core.signals import SignalSafeLock
from millstream.loader.pipeline.calls import num_bytes

Node: TypeAlias = tuple[int, str]
"""A node: 0 and the label of a stage; or of a MapDataset's node, the number of nodes above it, from 1, and its text."""


class Cost(NamedTuple):
    """The cost of one node."""

    seconds: float = 0.0  # Of all its calls, over all threads and workers.
    min_seconds: float = math.inf  # Per element of a call, as the next one.
    max_seconds: float = 0.0
    elements: int = 0
    max_bytes: int = 0  # The elements of its largest call, as if each were as large as the first one.


Costs: TypeAlias = Mapping[Node, tuple[float, float, float, int, int]]


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
            self.merge({node: (seconds, each, each, count, num_bytes(values[:1]) * count)})

    def merge(self, costs: Costs) -> None:
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

    def take(self) -> Costs:
        """Returns the costs so far as plain tuples, and begins at zero again."""
        with self._lock:
            taken, self._costs = self._costs, {}
        return {node: (*cost,) for node, cost in taken.items()}


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
