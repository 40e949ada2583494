"""A source whose reads wait for each other, so that tests know how many were in flight at once."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

LATENCY = 0.02
"""The seconds that a read takes until as many as allowed are in flight."""
GROWTH, MAX_LATENCY = 1.003, 1.0
"""On a busy machine, some thread may begin its read after those of the others have ended. So each read that was not met
by as many makes the next ones longer, up to this limit.
"""


class Storage:
    """Documents that hold the largest number of reads that were in flight so far, in the process that reads.

    A read ends when `limit` are in flight, or after some LATENCY.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._in_flight = self._peak = 0
        self._latency = LATENCY

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._limit,)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, key: int) -> dict[str, Any]:
        return self.read([key])[0]

    def read(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the documents at some keys."""
        with self._changed:
            self._in_flight += 1
            self._peak = max(self._peak, self._in_flight)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._peak >= self._limit, self._latency):
                self._latency = min(GROWTH * self._latency, MAX_LATENCY)
            self._in_flight -= 1
            return [{"tokens": np.full(3, self._peak, np.int32)} for _ in keys]
