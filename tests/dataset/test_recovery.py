"""Streams of streams, interrupted at many moments: whatever was half done, they are where their state says."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from millstream import IterDataset, MapDataset, ReadOptions
from millstream.experimental import (
    CacheIterDataset,
    InterleaveIterDataset,
    LimitIterDataset,
    RepeatIterDataset,
    ZipIterDataset,
)
from millstream.transforms import FlatMap
from support.faults.interrupted import interrupt_at
from support.user_streams import Counted


def numbers(count: int, start: int = 0) -> IterDataset[Any]:
    return MapDataset.range(start, start + count).to_iter_dataset(ReadOptions(num_threads=0))


def odd_one_out(number: int) -> int | None:
    return None if number == 102 else number


def with_hole() -> IterDataset[Any]:
    """Returns a mixture that is read at random until it turns out that its sixth element is missing."""
    return IterDataset.mix([numbers(8), MapDataset.range(100, 106).map(odd_one_out).to_iter_dataset()]).map(str)


def in_proportions(first: int, second: int) -> IterDataset[Any]:
    return IterDataset.mix({"a": numbers(12), "b": numbers(30, 100)}, {"a": first, "b": second}).map(str)


STREAMS: dict[str, Callable[[], IterDataset[Any]]] = {
    "limit": lambda: LimitIterDataset(numbers(40), 12),
    "limit of children": lambda: LimitIterDataset(numbers(9).apply(FlatMap(lambda n: [n * 10, n * 10 + 1], 2)), 12),
    "repeat": lambda: RepeatIterDataset(numbers(4), 3),
    "cache": lambda: RepeatIterDataset(CacheIterDataset(numbers(5)), 3),
    "zip": lambda: ZipIterDataset([numbers(12), numbers(20, 100).filter(lambda n: n % 2)], strict=False),
    "mix": lambda: IterDataset.mix([numbers(12), numbers(9, 100).filter(lambda n: n % 2)]),
    "fed": lambda: IterDataset.mix([numbers(12), Counted(40)]).map(str).prefetch(ReadOptions(num_threads=0)),
    "hole": lambda: with_hole().prefetch(ReadOptions(num_threads=0)),
    "interleave": lambda: InterleaveIterDataset([numbers(3), numbers(4, 100), numbers(5, 200)], cycle_length=2),
}


# An exception in a generator that is being freed cannot be raised: Python 3.12 has such a moment.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("does_move", [False, True], ids=["next", "set_state"])
def test_a_stream_that_is_interrupted_at_any_moment_is_where_it_says(name: str, does_move: bool) -> None:
    """An exception in `next`, or in `set_state` and the next `next`: what follows is what follows its state.

    A `next` may lose its element on the way to the caller, and that one alone. `step` says the same while an
    interrupted recovery is half done.
    """
    dataset = STREAMS[name]()
    expected = list(dataset)
    with iter(dataset) as other:
        next(other)
        early = other.get_state()
    for moment in itertools.count(step=43 if name in {"hole", "interleave"} else 17):
        with iter(dataset) as iterator, iter(dataset) as fresh:
            got = list(itertools.islice(iterator, 3))

            def work() -> None:
                if does_move:
                    iterator.set_state(early)
                    next(iterator)
                else:
                    got.extend(next(iterator) for _ in range(5))  # noqa: B023

            was_interrupted = interrupt_at(moment, work, within="millstream.dataset")
            step = iterator.step
            interrupt_at(moment // 2, iterator.get_state, within="millstream.dataset")
            assert iterator.step == step
            fresh.set_state(iterator.get_state())
            assert iterator.step == step
            rest = list(iterator)
            assert rest == list(fresh)
            position = len(expected) - len(rest)
            assert rest == expected[position:]
            assert position in ((1, 2, 3) if does_move else (len(got), len(got) + 1))
        if not was_interrupted:
            break
    assert moment > 2


def test_a_move_to_other_proportions_is_done_or_not() -> None:
    """An exception in `set_state` leaves a mixture at either position, with the state of that one."""
    dataset = in_proportions(1, 1)
    with iter(in_proportions(1, 3)) as other:
        list(itertools.islice(other, 3))
        state = other.get_state()
    for moment in itertools.count(200, step=9):
        with iter(dataset) as iterator, iter(dataset) as fresh:
            list(itertools.islice(iterator, 3))
            was_interrupted = interrupt_at(moment, lambda: iterator.set_state(state), within="millstream.dataset")
            fresh.set_state(iterator.get_state())
            assert list(iterator) == list(fresh)
        if not was_interrupted:
            break
    assert moment > 300


def test_an_error_below_a_cache_comes_again() -> None:
    """As long as its element is asked for: the cache does not end there, and a repetition does not go on after it."""
    with iter(numbers(1).zip(numbers(2)).cache().repeat(2)) as iterator:
        assert next(iterator) == (0, 0)
        for _ in range(3):
            with pytest.raises(ValueError, match="must end together"):
                next(iterator)
