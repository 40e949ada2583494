"""Streams of which elements are dropped, mixed by worker processes: one set of them does the work of all."""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import FirstFitPack, IterDataset, MapDataset, WindowShuffle
from millstream.errors import WorkerDiedError
from support.processes.process_tree import processes_below, worker_pids
from support.streams import comparable


def is_kept(number: Any) -> bool:
    return int(np.max(number)) % 3 > 0


def add_draw(number: Any, rng: np.random.Generator) -> Any:
    return number + float(rng.random())


def add_index(index: int, number: Any) -> Any:
    return number + 1000 * index


def twice(number: Any) -> list[Any]:
    return [number, -number]


class Own(IterDataset[Any]):
    """Some numbers, by an iterator that is nobody's but its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # which becomes an iterator with states
        return iter([float(number) for number in range(self.count)])


STEPS: dict[str, Any] = {
    "map": lambda stream: stream.map(float),
    "filter": lambda stream: stream.filter(is_kept),
    "random": lambda stream: stream.random_map(add_draw, seed=7),
    "index": lambda stream: stream.map_with_index(add_index),
    "flat": lambda stream: stream.flat_map(twice, max_fan_out=2),
    "window": lambda stream: stream.apply(WindowShuffle(5, seed=3)),
    "pairs": lambda stream: stream.batch(2, drop_remainder=True).map(lambda pair: float(pair.sum())),
    "workers": lambda stream: stream.mp_prefetch(3),
}


@st.composite
def streams(draw: st.DrawFn, depth: int = 1) -> IterDataset[Any]:
    """Draws a stream: of a MapDataset, of an iterator, or mixed, and operations after it."""
    kind = draw(st.sampled_from(["map", "map", "map", "own", "mixed"] if depth else ["map"]))
    stream: IterDataset[Any]
    if kind == "mixed":
        stream = draw(mixtures(depth - 1))
    elif kind == "own":
        stream = Own(draw(st.integers(1, 30)))
    else:
        first = draw(st.integers(0, 50))
        numbers = MapDataset.range(first, first + draw(st.integers(1, 40))).seed(first).shuffle()
        stream = numbers.repeat(draw(st.integers(1, 3))).to_iter_dataset()
    for step in draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=3)):
        stream = STEPS[step](stream)
    return stream


@st.composite
def mixtures(draw: st.DrawFn, depth: int = 1) -> IterDataset[Any]:
    """Draws a mixture of which at least one stream drops elements."""
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    parts = {name: draw(streams(depth)) for name in names}
    parts[names[0]] = parts[names[0]].filter(is_kept)
    return IterDataset.mix(parts, {name: draw(st.integers(1, 9)) for name in names})


def listed(iterator: Any) -> list[Any]:
    return [comparable(element) for element in iterator]


def saved(iterator: Any) -> Any:
    return json.loads(json.dumps(iterator.get_state()))


@settings(max_examples=8, deadline=None)
@given(mixtures(), st.integers(1, 5), st.integers(1, 3), st.data())
def test_workers_change_nothing(mixture: IterDataset[Any], batch_size: int, workers: int, data: st.DataObject) -> None:
    """The elements are those without workers, from every state on that was taken with them or without."""
    dataset = mixture.random_map(add_draw, seed=8).filter(is_kept).batch(batch_size)
    with iter(dataset) as alone, iter(dataset.mp_prefetch(workers)) as spread:
        expected, found = [], []
        states = [(saved(alone), saved(spread))]
        for element in alone:
            expected.append(comparable(element))
            found.append(comparable(next(spread)))
            states.append((saved(alone), saved(spread)))
        with pytest.raises(StopIteration):
            next(spread)
        assert found == expected
        for step in data.draw(st.lists(st.integers(0, len(expected)), max_size=3)):
            spread.set_state(states[step][0])
            assert listed(itertools.islice(spread, 2)) == expected[step : step + 2]
            alone.set_state(states[step][1])
            assert listed(itertools.islice(alone, 2)) == expected[step : step + 2]
        spread.set_state(states[-1][1])
        assert listed(spread) == []


def numbers(first: int, count: int = 60) -> IterDataset[Any]:
    """Returns the numbers of which some are dropped, each with the process that has dropped them."""
    chain = MapDataset.range(first, first + count).seed(first).shuffle().to_iter_dataset()
    return chain.filter(is_kept).map(lambda number: (number, os.getpid()))


def test_many_streams_have_one_set_of_workers() -> None:
    """35 streams, each of which asks for workers too, have the two of what draws from them, which do all the work."""
    mixture = IterDataset.mix([numbers(1000 * number).mp_prefetch(2) for number in range(35)])
    dataset = mixture.map(lambda element: (*element, os.getpid()))
    with iter(dataset.mp_prefetch(2)) as spread:
        elements = list(itertools.islice(spread, 700))
        workers = worker_pids()
        elements += list(spread)
    assert len(workers) == 2
    assert {process for _, *processes in elements for process in processes} <= workers
    assert processes_below() == []
    with iter(IterDataset.mix([numbers(1000 * number) for number in range(35)])) as alone:
        assert [number for number, *_ in elements] == [number for number, _ in alone]


def test_a_mixture_of_others_resumes() -> None:
    """A named mixture resumes with or without workers: new streams start at their beginning, in the same workers."""
    parts = {"a": numbers(0), "b": numbers(1000), "c": numbers(2000)}
    first = IterDataset.mix({name: parts[name] for name in "ab"})
    second = IterDataset.mix({name: parts[name] for name in "bc"}, {"b": 1, "c": 2}).batch(3, batch_fn=list)
    with iter(first.batch(3, batch_fn=list).mp_prefetch(2)) as iterator:
        list(itertools.islice(iterator, 4))
        state = saved(iterator)
    found = []
    for workers in (0, 2):
        with iter(second.mp_prefetch(workers) if workers else second) as resumed:
            list(itertools.islice(resumed, 2))
            resumed.set_state(state)
            found.append([number for batch in resumed for number, _ in batch])
    assert found[0] == found[1]
    assert len(found[0]) > 20


class KillOnce:
    """Ends its process at a number, once, or whenever it comes.

    Args:
        number: which one.
        file: is there once it has.
        always: whether it does so again.
    """

    def __init__(self, number: int, file: Path, *, always: bool = False) -> None:
        self.number = number
        self.file = file
        self.always = always

    def __call__(self, element: tuple[int, int]) -> tuple[int, int]:
        if element[0] == self.number and (self.always or not self.file.exists()):
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return element


@pytest.mark.parametrize("is_below", [True, False])
def test_a_worker_that_dies_loses_nothing(tmp_path: Path, is_below: bool) -> None:
    """Wherever a worker dies, others redo its work for all streams, and the elements are the same."""
    kill = KillOnce(1025, tmp_path / "killed")
    middle = numbers(1000).map(kill) if is_below else numbers(1000)
    mixture = IterDataset.mix([numbers(0), middle, numbers(2000)])
    dataset = mixture if is_below else mixture.map(kill)
    with iter(dataset.filter(lambda element: element[0] % 5 > 0).mp_prefetch(2)) as spread:
        found = [number for number, _ in spread]
    assert kill.file.exists()
    with iter(IterDataset.mix([numbers(0), numbers(1000), numbers(2000)])) as alone:
        assert found == [number for number, _ in alone if number % 5 > 0]


def test_an_element_that_kills_its_workers_is_named(tmp_path: Path) -> None:
    """It is an error at its turn, and what comes before it of all streams is delivered."""
    kill = KillOnce(1025, tmp_path / "killed", always=True)
    mixture = IterDataset.mix([numbers(0), numbers(1000).map(kill)])
    with iter(IterDataset.mix([numbers(0), numbers(1000)])) as alone:
        expected = list(itertools.takewhile(lambda number: number != 1025, (number for number, _ in alone)))
    with iter(mixture.mp_prefetch(2)) as spread:
        assert [number for number, _ in itertools.islice(spread, len(expected))] == expected
        with pytest.raises(WorkerDiedError, match=r"2 worker processes died .* from the record"):
            next(spread)


def test_rows_are_packed_from_streams_that_drop() -> None:
    """A packer after several streams that drop documents packs the same rows."""
    documents = [
        numbers(1000 * number).map(lambda element: {"tokens": np.arange(element[0] % 7 + 1)}) for number in range(5)
    ]
    packed = IterDataset.mix(documents, range(1, 6)).apply(FirstFitPack({"tokens": 16}, num_packing_bins=4)).batch(2)
    with iter(packed) as alone, iter(packed.mp_prefetch(2)) as spread:
        assert listed(spread) == listed(alone)
