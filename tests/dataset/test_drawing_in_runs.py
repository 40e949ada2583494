"""Joins yield the same, and are at the same positions, whether their elements are drawn one by one or in runs."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

import millstream
from millstream import IterDataset, MapDataset, experimental
from millstream.dataset.iterators import recovering_iterator
from millstream.dataset.iterators.chain_iterator import ReadIterator
from millstream.dataset.iterators.dataset_iterator import Drawn
from millstream.dataset.iterators.recovering_iterator import RecoveringIterator


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


def one_by_one(iterator: RecoveringIterator[Any], count: int) -> tuple[list[Any], str]:
    """Returns the next elements, and the text of the error that follows them."""
    values: list[Any] = []
    try:
        values.extend(itertools.islice(iterator, count))
    except (ArithmeticError, ValueError) as error:
        return values, repr(error)
    return values, ""


def in_runs(iterator: RecoveringIterator[Any], count: int) -> tuple[list[Any], str]:
    """Returns the same, drawn in one call."""
    values, error, _ = iterator._draw_run(count)
    return list(values), "" if error is None else repr(error)


@pytest.mark.parametrize("join", JOINS)
@hypothesis.settings(max_examples=30)
@hypothesis.given(
    parents=streams(),
    number=strategies.integers(1, 4),
    counts=strategies.lists(strategies.integers(1, 20), min_size=1, max_size=5),
    run=strategies.integers(1, 32),
)
@hypothesis.example(parents=[stream(0, 2, None, 1), stream(100, 5, 2, 1)], number=3, counts=[4], run=8)
def test_runs_change_nothing(
    join: str, parents: list[IterDataset[int]], number: int, counts: list[int], run: int
) -> None:
    """Elements, errors, steps and states after each draw are those of as many calls of `next`."""
    dataset = JOINS[join](parents, number)
    singly, together = iter(dataset), iter(dataset)
    assert isinstance(singly, RecoveringIterator)
    assert isinstance(together, RecoveringIterator)
    for count in counts:
        together._run = run
        expected = one_by_one(singly, count)
        assert in_runs(together, count) == expected
        values, error = expected
        if error:
            break
        assert together.step == singly.step
        assert together.get_state() == singly.get_state()
        if len(values) < count:
            break


class Logged(IterDataset[int]):
    """A stream of the user's that writes its number to a list whenever an element is drawn."""

    def __init__(self, number: int, drawn: list[int]) -> None:
        super().__init__()
        self.number = number
        self.drawn = drawn

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]  # a generator, which is counted
        for element in itertools.count():
            self.drawn.append(self.number)
            yield element


IN_TURN: dict[str, Callable[[list[Logged]], IterDataset[int]]] = {
    "interleave": lambda parents: experimental.InterleaveIterDataset(parents, cycle_length=2),
    "mix": IterDataset.mix,
}


@pytest.mark.parametrize(("fast_seconds", "longest"), [(0.0, 1), (math.inf, 16)])
@pytest.mark.parametrize("join", IN_TURN)
def test_runs_are_long_only_where_elements_come_fast(
    join: str, fast_seconds: float, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow streams are drawn from in turn, so that all read ahead; fast ones many times in a row, which costs less."""
    monkeypatch.setattr(recovering_iterator, "FAST_SECONDS", fast_seconds)
    drawn: list[int] = []
    iterator = iter(IN_TURN[join]([Logged(0, drawn), Logged(1, drawn)]))
    assert isinstance(iterator, RecoveringIterator)
    for _ in range(8):
        iterator._draw_run(32)
    assert max(len(list(run)) for _, run in itertools.groupby(drawn[-32:])) == longest


@pytest.mark.parametrize("stop", ["all_exhausted", "drop_exhausted"])
def test_a_batch_of_a_mixture_draws_each_chain_in_runs(stop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of draws from the chains of a mixture does not grow with the number of its elements."""
    monkeypatch.setattr(recovering_iterator, "FAST_SECONDS", math.inf)
    options = millstream.ReadOptions(num_threads=0)
    chains = [MapDataset.range(100_000).repeat().to_iter_dataset(options) for _ in range(3)]
    mixed = IterDataset.mix(chains, [3, 2, 1], stop=stop)
    counts: list[int] = []
    draw_run = ReadIterator._draw_run

    def counted(self: ReadIterator, count: int) -> Drawn[Any]:
        counts.append(count)
        return draw_run(self, count)

    monkeypatch.setattr(ReadIterator, "_draw_run", counted)
    with iter(mixed.batch(512)) as iterator:
        for _ in range(8):
            next(iterator)
        counts.clear()
        next(iterator)
    assert 0 < len(counts) <= 3 * len(chains)
