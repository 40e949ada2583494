"""Progress of a long scan: a bar on a terminal, otherwise log messages. A short scan reports nothing."""

import sys
import threading
import time
from typing import Any, final

from millstream.core.signals import SignalSafeLock

SHOW_AFTER_SECONDS = 2.0
"""Shorter scans report nothing."""

LOG_EVERY_SECONDS = 10.0
"""Interval between two log messages."""


@final
class CancelledScanError(Exception):
    """The scan was cancelled, because that of another file failed or Ctrl-C was pressed."""


@final
class Progress:
    """The progress of a scan, to which any number of threads may report.

    A description is such as "Indexing 12 files", and a unit such as "records"; None for bytes.
    """

    def __init__(self, description: str, total: int | None, unit: str | None = None) -> None:
        self._description = description
        self._total = total
        self._unit = unit
        self._done = 0
        self._bar: Any = None
        self._has_tried_bar = False
        self._lock = SignalSafeLock(threading.Lock())
        self._next_report = time.monotonic() + SHOW_AFTER_SECONDS
        self._cancelled = False

    def advance(self, amount: int) -> None:
        """Reports that more units are done. Raises CancelledScanError if the scan was cancelled."""
        if self._cancelled:
            raise CancelledScanError
        with self._lock:
            self._done += amount
            if time.monotonic() >= self._next_report:
                self._report()

    def cancel(self) -> None:
        """Makes `advance` raise from now on."""
        self._cancelled = True

    def close(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.close()

    def _report(self) -> None:
        if not self._has_tried_bar:
            self._has_tried_bar = True
            self._bar = _terminal_bar(self._description, self._total, self._unit)
        if self._bar is None:
            import logging  # noqa: PLC0415  (lazy: it takes long to import)

            amount = self._done if self._total is None else self._total
            state = f"{amount:,} {self._unit}" if self._unit else f"{amount / 1e9:.1f} GB"
            if self._total is not None:
                state = f"{100 * self._done // max(1, self._total)} % of {state}"
            logging.getLogger("millstream").info("%s: %s", self._description, state)
            self._next_report = time.monotonic() + LOG_EVERY_SECONDS
        else:
            self._bar.update(self._done - self._bar.n)


def _terminal_bar(description: str, total: int | None, unit: str | None) -> Any:
    """Returns a bar of tqdm, or None without a terminal or tqdm."""
    if not sys.stderr or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm  # noqa: PLC0415
    except ImportError:
        return None

    class Bar(tqdm):  # type: ignore[type-arg]  # it is not generic at run time
        """A bar without tqdm's monitor thread and interprocess lock."""

        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    return Bar(desc=description, total=total, unit=f" {unit}" if unit else "B", unit_scale=True, leave=False)
