"""Hangs are logged or bounded, wherever code runs, and the end of one thing does not hang or spoil another."""

import logging
import operator
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import millstream
from millstream.experimental import InterleaveIterDataset
from millstream.loader.engine.engine import ReadAhead
from millstream.loader.execution import Execution
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.processes.channel import Channel, Task
from millstream.loader.threads import reader_threads
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.shared_threads import SharedThreads
from millstream.loader.transport import importable_modules
from support.faults.user_faults import WAIT_SECONDS, Pipe, wait_at
from support.processes.worker_pools import at_most, pids_of

HANGS_AT = 30
STALL_SECONDS = 0.3


@pytest.fixture
def logged() -> Iterator["queue.SimpleQueue[str]"]:
    """Yields a queue of what is logged, from whichever thread."""
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.put(record.getMessage())

    logger, handler = logging.getLogger("millstream"), Handler()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    """Yields a pipe at which `hang_once` waits. It can be sent to workers, unlike an Event."""
    with Pipe(tmp_path / "hanging") as pipe:
        monkeypatch.setenv("HANGING", str(pipe.path))
        yield pipe


def hang_once(number: int) -> int:
    if number == HANGS_AT:
        wait_at(Path(os.environ["HANGING"]))
    return number


class Hanging:
    """A source whose storage hangs at one record; with batched reads."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, key: int) -> int:
        return hang_once(key)

    def __getitems__(self, keys: list[int]) -> list[int]:
        return [hang_once(key) for key in keys]


class Batched:
    """A source of the user with batched reads, none of which waits."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, key: int) -> int:
        return key

    def __getitems__(self, keys: list[int]) -> list[int]:
        return keys


class HangingStream(millstream.IterDataset[int]):
    def __iter__(self) -> Any:
        return map(hang_once, range(60))


def chain_of(dataset: Any) -> Any:
    return dataset.to_iter_dataset().batch(4)


