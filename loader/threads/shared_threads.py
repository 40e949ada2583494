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
        self._records_read[engine] = 0.0
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

    def delivered(self, now: float, waited: float, num_blocks: int) -> None:
        self._concurrency.delivered(now, waited, num_blocks)
        if self._readers is not None and self._readers.size != self.level:
            self._readers.resize(self.level)


WINDOW_SECONDS = 0.05
"""The shortest time over which a rate is measured: longer than the interpreter's switch interval."""

WINDOW_BLOCKS = 8
"""The smallest number of blocks over which a rate is measured. It is also at least twice the number of threads."""

STARVING = 0.1
"""No search takes place if the consumer waits for less than this share of its time."""

WORTH = 0.8
"""Fewer threads are sufficient if they reach this share of the best rate."""

FIRST_SETTLED_WINDOWS = 4
"""The number of windows after which a first rejection is tested again: a burst of blocks may have raised the rate."""

SETTLED_WINDOWS = 256
"""The number of windows after which the search restarts, because the consumer, disk or network may have changed."""


@final
class Concurrency:
    """Begins with the maximum number of threads, and halves the current `level` while the rate hardly falls.

    Args:
        limit: the maximum number of threads.
        settled: the number of windows before the search begins.
    """

    def __init__(self, limit: int, settled: int = 0) -> None:
        self.level = limit
        self._limit = limit
        self._level_above = limit
        self._best_rate = 0.0
        self._settled = settled
        self._patience = FIRST_SETTLED_WINDOWS
        self._skip = limit
        self._open_window(0.0)

    def delivered(self, now: float, waited: float, num_blocks: int) -> None:
        """Records a delivery to the consumer, the seconds that it waited, and the number of blocks completed meanwhile.

        The rate is that of the blocks that threads have completed. The rate of outputs would also depend on their
        order: many may be complete, and wait for one that is not.
        """
        if self._skip > 0:
            self._skip -= num_blocks
            self._open_window(now)
            return
        self._blocks += num_blocks
        self._waited += waited
        seconds = now - self._begin
        if seconds < WINDOW_SECONDS or self._blocks < max(WINDOW_BLOCKS, 2 * self.level):
            return
        if self._waited >= STARVING * seconds:
            self._decide(self._blocks / seconds)
        self._open_window(now)

    def _decide(self, rate: float) -> None:
        if self._settled > 0:
            self._settled -= 1
            if self._settled == 0:
                self._best_rate = 0.0
                self._go_to(self._limit)
        elif rate < WORTH * self._best_rate:
            self._go_to(self._level_above)
            self._settled = self._patience
            self._patience = min(4 * self._patience, SETTLED_WINDOWS)
        elif self.level == 1:
            self._settled = SETTLED_WINDOWS
        else:
            self._best_rate = max(rate, self._best_rate)
            self._level_above = self.level
            self._go_to(self.level // 2)

    def _go_to(self, level: int) -> None:
        self.level = level
        # The next blocks were begun by the previous number of threads.
        self._skip = self._limit

    def _open_window(self, now: float) -> None:
        self._begin, self._blocks, self._waited = now, 0, 0.0
