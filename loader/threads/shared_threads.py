"""Threads shared by several engines, the share of the buffer of each, and a search for the best number of threads.

All chains below an interleave, a zip, a mixture or a similar node share one set of threads, so that many slow files are
read concurrently. Each engine keeps its own schedule and submits its own calls.

Guarantees:
    * The number of threads never exceeds the sum of the options of all engines, and MAX_SHARED_THREADS if there are
      several.
    * The engines together hold as many records, ready or in work, as the buffer of one. Each gets a share in
      proportion to the records that it reads, so a source that is drawn from more often is read further ahead. Each may
      have at least one call ready or in work. If its records take little time, that call is not shorter than an eighth
      of the buffer or a millisecond.
    * The size of these records, and of the elements made from them, is shared in the same way.
    * The threads end when the last engine leaves, and with their owner (see `reader_threads`).
"""

import time
import weakref
from collections.abc import Hashable, Sequence, Sized
from typing import Any, final

from millstream.loader.threads.options import ReadOptions, affordable_threads, buffer_budget
from millstream.loader.threads.reader_threads import CLOSE_SECONDS, ReaderThreads

REMEMBERED_BUFFERS = 4
"""Shares follow the most recent records: about this many buffers of them."""

MAX_SHARED_THREADS = 64
"""The maximum number of threads for several engines, unless one of them asks for more."""

MIN_AHEAD = 2
"""The number of blocks of a single engine that may be ready or in work, whatever their size. With one block, no
thread would work while it waits to be taken."""


def joint_threads(asked: Sequence[int]) -> int:
    return affordable_threads(min(sum(asked), max(MAX_SHARED_THREADS, *asked)))


def min_buffer_bytes(asked: Sequence[ReadOptions]) -> int | None:
    """Returns the smallest explicit limit of pipelines that share a buffer, or None if none has one."""
    return min([one.max_buffer_bytes for one in asked if one.max_buffer_bytes is not None], default=None)


@final
class SharedThreads:
    """Threads for all engines that have entered.

    Attributes:
        calls_ahead: the largest number of calls that an engine has had in flight because its consumer had to wait.
        max_bytes: the maximum number of bytes that all engines together may hold.
        typical_seconds: the latest duration of a block or group, by the kind of the source and the stage: an estimate
            for engines that have made no call yet.
    """

    def __init__(self) -> None:
        self.calls_ahead = 1
        self.typical_seconds: dict[Hashable, float] = {}
        self._records_read: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._asked: weakref.WeakKeyDictionary[Any, ReadOptions] = weakref.WeakKeyDictionary()
        self._total = 0.0
        self._max_threads = 0
        self._buffer = 0
        self._default_bytes = 0
        self.max_bytes = 0
        self._concurrency = Concurrency(1)
        self._readers: ReaderThreads | None = None

    @property
    def level(self) -> int:
        """The number of threads that may work concurrently."""
        return self._concurrency.level

    def enter(self, engine: Any, options: ReadOptions, *, settled: int = 0) -> ReaderThreads:
        """Adds an engine, or changes its options, and returns the threads.

        Their numbers add up. The largest buffer is that of all, within the smallest explicit `max_buffer_bytes`. Their
        number is `settled` for that number of windows.
        """
        self._asked[engine] = options
        asked = list(self._asked.values())
        num_threads = joint_threads([one.num_threads for one in asked])
        self._buffer = max(self._buffer, options.prefetch_buffer_size)
        self._default_bytes = self._default_bytes or buffer_budget(None)
        self.max_bytes = min_buffer_bytes(asked) or self._default_bytes
        if num_threads > self._max_threads:
            self._max_threads, self._concurrency = num_threads, Concurrency(num_threads, settled)
        self._records_read.setdefault(engine, 0.0)
        readers = self._readers
        if readers is None or readers.is_stopped:
            self._readers = readers = ReaderThreads(self.level)
            readers.end_with(self)
        elif readers.size != self.level:
            readers.resize(self.level)
        return readers

    def leave(self, engine: Any, deadline: float | None = None) -> None:
        """Removes an engine. The last one stops the threads, and waits for user code until the deadline.

        That is a time of `time.monotonic`; with None, CLOSE_SECONDS from now. Idempotent and thread-safe.
        """
        self._asked.pop(engine, None)
        self._total -= self._records_read.pop(engine, 0.0)
        if not self._records_read and (readers := self._readers) is not None:
            readers.stop()
            readers.join(CLOSE_SECONDS if deadline is None else deadline - time.monotonic())

    @property
    def engines(self) -> Sized:
        """The engines that have entered."""
        return self._records_read

    @property
    def is_single(self) -> bool:
        return len(self._records_read) <= 1

    @property
    def min_ahead(self) -> int:
        return MIN_AHEAD if self.is_single else 1

    def records_ahead(self, engine: Any) -> int:
        """Returns the number of records of an engine that may be ready or in work."""
        return int(self._buffer * self._share_of(engine))

    def bytes_ahead(self, engine: Any) -> int:
        return int(self.max_bytes * self._share_of(engine))

    def _share_of(self, engine: Any) -> float:
        if self.is_single:
            return 1.0
        return (self._records_read.get(engine, 0.0) + 1) / (self._total + len(self._records_read))

    def record_read(self, engine: Any, num_records: int) -> None:
        read = self._records_read
        if self.is_single or engine not in read:
            return
        read[engine] += num_records
        self._total += num_records
        if self._total > REMEMBERED_BUFFERS * (self._buffer + len(read)):
            for other in list(read):
                read[other] = read.get(other, 0.0) / 2
            self._total = sum(read.values())

    def delivered(self, now: float, waited: float, num_calls: int, num_blocks: int) -> None:
        self._concurrency.delivered(now, waited, num_calls, num_blocks)
        if self._readers is not None and self._readers.size != self.level:
            self._readers.resize(self.level)


