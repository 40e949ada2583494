"""Operations after `mp_prefetch` in threads of this process: every wait and the memory have bounds, as anywhere."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream import IterDataset, MapDataset, MultiprocessingOptions, ReadOptions, WorkerStalledError
from millstream.experimental import DatasetOptions, WithOptionsIterDataset
from millstream.loader.threads.reader_threads import CLOSE_SECONDS
from support.faults import user_faults
from support.faults.user_faults import WAIT_SECONDS, At, Pipe, Raise, ReportThen, WaitAt
from support.processes.worker_pools import ATTEMPTS, fork_server_of, in_background, still_there

COUNT = 40


def chain(*before: Any) -> IterDataset[Any]:
    """Returns the numbers below COUNT, after some operations."""
    return MapDataset.range(COUNT).to_iter_dataset(ReadOptions(0, 0)).apply(list(before))


def closing_seconds(folder: Path, *, hangs: bool) -> float:
    """Returns the time to close an iterator whose fork server is stopped, and whose local thread may hang."""
    with Pipe(folder / "there") as there, Pipe(folder / "go") as go_on:
        local = At(1, ReportThen(there.path, WaitAt(go_on.path)))
        iterator = iter(chain(At(9, user_faults.hang)).mp_prefetch(1).map(local).prefetch(ReadOptions(1, 4)))
        assert next(iterator) == 0

        def wait_for_the_local_thread() -> None:
            with pytest.raises(ValueError, match="closed"):
                next(iterator)

        if not hangs:
            go_on.put()
            assert next(iterator) == 1
        with in_background(wait_for_the_local_thread) if hangs else contextlib.nullcontext():
            assert there.take_numbers() == [os.getpid()]
            fork_server = fork_server_of(iterator._inner)
            os.kill(fork_server, signal.SIGSTOP)
            start = time.monotonic()
            iterator.close()
            seconds = time.monotonic() - start
            go_on.put()
    assert still_there([fork_server]) == []
    return seconds


def test_closing_waits_for_workers_and_local_threads_together(tmp_path: Path) -> None:
    """A local thread that hangs costs no time in addition to a fork server that does not answer."""

    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    differences = (
        closing_seconds(folder(f"hangs{attempt}"), hangs=True) - closing_seconds(folder(f"ends{attempt}"), hangs=False)
        for attempt in range(ATTEMPTS)
    )
    assert any(difference < CLOSE_SECONDS / 2 for difference in differences)


def test_a_stall_of_a_local_thread_is_an_error(tmp_path: Path) -> None:
    """After stall_timeout, a local operation that hangs is an error at its turn, with its stack and its record key."""
    with Pipe(tmp_path / "go") as go_on:
        workers = MultiprocessingOptions(1, stall_timeout=2 * WAIT_SECONDS)
        dataset = chain(abs).mp_prefetch(workers).map(At(25, WaitAt(go_on.path))).prefetch(ReadOptions(1, 4))
        with iter(dataset) as iterator:
            found = [next(iterator) for _ in range(20)]
            calls = iterator._inner._executor._aside
            assert calls._stall_timeout == workers.stall_timeout
            # Shortened shortly before: how long all else takes depends on the machine.
            calls._stall_timeout = 1.0
            with pytest.raises(WorkerStalledError) as caught:
                found.extend(iterator)
            assert found == list(range(len(found)))
            assert len(found) <= 25
            for text in ("stall_timeout", " 25", "in wait_at"):
                assert text in str(caught.value)
            go_on.put()
            iterator.seek(26)
            assert list(iterator) == list(range(26, COUNT))


@pytest.mark.parametrize("reading", [None, ReadOptions(2, 8)])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_element_that_fails_here_is_skipped(workers: int, reading: ReadOptions | None) -> None:
    """With on_error="skip", elements that fail on either side of mp_prefetch are dropped, in order, and counted."""
    fails = [At(number, Raise(ValueError, (f"{number} is bad",))) for number in (7, 9)]
    dataset = chain(fails[0]).mp_prefetch(workers).map(fails[1])
    dataset = dataset if reading is None else dataset.prefetch(reading)
    for max_errors in (2, 1):
        options = DatasetOptions(on_error="skip", max_errors=max_errors)
        with iter(WithOptionsIterDataset(dataset, options)) as iterator:
            if max_errors == 2:
                assert list(iterator) == [number for number in range(COUNT) if number not in {7, 9}]
                assert iterator.metrics()["loader/errors"] == 2.0
                iterator.set_state(iterator.get_state())
                assert list(iterator) == []
                continue
            assert [next(iterator) for _ in range(8)] == [0, 1, 2, 3, 4, 5, 6, 8]
            with pytest.raises(ValueError, match="9 is bad"):
                next(iterator)


class Grow:
    """Turns a number into an array, and counts its calls in a file."""

    def __init__(self, file: Path, size: int) -> None:
        self.file = file
        self.size = size

    def __call__(self, number: int) -> np.ndarray[Any, Any]:
        """Returns an array of bytes."""
        with self.file.open("ab", buffering=0) as file:
            file.write(b"\0")
        return np.full(self.size, number, np.uint8)


@pytest.mark.parametrize(
    ("reading", "most"),
    [
        (ReadOptions(2, 1000, max_buffer_bytes=400_000), 4),
        (ReadOptions(2, 1000, max_buffer_bytes=1), 1),
        (ReadOptions(2, 16), 16),
    ],
)
def test_local_threads_hold_no_more_than_their_buffer(reading: ReadOptions, most: int, tmp_path: Path) -> None:
    """Local threads work as far ahead as the limits of bytes and of records allow, however small their inputs are.

    The rest of the call that is being delivered comes on top. Workers would give them much more to do.
    """
    file = tmp_path / "calls"
    numbers = MapDataset.range(120).to_iter_dataset(ReadOptions(0, 0))
    workers = MultiprocessingOptions(1, per_worker_buffer_size=50)
    dataset = numbers.map(abs).mp_prefetch(workers).map(Grow(file, 100_000)).prefetch(reading)
    held = size = 0
    with iter(dataset) as iterator:
        for number in range(120):
            assert next(iterator)[0] == number
            calls = iterator._inner._executor._aside
            deadline = time.monotonic() + WAIT_SECONDS
            while len(calls._finished) < calls.in_flight:
                assert time.monotonic() < deadline, "the local threads do not finish"
            # The first calls are larger: sizes are known once outputs are received. Calls begin before they count.
            if number > 30:
                size = max([size, *[call.num_records for call in calls._in_flight]])
            if number > 60:
                held = max(held, file.stat().st_size - number - 1)
    assert held <= most + size - 1
