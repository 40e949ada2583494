"""A search for the best number of concurrent threads.

Work that waits for a disk or network benefits from many threads. Work that waits for the interpreter's lock, or for a
lock of a library, slows down with each. The duration of one call cannot distinguish the two, but the overall rate can.

No fixed number serves both. With one thread for each of 2 cores instead of up to 16, a source that waits 20 ms for
each batched read of 32 records reached 95 batches/s instead of 700, and JPEGs read and cropped into batches of 64
reached 19 instead of 24.
"""

from typing import final

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
    """Begins with the maximum number of threads, and halves the current `level` while the rate hardly falls."""

    def __init__(self, limit: int) -> None:
        self.level = limit
        self._limit = limit
        self._level_above = limit
        self._best_rate = 0.0
        self._settled = 0
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
