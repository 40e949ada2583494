"""Real signals at any moment: no wrong batch, no second thread on one iterator, no hang, whatever a handler does."""

import collections
import concurrent.futures
import contextlib
import functools
import gc
import itertools
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream
from millstream.core.signals import SignalSafeLock
from millstream.loader import monitoring
from millstream.loader.engine import engine
from millstream.loader.monitoring import query, served_processes
from millstream.loader.threads import shared_threads
from millstream.sources import ParquetDataSource, TextLineDataSource
from millstream.transforms import Filter, FlatMap
from support.faults.interrupted import interrupt_at
from support.faults.user_faults import WAIT_SECONDS
from support.processes.process_tree import open_descriptors, our_threads, processes_below

NUM_RECORDS = 240
TRIALS = 12
LATEST_SECONDS = 6e-4
"""A signal comes this long after an iterator was first used, at the latest: its threads are being started then."""
LATEST_START_SECONDS = 0.05
"""And this long, where worker processes are started."""


class Interruption(BaseException):
    """The exception that the handler of these tests raises."""


@pytest.fixture(autouse=True)
def alarm_handler() -> Iterator[None]:
    """Leaves a handler of the timer's signal that does nothing.

    A signal may have been sent, and given to a thread that runs only later. The default handler would then end the
    process, or Python would complain of a race.

    An exception that a handler raises within JAX's own callbacks for the garbage collector is lost. It is reported to a
    function in C: pytest's own would be interrupted as well, and fail the test.
    """
    told = sys.unraisablehook
    sys.unraisablehook = collections.deque[Any](maxlen=0).append
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, lambda *_: None)
    gc.collect()
    sys.unraisablehook = told


def loader_of(*operations: Any, **options: Any) -> millstream.DataLoader:
    """Returns a loader of one shuffled epoch of numbers."""
    arguments: dict[str, Any] = {"shuffle": True, "seed": 3, "num_epochs": 1, "batch_size": 8}
    loader = millstream.load(list(range(NUM_RECORDS)), **(arguments | {"transformations": operations} | options))
    # The warning about a repeated pass takes the locks of `logging`, which an interruption may leave taken.
    loader._passes._is_random = False
    return loader


def batches_of(loader: millstream.DataLoader) -> list[Any]:
    return [np.asarray(batch).tolist() for batch in loader]


def device_iterator(loader: millstream.DataLoader) -> Any:
    return millstream.device_put(iter(loader))


def interrupt(work: Callable[[], Any], after: float, times: int) -> None:
    """Does some work, interrupted by this many exceptions in a row, the first of them after some seconds."""
    left = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            if left == 0:
                # More signals would leave a slow machine no time for the work.
                signal.setitimer(signal.ITIMER_REAL, 0)
            raise Interruption

    signal.signal(signal.SIGALRM, handle)
    try:
        try:
            left = times
            signal.setitimer(signal.ITIMER_REAL, after, 2e-5)
            work()
        finally:
            left = 0  # No call comes before this, and so no signal: what follows is not interrupted.
    except Interruption:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def rest_of(iterator: Any) -> tuple[int, list[Any]]:
    """Returns the step of an iterator and all batches from there on, drawn in a thread: what hangs fails the test."""
    step = iterator.step
    batches: list[Any] = []
    reader = threading.Thread(target=lambda: batches.extend(np.asarray(batch).tolist() for batch in iterator))
    reader.start()
    reader.join(WAIT_SECONDS)
    assert not reader.is_alive(), f"next waits for ever, at step {iterator.step}"
    return step, batches


INLINE = millstream.ReadOptions(num_threads=0)
DEALT = millstream.ShardOptions(0, 1, logical_shards=4)
KINDS = pytest.mark.parametrize(
    ("make", "options"),
    [
        (device_iterator, {}),
        (device_iterator, {"read_options": INLINE}),
        (iter, {}),
        (iter, {"batch_size": None}),
        (iter, {"read_options": INLINE}),
        (iter, {"transformations": [Filter(lambda number: number % 3)], "shard_options": DEALT}),
    ],
    ids=["device", "device inline", "threads", "threads, elements", "inline", "logical shards"],
)


