"""As many threads work as help, on calls of the size that helps, and several executors share them."""

import collections
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.loader.engine.policy import (
    CALL_SECONDS,
    MAX_CALL_BYTES,
    MAX_CALL_SECONDS,
    RECORDS_PER_CALL,
    CallSize,
)
from millstream.loader.pipeline.calls import BlockCall
from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.threads import shared_threads, shared_work
from millstream.loader.threads.options import ReadOptions
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.threads.shared_threads import MAX_SHARED_THREADS, Concurrency, SharedThreads
from millstream.loader.threads.shared_work import RecordTime, SharedWork
from millstream.sources.reads import read_all

MOST = 16


def run(
    tried: Concurrency, rate: Callable[[int], float], outputs: int, waiting: float = 1.0, now: float = 0.0
) -> tuple[list[int], float]:
    """Returns the level after each of some outputs, which come at the rate of the level, and the time at the end."""
    levels = []
    for _ in range(outputs):
        seconds = 1 / rate(tried.level)
        now += seconds
        tried.delivered(now, waiting * seconds, 1, 1)
        levels.append(tried.level)
    return levels, now


@pytest.mark.parametrize("scale", [3.0, 700.0, 50_000.0])
def test_work_that_waits_keeps_all_threads(scale: float) -> None:
    """If twice as many threads are twice as fast, all of them are used, except for one trial of fewer."""
    levels, _ = run(Concurrency(MOST), lambda level: scale * level, 20_000)
    assert levels[-1] == MOST
    assert levels.count(MOST // 2) < 0.1 * len(levels)


@given(most=st.integers(1, 64), cores=st.integers(1, 64))
@settings(max_examples=30)
def test_no_more_threads_than_cores_can_use(most: int, cores: int) -> None:
    """If cores are the limit, the threads chosen are nearly as fast as all of them, and half of them not more so."""
    levels, _ = run(Concurrency(most), lambda level: 10.0 * min(level, cores), 400 * most + 1000)
    # Now and then it tries others.
    ((level, _),) = collections.Counter(levels[len(levels) // 4 :]).most_common(1)
    enough = shared_threads.WORTH * min(most, cores)
    assert min(level, cores) >= enough
    assert level == 1 or level // 2 <= enough


@pytest.mark.parametrize("exponent", [0.0, 0.03, 0.06, 0.1, 0.2, 0.3, 0.5])
def test_small_losses_do_not_add_up(exponent: float) -> None:
    """However little each halving of the threads costs, the level that is left has 4/5 of the rate of all of them."""
    levels, _ = run(Concurrency(MOST), lambda level: 500.0 * (level / MOST) ** exponent, 20_000)
    ((level, _),) = collections.Counter(levels[len(levels) // 4 :]).most_common(1)
    assert (level / MOST) ** exponent >= 0.8


def test_a_burst_does_not_mislead_for_long() -> None:
    """Outputs that were ready already make the first rate look better than any to come: it is soon measured again."""
    tried = Concurrency(MOST)
    _, now = run(tried, lambda _: 20_000.0, 1_200)
    levels, _ = run(tried, lambda level: 1000.0 / level, 1_500, now=now)
    assert levels[-1] == 1


@pytest.mark.parametrize("more_are_better", [False, True])
def test_late_and_lucky_windows_decide_nothing(*, more_are_better: bool) -> None:
    """Noisy rates lead to the best level, whatever was best before, and to no other one for long."""
    rng = random.Random(0)

    def rate(level: int, *, more: bool) -> float:
        return 50.0 * level if more else 800.0 / level**0.25

    for _ in range(10):
        tried, noise, now, gained = Concurrency(MOST), [rng.lognormvariate(0.0, 0.3) for _ in range(2000)], 0.0, 0.0
        best = rate(MOST if more_are_better else 1, more=more_are_better)
        while now < 80.0:
            is_better = more_are_better != (now < 40.0)
            seconds = 1 / (rate(tried.level, more=is_better) * noise[int(20 * now) % len(noise)])
            now += seconds
            if now > 60.0:
                gained += seconds * rate(tried.level, more=more_are_better) / best
            tried.delivered(now, seconds, 1, 1)
        assert gained > 0.9 * 20.0


def test_a_consumer_that_has_enough_is_left_alone() -> None:
    """Rates say nothing about the threads where the consumer sets the pace."""
    levels, _ = run(Concurrency(MOST), lambda _: 1000.0, 20_000, waiting=0.01)
    assert set(levels) == {MOST}


def test_what_was_found_is_looked_at_again() -> None:
    """If more threads are slower, one is left. A source that begins to wait gets its threads back."""
    tried = Concurrency(MOST)
    _, now = run(tried, lambda level: 1000.0 / level, 20_000)
    assert tried.level == 1
    levels, _ = run(tried, lambda level: 1000.0 * level, 200_000, now=now)
    assert levels[-1] == MOST


def test_a_readers_can_shrink_and_grow() -> None:
    """As many jobs run at once as there should be threads; no job is lost, and threads that leave are gone."""
    readers = ReaderThreads(8)
    for size in (8, 2, 5, 1, 8):
        readers.resize(size)
        together, done = threading.Barrier(size, timeout=60), threading.Semaphore(0)

        def meet(together: threading.Barrier = together, done: threading.Semaphore = done) -> None:
            together.wait()
            done.release()

        for _ in range(3 * size):
            readers.submit(meet)
        for _ in range(3 * size):
            assert done.acquire(timeout=60)
        # Surplus threads have left before the next jobs, in the order of the queue, or do so now.
        readers.submit(done.release)
        assert done.acquire(timeout=60)
        assert readers.size == size
    readers.stop()
    readers.join(60)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("millstream-read")] == []


@pytest.mark.parametrize("are_busy", [False, True])
def test_surplus_readers_end_without_another_job(are_busy: bool) -> None:
    """Once there should be fewer threads, the others end: idle ones now, busy ones after their job."""
    readers, release, deadline = ReaderThreads(8), threading.Event(), time.monotonic() + 60
    for _ in range(8):
        if are_busy:
            readers.submit(lambda: release.wait(60))
        else:
            readers._start_thread()
    while len(readers._working) < 8 or readers.num_busy < 8 * are_busy:
        assert time.monotonic() < deadline
    threads = list(readers._started)
    readers.resize(2)
    release.set()
    while len(alive := [thread for thread in threads if thread.is_alive()]) > 2 and time.monotonic() < deadline:
        alive[0].join(0.01)
    assert len(alive) == 2
    pair = threading.Barrier(3, timeout=60)
    for _ in range(2):
        readers.submit(pair.wait)
    pair.wait()
    readers.stop()
    readers.join(60)
    assert {thread.is_alive() for thread in threads} == {False}


@pytest.mark.parametrize(("num_busy", "is_shared"), [(1, True), (1000, False)])
def test_reads_that_waited_for_other_threads_are_not_shared(*, num_busy: int, is_shared: bool) -> None:
    """Time in which other threads compute is not that of a read. Reads that take long alone are shared."""
    readers = ReaderThreads(2)
    readers._busy.update(range(num_busy))

    def wait_for_a_thread_that_computes() -> None:
        def compute() -> None:
            end = time.perf_counter() + 2 * shared_work.MIN_SHARED_SECONDS
            while time.perf_counter() < end:
                pass

        computing = threading.Thread(target=compute)
        computing.start()
        computing.join(60)

    with SharedWork(readers, RecordTime()).for_sources():
        read_all([wait_for_a_thread_that_computes, list, list])
    assert bool(readers._started) == is_shared
    readers.stop()
    readers.join(60)


def call_size(*operations: millstream.transforms.Transformation) -> CallSize:
    """Returns the sizes of calls over 1,000,000 records."""
    sampler = millstream.SequentialSampler(1_000_000)
    return CallSize(millstream.DataLoader(data_source=range(1_000_000), sampler=sampler, operations=operations)._plan)


def sizes_of(size: CallSize, cost: Callable[[int], float], count: int, record_bytes: int = 8) -> list[int]:
    """Returns the sizes of calls, made one after another, that take `cost(size)` seconds."""
    sizes = []
    for _ in range(count):
        call = BlockCall(size._plan.shards[0], 0, size.blocks)
        sizes.append(size.blocks)
        table = np.zeros((5, size.blocks), np.int64)
        call.complete(Elements([np.empty(record_bytes, np.uint8)] * size.blocks, Origins(table)))
        size.record(call, cost(size.blocks))
    return sizes


@pytest.mark.parametrize("latency", [1e-5, 0.02, 0.05, 0.2])
def test_calls_grow_while_larger_ones_are_cheaper_per_block(latency: float) -> None:
    """A request that takes as long for one record as for many gets the maximum, however long it takes."""
    sizes = sizes_of(call_size(), lambda _: latency, 12)
    assert sizes == sorted(sizes)
    assert sizes[-1] == RECORDS_PER_CALL


@pytest.mark.parametrize("seconds", [1e-4, 0.002, 0.02, 0.3])
def test_calls_stay_short_where_each_record_has_its_own_cost(seconds: float) -> None:
    """If a record takes as long in a large call, calls are short, and a larger size is tried rarely."""
    sizes = sizes_of(call_size(), lambda size: seconds * size, 400)
    too_long = [size for size in sizes if size > 1 and size * seconds > CALL_SECONDS]
    assert len(too_long) <= len(sizes) // 32


def test_calls_shrink_when_a_block_is_no_longer_cheaper() -> None:
    """If the latency was shared and then each record costs, a call soon takes less than the maximum again."""
    size = call_size()
    assert sizes_of(size, lambda _: 0.02, 12)[-1] == RECORDS_PER_CALL
    sizes = sizes_of(size, lambda count: 0.01 * count, 40)
    assert 0.01 * max(sizes[20:]) <= MAX_CALL_SECONDS
    assert sizes[-1] <= 8


@pytest.mark.parametrize("record_bytes", [8, 100_000, MAX_CALL_BYTES])
def test_calls_have_a_maximum_of_bytes(record_bytes: int) -> None:
    """However much latency they share, calls that make several blocks stay below the maximum of bytes."""
    sizes = sizes_of(call_size(), lambda _: 0.02, 12, record_bytes)
    assert all(size == 1 or size * record_bytes <= MAX_CALL_BYTES for size in sizes)
    assert sizes[-1] * 4 * record_bytes > MAX_CALL_BYTES or sizes[-1] == RECORDS_PER_CALL


def test_a_call_has_one_batch_where_a_block_is_a_large_one() -> None:
    """A batch has its latency to itself: other batches come in other calls, which overlap."""
    assert set(sizes_of(call_size(millstream.Batch(256)), lambda _: 0.02, 12)) == {1}


class Executor:
    """Stands for an executor: shared threads need no more of it than its identity."""


def shared_by(count: int, options: ReadOptions) -> tuple[SharedThreads, list[Executor]]:
    threads, executors = SharedThreads(), [Executor() for _ in range(count)]
    for executor in executors:
        threads.enter(executor, options)
    return threads, executors


@given(st.lists(st.integers(0, 5000), min_size=2, max_size=8), st.integers(1, 2000))
def test_all_executors_together_have_one_buffer(reads: list[int], buffer: int) -> None:
    """Shares add up to no more than the buffer, and who has read more may read further ahead."""
    threads, executors = shared_by(len(reads), ReadOptions(4, buffer))
    for executor, count in zip(executors, reads, strict=True):
        threads.record_read(executor, count)
    shares = [threads.records_ahead(executor) for executor in executors]
    assert sum(shares) <= buffer
    # What was read early has been halved since, so only the last two compare.
    if reads[-1] >= reads[-2]:
        assert shares[-1] >= shares[-2]


def test_shares_follow_what_was_read_last() -> None:
    """After a few buffers, an executor that is no longer drawn from has next to nothing."""
    threads, (former, present) = shared_by(2, ReadOptions(2, 100))
    threads.record_read(former, 400)
    assert threads.records_ahead(former) > 90
    for _ in range(40):
        threads.record_read(present, 100)
    assert threads.records_ahead(present) > 90
    assert threads.records_ahead(former) < 10


def test_what_has_left_takes_no_share() -> None:
    """Executors that remain have the buffer of one that has read and left, and a single one has all of it."""
    threads, (first, second, third) = shared_by(3, ReadOptions(2, 100))
    threads.record_read(first, 300)
    assert threads.records_ahead(second) < 10
    threads.leave(first)
    assert threads.records_ahead(second) == threads.records_ahead(third) == 50
    threads.leave(third)
    assert threads.records_ahead(second) == 100


def test_threads_add_up_and_the_last_executor_ends_them() -> None:
    """The numbers of threads add up, the largest buffer is that of all, and a later executor gets new threads."""
    threads, first, second = SharedThreads(), Executor(), Executor()
    readers = threads.enter(first, ReadOptions(2, 300))
    assert threads.enter(second, ReadOptions(8, 100)) is readers
    assert (readers.size, threads.records_ahead(first) + threads.records_ahead(second)) == (10, 300)
    are_stopped = []
    for executor in (first, first, second):
        threads.leave(executor)
        are_stopped.append(readers.is_stopped)
    assert are_stopped == [False, False, True]
    later = threads.enter(second, ReadOptions(2, 100))
    assert later is not readers
    assert not later.is_stopped
    threads.leave(second)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_no_more_threads_than_all_ask_for(asked: list[int]) -> None:
    """Many executors have MAX_SHARED_THREADS at most, unless one of them asks for more."""
    threads, executors = SharedThreads(), [Executor() for _ in asked]
    for executor, number in zip(executors, asked, strict=True):
        threads.enter(executor, ReadOptions(number, 100))
    assert threads.level == min(sum(asked), max(MAX_SHARED_THREADS, *asked))
    for executor in executors:
        threads.leave(executor)
