"""Streams of streams: their order, their ends, their states by name, and what they refuse."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from millstream import CheckpointError, IterDataset, MapDataset
from millstream.experimental import (
    CacheIterDataset,
    InterleaveIterDataset,
    LimitIterDataset,
    RepeatIterDataset,
    ZipIterDataset,
)


def numbers(count: int, start: int = 0) -> IterDataset[int]:
    return MapDataset.range(start, start + count).to_iter_dataset()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_named_mixture_is_resumed_with_others(workers: int) -> None:
    """In a named mixture, known datasets resume, new ones start at their beginning, and removed ones are dropped."""
    before = IterDataset.mix({"web": numbers(90), "books": numbers(90, 100)})
    after = IterDataset.mix({"books": numbers(90, 100), "code": numbers(90, 200)}, {"code": 1, "books": 1})
    with iter(before.mp_prefetch(workers)) as iterator, iter(after.mp_prefetch(workers)) as other:
        list(itertools.islice(iterator, 8))
        list(itertools.islice(other, 5))
        other.set_state(json.loads(json.dumps(iterator.get_state())))
        assert sorted(itertools.islice(other, 6)) == [104, 105, 106, 200, 201, 202]


class Lasting(IterDataset[int]):
    """A stream of its own class."""

    def __iter__(self) -> Any:
        return iter(range(9))


TWO, THREE = [numbers(9), numbers(9, 100)], [numbers(9), numbers(9, 100), numbers(9, 200)]


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        (IterDataset.mix(TWO), IterDataset.mix({"a": TWO[0], "b": TWO[1]}), "by name, and one of a list in order"),
        (IterDataset.mix({"a": TWO[0], "b": TWO[1]}), IterDataset.mix(TWO), "by name, and one of a list in order"),
        (IterDataset.mix(TWO), IterDataset.mix(THREE), "other weights"),
        (IterDataset.mix(TWO), IterDataset.mix([TWO[1], TWO[0]]), "belongs to another one: its identity is"),
        (ZipIterDataset(TWO), ZipIterDataset(THREE), "of 2 zipped datasets, but there are 3"),
        (
            InterleaveIterDataset(THREE, cycle_length=2),
            InterleaveIterDataset(THREE, cycle_length=3),
            "cycle_length=2",
        ),
        (IterDataset.source(range(9)), Lasting(), "stream: saved"),
    ],
)
def test_the_state_of_another_combination_is_refused(saved: Any, here: Any, words: str) -> None:
    """The error says what differs, and the iterator stays where it was."""
    with iter(saved) as other, iter(here) as iterator:
        list(itertools.islice(other, 3))
        next(iterator)
        before = iterator.get_state()
        with pytest.raises(CheckpointError, match=words):
            iterator.set_state(other.get_state())
        assert iterator.get_state() == before


class MayBeGone(IterDataset[int]):
    """Numbers from 200 on, which begin again to be moved, and cannot while they are gone."""

    is_gone = False

    def __iter__(self) -> Any:
        if self.is_gone:
            raise OSError("gone")
        return iter(range(200, 290))


def test_a_named_mixture_remains_if_a_dataset_cannot_begin_again() -> None:
    """If the second dataset that the state lacks cannot begin again, the mixture continues where it was."""
    code = MayBeGone()
    mixture = IterDataset.mix({"web": numbers(90), "books": numbers(90, 100), "code": code})
    with iter(IterDataset.mix({"web": numbers(90)})) as other, iter(mixture) as iterator:
        assert list(itertools.islice(iterator, 4)) == [0, 100, 200, 1]
        code.is_gone = True
        with pytest.raises(OSError, match="gone"):
            iterator.set_state(other.get_state())
        code.is_gone = False
        assert list(itertools.islice(iterator, 3)) == [101, 201, 2]


@pytest.mark.parametrize(("lengths", "words"), [([4, 5], r"\[0\] has ended before"), ([5, 5, 4], r"\[2\] has ended")])
def test_zipped_datasets_end_together(lengths: Sequence[int], words: str) -> None:
    """Zipped datasets of different lengths are an error, unless the shortest one may end them."""
    datasets = [numbers(length) for length in lengths]

    assert list(ZipIterDataset([numbers(3), numbers(3, 10)])) == [(0, 10), (1, 11), (2, 12)]
    with pytest.raises(ValueError, match=words):
        list(ZipIterDataset(datasets))
    assert len(list(ZipIterDataset(datasets, strict=False))) == 4


def test_the_state_of_a_closed_interleave_is_its_beginning() -> None:
    """A fresh iterator that is closed before the first element has a state from which all elements come."""
    dataset = InterleaveIterDataset(MapDataset.source([3, 1, 0, 4]).map(numbers), cycle_length=3)
    closed = iter(dataset)
    closed.close()
    with iter(dataset) as fresh:
        fresh.set_state(json.loads(json.dumps(closed.get_state())))
        assert list(fresh) == list(dataset)


def test_a_cache_is_filled_once() -> None:
    """Under a repeat, the parent is drawn from once, and a dict is another one each time."""
    made: list[int] = []

    def make(number: int) -> dict[str, int]:
        made.append(number)
        return {"number": number}

    dataset = RepeatIterDataset(CacheIterDataset(numbers(3).map(make)), 3)
    for element in dataset:
        element["number"] += 1

    assert made == [0, 1, 2]
    assert list(itertools.islice(RepeatIterDataset(numbers(2)), 5)) == [0, 1, 0, 1, 0]
    assert list(RepeatIterDataset(numbers(0))) == []


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: IterDataset.mix([]), ValueError, "at least one"),
        (lambda: IterDataset.mix([[1, 2]]), TypeError, r"datasets\[0\] must be an IterDataset"),  # type: ignore[arg-type]
        (lambda: IterDataset.mix({"a": numbers(1)}, {"b": 1}), ValueError, "no weight for 'a'"),
        (lambda: ZipIterDataset([]), ValueError, "at least one"),
        (lambda: LimitIterDataset(numbers(1), 0), ValueError, "count must be at least 1"),
        (lambda: RepeatIterDataset(numbers(1), 0), ValueError, "num_epochs must be at least 1"),
        (lambda: InterleaveIterDataset("files", cycle_length=2), TypeError, "a list or a MapDataset"),
        (lambda: InterleaveIterDataset([], cycle_length=0), ValueError, "cycle_length must be at least 1"),
        (lambda: numbers(1).random_map(lambda value, _rng: value), ValueError, "needs a seed"),
        (lambda: numbers(1).map(3), TypeError, "needs a function"),  # type: ignore[call-overload]
        (lambda: numbers(1).mp_prefetch(-1), ValueError, "num_workers must be at least 0"),
        (lambda: numbers(1).mp_prefetch(1, worker_init_fn=3), TypeError, "worker_init_fn"),  # type: ignore[arg-type]
        (lambda: MapDataset.range(3).to_iter_dataset(5), TypeError, "read_options"),  # type: ignore[arg-type]
        (lambda: numbers(8)[0], ValueError, r"Slice or index the MapDataset, before to_iter_dataset\(\)"),
        (lambda: numbers(8)[1:3], ValueError, "Slice or index the MapDataset"),
    ],
)
def test_mistakes_are_errors_where_they_are_made(make: Any, error: type[Exception], words: str) -> None:
    """Wrong arguments are refused when the chain is built."""
    with pytest.raises(error, match=words):
        make()


@dataclasses.dataclass
class Box:
    """An element of a user's class."""

    inside: Any