@KINDS
def test_a_first_next_that_is_interrupted_loses_nothing(
    make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exceptions while the threads are being started: what follows is the stream from the iterator's step on.

    Threads that have ended are not waited for: such a wait, which is as long as the bound, would fail `rest_of`.
    """
    for module in (engine, shared_threads):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 2 * WAIT_SECONDS)
    loader = loader_of(**options)
    expected = batches_of(loader)
    chance = random.Random(1)
    for trial in range(2 * TRIALS):
        iterator, times = make(loader), 1 + trial % 3
        interrupt(lambda: next(iterator), chance.uniform(1e-5, LATEST_SECONDS), times)  # noqa: B023  (called here)
        interrupt(iterator.start_prefetch, chance.uniform(1e-6, 1e-4), times)
        step, batches = rest_of(iterator)
        assert step <= 1
        assert batches == expected[step:]
        assert not hasattr(iterator, "_readers") or len(iterator._readers._working) <= 1
        iterator.close()


@KINDS
def test_an_iterator_that_is_interrupted_again_and_again_resumes_each_time(make: Any, options: dict[str, Any]) -> None:
    """Exceptions at any moment of a pass, of `seek` and of `set_state`: each batch is that of the iterator's step."""
    loader = loader_of(**options)
    expected = batches_of(loader)
    chance = random.Random(1)
    with make(loader) as iterator:

        def work() -> None:
            for _ in range(4):
                step = iterator.step
                if step >= len(expected):
                    iterator.seek(chance.randrange(len(expected)))
                elif chance.random() < 0.1:
                    iterator.set_state(iterator.get_state())
                else:
                    assert np.asarray(next(iterator)).tolist() == expected[step]
                    assert iterator.step == step + 1

        for _ in range(3 * TRIALS):
            interrupt(work, chance.uniform(1e-5, 2e-3), chance.randint(1, 3))


@pytest.mark.parametrize(
    ("operations", "num_threads"),
    [((), 0), ((), 4), ((FlatMap(lambda number: [number] * 8, 8),), 0), ((Filter(lambda number: number % 3),), 0)],
    ids=["elements", "elements in threads", "children", "survivors"],
)
@pytest.mark.parametrize("move", ["next", "seek on", "seek back", "set_state"])
def test_a_move_that_is_interrupted_at_any_moment_skips_nothing(
    operations: tuple[Any, ...], num_threads: int, move: str
) -> None:
    """An exception after calls in `next`, `seek` and `set_state`: the next elements are those of the step."""
    loader = loader_of(*operations, batch_size=None, read_options=millstream.ReadOptions(num_threads))
    with iter(loader) as iterator:
        expected = [next(iterator) for _ in range(50)]
    # After each of the first calls, and after every eleventh of the others.
    for moment in itertools.chain(range(20), itertools.count(20, 11)):
        with iter(loader) as iterator:
            iterator.seek(5)
            state = iterator.get_state()
            iterator.seek(30)
            next(iterator)
            work = {
                "next": lambda: [next(iterator) for _ in range(9)],
                "seek on": lambda: iterator.seek(35),
                "seek back": lambda: iterator.seek(3),
                "set_state": lambda: iterator.set_state(state),  # noqa: B023
            }[move]
            was_interrupted = interrupt_at(moment, work)
            step = iterator.step
            assert [next(iterator) for _ in range(3)] == expected[step : step + 3]
        if not was_interrupted:
            break
    assert moment >= 1


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock], ids=["plain", "reentrant"])
def test_a_lock_is_free_after_its_block_whatever_interrupts_that(make: Callable[[], Any]) -> None:
    """Exceptions at any moment of taking a lock and of giving it back: another thread can take it afterwards."""
    lock, chance = make(), random.Random(9)
    guarded = SignalSafeLock(lock)

    def work() -> None:
        while True:
            with guarded:
                pass

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        for trial in range(20 * TRIALS):
            interrupt(work, chance.uniform(1e-5, 1e-4), 1 + trial % 3)
            assert other.submit(lock.acquire, timeout=WAIT_SECONDS).result()
            other.submit(lock.release).result()


