"""A bounded wait for threads that make calls: first a log line, then an error with their stacks.

Only time in which the consumer waits counts, a look at a time: a look that took much longer was no waiting, but a
suspended machine.
"""

import math
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import final

from millstream.errors import WorkerStalledError

STALL_WARNING_SECONDS = 30.0
"""Threads that finish nothing for this long, while the consumer waits, are reported in the log."""

LOOK_SECONDS = 1.0
"""The longest wait between two looks."""


@final
class Wait:
    """The consumer's wait for the next call to finish.

    Args:
        stall_timeout: the number of seconds after which it is an error; `math.inf` for never.
    """

    def __init__(self, stall_timeout: float) -> None:
        self._timeout = stall_timeout
        self._waited = 0.0
        self._is_reported = False
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long to wait now, at least 0."""
        self._since = time.monotonic()
        limit = self._timeout if self._is_reported else min(self._timeout, STALL_WARNING_SECONDS)
        return max(0.0, min(LOOK_SECONDS, limit - self._waited))

    def was_in_vain(self, records: str, threads: Iterable[threading.Thread]) -> WorkerStalledError | None:
        """Records that nothing has finished; returns the error if that is one now, and warns once before.

        Args:
            records: the records of the oldest call.
            threads: those that make calls.
        """
        self._waited += min(LOOK_SECONDS, time.monotonic() - self._since)
        if self._waited >= self._timeout:
            return WorkerStalledError(
                f"The threads that read have finished nothing for {self._waited:.1f} s (stall_timeout), "
                f"with {records}. Stacks:\n{stacks_of(threads)}"
            )
        if self._waited >= STALL_WARNING_SECONDS and not self._is_reported:
            self._is_reported = True
            import logging  # noqa: PLC0415  (takes long to import)

            limit = "never" if math.isinf(self._timeout) else f"after {self._timeout:g} s"
            logging.getLogger("millstream").warning(
                "millstream: the threads that read have finished nothing for %.1f s, with %s. This becomes an error "
                "%s (stall_timeout). Stacks:\n%s",
                self._waited,
                records,
                limit,
                stacks_of(threads),
            )
        return None


def stacks_of(threads: Iterable[threading.Thread]) -> str:
    """Returns the stacks of the given threads, as text."""
    frames = sys._current_frames()  # noqa: SLF001  (the only way to see other threads' stacks)
    stacks = [
        f"Thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    ]
    return "".join(stacks) or "(no thread is there)"