WINDOW_SECONDS = 0.05
"""The shortest time over which a rate is measured: longer than the interpreter's switch interval."""

WINDOW_CALLS = 8
"""The smallest number of calls over which a rate is measured. It is also at least twice the number of threads."""

STARVING = 0.1
"""No search takes place if the consumer waits for less than this share of its time."""

WORTH = 0.95
"""Fewer threads are sufficient if they reach this share of the rate of twice as many. A single one then reaches 4/5 of
that of 16.
"""

HOPELESS = 0.65
"""A level whose rate is below this share of that of the kept one is not tried any longer."""

DECISIVE_LEAD = 2
"""The number of rounds that a level must have won more often than the other: one late or lucky window decides nothing.
"""

FIRST_SETTLED_WINDOWS = 4
"""The number of windows after which a level that was kept is first compared again."""

SETTLED_WINDOWS = 64
"""The largest number of windows between comparisons, because the consumer, disk or network may change."""


@final
class Concurrency:
    """Begins with the maximum number of threads, and moves to half or twice the current one while that is better.

    Two levels are compared in rounds of a window each, in alternating order, so that what slows down or speeds up the
    whole machine for a while does so for both. A level that is kept is compared again, with the other neighbour and
    after a longer time, so that a wrong step is soon taken back.

    Args:
        limit: the maximum number of threads.
        settled: the number of windows before the search begins.

    Attributes:
        level: the number of threads that may work now.
    """

    def __init__(self, limit: int, settled: int = 0) -> None:
        self.level = self._kept = limit
        self._limit = limit
        self._settled = settled
        self._patience = FIRST_SETTLED_WINDOWS
        self._goes_up = False
        self._first_rate: float | None = None
        self._lead = 0
        self._skip: float = limit
        self._open_window(0.0)

    def delivered(self, now: float, waited: float, num_calls: float, num_blocks: int) -> None:
        """Records a delivery to the consumer, the seconds that it waited, and the reads completed meanwhile.

        The rate is that of the blocks that threads have completed. The rate of outputs would also depend on their
        order: many may be complete, and wait for one that is not.

        Args:
            now: the time in seconds.
            waited: the seconds that the consumer waited.
            num_calls: the number of calls completed, per process that has this number of threads.
            num_blocks: the number of their blocks.
        """
        if self._skip > 0:
            self._skip -= num_calls
            self._open_window(now)
            return
        self._calls += num_calls
        self._blocks += num_blocks
        self._waited += waited
        seconds = now - self._begin
        if seconds < WINDOW_SECONDS or self._calls < max(WINDOW_CALLS, 2 * self.level):
            return
        if self._waited >= STARVING * seconds:
            self._decide(self._blocks / seconds)
        self._open_window(now)

    @property
    def _rival(self) -> int:
        """The level that the kept one is compared with; itself if there is none in this direction."""
        return min(2 * self._kept, self._limit) if self._goes_up else max(1, self._kept // 2)

    def _decide(self, rate: float) -> None:
        if self._settled > 0:
            self._settled -= 1
            return
        other = self._rival if self.level == self._kept else self._kept
        if self._first_rate is None:
            self._first_rate = rate
            self._go_to(other)
            return
        rates = {self.level: rate, other: self._first_rate}
        self._first_rate = None
        self._lead += 1 if rates[min(rates)] >= WORTH * rates[max(rates)] else -1
        if rates[self._rival] < HOPELESS * rates[self._kept]:
            self._keep(self._kept)
        elif abs(self._lead) == DECISIVE_LEAD:
            self._keep(min(rates) if self._lead > 0 else max(rates))

    def _keep(self, level: int) -> None:
        if level != self._kept:
            self._patience = FIRST_SETTLED_WINDOWS
        else:
            self._settled = self._patience
            self._patience = min(4 * self._patience, SETTLED_WINDOWS)
            self._goes_up = not self._goes_up
        self._kept, self._lead = level, 0
        if self._rival == level:
            self._goes_up = not self._goes_up
        self._go_to(level)

    def _go_to(self, level: int) -> None:
        if level != self.level:
            # These calls were begun by the previous number of threads.
            self._skip = self.level
        self.level = level

    def _open_window(self, now: float) -> None:
        self._begin, self._calls, self._blocks, self._waited = now, 0.0, 0, 0.0