def test_a_lock_is_held_in_its_block() -> None:
    """The lock excludes other threads while its block runs, and a block waits for the lock."""
    lock, entered = threading.Lock(), threading.Event()

    def enter() -> None:
        with SignalSafeLock(lock):
            entered.set()
            assert not lock.acquire(blocking=False)

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        with lock:
            done = other.submit(enter)
            assert not entered.wait(0.05)
        done.result(WAIT_SECONDS)


def lines_in(folder: Path) -> TextLineDataSource:
    for number in range(0, NUM_RECORDS, 20):
        (folder / f"{number:03}").write_text("".join(f"{line}\n" for line in range(number, number + 20)))
    return TextLineDataSource(sorted(folder.iterdir()))


def rows_in(folder: Path) -> ParquetDataSource:
    """Returns the numbers as rows, in row groups of which not all are kept."""
    pq.write_table(pa.table({"number": range(NUM_RECORDS)}), folder / "rows", row_group_size=20)
    return ParquetDataSource(folder / "rows", cache_bytes=1000)


@pytest.mark.parametrize("source_in", [lines_in, rows_in])
def test_a_read_of_files_that_is_interrupted_keeps_nobody_from_reading_them(
    source_in: Callable[[Path], Any], tmp_path: Path
) -> None:
    """Exceptions at any moment of reads in the main thread: another thread reads the rest, and waits for no lock."""
    with source_in(tmp_path) as source:
        loader = millstream.load(
            source, shuffle=False, num_epochs=1, batch_size=8, read_options=INLINE, transformations=[repr]
        )
        expected = batches_of(loader)
        chance = random.Random(10)
        for trial in range(3 * TRIALS):
            with iter(loader) as iterator:
                interrupt(lambda: collections.deque(iterator, 0), chance.uniform(1e-5, 2e-3), 1 + trial % 3)
                step, batches = rest_of(iterator)
                assert batches == expected[step:]


def ring(*_: object) -> None:
    """Handles a signal as a time limit does."""
    raise TimeoutError


def with_limits(loader: millstream.DataLoader) -> tuple[list[Any], int]:
    """Returns the elements of a pass, and how often a time limit has ended a `next` meanwhile."""
    got: list[Any] = []
    limits = 0
    with iter(loader) as iterator:
        while True:
            try:
                got.extend(iterator)
            except TimeoutError:
                limits += 1
                assert iterator.step == len(got)
            else:
                return got, limits


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("num_threads", [0, 4])
def test_what_a_handler_raises_is_raised_at_once_as_it_is(batch_size: int | None, num_threads: int) -> None:
    """A time limit by SIGALRM in the midst of an operation: its exception ends that `next`, and the stream is whole."""
    alarms: set[int] = set()

    def operation(number: int) -> int:
        if number in alarms and threading.current_thread() is threading.main_thread():
            alarms.remove(number)
            signal.raise_signal(signal.SIGALRM)
        return number

    loader = loader_of(operation, batch_size=batch_size, read_options=millstream.ReadOptions(num_threads))
    expected = batches_of(loader_of(batch_size=batch_size, read_options=INLINE))
    # A method, and an object that can be called, are handlers as well.
    for handler in (ring, functools.partial(ring)):
        signal.signal(signal.SIGALRM, handler)
        alarms |= {37, 90, 91, 202}
        got, limits = with_limits(loader)
        assert [np.asarray(batch).tolist() for batch in got] == expected
        assert limits == 4 - len(alarms)
        assert not alarms or num_threads


