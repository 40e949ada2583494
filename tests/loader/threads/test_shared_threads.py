"""Several executors on one set of threads: they share its buffer as they read, and end it together."""

from hypothesis import given
from hypothesis import strategies as st

from millstream.loader.threads.options import ReadOptions
from millstream.loader.threads.shared_threads import MAX_SHARED_THREADS, SharedThreads


class Executor:
    """Stands for an executor: shared threads need no more of it than its identity."""


@given(st.lists(st.integers(0, 5000), min_size=2, max_size=8), st.integers(1, 2000))
def test_all_executors_together_have_one_buffer(reads: list[int], buffer: int) -> None:
    """Shares add up to no more than the buffer, and who has read more may read further ahead."""
    threads, executors = SharedThreads(), [Executor() for _ in reads]
    for executor in executors:
        threads.enter(executor, ReadOptions(4, buffer))
    for executor, count in zip(executors, reads, strict=True):
        threads.record_read(executor, count)
    shares = [threads.records_ahead(executor) for executor in executors]
    assert sum(shares) <= buffer
    # What was read early has been halved since, so only the last two compare.
    if reads[-1] >= reads[-2]:
        assert shares[-1] >= shares[-2]


def test_shares_follow_what_was_read_last() -> None:
    """After a few buffers, an executor that is no longer drawn from has next to nothing."""
    threads, former, present = SharedThreads(), Executor(), Executor()
    for executor in (former, present):
        threads.enter(executor, ReadOptions(2, 100))
    threads.record_read(former, 400)
    assert threads.records_ahead(former) > 90
    for _ in range(40):
        threads.record_read(present, 100)
    assert threads.records_ahead(present) > 90
    assert threads.records_ahead(former) < 10


def test_what_has_left_takes_no_share() -> None:
    """Executors that remain have the buffer of one that has read and left, and a single one has all of it."""
    threads, first, second, third = SharedThreads(), Executor(), Executor(), Executor()
    for executor in (first, second, third):
        threads.enter(executor, ReadOptions(2, 100))
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
