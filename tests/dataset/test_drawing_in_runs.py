"""Joins yield the same, and are at the same positions, whether their elements are drawn one by one or in runs."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

import millstream
from millstream import IterDataset, MapDataset, experimental
from millstream.dataset.iterators.fed_iterator import Drawing
from millstream.dataset.iterators.inputs import Input
from millstream.dataset.iterators.join_iterator import JoinIterator
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.pipeline.elements import END, Elements


def stream(first: int, length: int, failing: int | None, step: int) -> IterDataset[int]:
    """Returns the multiples of `step` among `length` numbers, one of which cannot be computed.

    A filter drops the others; if the step is negative, they are missing.
    """

    def number(offset: int) -> int | None:
        if offset == failing:
            raise ArithmeticError(first + offset)
        return first + offset if step > 0 or offset % step == 0 else None

    numbers: Any = MapDataset.range(length).map(number).to_iter_dataset(millstream.ReadOptions(num_threads=0))
    return numbers.filter(lambda value: value % step == 0) if step > 1 else numbers  # type: ignore[no-any-return]


@strategies.composite
def streams(draw: strategies.DrawFn) -> list[IterDataset[int]]:
    """One to six short streams; few of them fail."""
    lengths = draw(strategies.lists(strategies.integers(0, 9), min_size=1, max_size=6))
    failing = draw(strategies.sampled_from([None, None, None, (0, 3), (1, 0), (2, 5)]))
    return [
        stream(
            100 * number,
            length,
            failing[1] if failing is not None and failing[0] == number else None,
            draw(strategies.sampled_from([1, 1, 2, 3, -2])),
        )
        for number, length in enumerate(lengths)
    ]


JOINS: dict[str, Callable[[list[IterDataset[int]], int], IterDataset[Any]]] = {
    "interleave": lambda parents, number: experimental.InterleaveIterDataset(parents, cycle_length=number),
    "zip": lambda parents, number: experimental.ZipIterDataset(parents, strict=number > 2),
    "limit": lambda parents, number: experimental.LimitIterDataset(parents[0], number),
    "repeat": lambda parents, number: experimental.RepeatIterDataset(parents[0], number),
    "cache": lambda parents, number: experimental.RepeatIterDataset(experimental.CacheIterDataset(parents[0]), number),
    "mix": lambda parents, number: IterDataset.mix(parents, [number + row for row, _ in enumerate(parents)]),
    "mix to the end of all": lambda parents, number: IterDataset.mix(
        parents, [number + row for row, _ in enumerate(parents)], stop="all_exhausted"
    ),
    "mix, and drop those that end": lambda parents, number: IterDataset.mix(
        parents, [number + row for row, _ in enumerate(parents)], stop="drop_exhausted"
    ).reweighted(5, [1] * len(parents)),
    "a limited interleave of repeated streams": lambda parents, number: experimental.LimitIterDataset(
        experimental.InterleaveIterDataset(
            [experimental.RepeatIterDataset(parent, 2) for parent in parents], cycle_length=number
        ),
        20,
    ),
    "an interleave of zipped streams": lambda parents, number: experimental.InterleaveIterDataset(
        [experimental.ZipIterDataset([parent, parent]) for parent in parents], cycle_length=number
    ),
}


def one_by_one(iterator: JoinIterator, count: int) -> tuple[list[Any], str]:
    """Returns the next elements, and the text of the error that follows them."""
    values: list[Any] = []
    try:
        values.extend(itertools.islice(iterator, count))
    except (ArithmeticError, ValueError) as error:
        return values, repr(error)
    return values, ""


def in_runs(iterator: JoinIterator, count: int) -> tuple[list[Any], str]:
    """Returns the same, drawn for operations."""
    drawn = Drawing(iterator.join, math.inf).draw(count, 0)
    assert isinstance(drawn, Elements)
    return list(drawn.values), "" if drawn.error is None else repr(drawn.error)


@pytest.mark.parametrize("join", JOINS)
@hypothesis.settings(max_examples=30)
@hypothesis.given(
    parents=streams(),
    number=strategies.integers(1, 4),
    counts=strategies.lists(strategies.integers(1, 20), min_size=1, max_size=5),
)
@hypothesis.example(parents=[stream(0, 2, None, 1), stream(100, 5, 2, 1)], number=3, counts=[4])
def test_runs_change_nothing(join: str, parents: list[IterDataset[int]], number: int, counts: list[int]) -> None:
    """Elements, errors, steps and states after each draw are those of as many calls of `next`."""
    dataset = JOINS[join](parents, number)
    singly, together = iter(dataset), iter(dataset)
    assert isinstance(singly, JoinIterator)
    assert isinstance(together, JoinIterator)
    together.join.for_operations()
    for count in counts:
        expected = one_by_one(singly, count)
        assert in_runs(together, count) == expected
        values, error = expected
        if error:
            break
        assert together.join.step == singly.step
        assert together.join.position() == singly._position_here()
        if len(values) < count:
            break


@pytest.mark.parametrize("join", JOINS)
@hypothesis.settings(max_examples=30)
@hypothesis.given(parents=streams(), number=strategies.integers(1, 4), limit=strategies.integers(1, 16))
def test_the_position_before_each_taken_element_is_known(
    join: str, parents: list[IterDataset[int]], number: int, limit: int
) -> None:
    """However many elements were taken together, each has the position that it has if it was taken alone."""
    dataset = JOINS[join](parents, number)
    singly, together = iter(dataset), iter(dataset)
    assert isinstance(singly, JoinIterator)
    assert isinstance(together, JoinIterator)
    alone, run = singly.join, together.join
    while has_more(run, limit):
        values = run.take(count := min(limit, run.num_ready()))
        assert has_elements(alone, 1)
        positions = [alone.position()]
        for value in values:
            assert has_elements(alone, 1)
            assert alone.take(1) == [value]
            positions.append(alone.position())
        assert [run.position(back) for back in range(count, -1, -1)] == positions


def has_elements(join: Input, limit: int) -> bool:
    """Fetches elements, and waits for them. Returns False at the end."""
    while not join.num_ready() and (lack := join.fetch(limit)) is not None:
        if lack is END:
            return False
        lack.wait()
    return True


def has_more(join: Input, limit: int) -> bool:
    """Returns True if there is another element before the end and before the first error."""
    try:
        return has_elements(join, limit)
    except (ArithmeticError, ValueError):
        return False


class Counted:
    """A source that counts its reads."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, key: int) -> int:
        self.reads += 1
        return key


