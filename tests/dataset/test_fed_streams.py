"""A stream of the user's own feeds operations that run in threads and workers: exactly once, in order, resumable."""

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millstream import DatasetIterator, IterDataset, MapDataset, ReadOptions
from millstream.dataset import InterleaveIterDataset
from millstream.experimental import assert_equal_output_after_checkpoint
from millstream.loader.scheduling import feed
from support.processes.process_tree import processes_below
from support.user_streams import Numbers


def spread(dataset: IterDataset[Any], how: str) -> IterDataset[Any]:
    options: dict[str, Any] = {"inline": 0, "threads": ReadOptions(3, 100), "workers": 2}
    return dataset.prefetch(options[how])


PLACES = pytest.mark.parametrize("how", ["inline", "threads", "workers"])


@PLACES
def test_an_error_of_the_stream_comes_at_its_turn(how: str) -> None:
    """All that comes before the error is delivered, then it is raised; the next attempt continues where it was."""
    dataset = spread(Numbers(23, fails_at=10).map(lambda number: number * 2).batch(3), how)
    with iter(dataset) as iterator:
        batches = [next(iterator).tolist() for _ in range(3)]
        with pytest.raises(ConnectionError, match="the network is gone"):
            next(iterator)
        state = iterator.get_state()
        batches += [batch.tolist() for batch in iterator]

        assert batches == [[2 * n for n in range(start, min(start + 3, 23))] for start in range(0, 23, 3)]
        iterator.set_state(state)
        assert next(iterator).tolist() == [18, 20, 22]


@PLACES
def test_an_error_of_an_operation_names_the_element(how: str) -> None:
    """An operation that fails at an element is an error at its turn, which says where; it comes again."""
    dataset = spread(Numbers(9).map(lambda number: 1 // (number - 4)), how)
    with iter(dataset) as iterator:
        assert list(itertools.islice(iterator, 4)) == [-1, -1, -1, -1]
        for _ in range(2):
            with pytest.raises(ZeroDivisionError) as caught:
                next(iterator)
            assert "position 4" in "".join(caught.value.__notes__)


@PLACES
def test_nothing_is_left(how: str) -> None:
    """A closed iterator has no threads and processes, nor has one that nobody holds; closing it twice is one time."""
    dataset = spread(Numbers(10_000).map(lambda number: number).batch(8), how)
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    iterator.close()
    assert processes_below() == []
    with pytest.raises(ValueError, match="Trying to advance a closed iterator"):
        next(iterator)
    assert iterator.get_state()["stream"] is not None
    dropped = iter(dataset)
    next(dropped)
    reference = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert reference() is None


def test_a_state_holds_a_little_more_than_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the stream's states are saved rarely, elements are drawn again, and exactly those delivered are skipped."""
    monkeypatch.setattr(feed, "KEPT_ELEMENTS", 16)
    dataset = Numbers(100).map(lambda number: number).filter(lambda number: number % 4 != 1).batch(5)
    assert_equal_output_after_checkpoint(dataset)


def test_the_stream_is_read_once_and_not_ahead() -> None:
    """Without workers and threads, no more elements are drawn than requested, up to one call."""
    stream = iter(Numbers(1_000_000).map(lambda number: number))
    list(itertools.islice(stream, 3))

    assert stream.get_state()["stream"]["step"] <= 8


def names(number: int) -> IterDataset[int]:
    return MapDataset.range(number * 100, number * 100 + 3).to_iter_dataset()


@PLACES
def test_an_endless_list_of_files(how: str) -> None:
    """`source(files).repeat().map(open)` under an interleave is read lazily, and resumed where it was."""
    files = MapDataset.source([1, 2, 3]).repeat().map(names)
    dataset = spread(InterleaveIterDataset(files, cycle_length=2).map(lambda number: number).batch(4), how)
    with iter(dataset) as iterator, iter(dataset) as other:
        first = [next(iterator).tolist() for _ in range(3)]
        state = iterator.get_state()
        following = [next(iterator).tolist() for _ in range(9)]
        other.set_state(state)
        assert [next(other).tolist() for _ in range(9)] == following

    assert list(itertools.chain(*first)) == [100, 200, 101, 201, 102, 202, 300, 100, 301, 101, 302, 102]


class Endless(IterDataset[int]):
    """A generator, which has no states, and no end."""

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]  # as users write it
        return itertools.count()


def test_a_generator_is_a_dataset() -> None:
    """The result of `__iter__` becomes a DatasetIterator, which is resumed by drawing from its beginning."""
    dataset = Endless().map(np.int64).batch(3)
    endless: IterDataset[int] = Endless()
    with iter(endless) as plain, iter(dataset) as iterator, iter(dataset) as other:
        assert isinstance(plain, DatasetIterator)
        with pytest.raises(NotImplementedError, match="read in order"):
            plain.seek(3)
        next(iterator)
        other.set_state(iterator.get_state())
        assert next(other).tolist() == [3, 4, 5]