def test_a_time_limit_while_an_element_is_measured_is_raised() -> None:
    """If the limit comes while the items of an element are listed, it ends that `next`, and the stream is whole."""
    alarms = [signal.SIGALRM, signal.SIGALRM]

    class Ringing(collections.UserDict[str, int]):
        """An element that takes long to list."""

        def __getitem__(self, key: str) -> int:
            if alarms:
                signal.raise_signal(alarms.pop())
            return super().__getitem__(key)

    signal.signal(signal.SIGALRM, ring)
    options: dict[str, Any] = {"batch_size": None, "read_options": INLINE}
    got, limits = with_limits(loader_of(lambda number: Ringing(number=number), **options))
    assert [element.data["number"] for element in got] == list(loader_of(**options))
    assert limits == 2


@pytest.mark.parametrize("look", range(2))
def test_a_time_limit_while_an_operation_is_looked_at_is_no_error_of_it(look: int) -> None:
    """Described for checkpoints, or pickled for workers: the limit is raised, and all is as if it had not come."""
    looks: list[int] = []

    class Ringing:
        """A function with a state that it takes long to get at."""

        def __getstate__(self) -> dict[str, Any]:
            looks.append(len(looks))
            if looks[-1] == look:
                signal.raise_signal(signal.SIGALRM)
            return {}

        def __call__(self, number: int) -> int:
            return number

    signal.signal(signal.SIGALRM, ring)
    limits, iterator = 0, None
    while limits < 2:
        try:
            with iter(loader_of(Ringing(), worker_count=1)) as iterator:
                got = [batch.tolist() for batch in iterator]
            break
        except TimeoutError:
            limits += 1
    assert limits == 1
    assert got == [batch.tolist() for batch in loader_of(read_options=INLINE)]
    signal.signal(signal.SIGALRM, lambda *_: None)
    with iter(loader_of(Ringing())) as other:
        assert iterator is not None
        other.set_state(iterator.get_state())


@pytest.mark.parametrize("num_threads", [0, 4])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_handler_may_look_at_everything(num_threads: int, filtered: bool) -> None:
    """State, step, profile, length, keys and repr, thousands of times a second: nothing hangs, every state is right."""
    options: dict[str, Any] = {"read_options": millstream.ReadOptions(num_threads), "num_epochs": 20}
    loader = loader_of(*([Filter(lambda number: number % 3)] if filtered else []), **options)
    with iter(loader) as reference:
        states = [reference.get_state(), *(reference.get_state() for _ in reference)]
    are_right: list[bool] = []

    def look(*_: object) -> None:
        are_right.append(iterator.get_state() == states[iterator.step])
        loader.profile()
        repr(iterator)
        if not filtered:
            len(loader)
            loader.record_keys(len(are_right) % 50)
        if is_on:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-5, 2e-4))

    chance, is_on = random.Random(4), True
    signal.signal(signal.SIGALRM, look)
    with iter(loader) as iterator:
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
        count = sum(1 for _ in iterator)
        is_on = False
    signal.setitimer(signal.ITIMER_REAL, 0)

    assert (set(are_right), count) == ({True}, len(states) - 1)


@KINDS
def test_a_handler_may_close_the_iterator(make: Any, options: dict[str, Any]) -> None:
    """`close` from a handler inside `next` does not wait for what it interrupted, and `next` says what happened."""
    loader = loader_of(**options)
    chance = random.Random(2)
    for _ in range(TRIALS // 4):
        iterator = make(loader)
        signal.signal(signal.SIGALRM, lambda *_, iterator=iterator: iterator.close())
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 2e-3))
        try:
            list(iterator)
        except ValueError as error:
            assert "closed" in str(error)  # noqa: PT017  (or the pass was over before)
        signal.setitimer(signal.ITIMER_REAL, 0)
        iterator.close()


