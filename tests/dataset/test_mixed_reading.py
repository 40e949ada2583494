"""A mixture of straight chains that is read at random: what is drawn from the mixed stream, with one set of workers."""

import itertools
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import IterDataset, MapDataset
from millstream.dataset.chain import Chain
from millstream.dataset.iterators.chain_iterator import ReadIterator
from millstream.dataset.iterators.fed_iterator import FedIterator
from millstream.dataset.iterators.running import FixedChain, Running, Shared
from millstream.dataset.joins.mixing import Mix, MixtureIterator
from millstream.dataset.opening import drawn as drawn_join
from millstream.dataset.stream_steps import NO_THREADS, step_of
from millstream.experimental import assert_equal_output_after_checkpoint
from millstream.loader.threads.options import MultiprocessingOptions


def add_draw(number: int, rng: np.random.Generator) -> float:
    return number + float(rng.random())


def add_index(index: int, number: float) -> float:
    return number + 1000 * index


STEPS: dict[str, Callable[[IterDataset[Any]], IterDataset[Any]]] = {
    "map": lambda stream: stream.map(lambda number: -number),
    "shared map": lambda stream: stream.map(abs),
    "random": lambda stream: stream.random_map(add_draw, seed=7),
    "index": lambda stream: stream.map_with_index(add_index),
}


@st.composite
def mixtures(draw: st.DrawFn) -> IterDataset[Any]:
    """Draws a mixture of chains in which each position has an element; some end with the same maps."""
    shared = draw(st.integers(0, 2))
    names = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True))
    parts: dict[str, IterDataset[Any]] = {}
    for number, name in enumerate(names):
        numbers = MapDataset.range(100 * number, 100 * number + draw(st.integers(1, 30)))
        if draw(st.booleans()):
            numbers = numbers.shuffle(seed=number).repeat(draw(st.integers(1, 3)))
        stream: IterDataset[Any] = numbers.to_iter_dataset()
        for step in draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=3)):
            stream = STEPS[step](stream)
        for _ in range(shared):
            stream = stream.map(float)
        parts[name] = stream
    weights = {name: draw(st.integers(1, 9)) for name in names}
    return IterDataset.mix(parts, weights)


def followed(mixture: IterDataset[Any], batch_size: int) -> IterDataset[Any]:
    return mixture.random_map(add_draw, seed=8).batch(batch_size)


def drawn_iterator(dataset: IterDataset[Any]) -> FedIterator:
    """Returns an iterator that draws from the mixed stream: what a mixture of any streams has."""
    chain = Chain.of(step_of(dataset))
    fixed = FixedChain(None, None, chain.operations)
    return FedIterator(drawn_join(chain.leaf, Shared()), fixed, Running(MultiprocessingOptions(), NO_THREADS))


def listed(batches: Any) -> list[list[float]]:
    return [batch.tolist() for batch in batches]


@settings(max_examples=12, deadline=None)
@given(mixtures(), st.integers(1, 9))
def test_a_mixture_read_at_random_is_the_one_drawn_from(mixture: IterDataset[Any], batch_size: int) -> None:
    """The same batches, and each state of the one resumes the other, at every step and at the end."""
    dataset = followed(mixture, batch_size)
    drawn, read = drawn_iterator(dataset), iter(dataset)
    assert isinstance(read, MixtureIterator)
    with drawn, read:
        assert json.loads(json.dumps(read.get_state())) == drawn.get_state()
        of_drawn, expected = [drawn.get_state()], []
        for batch in drawn:
            expected.append(batch.tolist())
            of_drawn.append(json.loads(json.dumps(drawn.get_state())))
        of_read, found = [read.get_state()], []
        for batch in read:
            found.append(batch.tolist())
            of_read.append(json.loads(json.dumps(read.get_state())))
        assert found == expected
        for step in range(len(expected) + 1):
            drawn.set_state(of_read[step])
            assert listed(itertools.islice(drawn, 2)) == expected[step : step + 2]
            read.set_state(of_read[step])
            assert read.get_state() == of_read[step]
            assert listed(itertools.islice(read, 2)) == expected[step : step + 2]
            with iter(dataset) as resumed:
                resumed.set_state(of_drawn[step])
                assert resumed.get_state() == of_drawn[step]
                assert listed(itertools.islice(resumed, 2)) == expected[step : step + 2]


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("rows", range(10))
def test_a_stream_knows_its_states_in_advance(rows: int, drop_remainder: bool) -> None:
    """The state after any number of batches is that of a stream which is there, also after a short or only batch."""
    dataset = MapDataset.range(rows).to_iter_dataset().batch(4, drop_remainder=drop_remainder)
    with iter(dataset) as stream, iter(dataset) as first, iter(dataset) as moved:
        assert isinstance(first, ReadIterator)
        assert isinstance(moved, ReadIterator)
        for count in range(sum(1 for _ in dataset) + 1):
            moved._move_to(first.position_after(count))
            assert moved.get_state() == stream.get_state()
            assert listed(moved) == listed(itertools.islice(dataset, count, None))
            next(stream, None)


