"""Mixtures of chains end by the same rules, and change their weights at the same positions, as a MixtureSampler."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from millstream import (
    CheckpointError,
    ConcatenatedDataSource,
    DataLoader,
    DatasetIterator,
    IndexSampler,
    IterDataset,
    MapDataset,
    MixtureSampler,
    ReadOptions,
)

PARTS = [range(7), range(100, 104), range(200, 211)]
WEIGHTS = [3, 1, 2]
STOPS = ["first_exhausted", "all_exhausted", "drop_exhausted"]
CHANGES: list[list[tuple[int, list[int]]]] = [[], [(5, [1, 3, 1])], [(5, [0, 1, 1]), (9, [2, 1, 1])]]


class Counted(IterDataset[int]):
    """A user's stream, whose iterators have no states."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.numbers = numbers

    def __iter__(self) -> Any:
        return iter(self.numbers)


def by_position(parts: Sequence[range], **options: Any) -> MapDataset[int]:
    return MapDataset.mix([MapDataset.source(part) for part in parts], WEIGHTS, **options)


def streams(parts: Sequence[range], **options: Any) -> IterDataset[int]:
    return IterDataset.mix([MapDataset.source(part).to_iter_dataset() for part in parts], WEIGHTS, **options)


def named(parts: Sequence[range], **options: Any) -> IterDataset[int]:
    made = {str(part.start): Counted(part) for part in parts}
    return IterDataset.mix(made, dict(zip(made, WEIGHTS, strict=True)), **options)


KINDS: dict[str, Callable[..., Any]] = {"positions": by_position, "streams": streams, "named": named}


def changed(mixture: Any, changes: Sequence[tuple[int, list[int]]]) -> Any:
    for position, weights in changes:
        mixture = mixture.reweighted(position, weights)
    return mixture


def of_sampler(stop: str, changes: Any) -> list[int]:
    samplers = [IndexSampler(len(part), num_epochs=1) for part in PARTS]
    sampler = MixtureSampler(samplers, WEIGHTS, stop=stop, changes=changes)
    return list(DataLoader(data_source=ConcatenatedDataSource(PARTS), sampler=sampler, operations=[]))


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("changes", CHANGES, ids=len)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_of_chains_is_that_of_a_sampler(kind: str, changes: Any, stop: str) -> None:
    """Elements, end and changes are those of a MixtureSampler, one by one and in batches after it."""
    mixture = changed(KINDS[kind](PARTS, stop=stop), changes)
    expected = of_sampler(stop, changes)

    assert list(mixture) == expected
    assert list(itertools.chain.from_iterable(mixture.batch(3, batch_fn=list))) == expected


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("kind", ["streams", "named"])
def test_a_mixture_resumes_at_each_position(kind: str, stop: str) -> None:
    """A state, through JSON, resumes there and is the state there, also if weights change from there on."""
    mixture = changed(KINDS[kind](PARTS, stop=stop), CHANGES[1])
    with iter(mixture) as iterator:
        states, elements = [iterator.get_state()], []
        for element in iterator:
            elements.append(element)
            states.append(json.loads(json.dumps(iterator.get_state())))
    for step, state in enumerate(states[: len(elements) + 1]):
        with iter(mixture) as fresh:
            fresh.set_state(state)
            assert fresh.get_state() == state
            assert list(fresh) == elements[step:]
    with iter(mixture.reweighted(8, [0, 0, 1])) as fresh:
        fresh.set_state(states[8])
        taken = list(itertools.islice(fresh, 3))
        assert all(200 <= number < 211 for number in taken)


@pytest.mark.parametrize("stop", STOPS)
def test_a_state_of_other_weights_is_refused(stop: str) -> None:
    """Without names, and if the mixture goes on after a stream has ended, a state is refused for other weights."""
    with iter(streams(PARTS, stop=stop)) as iterator:
        next(iterator)
        state = iterator.get_state()
    with (
        iter(streams(PARTS, stop=stop).reweighted(0, [1, 1, 1])) as fresh,
        pytest.raises(CheckpointError, match="weights"),
    ):
        fresh.set_state(state)
    other = "all_exhausted" if stop == "drop_exhausted" else "drop_exhausted"
    with iter(streams(PARTS, stop=other)) as fresh, pytest.raises(CheckpointError, match="mixture"):
        fresh.set_state(state)