NO_THREADS = ReadOptions(num_threads=0)
OPTIONS: dict[str, Any] = {"num_epochs": 1, "batch_size": 4}
CONSUMERS: dict[str, tuple[Callable[[], Any], str]] = {
    "default threads": (
        lambda: millstream.load(list(range(60)), transformations=[hang_once], **OPTIONS),
        "Map(hang_once), at record key 30 (position 30)",
    ),
    "no threads, operation": (
        lambda: millstream.load(range(60), transformations=[hang_once], read_options=NO_THREADS, **OPTIONS),
        "Map(hang_once), at record key 30 (position 30)",
    ),
    "no threads, source": (
        lambda: millstream.load(Hanging(), read_options=NO_THREADS, **OPTIONS),
        "reading from Hanging, with the records 28, 29, 30, 31",
    ),
    "debug": (
        lambda: millstream.load(list(range(60)), transformations=[hang_once], debug=True, **OPTIONS),
        "Map(hang_once), at record key 30",
    ),
    "chain": (
        lambda: chain_of(millstream.MapDataset.range(60).map(hang_once)),
        "Map(hang_once), at record key 30",
    ),
    "mixture": (
        lambda: millstream.IterDataset.mix(
            [
                millstream.MapDataset.range(60).map(hang_once).to_iter_dataset(NO_THREADS).filter(bool),
                millstream.MapDataset.range(60, 90).to_iter_dataset(NO_THREADS),
            ]
        ).batch(4),
        "reading from MapDataset, with the records ",
    ),
    "operations after a stream": (lambda: HangingStream().map(abs).batch(4), "HangingStream, at element"),
    "local operations after workers": (
        lambda: chain_of(millstream.MapDataset.range(60)).mp_prefetch(2).map(lambda batch: hang_once(int(batch[2]))),
        "Map(<lambda>), ",
    ),
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_call_that_hangs_in_the_consumers_thread_is_logged(
    consumer: str, logged: "queue.SimpleQueue[str]", hanging: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names record and operation, with the stack; no thread is left after close, and the stream goes on."""
    monkeypatch.setattr("millstream.loader.threads.waiting.STALL_WARNING_SECONDS", STALL_SECONDS)
    make, named = CONSUMERS[consumer]
    with iter(make()) as iterator:
        batches: list[Any] = []
        reader = threading.Thread(target=lambda: batches.extend(iterator))
        reader.start()
        try:
            # On a busy machine, the batches before, or the start of workers, may take longer than the limit, too.
            while named not in (message := logged.get(timeout=WAIT_SECONDS)):
                assert "in hang_once\n" not in message
            assert message.startswith("millstream: the consumer's thread has been busy for ")
            assert "in hang_once\n" in message
        finally:
            hanging.put(64)
            reader.join(WAIT_SECONDS)
    assert len(batches) >= 15
    assert not any("in hang_once\n" in logged.get() for _ in range(logged.qsize()))


def test_a_read_that_hangs_is_an_error(hanging: Pipe) -> None:
    """The stall timeout ends the wait for a source of the user, however quick its reads were."""
    with iter(millstream.load(Hanging(), num_epochs=1, batch_size=4)) as iterator:
        # Shortened shortly before: how long all else takes depends on the machine.
        assert [next(iterator)[0] for _ in range(6)] == list(range(0, 24, 4))
        engine: Any = iterator._executor
        engine.budget.place._stall_timeout = 1.0
        with pytest.raises(millstream.WorkerStalledError, match=r"record.* 30"):
            list(iterator)
        hanging.put(64)


def test_only_plain_data_in_memory_is_read_in_the_consumers_thread(tmp_path: Path) -> None:
    """A read that may wait runs in a thread however quick it was."""
    (tmp_path / "lines").write_text("line\n" * 60)
    np.save(tmp_path / "array.npy", np.arange(60))
    mapped = millstream.InMemoryDataSource(np.load(tmp_path / "array.npy", mmap_mode="r"))
    lines = millstream.TextLineDataSource(str(tmp_path / "lines"))
    held = millstream.InMemoryDataSource(np.arange(60))
    sources: list[tuple[Any, bool]] = [
        (list(range(60)), True),
        (range(60), True),
        (held, True),
        (millstream.ConcatenatedDataSource([held, [1, 2]]), True),
        (millstream.MapDataset.source(held).map(abs).shuffle(seed=1), True),
        (Batched(), False),
        (mapped, False),
        (lines, False),
        (millstream.ConcatenatedDataSource([held, lines]), False),
        (millstream.MapDataset.source(lines).map(len), False),
    ]
    for source, is_plain in sources:
        with iter(millstream.load(source, batch_size=4)) as iterator:
            for _ in range(12):
                next(iterator)
            engine: Any = iterator._executor
            assert isinstance(engine.budget, ReadAhead)
            engine.budget._costs.seconds = [0.0]
            assert engine.budget._is_quick(0) == is_plain, source


def refuse_threads(error: type[Exception], self: threading.Thread, *, start: Callable[[Any], None]) -> None:
    if self.name == reader_threads.THREAD_NAME:
        raise error("no thread is left")
    start(self)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_without_another_thread_the_stream_is_the_same(
    error: type[Exception], hanging: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a thread cannot start, for whatever reason, its work is done elsewhere, and no wait is endless."""
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: refuse_threads(error, self, start=start))
    loader = millstream.load(Hanging(), num_epochs=1, batch_size=4, stall_timeout=WAIT_SECONDS)
    hanging.put(64)
    batches: list[Any] = []
    reader = threading.Thread(target=lambda: batches.extend(loader), daemon=True)
    start(reader)
    reader.join(WAIT_SECONDS)
    assert [batch.tolist() for batch in batches] == [list(range(start, start + 4)) for start in range(0, 60, 4)]


def test_one_deadline_is_that_of_all_hung_threads(hanging: Pipe) -> None:
    """Closing a loader with several iterators that hang takes no longer than with one."""
    loader = millstream.load(Hanging(), batch_size=31)
    iterators = [iter(loader) for _ in range(6)]
    for iterator in iterators:
        iterator.start_prefetch()
    try:
        with at_most(1.5 * reader_threads.CLOSE_SECONDS):
            loader.close()
    finally:
        hanging.put(64)


@pytest.mark.parametrize("reading", [NO_THREADS, millstream.ReadOptions(2, 4)])
def test_operations_of_two_places_may_run_in_one(reading: millstream.ReadOptions) -> None:
    """Local operations run without workers, too, and are not waited for without an end."""
    pipeline = Pipeline.of(range(10), millstream.SequentialSampler(10), [abs, operator.neg], millstream.NoSharding())
    vars(pipeline)["num_local"] = 1
    execution = Execution(pipeline, MultiprocessingOptions(), reading)
    with DataLoaderIterator.of(execution) as iterator:
        assert list(iterator) == [-number for number in range(10)]


@pytest.mark.parametrize("limits", [[1 << 20, None, 1 << 30], [None, 1 << 30, 1 << 20], [1 << 20], [None, 1 << 20]])
def test_the_smallest_limit_is_that_of_all_that_share_a_buffer(limits: list[int | None]) -> None:
    """Whatever the order in which executors, or chains below workers, come with or without a limit."""
    shared = SharedThreads()
    executors = [threading.Event() for _ in limits]  # Any objects.
    for executor, limit in zip(executors, limits, strict=True):
        shared.enter(executor, ReadOptions(max_buffer_bytes=limit))
    assert shared.max_bytes == 1 << 20
    for executor in executors:
        shared.leave(executor)

    chains = [
        millstream.MapDataset.range(8).to_iter_dataset(ReadOptions(max_buffer_bytes=limit)).filter(bool)
        for limit in limits
    ]
    for requested in (None, ReadOptions(2)):
        mixed = millstream.IterDataset.mix(chains)
        ahead = mixed.batch(2) if requested is None else mixed.batch(2).prefetch(requested)
        with iter(ahead.mp_prefetch(1)) as iterator:
            assert iterator.engine[0].reading.max_buffer_bytes == 1 << 20


class ClosesBadly:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: int) -> int:
        return key

    def close(self) -> None:
        raise RuntimeError("closed before")