@settings(max_examples=12, deadline=None)
@given(mixtures(), mixtures(), st.integers(1, 5), st.integers(0, 30))
def test_a_mixture_resumes_in_another_one(
    before: IterDataset[Any], after: IterDataset[Any], batch_size: int, step: int
) -> None:
    """A named mixture resumes with other weights and chains as the drawn one does, and so does every later state."""
    one, other = step_of(before), step_of(after)
    assert isinstance(one, Mix)
    assert isinstance(other, Mix)
    shared = dict(zip(one.mixing.names, before.parents, strict=True))
    parts = {name: shared.get(name, part) for name, part in zip(other.mixing.names, after.parents, strict=True)}
    changed = IterDataset.mix(parts, dict(zip(other.mixing.names, other.mixing.weights, strict=True)))
    dataset = followed(changed, batch_size)
    with iter(followed(before, batch_size)) as saved:
        list(itertools.islice(saved, step))
        state = json.loads(json.dumps(saved.get_state()))
    with drawn_iterator(dataset) as drawn, iter(dataset) as read:
        drawn.set_state(state)
        read.set_state(state)
        expected = listed(drawn)
        later, found = [], []
        for batch in read:
            found.append(batch.tolist())
            later.append(json.loads(json.dumps(read.get_state())))
        assert found == expected
        for number, one in list(enumerate(later))[::7]:
            with iter(dataset) as fresh:
                fresh.set_state(one)
                assert fresh.get_state() == one
                assert listed(fresh) == expected[number + 1 :]


def odd_ones_out(number: int) -> int | None:
    return None if number % 17 == 15 else number


ABSENT: dict[str, IterDataset[Any]] = {
    "absent": MapDataset.range(24).map(odd_ones_out).to_iter_dataset(),
    "absent in batches": MapDataset.range(24).map(odd_ones_out).to_iter_dataset().batch(2),
    "an element": MapDataset.range(24).to_iter_dataset().map(odd_ones_out).map(lambda number: [number]),
}


@pytest.mark.parametrize("kind", ABSENT)
def test_an_absent_element_hands_over_to_the_stream(kind: str) -> None:
    """If a map returns None, elements are drawn from the stream from that position on, also after a resume."""
    mixture = IterDataset.mix({"holes": ABSENT[kind], "dense": MapDataset.range(1000, 1024).to_iter_dataset()})
    assert listed(mixture.map(np.asarray)) == listed(map(np.asarray, mixture))
    assert_equal_output_after_checkpoint(mixture.map(np.asarray))


def test_what_is_not_straight_is_drawn() -> None:
    """A chain that filters, is joined, or counts batches among the others: the mixture is drawn from as ever."""
    straight = MapDataset.range(30).to_iter_dataset()
    for other in (
        straight.filter(bool),
        IterDataset.mix([straight, straight]),
        straight.batch(2).map_with_index(lambda index, batch: batch + index),
        MapDataset.range(30).filter(bool).to_iter_dataset(),
        MapDataset.range(0).to_iter_dataset(),
    ):
        with iter(IterDataset.mix([straight, other]).map(np.max)) as iterator:
            assert isinstance(iterator, FedIterator)
    with iter(IterDataset.mix([straight, straight.mp_prefetch(1)]).map(np.max)) as iterator:
        assert "draws from a mixture of 2" in repr(iterator)


def large(number: int) -> Any:
    """Returns a number above 9."""
    return number if number > 9 else None


def test_a_mixture_that_is_read_moves_to_any_step() -> None:
    """Forwards and backwards, with the state of that step; not if a chain is drawn from, nor past missing elements."""
    straight = MapDataset.range(30).shuffle(seed=1).to_iter_dataset()
    mixture = IterDataset.mix([straight, straight.map(int)], [2, 1]).map(abs).batch(4)
    with iter(mixture) as iterator, iter(mixture) as plain:
        states, expected = [plain.get_state()], []
        for batch in plain:
            expected.append(batch.tolist())
            states.append(plain.get_state())
        for step in (5, 0, len(expected), 2):
            iterator.seek(step)
            assert (iterator.step, iterator.get_state()) == (step, states[step])
            assert listed(iterator) == expected[step:]
        with pytest.raises(IndexError, match=f"between 0 and {len(expected)}"):
            iterator.seek(len(expected) + 1)
    for drawn in (straight.filter(bool), straight.mp_prefetch(1)):
        drawn_from = iter(IterDataset.mix([straight, drawn]).map(abs))
        with drawn_from, pytest.raises(NotImplementedError, match="cannot seek step 2"):
            drawn_from.seek(2)
    absent = IterDataset.mix([straight, MapDataset.range(30).map(large).to_iter_dataset()]).map(abs)
    with iter(absent) as holes:
        holes.seek(1)
        with pytest.raises(ValueError, match="seek has moved to a position with fewer elements"):
            list(holes)
        holes.seek(0)
        assert list(holes) == list(absent)


def in_parts(**weights: int) -> IterDataset[int]:
    return IterDataset.mix({name: MapDataset.range(30).to_iter_dataset() for name in "ab"}, weights or None)


def test_a_mixture_that_cannot_seek_says_why() -> None:
    """After a filter, or with a state of other proportions, it is not called a stream; closed is closed first."""
    with iter(in_parts().filter(bool)) as filtered, pytest.raises(NotImplementedError, match="filtered, split or pack"):
        filtered.seek(2)
    with iter(in_parts(a=3, b=1).map(abs)) as other, iter(in_parts().map(abs)) as resumed:
        list(itertools.islice(other, 8))
        resumed.set_state(other.get_state())
        with pytest.raises(NotImplementedError, match="other proportions"):
            resumed.seek(2)
    with pytest.raises(ValueError, match="closed iterator"):
        resumed.seek(2)


def process_of(_: int) -> int:
    """Returns the number of the process."""
    return os.getpid()


def test_a_mixture_in_its_own_proportions_has_the_same_workers() -> None:
    """After a state of other proportions and one of its own, the workers are those of the next pass."""
    mixture = in_parts().map(process_of).mp_prefetch(1)
    resumed = iter(mixture)
    for weights in ({"a": 3, "b": 1}, {}):
        with iter(in_parts(**weights).map(process_of)) as other:
            list(itertools.islice(other, 8))
            resumed.set_state(other.get_state())
    (worker,) = set(resumed)
    assert set(mixture) == {worker} != {os.getpid()}
