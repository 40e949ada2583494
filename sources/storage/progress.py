"""How far a long scan of files is: a bar on a terminal, lines in the log elsewhere, and nothing for a short one."""

import sys
import threading
import time
from typing import Any, final

from millstream.signal_safe_lock import SignalSafeLock

SHOW_AFTER_SECONDS = 2.0
"""A scan that is done earlier is not worth a word."""

LOG_EVERY_SECONDS = 10.0
"""The time between two lines in the log."""


@final
class CancelledScanError(Exception):
    """The scan was given up: another file's failed, or Ctrl-C was pressed."""


@final
class Progress:
    """Bytes of a total that are done, or whatever else is counted. Any number of threads may report.

    Args:
        words: what is being done, such as "Indexing 12 files".
        total: how many bytes there are.
        unit: what is counted, such as "records"; None for bytes.
    """

    def __init__(self, words: str, total: int, unit: str | None = None) -> None:
        self._words = words
        self._total = total
        self._unit = unit
        self._done = 0
        self._bar: Any = None
        self._looked_for_bar = False
        self._lock = SignalSafeLock(threading.Lock())
        self._next_report = time.monotonic() + SHOW_AFTER_SECONDS
        self._cancelled = False

    def advance(self, amount: int) -> None:
        """Reports that this many more are done.

        Raises:
            CancelledScanError: nobody waits for them any more.
        """
        if self._cancelled:
            raise CancelledScanError
        with self._lock:
            self._done += amount
            if time.monotonic() >= self._next_report:
                self._report()

    def cancel(self) -> None:
        """Makes each thread that reports from now on stop."""
        self._cancelled = True

    def close(self) -> None:
        """Takes the bar away."""
        with self._lock:
            if self._bar is not None:
                self._bar.close()

    def _report(self) -> None:
        if not self._looked_for_bar:
            self._looked_for_bar = True
            self._bar = _terminal_bar(self._words, self._total, self._unit)
        if self._bar is None:
            import logging  # noqa: PLC0415  (takes its time)

            share = 100 * self._done // max(1, self._total)
            whole = f"{self._total:,} {self._unit}" if self._unit else f"{self._total / 1e9:.1f} GB"
            logging.getLogger("millstream").info("%s: %d %% of %s", self._words, share, whole)
            self._next_report = time.monotonic() + LOG_EVERY_SECONDS
        else:
            self._bar.update(self._done - self._bar.n)


def _terminal_bar(words: str, total: int, unit: str | None) -> Any:
    """Returns a bar of tqdm, or None where there is no terminal or no tqdm."""
    if not sys.stderr or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm  # noqa: PLC0415
    except ImportError:
        return None

    class Bar(tqdm):  # type: ignore[type-arg]  # it is not generic at run time
        """A bar without the thread and the lock of processes that tqdm starts with."""

        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    return Bar(desc=words, total=total, unit=f" {unit}" if unit else "B", unit_scale=True, leave=False)
