"""Threads really work at once, never further ahead than allowed, in order, and always come to an end."""

import contextlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.loader.engine import policy
from millstream.loader.engine.engine import Engine, ReadAhead
from millstream.loader.threads import shared_threads, shared_work, waiting
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.transforms import Batch, Filter, Map
from support.faults.memory_limits import no_threads
from support.faults.user_faults import WAIT_SECONDS
from support.processes.worker_pools import at_most, in_background, python, wait_inside


def loader_of(
    num_threads: int, *operations: Any, source: Any, prefetch_buffer_size: int = 500
) -> millstream.DataLoader:
    """Returns a loader of all records in order, read by threads."""
    return millstream.DataLoader(
        data_source=source,
        sampler=millstream.SequentialSampler(len(source)),
        operations=operations,
        read_options=millstream.ReadOptions(num_threads, prefetch_buffer_size),
    )


def budget_of(engine: object) -> ReadAhead:
    assert isinstance(engine, Engine)
    assert isinstance(engine.budget, ReadAhead)
    return engine.budget


def rushed(loader: millstream.DataLoader) -> millstream.DataLoaderIterator:
    """Returns an iterator whose threads read as far ahead as they may, as once the consumer has often waited."""
    iterator = iter(loader)
    engine = iterator._running_executor()
    budget_of(engine).calls_ahead = 1000
    engine.start()
    return iterator


class Source:
    """Numbers, read one by one by a function that may wait."""

    def __init__(self, size: int, read: Callable[[int], object] = bool) -> None:
        self.size = size
        self.read = read

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int) -> int:
        self.read(key)
        return key


class BatchedSource(Source):
    """Numbers, read many at a time."""

    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        return list(map(self.__getitem__, keys))


@pytest.fixture
def all_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every call worth handing over, and every block worth cutting, however short."""
    monkeypatch.setattr(policy, "HAND_OVER_SECONDS", 0.0)
    monkeypatch.setattr(shared_work, "MIN_SHARED_SECONDS", 1e-12)


class Waiting(millstream.MapDataset[int]):
    """A dataset of the user's over a list in memory, whose elements wait."""

    def __init__(self, read: Callable[[int], object]) -> None:
        super().__init__(millstream.MapDataset.source([*range(21)]))
        self.read = read

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: Any) -> Any:
        self.read(index)
        return self._parent[index]


ONE_BY_ONE: dict[str, Callable[[Source, Source], Any]] = {
    "a source": lambda first, _: Source(21, first.read),
    "several sources": lambda first, second: millstream.ConcatenatedDataSource([first, second]),
    "a mixture": lambda first, second: millstream.MapDataset.mix(
        [millstream.MapDataset.source(first), millstream.MapDataset.source(second)]
    ),
    "datasets as a source": lambda first, second: millstream.MapDataset.source(
        millstream.ConcatenatedDataSource([first, second])
    ).map(int),
    "batched sources": lambda first, _: millstream.MapDataset.concatenate(
        [millstream.MapDataset.source(BatchedSource(1, first.read)) for _ in range(21)]
    ),
}


@pytest.mark.usefixtures("all_by_threads")
@pytest.mark.parametrize("source", ONE_BY_ONE)
def test_records_of_one_block_are_read_at_once(source: str) -> None:
    """All threads share a block of records that are read one by one, also below other sources and in datasets."""
    # Each read but the first waits for three others.
    barrier = threading.Barrier(4, timeout=WAIT_SECONDS)
    reads = itertools.count()
    halves = [Source(size, lambda _: next(reads) and barrier.wait()) for size in (11, 10)]

    (batch,) = loader_of(4, Batch(21), source=ONE_BY_ONE[source](*halves))
    assert len(batch) == 21


class OneByOne(Source):
    """Numbers whose batched reads read one by one: the function gets the numbers of keys."""

    reads_one_by_one = True

    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        self.read(len(keys))
        return list(keys)


