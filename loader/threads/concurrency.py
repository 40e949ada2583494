"""How many threads should work at once: found by trying.

Work that waits for a disk or a network wants many. Work that waits for others of its kind, for Python's lock or for one
inside a library, is slower the more there are. One call's duration cannot tell these apart; the overall rate can.

No fixed number serves both. With one thread for each of 2 cores instead of up to 16, a source that waits 20 ms for
each batched read of 32 records gave 95 batches/s instead of 700, and JPEGs read and cropped into batches of 64 gave 19,
not 24.
"""

from typing import final

WINDOW_SECONDS = 0.05
"""How long a rate is taken at least: longer than threads take turns."""

WINDOW_RUNS = 8
"""From how many outputs a rate is taken at least, and from twice as many as there are threads."""

STARVING = 0.1
"""A consumer that waits for less than this share of its time has enough: nothing is tried."""

WORTH = 0.8
"""Fewer threads are enough if they reach this share of the best rate."""

FIRST_SETTLED_WINDOWS = 4
"""After this many windows a first refusal is put to the test: one burst of outputs may have made a rate look good."""

SETTLED_WINDOWS = 256
"""After this many windows the search begins again: the consumer, the disk or the network may have changed."""


@final
class Concurrency:
    """Begins with as many threads as allowed, and halves them for as long as that costs next to nothing.

    Args:
        most: how many threads may work at once, at least 1.

    Attributes:
        level: how many should now.
    """

    def __init__(self, most: int) -> None:
        self.level = most
        self._most = most
        self._level_above = most
        self._best_rate = 0.0
        self._settled = 0
        self._patience = FIRST_SETTLED_WINDOWS
        self._skip = most
        self._open_window(0.0)

    def delivered(self, now: float, waited: float) -> None:
        """Takes note of an output.

        Args:
            now: when it was delivered, in seconds.
            waited: for how many of them the consumer waited for it.
        """
        if self._skip > 0:
            self._skip -= 1
            self._open_window(now)
            return
        self._runs += 1
        self._waited += waited
        seconds = now - self._begin
        if seconds < WINDOW_SECONDS or self._runs < max(WINDOW_RUNS, 2 * self.level):
            return
        if self._waited >= STARVING * seconds:
            self._decide(self._runs / seconds)
        self._open_window(now)

    def _decide(self, rate: float) -> None:
        """Continues the search, at the end of a window in which the consumer was starving."""
        if self._settled > 0:
            self._settled -= 1
            if self._settled == 0:
                self._best_rate = 0.0
                self._go_to(self._most)
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
        # What comes next was begun by as many threads as before.
        self._skip = self._most

    def _open_window(self, now: float) -> None:
        self._begin, self._runs, self._waited = now, 0, 0.0
