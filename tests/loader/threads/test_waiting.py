"""Waits end in time, whatever signal handlers do; a stall is a log line, and then an error that says where it is."""

import signal
import threading
import time
from collections.abc import Iterator

import pytest

import millstream
from millstream.loader.threads import shared_threads, thread_executor, waiting
from support.faults.user_faults import WAIT_SECONDS


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[millstream.DataLoader]:
    """Yields a loader whose threads are stuck at number 43 until the end of the test."""
    monkeypatch.setattr(thread_executor, "HAND_OVER_SECONDS", 0.0)
    monkeypatch.setattr(shared_threads, "CLOSE_SECONDS", 0.1)
    released = threading.Event()

    def read_from_storage(key: int) -> int:
        if key == 43:
            released.wait(WAIT_SECONDS)
        return key

    yield millstream.load(range(1000), transformations=[read_from_storage], batch_size=10, stall_timeout=0.3)
    released.set()


def test_a_read_that_never_returns_is_reported_and_becomes_an_error(
    loader: millstream.DataLoader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All batches before come, then a log line, then an error at its turn: with record keys and the read's stack."""
    monkeypatch.setattr(waiting, "STALL_WARNING_SECONDS", 0.05)
    batches: list[list[int]] = []
    with pytest.raises(millstream.WorkerStalledError) as caught, iter(loader) as iterator:
        batches.extend(batch.tolist() for batch in iterator)
    assert batches == [list(range(first, first + 10)) for first in range(0, 40, 10)]
    (message,) = [message for message in caplog.messages if "finished nothing" in message]
    for text in (str(caught.value), message):
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
