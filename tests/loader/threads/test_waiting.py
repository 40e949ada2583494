"""Waits end in time, whatever signal handlers do; a stall is a log line, and then an error that says where it is."""

import logging
import signal
import threading
import time
from collections.abc import Iterator

import pytest

import millstream
from millstream.loader.threads import shared_threads, thread_executor, waiting
from millstream.transforms import Batch
from support.faults.user_faults import WAIT_SECONDS


class Stuck:
    """Numbers, of which number 43 is not read before it is released, or very much later."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, key: int) -> int:
        if key == 43:
            self.read_from_storage()
        return key

    def read_from_storage(self) -> None:
        self.released.wait(WAIT_SECONDS)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[millstream.DataLoader]:
    """Yields a loader of a stuck source, which threads read."""
    monkeypatch.setattr(thread_executor, "HAND_OVER_SECONDS", 0.0)
    monkeypatch.setattr(shared_threads, "CLOSE_SECONDS", 0.1)
    source, sampler = Stuck(), millstream.SequentialSampler(1000)
    yield millstream.DataLoader(data_source=source, sampler=sampler, operations=[Batch(10)], stall_timeout=0.3)
    source.released.set()


def test_a_read_that_never_returns_is_reported_and_becomes_an_error(
    loader: millstream.DataLoader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All batches before come, then a log line, then an error at its turn: with record keys and the read's stack."""
    monkeypatch.setattr(waiting, "STALL_WARNING_SECONDS", 0.05)
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


def test_a_signal_handler_that_outlasts_a_wait_does_not_unbind_it(loader: millstream.DataLoader) -> None:
    """A handler that runs past the end of a wait delays the error of a stall by its own time, and not for ever."""
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.6))
    try:
        with iter(loader) as iterator:
            iterator.seek(4)
            iterator.start_prefetch()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(millstream.WorkerStalledError, match="the records 40, 41, 42"):
                next(iterator)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