@KINDS
def test_next_in_a_handler_inside_next_is_refused(make: Any, options: dict[str, Any]) -> None:
    """A handler that draws a batch gets it, or an error where `next` was interrupted: each batch comes once."""
    loader = loader_of(**options)
    expected = batches_of(loader)
    got: list[Any] = []
    refusals: list[str] = []

    def draw(*_arguments: object) -> None:
        for _ in range(2):
            try:
                got.append(np.asarray(next(iterator)).tolist())
            except ValueError as error:
                refusals.append(str(error))
            except StopIteration:
                pass
        if is_on:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-5, 3e-4))

    chance = random.Random(5)
    signal.signal(signal.SIGALRM, draw)
    for _ in range(4):
        got.clear()
        is_on = True
        with make(loader) as iterator:
            signal.setitimer(signal.ITIMER_REAL, 5e-5)
            got.extend(np.asarray(batch).tolist() for batch in iterator)
            is_on = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert sorted(map(str, got)) == sorted(map(str, expected))
    # A signal of the last moment is handled when the iterator is closed.
    assert all("is in use" in refusal or "closed" in refusal for refusal in refusals)


@pytest.mark.parametrize("num_threads", [1, 16])
def test_threads_of_a_dropped_iterator_end_whatever_interrupts_its_end(num_threads: int) -> None:
    """An iterator is let go of, and a handler raises meanwhile: its threads end all the same."""
    chance = random.Random(6)
    loader = loader_of(read_options=millstream.ReadOptions(num_threads))
    threads: set[threading.Thread] = set()
    for _ in range(TRIALS):
        iterators = [iter(loader)]
        iterators[0].start_prefetch()
        executor = weakref.ref(iterators[0]._executor)
        threads |= set(our_threads())  # Not that of an idle fork server, which waits for a minute.
        interrupt(iterators.clear, chance.uniform(1e-6, 5e-5), 1)
        del iterators
        gc.collect(0)
        assert executor() is None
    for thread in threads:
        # One that another thread is just about to start cannot be joined yet. The guard of all tests waits for it.
        with contextlib.suppress(RuntimeError):
            thread.join(WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)


def test_a_loader_is_served_whatever_interrupts_the_start_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at any moment of `serve_top`, with its thread there or not: asked anew, it serves, from one thread alone.

    When the loader is closed, the thread ends, and its socket goes.
    """
    monkeypatch.setattr(monitoring, "POLL_SECONDS", 0.002)
    chance = random.Random(8)
    for trial in range(2 * TRIALS):
        with loader_of() as loader:
            interrupt(loader.serve_top, chance.uniform(1e-5, 2 * LATEST_SECONDS), 1 + trial % 3)
            loader.serve_top()
            assert len(query(os.getpid(), "snapshot")["pipelines"]) == 1
            # One too many, of the start that was interrupted, leaves when it runs.
            await_ends_but_of(monitoring._top().thread)
        if trial % 2 == 0:
            await_ends_but_of(None)
            assert os.getpid() not in served_processes()


def await_ends_but_of(stays: threading.Thread | None) -> None:
    """Waits until no other thread answers `millstream top`."""
    for thread in threading.enumerate():
        # One that is being started cannot be waited for, and ends as soon as it runs.
        if thread.name == "millstream-top" and thread is not stays and thread.is_alive():
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()


def test_worker_processes_whose_start_is_interrupted_end_with_their_iterator() -> None:
    """Ctrl-C at any moment of the start: neither a process nor a descriptor is left that nobody knows of."""
    loader = loader_of(worker_count=2)
    expected = batches_of(loader)
    loader.close()
    before, chance = len(open_descriptors()), random.Random(0)
    for _ in range(TRIALS // 3):
        with loader_of(worker_count=2) as interrupted:
            iterator = iter(interrupted)
            interrupt(lambda: next(iterator), chance.uniform(1e-4, LATEST_START_SECONDS), 1)  # noqa: B023  (called here)
            step, batches = rest_of(iterator)
            assert batches == expected[step:]
        gc.collect()
        assert psutil.wait_procs(processes_below(), WAIT_SECONDS)[1] == []
    assert len(open_descriptors()) <= before
