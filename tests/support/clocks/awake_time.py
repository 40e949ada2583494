"""Time in which processes run: what passes while the machine stands still is no fault of anybody's.

A machine that is shared is suspended for seconds now and then, and so is a container. Clocks go on meanwhile, and no
process makes progress. A law about seconds is about those in which it could.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

LOOK_SECONDS = 0.05
"""The interval of looks at what runs."""


@contextlib.contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yields what returns the seconds since the beginning of the block, without those in which all stood still."""
    begin, stood_still, has_ended = time.monotonic(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal stood_still
        is_over = False
        while not is_over:
            look = time.monotonic()
            is_over = has_ended.wait(LOOK_SECONDS)
            stood_still += max(0.0, time.monotonic() - look - LOOK_SECONDS)

    watcher = threading.Thread(target=watch, name="stopwatch")

    def seconds() -> float:
        has_ended.set()
        watcher.join()
        return time.monotonic() - begin - stood_still

    watcher.start()
    try:
        yield seconds
    finally:
        has_ended.set()
        watcher.join()
