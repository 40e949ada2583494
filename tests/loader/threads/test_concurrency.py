"""As many threads work as help, whatever they wait for."""

import collections
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream
from millstream.loader.threads import concurrency
from millstream.loader.threads.concurrency import Concurrency
from millstream.loader.threads.reader_threads import ReaderThreads

MOST = 16


def run(
    tried: Concurrency, rate: Callable[[int], float], outputs: int, waiting: float = 1.0, now: float = 0.0
) -> tuple[list[int], float]:
    """Returns the level after each of some outputs, which come at the rate of the level, and the time at the end."""
    levels = []
    for _ in range(outputs):
        seconds = 1 / rate(tried.level)
        now += seconds
        tried.delivered(now, waiting * seconds, 1)
        levels.append(tried.level)
    return levels, now


@pytest.mark.parametrize("scale", [3.0, 700.0, 50_000.0])
def test_work_that_waits_keeps_all_threads(scale: float) -> None:
    """Where twice as many threads are twice as fast, all of them are used, except for one trial of fewer."""
    levels, _ = run(Concurrency(MOST), lambda level: scale * level, 20_000)
    assert levels[-1] == MOST
    assert levels.count(MOST // 2) < 0.1 * len(levels)


@pytest.mark.parametrize("scale", [700.0, 50_000.0])
def test_work_that_contends_is_left_to_one_thread(scale: float) -> None:
    """Where more threads are slower, one is left."""
    levels, _ = run(Concurrency(MOST), lambda level: scale / level, 100_000)
    assert levels[-1] == 1


@given(most=st.integers(1, 64), cores=st.integers(1, 64))
def test_no_more_threads_than_cores_can_use(most: int, cores: int) -> None:
    """Where cores are the limit, the threads chosen are nearly as fast as all of them, and half of them not more so."""
    levels, _ = run(Concurrency(most), lambda level: 10.0 * min(level, cores), 400 * most + 1000)
    # Now and then it tries others.
    ((level, _),) = collections.Counter(levels[len(levels) // 4 :]).most_common(1)
    enough = concurrency.WORTH * min(most, cores)
    assert min(level, cores) >= enough
    assert level == 1 or level // 2 <= enough


def test_a_burst_does_not_mislead_for_long() -> None:
    """Outputs that were ready already make the first rate look better than any to come: it is soon measured again."""
    tried = Concurrency(MOST)
    _, now = run(tried, lambda _: 20_000.0, 1_200)
    levels, _ = run(tried, lambda level: 1000.0 / level, 1_500, now=now)
    assert levels[-1] == 1


def test_a_consumer_that_has_enough_is_left_alone() -> None:
    """Rates say nothing about the threads where the consumer sets the pace."""
    levels, _ = run(Concurrency(MOST), lambda _: 1000.0, 20_000, waiting=0.01)
    assert set(levels) == {MOST}


def test_what_was_found_is_looked_at_again() -> None:
    """A source that begins to wait gets its threads back, without being told."""
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


def test_readers_are_told_apart_by_a_number_in_their_names() -> None:
    """As in Grain, after the one underscore: sources that are streams have an iterator for each."""
    names = set()

    class Stream:
        def __len__(self) -> int:
            return 10**10

        def __getitem__(self, key: int) -> int:
            names.add(threading.current_thread().name)
            return key

    loader = millstream.DataLoader(
        data_source=Stream(),
        sampler=millstream.SequentialSampler(10**10),
        operations=[millstream.Batch(2)],
        read_options=millstream.ReadOptions(num_threads=1, prefetch_buffer_size=8),
    )
    with iter(loader) as iterator:
        assert [next(iterator).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [name.split("_")[1:] for name in names - {threading.current_thread().name}] == [["0"]]
