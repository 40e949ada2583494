"""Waits end in time, whatever signal handlers do; a stall is a log line, and then an error that says where it is."""

import itertools
import logging
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

import millstream
from millstream.loader.threads import shared_threads, thread_executor, waiting
from millstream.loader.threads.waiting import TimedQueue
from millstream.transforms import Batch, Map
from support.faults.user_faults import WAIT_SECONDS


class Stuck:
    """Numbers, of which one is not read before it is released."""

    def __init__(self, key: int) -> None:
        self.released = threading.Event()
        self._key = key

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, key: int) -> int:
        self.read_from_storage([key])
        return key

    def read_from_storage(self, keys: Sequence[int]) -> None:
        if self._key in keys:
            self.released.wait()


class BatchedStuck(Stuck):
    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        self.read_from_storage(keys)
        return list(keys)


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stuck]]:
    """Releases the sources in a list after the test, and lets closing an iterator wait less long for them."""
    monkeypatch.setattr(shared_threads, "CLOSE_SECONDS", 0.1)
    sources: list[Stuck] = []
    yield sources
    for source in sources:
        source.released.set()


@pytest.mark.parametrize("kind", [Stuck, BatchedStuck])
def test_a_read_that_never_returns_is_reported_and_becomes_an_error(
    kind: type[Stuck],
    released: list[Stuck],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All batches before come, then a log line, then an error at its turn: with record keys and the read's stack."""
    monkeypatch.setattr(waiting, "STALL_WARNING_SECONDS", 0.05)
    monkeypatch.setattr(thread_executor, "HAND_OVER_SECONDS", 0.0)
    source = kind(43)
    released.append(source)
    sampler = millstream.SequentialSampler(1000)
    loader = millstream.DataLoader(data_source=source, sampler=sampler, operations=[Batch(10)], stall_timeout=0.3)
    batches: list[list[int]] = []
    with (
        caplog.at_level(logging.WARNING, "millstream"),
        pytest.raises(millstream.WorkerStalledError) as caught,
        iter(loader) as iterator,
    ):
        batches.extend(batch.tolist() for batch in iterator)
    assert batches == [list(range(first, first + 10)) for first in range(0, 40, 10)]
    (record,) = [record for record in caplog.records if "finished nothing" in record.getMessage()]
    for text in (str(caught.value), record.getMessage()):
        assert "the records 40, 41, 42" in text
        assert "read_from_storage" in text


def test_a_signal_handler_that_outlasts_a_wait_does_not_unbind_it(
    released: list[Stuck], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that runs past the end of a wait delays the error of a stall by its own time, and not for ever."""
    monkeypatch.setattr(thread_executor, "HAND_OVER_SECONDS", 0.0)
    source = Stuck(3)
    released.append(source)
    sampler = millstream.SequentialSampler(1000)
    loader = millstream.DataLoader(data_source=source, sampler=sampler, operations=[Batch(10)], stall_timeout=0.3)
    rescue = threading.Timer(WAIT_SECONDS, source.released.set)
    rescue.start()
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.6))
    try:
        with iter(loader) as iterator:
            iterator.start_prefetch()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(millstream.WorkerStalledError, match="the records 0, 1, 2"):
                next(iterator)
    finally:
        rescue.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_operations_that_never_return_are_an_error_too(released: list[Stuck], monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation after a Batch that waits forever is an error, and a finished call after it is not taken for it."""
    monkeypatch.setattr(thread_executor, "HAND_OVER_SECONDS", 0.0)
    source = Stuck(-1)
    released.append(source)
    operations = [Batch(10), Map(lambda batch: (batch[0] == 20 and source.released.wait(), batch[0])[1])]
    sampler = millstream.SequentialSampler(1000)
    loader = millstream.DataLoader(data_source=source, sampler=sampler, operations=operations, stall_timeout=0.3)
    firsts: list[int] = []
    with pytest.raises(millstream.WorkerStalledError, match="the records 20, 21"), iter(loader) as iterator:
        firsts.extend(iterator)
    assert firsts == [0, 10]
    source.released.set()
    assert sum(1 for _ in loader) == 100


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
