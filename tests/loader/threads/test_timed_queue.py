"""A queue whose waits end in time, whatever signal handlers do."""

import itertools
import queue
import signal
import threading
import time

import pytest

from millstream.loader.threads.timed_queue import TimedQueue
from support.faults.user_faults import WAIT_SECONDS


def test_items_come_once_each_and_in_order_whoever_waits() -> None:
    """Four threads put 500 items each, and three take them: each item once, those of one thread in its order."""
    items: TimedQueue[tuple[int, int]] = TimedQueue()
    taken: list[list[tuple[int, int]]] = [[], [], []]

    def take(mine: list[tuple[int, int]]) -> None:
        while (item := items.get(WAIT_SECONDS))[0] >= 0:
            mine.append(item)
        items.put(item)

    takers = [threading.Thread(target=take, args=(mine,)) for mine in taken]

    def put(own: int) -> None:
        for number in range(500):
            items.put((own, number))

    putters = [threading.Thread(target=put, args=(own,)) for own in range(4)]
    for thread in takers + putters:
        thread.start()
    for thread in putters:
        thread.join(WAIT_SECONDS)
    items.put((-1, 0))
    for thread in takers:
        thread.join(WAIT_SECONDS)
    assert sorted(itertools.chain(*taken)) == [(own, number) for own in range(4) for number in range(500)]
    for mine in taken:
        for own in range(4):
            numbers = [number for other, number in mine if other == own]
            assert numbers == sorted(numbers)
    assert len(items) == 1


def test_a_wait_ends_in_time_though_a_handler_outlasts_it() -> None:
    """Nothing comes within 0.1 s, in which a signal handler runs that takes 0.2 s: queue.Empty, and soon."""
    rescued: TimedQueue[int] = TimedQueue()
    rescue = threading.Timer(WAIT_SECONDS, rescued.put, (1,))
    rescue.start()
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.2))
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(queue.Empty):
            rescued.get(0.1)
    finally:
        rescue.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < WAIT_SECONDS
