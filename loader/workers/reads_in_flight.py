"""The number of reads in flight per worker: one if reads compute, as many as help if they wait."""

from typing import final

from millstream.loader.threads.concurrency import Concurrency

IDLE_CALLS = 4
"""After this many consecutive calls that mostly waited for storage, a worker gets several reads in flight."""

IDLE_SHARE = 0.5
"""A call mostly waits if its worker is idle for more than this share of its time, and for at least IDLE_SECONDS."""

IDLE_SECONDS = 0.004
"""A shorter wait is not worth another thread, and may be a wait for a core."""


@final
class ReadsInFlight:
    """Begins with one read, because several cost memory. Searches for the best number once reads wait."""

    def __init__(self, limit: int) -> None:
        self._concurrency = Concurrency(limit)
        self._idle_calls = 0
        self._waited = 0.0
        self._num_completed = 0

    @property
    def number(self) -> int:
        """The number of concurrent reads per worker."""
        return self._concurrency.level if self._idle_calls >= IDLE_CALLS else 1

    def record(self, num_blocks: int, seconds: float, idle_seconds: float) -> None:
        """Records a call: its blocks, its duration, and the part of it in which the worker did not compute."""
        self._num_completed += num_blocks
        if self._idle_calls < IDLE_CALLS:
            is_idle = idle_seconds > max(IDLE_SECONDS, IDLE_SHARE * seconds)
            self._idle_calls = self._idle_calls + 1 if is_idle else 0

    def waited(self, seconds: float) -> None:
        """Records time that the consumer has waited for the next outputs."""
        self._waited += seconds

    def delivered(self, now: float) -> None:
        """Records that these outputs were delivered at time `now`, in seconds."""
        if self._idle_calls >= IDLE_CALLS:
            self._concurrency.delivered(now, self._waited, self._num_completed)
        self._waited, self._num_completed = 0.0, 0