def test_a_source_that_cannot_be_closed_ends_no_worker(capfd: pytest.CaptureFixture[str]) -> None:
    """The error of its close() is logged, in one line, and the worker goes on, or exits well."""
    with millstream.load(ClosesBadly(), num_epochs=1, batch_size=4, worker_count=1) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    output = capfd.readouterr().err
    assert "close() of ClosesBadly raised RuntimeError: closed before" in output
    assert "Traceback" not in output


def test_prefetching_after_the_end_takes_no_workers() -> None:
    """After the end of the stream, `start_prefetch` leaves the warm workers to the next iterator."""
    with millstream.load(range(8), num_epochs=1, batch_size=4, worker_count=1) as loader:
        iterator = iter(loader)
        assert len(list(iterator)) == 2
        iterator.start_prefetch()
        assert iterator.lifecycle == "idle"
        assert loader._execution.pools is not None
        assert len(loader._execution.pools.idle) == 1
        iterator.seek(1)
        assert next(iterator).tolist() == [4, 5, 6, 7]


def test_a_channel_may_be_closed_while_another_thread_sends() -> None:
    """From then on, messages are dropped without an error, and each descriptor is closed once."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(30):
            ours, theirs = socket.socketpair()
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            channel, is_full = Channel(ours, blocking=False), threading.Event()
            closer = threading.Thread(target=lambda: is_full.wait(WAIT_SECONDS) and channel.shut_down())  # type: ignore[func-returns-value]  # noqa: B023
            closer.start()
            for number in range(200):
                channel.send(Task(number, [], b"x" * 100, 0, 1), [theirs.fileno()])
                channel.flush()
                if number == 50:
                    is_full.set()
            closer.join(WAIT_SECONDS)
            assert not channel.has_unsent
            assert list(channel.receive()) == list(channel.receive_rest()) == []
            theirs.close()
    finally:
        sys.setswitchinterval(interval)


def arrays_of(number: int) -> Any:
    columns = millstream.InMemoryDataSource({"x": np.full((400, 2000), number, np.float64)})
    return millstream.MapDataset.source(columns).map(lambda element: float(element["x"][0]))


def mapped_arrays(pid: int) -> set[str]:
    """Returns the numbers of the files of the arrays above that a process has mapped."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "millstream-arena" in line]
    sizes = [[int(address, 16) for address in line[0].split("-")] for line in lines]
    return {
        line[4] for line, (start, stop) in zip(lines, sizes, strict=True) if 400 * 16_000 < stop - start < 402 * 16_000
    }


@pytest.mark.usefixtures("one_batch_a_call")
def test_workers_and_their_replacements_share_the_files_of_late_pipelines() -> None:
    """A worker that replaces another one maps the same files as those that have run all the time."""
    joined = InterleaveIterDataset(millstream.MapDataset.range(3).map(arrays_of), cycle_length=1)
    with iter(joined.map(abs).batch(8).mp_prefetch(2)) as iterator:
        for _ in range(60):
            next(iterator)  # Those of the second dataset, which was opened late.
        inner: Any = iterator
        first, _ = pids = pids_of(inner)
        before = set.union(*map(mapped_arrays, pids))
        os.kill(first, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(first)] if psutil.pid_exists(first) else [], WAIT_SECONDS)
        for _ in range(20):
            next(iterator)
        after = set.union(*map(mapped_arrays, pids_of(inner)))
    assert len(before) > 1
    assert after <= before


def test_import_paths_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that appends to `sys.path` before each loader keeps the latest paths only."""
    monkeypatch.setattr(importable_modules, "_paths", {})
    for number in range(100):
        importable_modules.record_import_path([str(step) for step in range(number % 60)])
    assert len(importable_modules._paths) == importable_modules.MAX_PATHS
    assert tuple(map(str, range(39))) in importable_modules._paths
