"""States of chains with mp_prefetch and prefetch at every position: they are those of the chain without."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
from collections.abc import Callable
from operator import methodcaller
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from millstream import CheckpointError, IterDataset, Map, MapDataset, ReadOptions, Rebatch, WindowShuffle
from millstream.experimental import (
    CacheIterDataset,
    InterleaveIterDataset,
    LimitIterDataset,
    RepeatIterDataset,
    ThreadPrefetchIterDataset,
    WindowShuffleIterDataset,
    ZipIterDataset,
)
from support.user_streams import Counted

Step = Callable[[Any], Any]

STEPS = 3
"""The number of elements of each chain that are compared, besides those at its end."""
LENGTH = 30
"""The number of elements of each stream at the beginning of a chain: several calls of workers, and several batches."""


class Chain(NamedTuple):
    """A chain to which prefetching is added.

    Attributes:
        begin: returns the dataset before the operations.
        steps: the operations. Position 0 is before the first one.
    """

    begin: Callable[[], Any]
    steps: list[Step]


def read(start: int = 0) -> IterDataset[Any]:
    numbers = MapDataset.range(start, start + LENGTH).shuffle(seed=1)
    return numbers.to_iter_dataset(ReadOptions(num_threads=0, prefetch_buffer_size=0))


def abs_of(element: Any) -> Any:
    """Returns an element, or the absolute value of a number."""
    return abs(element) if isinstance(element, float) else element


def is_odd(number: int) -> bool:
    return number % 2 > 0


def without_fifths(number: int) -> int | None:
    return number if number % 5 else None


def pair(number: int) -> list[int]:
    return [number, number + 1]


def drawn(number: int, rng: np.random.Generator) -> tuple[int, int]:
    return number, int(rng.integers(1000))


def with_index(index: int, element: Any) -> tuple[int, Any]:
    return index, element


as_float = methodcaller("map", float)
odd = methodcaller("filter", is_odd)
pairs = methodcaller("batch", 2)
triples = methodcaller("batch", 3, batch_fn=list)
lists = methodcaller("batch", 2, batch_fn=list)
random = methodcaller("random_map", drawn, seed=0)


def uneven(start: int = 0) -> IterDataset[Any]:
    return MapDataset.range(start, start + LENGTH - 1).to_iter_dataset(
        ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )


def holes() -> IterDataset[Any]:
    """Returns LENGTH numbers without some."""
    numbers = MapDataset.range(1001, 1001 + LENGTH).map(without_fifths)
    return numbers.to_iter_dataset(ReadOptions(num_threads=0, prefetch_buffer_size=0))


def mix() -> IterDataset[Any]:
    return IterDataset.mix([read(), read(1000).filter(is_odd)])


def straight_mix() -> IterDataset[Any]:
    return IterDataset.mix([read(), read(1000)])


CHAINS = {
    "map, map": Chain(read, [as_float, as_float]),
    "filter, batch": Chain(read, [odd, pairs]),
    "missing, map, batch": Chain(
        lambda: MapDataset.range(LENGTH).map(without_fifths).to_iter_dataset(), [as_float, pairs]
    ),
    "draws, indices, batch, draws": Chain(
        read, [random, lambda data: data.map_with_index(with_index), triples, random]
    ),
    "split, batch, split": Chain(
        read, [lambda data: data.flat_map(pair, 2), triples, lambda data: data.flat_map(list, 3), as_float]
    ),
    "window shuffle": Chain(read, [lambda data: WindowShuffleIterDataset(data, window_size=4, seed=1), as_float]),
    "mixture": Chain(mix, []),
    "straight mixture": Chain(straight_mix, []),
    "mixture, filter, batch": Chain(mix, [odd, pairs]),
    "straight mixture, map, batch": Chain(straight_mix, [as_float, pairs]),
    "interleave, map": Chain(lambda: InterleaveIterDataset([read(), read(1000)], cycle_length=2), [as_float]),
    "zip, map": Chain(lambda: ZipIterDataset([read(), read(1000)]), [lambda data: data.map(sum)]),
    "limit, map": Chain(read, [lambda data: LimitIterDataset(data, 20), as_float]),
    "limit": Chain(read, [lambda data: LimitIterDataset(data, 20)]),
    "map, repeat, batch": Chain(read, [as_float, lambda data: RepeatIterDataset(data, num_epochs=2), triples]),
    "stream": Chain(lambda: Counted(LENGTH), []),
    "stream, map, batch": Chain(lambda: Counted(LENGTH), [as_float, pairs]),
}

JOINS: dict[str, Callable[[Step], Any]] = {
    "mixture": lambda ahead: IterDataset.mix([ahead(read()), ahead(read(1000).filter(is_odd))]),
    "straight mixture": lambda ahead: IterDataset.mix([ahead(read().map(float)), ahead(read(1000).map(float))]),
    "one part of a mixture": lambda ahead: IterDataset.mix({"a": read(), "b": ahead(read(1000).map(float))}, [2, 1]),
    "mixture of batches": lambda ahead: IterDataset.mix([ahead(triples(read())), ahead(triples(read(1000)))]),
    "mixture of batches, the last ones short": lambda ahead: IterDataset.mix(
        [ahead(lists(uneven())), ahead(lists(uneven(1000)))]
    ),
    "zip of short batches": lambda ahead: ZipIterDataset([ahead(lists(uneven())), ahead(lists(uneven(1000)))]),
    "mixture with draws": lambda ahead: IterDataset.mix([ahead(random(read())), ahead(odd(read(1000)))]),
    "missing elements": lambda ahead: IterDataset.mix([ahead(read()), ahead(holes())]),
    "None from a stream's map": lambda ahead: IterDataset.mix([ahead(read().map(without_fifths)), ahead(read(1000))]),
    "None between two maps": lambda ahead: IterDataset.mix(
        [ahead(read().map(without_fifths).map(str)), ahead(read(1000).map(str))]
    ),
    "None before a batch": lambda ahead: IterDataset.mix(
        [ahead(triples(read().map(without_fifths))), ahead(triples(read(1000)))]
    ),
    "an error": lambda ahead: IterDataset.mix([ahead(read().map(FailsAt(27))), ahead(read(1000))]),
    "an error after a filter": lambda ahead: InterleaveIterDataset(
        [ahead(odd(read()).map(FailsAt(27))), ahead(read(1000))], cycle_length=2
    ),
    "an error before a filter": lambda ahead: ZipIterDataset([ahead(odd(read().map(FailsAt(3)))), ahead(read(1000))]),
    "mixture of a stream": lambda ahead: IterDataset.mix([ahead(Counted(LENGTH).map(float)), ahead(read(1000))]),
    "mixture of a mixture": lambda ahead: IterDataset.mix([ahead(straight_mix().map(float)), read().filter(is_odd)]),
    "interleave": lambda ahead: InterleaveIterDataset(
        [ahead(read()), ahead(odd(read(1000))), ahead(read())], cycle_length=2
    ),
    "zip": lambda ahead: ZipIterDataset([ahead(read()), ahead(odd(read(1000)))], strict=False),
    "repeat": lambda ahead: RepeatIterDataset(ahead(odd(read())), num_epochs=2),
    "limit": lambda ahead: LimitIterDataset(ahead(odd(read())), 13),
    "window shuffle": lambda ahead: WindowShuffleIterDataset(ahead(odd(read())), window_size=4, seed=1),
    "missing elements below two mixtures": lambda ahead: IterDataset.mix(
        [IterDataset.mix([ahead(holes()).map(abs_of), read(1000)]).map(abs_of), ahead(odd(read(2000)))]
    ),
    "interleave of lazy streams": lambda ahead: InterleaveIterDataset(
        MapDataset.range(6).map(lambda number: ahead(MapDataset.range(5 * number, 5 * number + 5).to_iter_dataset())),
        cycle_length=2,
    ),
    "endless files": lambda ahead: LimitIterDataset(
        InterleaveIterDataset(
            MapDataset.range(3).repeat().map(lambda file: ahead(MapDataset.range(file, file + 4).to_iter_dataset())),
            cycle_length=2,
        ),
        30,
    ),
    "repeat of cache": lambda ahead: RepeatIterDataset(CacheIterDataset(ahead(odd(read()))), num_epochs=2),
    "limit of repeat of interleave": lambda ahead: LimitIterDataset(
        RepeatIterDataset(InterleaveIterDataset([ahead(odd(read())), ahead(uneven())], cycle_length=2), 2), 70
    ),
    "mixture of an interleave and zips": lambda ahead: IterDataset.mix(
        [
            InterleaveIterDataset(
                [ahead(read()), ZipIterDataset([ahead(read()), ahead(odd(read()))], strict=False)], cycle_length=2
            ),
            ZipIterDataset([ahead(read(9)), read(8)]),
        ]
    ),
}
"""Combinations of chains, each with prefetching below."""

FOLLOWING: dict[str, Step] = {
    "nothing": lambda data: data,
    "map, batch": lambda data: data.map(abs_of).batch(3, batch_fn=list),
}

PREFETCHES: dict[str, Step] = {
    "no process": lambda data: data.mp_prefetch(0),
    "two processes": lambda data: data.mp_prefetch(2),
    "threads": lambda data: data.prefetch(ReadOptions(num_threads=2, prefetch_buffer_size=8)),
    "Grain's thread": lambda data: ThreadPrefetchIterDataset(data, prefetch_buffer_size=4),
}


def with_prefetch(chain: Chain, position: int | None, prefetch: Step) -> Any:
    """Returns the dataset with prefetching at a position; None for none at all."""
    dataset: Any = chain.begin()
    for number, step in enumerate(chain.steps):
        dataset = step(prefetch(dataset) if number == position else dataset)
    return prefetch(dataset) if position == len(chain.steps) else dataset


BELOW: dict[str, Step] = {
    "a process": lambda data: data.mp_prefetch(1),
    "threads": PREFETCHES["threads"],
    "Grain's thread": PREFETCHES["Grain's thread"],
}
"""Prefetching of a chain below others."""


def read_through(iterator: Any) -> tuple[list[Any], list[str]]:
    """Returns the states before each element and at the end or an error, and the elements as text."""
    states, elements = [iterator.get_state()], []
    with contextlib.suppress(ValueError):
        for element in iterator:
            elements.append(repr(element))
            states.append(iterator.get_state())
    states.append(iterator.get_state())
    return states, elements


@dataclasses.dataclass
class FailsAt:
    """Fails at one element."""

    element: int

    def __call__(self, element: float) -> float:
        if element == self.element:
            raise ValueError("a bad element")
        return float(element)


def check_same(iterator: Any, expected: tuple[list[Any], list[str]]) -> None:
    """Checks that an iterator has the same states and elements as another one, and resumes from its states."""
    states, elements = expected
    assert len(elements) > STEPS
    assert read_through(iterator) == expected
    for step in (STEPS, 1, len(elements)):
        iterator.set_state(json.loads(json.dumps(states[step])))
        assert iterator.get_state() == states[step]
        following = elements[step : step + STEPS]
        assert list(map(repr, itertools.islice(iterator, len(following)))) == following


@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("name", CHAINS)
def test_a_state_does_not_depend_on_prefetching(name: str, prefetch: str) -> None:
    """All states equal those of the chain without prefetching, and resume it: at every position, with any number."""
    chain = CHAINS[name]
    with iter(with_prefetch(chain, None, PREFETCHES[prefetch])) as iterator:
        expected = read_through(iterator)
    for position in range(len(chain.steps) + 1):
        with iter(with_prefetch(chain, position, PREFETCHES[prefetch])) as iterator:
            check_same(iterator, expected)


@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("join", JOINS)
def test_a_state_does_not_depend_on_prefetching_below(join: str, following: str) -> None:
    """Prefetching in each chain below a mixture, interleave, zip and the like changes no state and no element.

    What follows a join sees no difference between the ways to prefetch in a process, nor between those in threads.
    """
    with iter(FOLLOWING[following](JOINS[join](lambda data: data))) as iterator:
        expected = read_through(iterator)
    for name in BELOW if following == "nothing" else ("a process", "threads"):
        with iter(FOLLOWING[following](JOINS[join](BELOW[name]))) as iterator:
            check_same(iterator, expected)


@pytest.mark.parametrize("join", JOINS)
def test_a_state_does_not_depend_on_operations_between_workers_and_a_join(join: str) -> None:
    """The same for an operation that the consumer runs on what a process has computed."""
    with iter(JOINS[join](lambda data: data.map(abs_of))) as iterator:
        expected = read_through(iterator)
    with iter(JOINS[join](lambda data: data.mp_prefetch(1).map(abs_of))) as iterator:
        check_same(iterator, expected)


@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("join", JOINS)
def test_a_state_does_not_depend_on_workers_after_a_join(join: str, following: str) -> None:
    """Processes that run a join and all below it change no state, nor what comes before a None or an error."""
    dataset = FOLLOWING[following](JOINS[join](lambda data: data))
    with iter(dataset) as alone:
        expected = read_through(alone)
    with iter(dataset.mp_prefetch(2)) as spread:
        check_same(spread, expected)


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_states_after_a_stream_do_not_depend_on_the_sizes_of_draws(prefetch: str) -> None:
    """The state of a long stream is saved at the same positions, however much is drawn in advance."""
    numbers = MapDataset.range(3000).to_iter_dataset(ReadOptions(0, 0)).filter(is_odd)
    dataset = IterDataset.mix([numbers, numbers]).map(float)
    with iter(dataset) as alone, iter(PREFETCHES[prefetch](dataset)) as ahead:
        for number in range(2100):
            assert next(alone) == next(ahead)
            if number in {0, 999, 1022, 1023, 1024, 2047, 2048}:
                assert alone.get_state() == ahead.get_state()


def process(element: Any) -> tuple[int, Any]:
    return os.getpid(), element


@pytest.mark.parametrize("begin", [read, mix, straight_mix])
@pytest.mark.parametrize("following", [None, ReadOptions(num_threads=2, prefetch_buffer_size=8)])
def test_operations_after_mp_prefetch_run_here(begin: Callable[[], Any], following: ReadOptions | None) -> None:
    """Those before it run in a worker, and those after it in this process, also the ones that batch or regroup."""
    dataset = begin().map(process).mp_prefetch(1).map(process).filter(bool).batch(4, batch_fn=process)
    for here, elements in dataset if following is None else dataset.prefetch(following):
        pids = {(last, first) for last, (first, _) in elements}
        assert here == os.getpid()
        assert {last for last, _ in pids} == {os.getpid()}
        assert os.getpid() not in {first for _, first in pids}


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_operation_of_the_whole_chain(position: int, workers: int) -> None:
    """An operation after mp_prefetch has its number in the chain; the elements before it come first, and it recurs."""
    chain = Chain(read, [as_float, lambda data: data.map(FailsAt(7)), pairs])
    expected = list(itertools.takewhile(lambda number: number != 7, read()))
    with iter(with_prefetch(chain, position, lambda data: data.mp_prefetch(workers))) as iterator:
        found = [next(iterator).tolist() for _ in range(len(expected) // 2)]
        assert list(itertools.chain.from_iterable(found)) == expected[: len(found) * 2]
        for _ in range(2):
            with pytest.raises(ValueError, match="a bad element") as failure:
                next(iterator)
            assert any(
                "operation 1, Map(FailsAt" in note and "record key 7" in note for note in failure.value.__notes__
            )


@pytest.mark.parametrize("name", ["concatenate", "interleave"])
def test_a_state_of_streams_in_turn_compares_those_that_are_open(name: str) -> None:
    """A change of the dataset that is being read is an error, and one of a dataset whose turn has not come is not."""

    def joined(first_seed: int, second_seed: int) -> IterDataset[int]:
        parts = [MapDataset.range(5).shuffle(seed=seed).to_iter_dataset() for seed in (first_seed, second_seed)]
        return IterDataset.concatenate(*parts) if name == "concatenate" else IterDataset.interleave(parts, 1)

    with iter(joined(0, 0)) as iterator:
        next(iterator)
        state = iterator.get_state()
    with iter(joined(0, 1)) as iterator:
        iterator.set_state(state)
        assert next(iterator) == list(joined(0, 1))[1]
    with iter(joined(1, 0)) as iterator, pytest.raises(CheckpointError):
        iterator.set_state(state)


def test_an_interrupt_in_a_local_operation_loses_nothing() -> None:
    """An exception of a signal handler leaves the iterator before the element, wherever it comes."""
    with iter(read().map(float).mp_prefetch(1).map(FailsAt(-1)).batch(4)) as alone:
        expected = [batch.tolist() for batch in alone]
    for calls in (1, 5, 30):
        interrupting = Interrupting(calls)
        interrupts = 0
        with iter(read().map(float).mp_prefetch(1).map(interrupting).batch(4)) as iterator:
            found: list[Any] = []
            while len(found) < len(expected):
                try:
                    found.append(next(iterator).tolist())
                except KeyboardInterrupt:
                    interrupts += 1
                    assert Interrupting.calls == calls
            assert (found, interrupts) == (expected, 1)
            assert Interrupting.calls > calls


class Interrupting:
    """A function that is interrupted by a signal once. A chain runs on copies of it, so the class counts."""

    calls: ClassVar[int] = 0

    def __init__(self, at: int) -> None:
        self.at = at
        Interrupting.calls = 0

    def __call__(self, element: float) -> float:
        Interrupting.calls += 1
        if Interrupting.calls == self.at:
            signal.raise_signal(signal.SIGINT)
        return element


def test_states_after_a_resume_are_those_of_an_undisturbed_stream() -> None:
    """Also once an output was made from the end of the order: all later positions say so, wherever it was resumed."""
    batches = MapDataset.range(6).batch(4, batch_fn=list).to_iter_dataset(ReadOptions(0, 0))
    dataset = batches.apply(WindowShuffle(5, seed=3)).apply(Map(np.array)).apply(Rebatch(1))
    iterator = iter(dataset)
    states = [iterator.get_state(), *[iterator.get_state() for _ in iterator]]
    assert len(states) == 7

    for number, state in enumerate(states):
        resumed = iter(dataset)
        resumed.set_state(state)
        assert [resumed.get_state(), *[resumed.get_state() for _ in resumed]] == states[number:]
