"""Joins yield the same, and are at the same positions, whether elements are drawn one by one or many in one call."""

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

import millstream
from millstream import IterDataset, MapDataset, experimental
from millstream.dataset.iterators.recovering_iterator import RecoveringIterator


def stream(first: int, length: int, failing: int | None, step: int) -> IterDataset[int]:
    """Returns the multiples of `step` among `length` numbers, one of which cannot be computed."""

    def number(offset: int) -> int:
        if offset == failing:
            raise ArithmeticError(first + offset)
        return first + offset

    numbers = MapDataset.range(length).map(number).to_iter_dataset(millstream.ReadOptions(num_threads=0))
    return numbers if step == 1 else numbers.filter(lambda value: value % step == 0)


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
            draw(strategies.sampled_from([1, 1, 2, 3])),
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


def in_one_call(iterator: RecoveringIterator[Any], count: int) -> tuple[list[Any], str]:
    """Returns the same, drawn in one call."""
    values, error = iterator.draw(count)
    return values, "" if error is None else repr(error)


@pytest.mark.parametrize("join", JOINS)
@hypothesis.given(
    parents=streams(),
    number=strategies.integers(1, 4),
    counts=strategies.lists(strategies.integers(1, 20), min_size=1, max_size=5),
)
def test_one_call_yields_what_many_do(
    join: str, parents: list[IterDataset[int]], number: int, counts: list[int]
) -> None:
    """Elements, errors, steps and states after each draw are those of as many calls of `next`."""
    dataset = JOINS[join](parents, number)
    singly, together = iter(dataset), iter(dataset)
    assert isinstance(singly, RecoveringIterator)
    assert isinstance(together, RecoveringIterator)
    for count in counts:
        expected = one_by_one(singly, count)
        assert in_one_call(together, count) == expected
        values, error = expected
        if error:
            break
        assert together.step == singly.step
        assert together.get_state() == singly.get_state()
        if len(values) < count:
            break