@pytest.mark.parametrize(("slice_seconds", "is_shared"), [(math.inf, False), (1e-12, True)])
def test_only_slow_records_are_read_in_slices(
    slice_seconds: float, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the time of a record is known, quick ones are read in one call per block; slow ones are shared as before."""
    monkeypatch.setattr(policy, "HAND_OVER_SECONDS", 0.0)
    monkeypatch.setattr(shared_work, "MIN_SHARED_SECONDS", slice_seconds)
    sizes: list[int] = []
    assert len(list(rushed(loader_of(1, Batch(8), source=OneByOne(64, sizes.append))))) == 8
    assert sizes[0] == 1
    assert (1 in sizes[2:]) is is_shared


@pytest.mark.usefixtures("all_by_threads")
@pytest.mark.parametrize("slice_seconds", [0.0, math.inf])
def test_the_first_source_that_fails_is_named(slice_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """If several sources fail, the error is that of the first in order, whether threads share the reads or not."""
    monkeypatch.setattr(shared_work, "MIN_SHARED_SECONDS", slice_seconds)

    def fails(key: int) -> None:
        raise OSError(f"no record {key}")

    parts = {"a": BatchedSource(4), "b": BatchedSource(5, fails), "c": BatchedSource(6, fails)}
    with pytest.raises(OSError, match="no record 0") as caught:
        list(loader_of(4, Batch(15), source=millstream.ConcatenatedDataSource(parts)))
    assert "in source 'b', its record 0" in "".join(caught.value.__notes__)


@pytest.mark.usefixtures("all_by_threads")
def test_operations_behind_a_regrouping_run_at_once() -> None:
    """After Filter and Batch, too, several threads work on several groups."""
    barrier = threading.Barrier(3, timeout=WAIT_SECONDS)
    wait = Map(lambda batch: (barrier.wait(), batch.tolist())[1])
    loader = loader_of(4, Filter(lambda key: key % 2), Batch(2), wait, source=range(24))

    assert list(rushed(loader)) == [[key, key + 2] for key in range(1, 24, 4)]


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("millstream-read")]


class Meter:
    """Counts the records read, and lets a test wait for a number of them."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = threading.Condition()

    def read(self, _: object) -> None:
        with self.changed:
            self.count += 1
            self.changed.notify_all()

    def reaches(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.count >= count, WAIT_SECONDS)


@pytest.mark.usefixtures("all_by_threads")
@pytest.mark.parametrize("prefetch_buffer_size", [1, 4, 10, 23])
@pytest.mark.parametrize("kind", [Source, BatchedSource])
def test_no_more_is_read_ahead_than_allowed(kind: type[Source], prefetch_buffer_size: int) -> None:
    """Exactly `prefetch_buffer_size` records, in two or more whole batches, are ready or in work before each `next`."""
    meter, num_threads, size = Meter(), 3, 4
    ahead = size * max(2, math.ceil(prefetch_buffer_size / size))
    source = kind(size * 40, meter.read)

    loader = loader_of(num_threads, Batch(size), source=source, prefetch_buffer_size=prefetch_buffer_size)
    with rushed(loader) as iterator:
        for step in range(10):
            assert meter.reaches(step * size + ahead)
            assert meter.count == step * size + ahead
            assert next(iterator)[0] == step * size
    assert meter.count <= 10 * size + ahead


@pytest.mark.usefixtures("all_by_threads")
def test_reading_ahead_grows_as_the_consumer_waits_up_to_its_bound() -> None:
    """If blocks come only when the consumer asks, up to four times as many are in work, as far as there is room."""
    asked = Meter()
    source = Source(500, lambda key: asked.reaches(key + 1))
    with iter(loader_of(2, Batch(1), source=source, prefetch_buffer_size=7)) as iterator:
        budget = budget_of(iterator._running_executor())
        seen = [budget.calls_ahead]
        for step in range(500):
            asked.read(step)
            next(iterator)
            seen.append(budget.calls_ahead)

    assert seen[0] == 1
    assert all(before <= after <= 4 * before for before, after in itertools.pairwise(seen))
    assert seen[-1] == 7


@pytest.mark.parametrize(("seconds", "by_consumer"), [(1000.0, {True}), (0.0, {False})])
def test_short_calls_are_left_to_the_consumer(
    seconds: float, by_consumer: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks too short to be worth handing over are made by the consumer's thread, once that is known; others never."""
    monkeypatch.setattr(policy, "HAND_OVER_SECONDS", seconds)
    here, readers = threading.get_ident(), dict[int, bool]()

    def note(key: int) -> int:
        readers[key] = threading.get_ident() == here
        return key

    assert len(list(loader_of(4, Map(note), Batch(5), source=range(250)))) == 50
    assert {is_here for key, is_here in readers.items() if key >= 50} == by_consumer


@pytest.mark.usefixtures("all_by_threads")
@pytest.mark.parametrize("leave", ["close", "error"])
def test_leaving_does_not_wait_for_a_stuck_read(leave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that hangs in user code delays the consumer by a bounded time, and ends when its call does."""
    monkeypatch.setattr(shared_threads, "CLOSE_SECONDS", 0.1)
    stuck, release = threading.Event(), threading.Event()

    def hang(key: int) -> None:
        if key == 5:
            stuck.set()
            release.wait(WAIT_SECONDS)
        if key == 0 and leave == "error":
            assert stuck.wait(WAIT_SECONDS)
            raise LookupError

    iterator = rushed(loader_of(3, Batch(5), source=BatchedSource(40, hang)))
    assert stuck.wait(WAIT_SECONDS)
    threads = our_threads()
    try:
        with at_most(WAIT_SECONDS / 4), contextlib.nullcontext() if leave == "close" else pytest.raises(LookupError):
            iterator.close() if leave == "close" else next(iterator)
    finally:
        release.set()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert our_threads() == []


@pytest.mark.usefixtures("all_by_threads")
@pytest.mark.parametrize(("first", "most"), [(0, 1), (5, 21)])
def test_the_first_of_several_failing_records_is_the_error(first: int, most: int) -> None:
    """Of several failing records of a block, the first is the error; if it is the block's first, no other is read."""
    reads = Meter()

    def fail(key: int) -> None:
        reads.read(key)
        if key >= first:
            raise OSError(key)

    with (
        iter(loader_of(4, Batch(21), source=Source(21, fail))) as iterator,
        pytest.raises(OSError, match=f"at record key {first} "),
    ):
        next(iterator)
    assert reads.count <= most


def test_a_thread_that_cannot_start_is_done_without() -> None:
    """If the system has no more threads, those that run do the work."""
    readers, done = ReaderThreads(3), threading.Semaphore(0)
    readers.submit(done.release)
    with no_threads():
        for _ in range(5):
            readers.submit(done.release)
    try:
        assert all(done.acquire(timeout=WAIT_SECONDS) for _ in range(6))
        assert readers.size == 1
    finally:
        readers.stop()
        readers.join(WAIT_SECONDS)


@pytest.mark.usefixtures("all_by_threads")
@pytest.mark.parametrize("source", [range(40), BatchedSource(40)])
def test_without_any_thread_the_consumer_does_the_work(source: Any) -> None:
    """If the system has no thread to give at all, every call is made by the thread that asks: the same stream."""
    makers: set[int] = set()

    def note(batch: Any) -> Any:
        makers.add(threading.get_ident())
        return batch

    with no_threads(), iter(loader_of(3, Batch(4), Map(note), source=source)) as iterator:
        assert [batch.tolist() for batch in iterator] == [list(range(key, key + 4)) for key in range(0, 40, 4)]
    assert makers == {threading.get_ident()}


@pytest.mark.usefixtures("all_by_threads")
def test_reading_goes_on_while_groups_wait_to_be_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that wait for the consumer to stack them do not keep threads from reading for the groups after them."""
    meter = Meter()
    source = BatchedSource(4_000, meter.read)
    with rushed(loader_of(4, Filter(bool), Batch(8), source=source, prefetch_buffer_size=200)) as iterator:
        budget = budget_of(iterator._running_executor())
        monkeypatch.setattr(budget, "_is_quick", lambda stage: stage > 0)
        for step in range(60):
            next(iterator)
            assert meter.reaches(step * 8 + 150)


def test_stopped_readers_drop_what_they_have_not_begun() -> None:
    """After `stop`, the job at hand is the last, jobs in line and new ones are dropped, and all threads end."""
    readers, begun, release, late = ReaderThreads(2), threading.Semaphore(0), threading.Event(), threading.Event()

    def hold() -> None:
        begun.release()
        release.wait(WAIT_SECONDS)

    for _ in range(2):
        readers.submit(hold)
    assert all(begun.acquire(timeout=WAIT_SECONDS) for _ in range(2))
    readers.submit(late.set)
    readers.stop()
    readers.stop()
    readers.submit(late.set)
    release.set()
    readers.join(WAIT_SECONDS)

    assert not late.is_set()
    assert our_threads() == []


STALL_SECONDS = 0.3


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[millstream.DataLoaderIterator]:
    """Yields an iterator before its fifth batch, whose threads are stuck at number 43 until the end of the test.

    Only now does it expect stalls: on a busy machine, the batches before may take long, too.
    """
    monkeypatch.setattr(policy, "HAND_OVER_SECONDS", 0.0)
    monkeypatch.setattr(shared_threads, "CLOSE_SECONDS", 0.1)
    is_stuck, released = threading.Event(), threading.Event()

    def read_from_storage(key: int) -> int:
        if key == 43:
            is_stuck.set()
            released.wait(WAIT_SECONDS)
        return key

    with iter(millstream.load(range(1000), transformations=[read_from_storage], batch_size=10)) as iterator:
        assert [next(iterator)[0] for _ in range(4)] == [0, 10, 20, 30]
        iterator.start_prefetch()
        assert is_stuck.wait(WAIT_SECONDS)
        budget_of(iterator._running_executor()).place._stall_timeout = STALL_SECONDS
        yield iterator
    released.set()


def test_a_read_that_never_returns_is_reported_and_becomes_an_error(
    stuck: millstream.DataLoaderIterator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All batches before come, then a log line, then an error at its turn: with record keys and the read's stack."""
    monkeypatch.setattr(waiting, "STALL_WARNING_SECONDS", 0.05)
    with pytest.raises(millstream.WorkerStalledError) as caught:
        next(stuck)
    (message,) = [message for message in caplog.messages if "finished nothing" in message]
    for text in (str(caught.value), message):
        assert "the records 40, 41, 42" in text
        assert "read_from_storage" in text


def test_a_signal_handler_that_outlasts_a_wait_does_not_unbind_it(stuck: millstream.DataLoaderIterator) -> None:
    """A handler that runs past the end of a wait delays the error of a stall by its own time, and not for ever."""
    main, calls = threading.get_ident(), []

    def outlast(*_: object) -> None:
        calls.append(end := time.monotonic() + 2 * STALL_SECONDS)
        while time.monotonic() < end:
            pass

    def ring_while_it_waits() -> None:
        wait_inside(waiting.TimedQueue.get, main)
        signal.pthread_kill(main, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, outlast)
    try:
        with (
            in_background(ring_while_it_waits),
            pytest.raises(millstream.WorkerStalledError, match="the records 40, 41, 42"),
        ):
            next(stuck)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(calls) == 1


LEAVING_SCRIPT = """
import atexit, os, threading
import millstream

begun, leaving = threading.Event(), threading.Event()

class Slow:
    def __len__(self):
        return 8

    def __getitem__(self, key):
        begun.set()
        leaving.wait()
        for _ in range(500_000):
            pass
        os.write(1, b"read to its end\\n")
        return key

iterator = iter(millstream.load(Slow(), batch_size=1, read_options=millstream.ReadOptions(num_threads=1)))
iterator.start_prefetch()
begun.wait()
atexit.register(leaving.set)
{last_line}
"""


@pytest.mark.parametrize("last_line", ["", "del iterator", "raise SystemExit(0)"])
def test_the_interpreter_waits_for_a_read_before_it_ends(last_line: str, tmp_path: Path) -> None:
    """A script may just end, with or without its iterator: threads finish their call and are gone before Python is.

    A thread that comes back from C++ code into an interpreter that has ended would abort the process.
    """
    done = python("-c", LEAVING_SCRIPT.format(last_line=last_line), cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("read to its end\n", "")


LATE_SCRIPT = """
import atexit, itertools
iterators, laters = [], []

@atexit.register
def finish():
    for iterator, later in zip(iterators, laters, strict=True):
        assert [batch.tolist() for batch in itertools.islice(iterator, 10)] == later[:10]
    print("done")

import millstream
slow = millstream.transforms.Map(lambda key: (sum(range(50_000)), key)[1])
for options in ({}, {"read_options": millstream.ReadOptions(num_threads=0)}, {"worker_count": 1}):
    load = lambda: iter(millstream.load(range(400), batch_size=4, transformations=[slow], stall_timeout=20, **options))
    laters.append([batch.tolist() for _, batch in zip(range(15), load())][5:])
    iterators.append(load())
    for _ in range(5):
        next(iterators[-1])
"""


def test_functions_that_run_at_exit_may_read_on() -> None:
    """A last evaluation at the interpreter's exit, registered before the library ended its threads, gets the stream."""
    done = python("-c", LATE_SCRIPT)
    assert (done.stdout, done.stderr) == ("done\n", "")


FORKING_SCRIPT = """
import os, sys
import millstream
{preparation}

class Slow:
    def __len__(self):
        return 64

    def __getitem__(self, key):
        for _ in range(50_000):
            pass
        return key

loader = millstream.load(Slow(), batch_size=4, num_epochs=1, read_options=millstream.ReadOptions(num_threads=4))
expected = list(range(0, 64, 4))
iterator = {iterator}
assert [int(next(iterator)[0]) for _ in range(5)] == expected[:5]
for _ in range(2):
    child = os.fork()
    if child == 0:
        try:
            next(iterator)
        except RuntimeError as error:
            assert "Call iter(loader) in the forked process" in str(error), error
        else:
            sys.exit("waited for the parent's threads")
        assert iterator.step == 5
        own = iter(loader)
        own.set_state(iterator.get_state())
        assert [int(batch[0]) for batch in own] == expected[5:]
        iterator.close()
        assert list(loader.record_keys(5)) == [20, 21, 22, 23]
        {leave}
    assert os.waitpid(child, 0)[1] == 0
assert [int(batch[0]) for batch in iterator] == expected[5:]
print("done")
"""


@pytest.mark.parametrize(
    ("preparation", "iterator", "leave"),
    [
        # From Python 3.12 on, forking a process that has threads is a warning: here it is what the test is about.
        (
            "import warnings; warnings.filterwarnings('ignore', '.*use of fork', DeprecationWarning)",
            "iter(loader)",
            "sys.exit(0)",
        ),
        # JAX warns of forks, and crashes in a forked process that exits normally.
        ("import warnings; warnings.simplefilter('ignore')", "millstream.device_put(iter(loader))", "os._exit(0)"),
    ],
    ids=["threads", "device"],
)
def test_a_forked_process_has_threads_of_its_own(preparation: str, iterator: str, leave: str) -> None:
    """A forked process does not wait for threads that it does not have; its own iterators work, from any state."""
    done = python("-c", FORKING_SCRIPT.format(preparation=preparation, iterator=iterator, leave=leave))
    assert (done.stdout, done.stderr) == ("done\n", "")
