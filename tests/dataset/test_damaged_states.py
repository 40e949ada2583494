"""States of every kind of pipeline that are damaged at any leaf, or are of another one, are errors."""

import copy
import functools
import itertools
import json
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import millstream
from millstream import CheckpointError, DatasetIterator, IterDataset, MapDataset, ReadOptions, ShardOptions
from millstream.experimental import (
    CacheIterDataset,
    ElasticIterator,
    InterleaveIterDataset,
    LimitIterDataset,
    RepeatIterDataset,
    WindowShuffleIterDataset,
    ZipIterDataset,
)
from millstream.transforms import Filter, FirstFitPack, Map
from support.user_streams import Counted

NO_THREADS = ReadOptions(num_threads=0, prefetch_buffer_size=0)
BEFORE = 5
"""The number of elements before the state that is damaged."""
NUMBERS = (None, True, -1, 0, 1, 1 << 70, 0.5, float("nan"))
JUNK: tuple[Any, ...] = (*NUMBERS, "", "x", b"x", [], [[]], {}, {"x": 1}, object())


def is_odd(number: int) -> bool:
    return number % 2 > 0


class OwnStates(DatasetIterator[Any]):
    """A user's iterator, whose states have no envelope, and whose `set_state` checks nothing."""

    def __next__(self) -> Any:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return {"deep": [{"number": 1}], "parent": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])


class Own(IterDataset[Any]):
    def __iter__(self) -> Any:
        return OwnStates(iter(self._parent))


def numbers(start: int = 0) -> IterDataset[Any]:
    return MapDataset.range(start, start + 100).shuffle(seed=1).to_iter_dataset(NO_THREADS)


def mixed() -> IterDataset[Any]:
    return IterDataset.mix([numbers(), numbers(1000).filter(is_odd)], weights=[1, 2])


def loader(*operations: Any) -> Any:
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 1, "read_options": NO_THREADS}
    return iter(millstream.load(range(100), transformations=list(operations), **options))


PIPELINES: dict[str, Callable[[], Any]] = {
    "loader": loader,
    "loader with a filter": lambda: loader(Filter(is_odd)),
    "loader with a packer": lambda: loader(
        Map(lambda number: {"t": np.full(1 + number % 3, number)}),
        FirstFitPack({"t": 4}, num_packing_bins=2),
    ),
    "chain": lambda: iter(numbers()),
    "chain with a filter": lambda: iter(numbers().filter(is_odd).batch(2)),
    "chain with workers": lambda: iter(numbers().mp_prefetch(millstream.MultiprocessingOptions(num_workers=1))),
    "mixture": lambda: iter(mixed()),
    "mixture by name": lambda: iter(IterDataset.mix({"a": numbers(), "b": numbers(1000)})),
    "chain after a mixture": lambda: iter(mixed().filter(is_odd).batch(2)),
    "mixture of mixtures": lambda: iter(IterDataset.mix([mixed(), mixed().map(float)])),
    "zip": lambda: iter(ZipIterDataset([numbers(), mixed()])),
    "limit": lambda: iter(LimitIterDataset(numbers(), 50)),
    "repeat": lambda: iter(RepeatIterDataset(LimitIterDataset(numbers(), 4))),
    "cache": lambda: iter(CacheIterDataset(numbers())),
    "interleave": lambda: iter(InterleaveIterDataset([numbers(), numbers(1000), numbers(2000)], cycle_length=2)),
    "window shuffle": lambda: iter(WindowShuffleIterDataset(mixed(), window_size=4, seed=1)),
    "iterable": lambda: iter(IterDataset.source(list(range(100))).map(abs)),
    "counted stream": lambda: iter(Counted(100).map(float)),
    "own iterator below a chain": lambda: iter(Own(numbers()).map(float)),
    "own iterators below a join": lambda: iter(ZipIterDataset([Own(numbers()), Counted(100)])),
    "elastic": lambda: ElasticIterator(
        MapDataset.range(100), global_batch_size=2, shard_options=ShardOptions(0, 1), read_options=NO_THREADS
    ),
    "device_put": lambda: millstream.device_put(loader()),
    "device_put of a chain": lambda: millstream.device_put(iter(numbers().batch(2))),
}


def damaged(state: Any) -> Iterator[Any]:
    """Yields junk, and copies of a state in which one value, at any depth, is replaced, removed or added."""
    yield from JUNK
    for path in paths(state):
        for new in JUNK[:-1]:
            if repr(new) != repr(at(state, path)):
                yield with_change(state, path, functools.partial(replace, new))
        yield with_change(state, path, operator.delitem)
        yield with_change(state, path, add)


def replace(new: Any, holder: Any, name: Any) -> None:
    holder[name] = new


def add(holder: Any, _: Any) -> None:
    holder.update(x=1) if is_dict(holder) else holder.append(1)


def is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all values below a value: keys of dicts and positions in lists."""
    children = value.items() if is_dict(value) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield (*above, name)
        yield from paths(child, (*above, name))


def at(state: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(operator.getitem, path, state)


def with_change(state: Any, path: tuple[Any, ...], change: Callable[[Any, Any], Any]) -> Any:
    """Returns a copy of a state, after a change of the container that holds the value at a path."""
    copied = copy.deepcopy(state)
    change(at(copied, path[:-1]), path[-1])
    return copied


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_state_that_is_damaged_anywhere_is_refused(kind: str) -> None:
    """Each damage is a CheckpointError, the state stays as it was, and so do the elements that follow."""
    with PIPELINES[kind]() as iterator, PIPELINES[kind]() as uninterrupted:
        for _ in range(BEFORE):
            next(iterator), next(uninterrupted)
        here = iterator.get_state()
        written = json.loads(here) if isinstance(here, bytes) else json.loads(json.dumps(here))
        num_refused = 0
        for wrong in damaged(written):
            for state in encoded(wrong) if isinstance(here, bytes) else [wrong]:
                with pytest.raises(CheckpointError):
                    iterator.set_state(state)
                num_refused += 1
        assert num_refused > 100
        assert iterator.get_state() == here
        following, expected = (list(itertools.islice(each, 4)) for each in (iterator, uninterrupted))
        assert repr(following) == repr(expected)
        iterator.set_state(written if isinstance(here, dict) else here)
        assert iterator.get_state() == here


SAME_STREAMS = [{"loader", "device_put"}, {"chain", "chain with workers"}]
"""Kinds whose streams are the same, so that each resumes from the states of the other."""


@pytest.fixture(scope="module")
def first_states() -> dict[str, Any]:
    """The state of each kind after its first element."""
    states = {}
    for kind, begin in PIPELINES.items():
        with begin() as iterator:
            next(iterator)
            states[kind] = iterator.get_state()
    return states


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_state_of_every_other_kind_is_refused(kind: str, first_states: dict[str, Any]) -> None:
    """A whole state of another pipeline is a CheckpointError, and the iterator stays where it was."""
    with PIPELINES[kind]() as iterator:
        for _ in range(BEFORE):
            next(iterator)
        here = iterator.get_state()
        for other in PIPELINES.keys() - {kind}:
            if {kind, other} not in SAME_STREAMS:
                with pytest.raises(CheckpointError):
                    iterator.set_state(first_states[other])
                assert iterator.get_state() == here, other


def encoded(state: Any) -> Iterator[Any]:
    """Yields a state of a loader as bytes if JSON can hold it, and the value itself if it is not a dict."""
    if not isinstance(state, dict):
        yield state
    try:
        yield json.dumps(state).encode()
    except TypeError:
        assert not isinstance(state, str)