def doubled(value: Any) -> Any:
    """Doubles all arrays and numbers in an element, in place where that is possible."""
    if isinstance(value, np.ndarray):
        value *= 2
    elif isinstance(value, dict):
        value.update({name: doubled(member) for name, member in value.items()})
    elif isinstance(value, list):
        value[:] = map(doubled, value)
    elif isinstance(value, tuple):
        return tuple(map(doubled, value))
    elif isinstance(value, Box):
        value.inside = doubled(value.inside)
    else:
        return value * 2
    return value


NESTINGS: dict[str, Callable[[int], Any]] = {
    "array": lambda number: np.full(3, number),
    "array of objects": lambda number: np.array([[number], None], dtype=object)[:1],
    "dict": lambda number: {"x": np.full((2, 2), number, order="F"), "y": number},
    "nested": lambda number: {"x": [np.arange(number), {"y": (np.ones(2), "text")}]},
    "object": lambda number: Box({"x": [np.full(2, number)]}),
    "list": lambda number: [number, [number]],
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_operations_never_change_what_is_cached(nesting: str) -> None:
    """An operation that changes its element in place gets the same element in each pass, as without the cache."""
    stream = MapDataset.range(5).map(NESTINGS[nesting]).to_iter_dataset()
    expected = list(map(repr, RepeatIterDataset(stream, 3).map(doubled)))
    cached = RepeatIterDataset(CacheIterDataset(stream), 3)
    for dataset in (cached.map(doubled), RepeatIterDataset(CacheIterDataset(stream).map(doubled), 3)):
        assert list(map(repr, dataset)) == expected


def test_a_list_that_is_read_as_a_stream_is_not_changed() -> None:
    """Each pass gets dicts and lists of its own, as from a list that is read at random."""
    records = [{"x": number} for number in range(4)]
    stream = RepeatIterDataset(IterDataset.source(records).map(doubled), 2)
    assert [record["x"] for record in stream] == [0, 2, 4, 6] * 2
    assert records == [{"x": number} for number in range(4)]
