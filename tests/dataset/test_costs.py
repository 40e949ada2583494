"""Costs of chains below others, counted: the size and time of a state, of opening a stream, and of one element."""

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from millstream import IterDataset, MapDataset, ReadOptions
from millstream.dataset import InterleaveIterDataset

NUM_STREAMS = 64


def is_kept(number: int) -> bool:
    return number % 3 > 0


def chains(*, filtered: bool = True, seed: int = 0, length: int = 40) -> list[IterDataset[Any]]:
    """Returns chains over numbers that say which one they are of."""
    numbers = [
        MapDataset.range(1000 * stream, 1000 * stream + length).seed(seed).shuffle().to_iter_dataset()
        for stream in range(NUM_STREAMS)
    ]
    return [stream.filter(is_kept) for stream in numbers] if filtered else numbers


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("is_followed", [False, True])
def test_the_state_of_a_mixture_of_64_has_less_than_4_kb(filtered: bool, is_followed: bool) -> None:
    """A chain in a mixture takes some 40 bytes, so that a state can be saved with every checkpoint of a model."""
    mixture = IterDataset.mix(chains(filtered=filtered))
    dataset = mixture.map(float) if is_followed else mixture
    with iter(dataset) as iterator:
        for _ in range(500):
            next(iterator)
        state = iterator.get_state()
        following = list(itertools.islice(iterator, 200))
    assert len(json.dumps(state)) < 4096
    with iter(dataset) as iterator:
        iterator.set_state(json.loads(json.dumps(state)))
        assert iterator.get_state() == state
        assert list(itertools.islice(iterator, 200)) == following


def calls_of(function: Callable[[], object]) -> int:
    """Returns the number of Python functions that are called, this one included."""
    counted = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal counted
        counted += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return counted


@pytest.mark.parametrize("is_followed", [False, True])
def test_the_state_of_a_mixture_of_64_asks_only_the_chains_that_moved(is_followed: bool) -> None:
    """All others have the state that they had, so that a state after each batch is cheap. It belongs to the caller."""
    mixture = IterDataset.mix(chains(filtered=True))
    with iter(mixture.batch(32) if is_followed else mixture) as iterator:
        for _ in range(4):
            next(iterator)
        state = iterator.get_state()
        (state["stream"] if is_followed else state)["parents"].clear()
        next(iterator)
        assert calls_of(iterator.get_state) < 4 * NUM_STREAMS
        state = iterator.get_state()
        following = [repr(next(iterator)) for _ in range(3)]
        iterator.set_state(state)
        assert iterator.get_state() == state
        assert [repr(next(iterator)) for _ in range(3)] == following


def numbers(_: object) -> IterDataset[int]:
    return MapDataset.range(4).to_iter_dataset(ReadOptions(0, 0))


def test_opening_a_stream_of_an_interleave_calls_few_functions() -> None:
    """An interleave of thousands of short files opens, reads and closes each in less than a millisecond."""
    counts = (10, 110)
    few, many = (InterleaveIterDataset(MapDataset.range(count).map(numbers), cycle_length=4) for count in counts)
    list(few)
    assert (calls_of(lambda: list(many)) - calls_of(lambda: list(few))) / (counts[1] - counts[0]) < 1300


@pytest.mark.parametrize(
    ("join", "calls"), [(IterDataset.mix, 60), (lambda parts: InterleaveIterDataset(parts, cycle_length=8), 20)]
)
def test_one_element_of_a_join_calls_few_functions(
    join: Callable[[list[IterDataset[int]]], IterDataset[int]], calls: int
) -> None:
    """`next` asks only the stream that is due, and not as a run of one, because trainers ask for single elements."""
    with iter(join(chains(filtered=False, length=200))) as iterator:
        list(itertools.islice(iterator, 64))
        assert calls_of(lambda: list(itertools.islice(iterator, 1000))) < calls * 1000