@pytest.mark.parametrize("join", JOINS)
def test_what_is_taken_was_fetched(join: str) -> None:
    """A join takes elements without reading any."""
    sources = [Counted() for _ in range(3)]
    options = millstream.ReadOptions(num_threads=0)
    iterator = iter(JOINS[join]([MapDataset.source(source).to_iter_dataset(options) for source in sources], 2))
    assert isinstance(iterator, JoinIterator)
    taken = 0
    while taken < 40 and has_elements(iterator.join, 16):
        before = [source.reads for source in sources]
        taken += len(iterator.join.take(iterator.join.num_ready()))
        assert [source.reads for source in sources] == before
    assert taken


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "drop_exhausted"])
def test_a_batch_of_a_mixture_takes_from_each_chain_in_runs(stop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of times that elements are taken from the chains does not grow with the number of elements."""
    options = millstream.ReadOptions(num_threads=0)
    chains = [MapDataset.range(100_000).repeat().to_iter_dataset(options).filter(is_any) for _ in range(3)]
    mixed = IterDataset.mix(chains, [3, 2, 1], stop=stop)
    counts: list[int] = []
    take = DataLoaderIterator.take

    def counted(self: DataLoaderIterator, count: int) -> list[Any]:
        counts.append(count)
        return take(self, count)

    monkeypatch.setattr(DataLoaderIterator, "take", counted)
    with iter(mixed.batch(512)) as iterator:
        for _ in range(8):
            next(iterator)
        counts.clear()
        next(iterator)
    assert sum(counts) == 512
    assert len(counts) <= 8 * len(chains)


def is_any(element: Any) -> bool:
    """Keeps all elements, which is not known in advance."""
    return element is not None