def test_states_at_the_end_of_a_part_do_not_depend_on_threads() -> None:
    """A part of datasets in a row has one state between two of them, also if threads still read the second one."""

    def states(reading: ReadOptions) -> list[str]:
        parts = [
            MapDataset.select_from_datasets([MapDataset.source(part)], [(0, 0)]).to_iter_dataset(reading)
            for part in PARTS
        ]
        iterator = iter(IterDataset.mix([parts[0].concatenate(*parts[1:])], stop="all_exhausted"))
        return [json.dumps(iterator.get_state()) for _ in iterator]

    expected = states(ReadOptions(0, 0))
    for _ in range(10):
        assert states(ReadOptions(2, 3)) == expected


@pytest.mark.parametrize("stop", STOPS)
def test_weights_may_change_where_the_mixture_ends(stop: str) -> None:
    """Weights from the position after the last element, or from later ones, change nothing."""
    streams = [IterDataset.source(part) for part in PARTS]
    mixture = IterDataset.mix(streams, WEIGHTS, stop=stop)
    elements = list(mixture)
    for position in (len(elements), len(elements) + 1):
        assert list(mixture.reweighted(position, [1, 1, 1])) == elements


def test_dropped_datasets_come_once_in_each_epoch() -> None:
    """Each epoch of a mixture to the end of all has each element once, in one order."""
    mixture = by_position(PARTS, stop="drop_exhausted")
    first, second = mixture[: len(mixture)], [mixture[len(mixture) + position] for position in range(len(mixture))]

    assert sorted(first) == sorted(itertools.chain.from_iterable(PARTS))
    assert second == list(first)


class Failing(DatasetIterator[int]):
    """Counts to 5; the draw of 3 fails once."""

    def __init__(self, failures: list[Exception]) -> None:
        super().__init__()
        self.count, self.failures = 0, failures

    def __next__(self) -> int:
        if self.count == 3 and self.failures:
            raise self.failures.pop()
        if self.count == 5:
            raise StopIteration
        self.count += 1
        return self.count - 1

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class FailsOnce(IterDataset[int]):
    """A user's stream with states."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[Exception] = [OSError("gone")]

    def __iter__(self) -> Any:
        return Failing(self.failures)


@pytest.mark.parametrize("stop", STOPS)
def test_an_error_comes_at_its_turn(stop: str) -> None:
    """Elements before the error come first, although a stream is drawn from in advance; then the same element comes."""
    whole = list(IterDataset.mix([IterDataset.source(range(5)), IterDataset.source(range(10, 18))], stop=stop))
    before = whole.index(3)
    with iter(IterDataset.mix([FailsOnce(), IterDataset.source(range(10, 18))], stop=stop)) as iterator:
        assert list(itertools.islice(iterator, before)) == whole[:before]
        with pytest.raises(OSError, match="gone"):
            next(iterator)
        assert list(iterator) == whole[before:]


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: by_position(PARTS, stop="last"), ValueError, "stop must be 'first_exhausted'"),
        (lambda: streams(PARTS, stop="last"), ValueError, "stop must be 'first_exhausted'"),
        (lambda: by_position(PARTS).map(str).reweighted(3, WEIGHTS), TypeError, r"got .map\(str\): call it directly"),
        (lambda: streams(PARTS).map(str).reweighted(3, WEIGHTS), TypeError, "call it directly after mix"),
        (lambda: by_position(PARTS).reweighted(99, [1, 1, 1]), ValueError, "the mixture ends there, got 99"),
        (lambda: streams(PARTS).reweighted(-1, WEIGHTS), ValueError, "position must be at least 0"),
        (lambda: streams(PARTS).reweighted(1, [1]), ValueError, "one number for each of the 3 components"),
        (
            lambda: list(IterDataset.mix([Counted(range(0)), Counted(range(3))], stop="all_exhausted")),
            ValueError,
            "Dataset 0 is empty",
        ),
    ],
)
def test_mistakes_are_named(build: Callable[[], object], error: type[Exception], text: str) -> None:
    """When the dataset is built, if possible."""
    with pytest.raises(error, match=text):
        build()
