"""A worker, wherever it runs, and what its executor learns: how many reads help, and whether new workers die."""

import itertools
from collections.abc import Iterable
from typing import TypeVar, final

from millstream.errors import WorkerDiedError
from millstream.loader.threads.shared_threads import Concurrency
from millstream.loader.threads.waiting import StallClock

IDLE_CALLS = 4
"""After this many consecutive calls that mostly waited for storage, a worker gets several reads in flight."""

IDLE_SHARE = 0.5
"""A call mostly waits if its worker is idle for more than this share of its time, and for at least IDLE_SECONDS."""

IDLE_SECONDS = 0.004
"""A shorter wait is not worth another thread, and may be a wait for a core."""

MAX_DEATHS_AT_START = 8
"""Limit for consecutive deaths of new workers before a call, in addition to the number of workers."""


class AnyWorker:
    """The consumer's side of a worker, wherever it runs.

    Attributes:
        number: unique in the pool. Replacements get new ones.
        pid: the process ID; None until it is known.
        calls: the numbers of the unanswered calls, in the order sent.
        clock: the wait since the worker began its first unanswered call, or since its last sign of life.
    """

    def __init__(self, number: int, stall_timeout: float) -> None:
        self.number = number
        self.pid: int | None = None
        self.calls: list[int] = []
        self.clock = StallClock(stall_timeout)

    @property
    def accepts_calls(self) -> bool:
        """True if the worker may get calls, up to its limit. By default, they wait until it is ready."""
        return True

    def record_call(self, call: int) -> None:
        if not self.calls:
            self.clock.restart()
        self.calls.append(call)

    def record_result(self, call: int) -> None:
        self.calls.remove(call)
        self.clock.restart()


def first_free(taken: Iterable[int]) -> int:
    """Returns the smallest index that no other worker has."""
    indices = set(taken)
    return next(index for index in itertools.count() if index not in indices)


WorkerT = TypeVar("WorkerT", bound=AnyWorker)


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
        return self._concurrency.level if self._idle_calls >= IDLE_CALLS else 1

    def record(self, num_blocks: int, seconds: float, idle_seconds: float) -> None:
        """Records a call: its blocks, its duration, and the part of it in which the worker did not compute."""
        self._num_completed += num_blocks
        if self._idle_calls < IDLE_CALLS:
            is_idle = idle_seconds > max(IDLE_SECONDS, IDLE_SHARE * seconds)
            self._idle_calls = self._idle_calls + 1 if is_idle else 0

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def delivered(self, now: float) -> None:
        """Records that these outputs were delivered at time `now`, in seconds."""
        if self._idle_calls >= IDLE_CALLS:
            self._concurrency.delivered(now, self._waited, self._num_completed)
        self._waited, self._num_completed = 0.0, 0


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
