"""States of chains with mp_prefetch and prefetch at every position: each fits exactly, or is refused."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from millstream import CheckpointError, IterDataset, MapDataset, MultiprocessingOptions, ReadOptions
from millstream.experimental import (
    InterleaveIterDataset,
    LimitIterDataset,
    RepeatIterDataset,
    ThreadPrefetchIterDataset,
    WindowShuffleIterDataset,
    ZipIterDataset,
)

Step = Callable[[Any], Any]

BEFORE = 5
"""The number of elements before a state."""


class Chain(NamedTuple):
    """A chain to which prefetching is added.

    Attributes:
        begin: returns the dataset before the operations.
        steps: the operations. Position 0 is before the first one, position None is no prefetching at all.
        groups: the positions of mp_prefetch whose states fit each other. All positions of threads do if operations
            follow.
    """

    begin: Callable[[], Any]
    steps: list[Step]
    groups: list[set[int | None]]


def read(start: int = 0) -> IterDataset[Any]:
    """Returns 200 shuffled numbers."""
    numbers = MapDataset.range(start, start + 200).shuffle(seed=1)
    return numbers.to_iter_dataset(ReadOptions(num_threads=0, prefetch_buffer_size=0))


def is_odd(number: int) -> bool:
    """True for half of the numbers."""
    return number % 2 > 0


def as_float(dataset: Any) -> Any:
    """Adds a map."""
    return dataset.map(float)


def odd(dataset: Any) -> Any:
    """Adds a filter."""
    return dataset.filter(is_odd)


def pairs(dataset: Any) -> Any:
    """Adds batches."""
    return dataset.batch(2)


def mix() -> IterDataset[Any]:
    """Returns a mixture, of which one part is filtered."""
    return IterDataset.mix([read(), read(1000).filter(is_odd)])


CHAINS = {
    "map, map": Chain(read, [as_float, as_float], [{None, 2}, {0}, {1}]),
    "filter, batch": Chain(read, [odd, pairs], [{None, 2}, {0}, {1}]),
    "window shuffle": Chain(read, [lambda data: WindowShuffleIterDataset(data, window_size=4, seed=1)], [{None, 1}]),
    "mixture": Chain(mix, [], [{None}, {0}]),
    "mixture, filter, batch": Chain(mix, [odd, pairs], [{None, 2}, {0}, {1}]),
    "interleave, map": Chain(
        lambda: InterleaveIterDataset([read(), read(1000)], cycle_length=2), [as_float], [{None, 1}, {0}]
    ),
    "zip, map": Chain(lambda: ZipIterDataset([read(), read(1000)]), [lambda data: data.map(sum)], [{None, 1}, {0}]),
    "limit, map": Chain(read, [lambda data: LimitIterDataset(data, 90), as_float], [{None, 0, 2}, {1}]),
    "repeat": Chain(read, [RepeatIterDataset], [{None, 0}, {1}]),
}


def by_process(dataset: Any) -> Any:
    """Adds a worker process."""
    return dataset.mp_prefetch(MultiprocessingOptions(num_workers=1))


def by_threads(dataset: Any) -> Any:
    """Adds threads that prefetch."""
    return ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=4)


def with_prefetch(chain: Chain, position: int | None, prefetch: Step) -> Any:
    """Returns the dataset with prefetching at a position."""
    dataset: Any = chain.begin()
    steps: list[Step] = [*chain.steps, lambda data: data]
    for number, step in enumerate(steps):
        dataset = step(prefetch(dataset) if number == position else dataset)
    return dataset


@pytest.mark.parametrize("prefetch", [by_threads, by_process])
@pytest.mark.parametrize("name", CHAINS)
def test_a_state_fits_if_the_chain_is_divided_alike(name: str, prefetch: Step) -> None:
    """A state resumes exactly, or is refused by an iterator that stays where it was, as the table says."""
    chain = CHAINS[name]
    if prefetch is by_threads and name not in {"mixture", "repeat"}:
        chain = chain._replace(groups=[set().union(*chain.groups)])
    positions = sorted(set().union(*chain.groups), key=lambda position: -1 if position is None else position)
    states, following = {}, []
    for position in positions:
        with iter(with_prefetch(chain, position, prefetch)) as iterator:
            list(itertools.islice(iterator, BEFORE))
            states[position] = iterator.get_state()
            following.append(str(list(itertools.islice(iterator, 4))))
    assert following == following[:1] * len(positions)
    for here in positions:
        with iter(with_prefetch(chain, here, prefetch)) as iterator:
            beginning = iterator.get_state()
            for saved in positions:
                if any({saved, here} <= group for group in chain.groups):
                    iterator.set_state(states[saved])
                    assert iterator.get_state() == states[here]
                    assert str(list(itertools.islice(iterator, 4))) == following[0]
                    iterator.set_state(beginning)
                else:
                    with pytest.raises(CheckpointError):
                        iterator.set_state(states[saved])
                    assert iterator.get_state() == beginning


def test_the_error_names_prefetching() -> None:
    """A state of a chain that is divided elsewhere says so, in each direction."""
    for saved, here in itertools.permutations([mix(), by_threads(mix()), read(), LimitIterDataset(read(), 9)], 2):
        with iter(saved) as one, iter(here) as other, pytest.raises(CheckpointError, match="mp_prefetch and prefetch"):
            other.set_state(one.get_state())
