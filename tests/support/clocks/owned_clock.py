"""A clock that belongs to the test: it stands still, but for what the user's code says that it takes.

With it, what is measured does not depend on the machine: however slow that is, and whatever suspends a process, a
stage takes what was spent in it, and all others nothing.
"""

import os
import threading
import time
from typing import Any, final


@final
class OwnedClock:
    """Stands at zero in each thread, and moves on by what is spent there."""

    def __init__(self) -> None:
        self._local = threading.local()

    def perf_counter(self) -> float:
        """Returns the seconds that were spent in this thread."""
        return getattr(self._local, "now", 0.0)

    def spend(self, seconds: float) -> None:
        """Lets seconds pass, for those who ask in this thread."""
        self._local.now = self.perf_counter() + seconds


CLOCK = OwnedClock()
"""The one of this process: a worker process has its own."""


@final
class Spend:
    """Returns what it is called with, having spent some seconds. A process that it is sent to gets the clock too.

    Args:
        seconds: how many, for each call: a few powers of two, so that sums are exact in any order of tests.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, value: Any) -> Any:
        """Returns the value."""
        CLOCK.spend(self.seconds)
        return value

    def __repr__(self) -> str:
        return "spend"

    def __reduce__(self) -> Any:
        return arrived, (self.seconds, os.getpid())


def arrived(seconds: float, sender: int) -> Spend:
    """Returns a Spend in the process that it was sent to: a worker, in which everybody gets the owned clock now."""
    if os.getpid() != sender:
        time.perf_counter = CLOCK.perf_counter
    return Spend(seconds)


class SlowSource:
    """Numbers that are read one by one.

    Args:
        size: how many.
        seconds: what each read takes, of one number or of many.
    """

    def __init__(self, size: int, seconds: float) -> None:
        self.size = size
        self.spend = Spend(seconds)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int) -> int:
        return int(self.spend(key))
