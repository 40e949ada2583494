"""Methods of streams that join, cut and repeat them, and shards: elements, states and resumes with workers.

Each method alone, with threads and without, is a part of the random streams of `test_iter_dataset.py`.
"""

import collections
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import Batch, CheckpointError, DatasetIterator, IterDataset, MapDataset, ReadOptions, load

INLINE, THREADS = ReadOptions(0, 0), ReadOptions(2, 8)
ONE, TWO = list(range(1, 8)), [str(number) for number in range(10, 15)]


def negative(element: Any) -> Any:
    return [-1, element]


def parsed(element: Any) -> int:
    return 10 // (int(element) % 3)


def rows(element: int) -> Any:
    return np.full(element % 4 + 1, element)


METHODS: dict[str, tuple[Callable[[Any, Any], IterDataset[Any]], Sequence[Any]]] = {
    "take": (lambda one, _: one.take(3), ONE[:3]),
    "take all": (lambda one, _: one.take(30), ONE),
    "skip": (lambda one, _: one.skip(3), ONE[3:]),
    "skip none": (lambda one, _: one.skip(0), ONE),
    "skip all": (lambda one, _: one.skip(30), []),
    "repeat": (lambda one, _: one.repeat(2), ONE * 2),
    "repeat forever": (lambda one, _: one.repeat().take(17), (ONE * 3)[:17]),
    "cache": (lambda one, _: one.map(negative).cache().repeat(2), [negative(element) for element in ONE * 2]),
    "concatenate": (lambda one, two: one.concatenate(two, one), ONE + TWO + ONE),
    "zip": (lambda one, two: one.zip(two, strict=False), list(zip(ONE, TWO, strict=False))),
    "interleave": (
        lambda one, two: IterDataset.interleave([one, two, two], cycle_length=2),
        [*itertools.chain(*zip(ONE, TWO, strict=False)), 6, 7, *TWO],
    ),
    "rebatch": (
        lambda one, _: one.map(rows).rebatch(3).map(np.ndarray.tolist),
        [[1, 1, 2], [2, 2, 3], [3, 3, 3], [4, 5, 5], [6, 6, 6], [7, 7, 7], [7]],
    ),
    "window_shuffle": (lambda one, _: one.window_shuffle(4, seed=0), [3, 1, 4, 2, 5, 7, 6]),
    "options": (
        lambda one, _: one.map(parsed).options(on_error="skip", max_errors=3),
        [parsed(element) for element in ONE if element % 3],
    ),
}


def streams(reading: ReadOptions) -> tuple[IterDataset[Any], IterDataset[Any]]:
    """Returns one over numbers, with a filter, and one over texts."""
    one = MapDataset.range(1, 15).map(lambda number: number if number < 8 else None)
    return one.to_iter_dataset(reading), MapDataset.source(TWO).to_iter_dataset(reading)


def check(dataset: IterDataset[Any], other: IterDataset[Any], expected: Sequence[Any], every: int) -> None:
    """Reads a dataset, and resumes another one at some of its states."""
    with iter(dataset) as iterator, iter(other) as resumed:
        states = [iterator.get_state()]
        for element in expected:
            assert next(iterator) == element
            states.append(iterator.get_state())
        with pytest.raises(StopIteration):
            next(iterator)
        states.append(iterator.get_state())
        for step in [*range(0, len(states), every), len(states) - 1]:
            resumed.set_state(json.loads(json.dumps(states[step])))
            assert list(itertools.islice(resumed, len(expected) + 1)) == list(expected[step:])


def test_all_methods_run_in_workers() -> None:
    """One after the other, below and above operations; their states are those without workers."""
    one, two = streams(INLINE)
    parts = [build(one, two) for build, _ in METHODS.values()]
    expected = [str(element) for _, elements in METHODS.values() for element in elements]
    whole = parts[0].concatenate(*parts[1:]).map(str)
    check(whole.mp_prefetch(1), whole, expected, every=20)


def test_a_state_of_other_numbers_is_refused() -> None:
    """A stream without its first n elements is another one for another n; a shorter one does not have the position."""
    one, _ = streams(INLINE)
    state = iter(one.skip(2)).get_state()
    with pytest.raises(CheckpointError, match=r"write \.skip\(2\)"):
        iter(one.skip(3)).set_state(state)
    with iter(one.take(5)) as iterator:
        list(iterator)
        with pytest.raises(CheckpointError, match=r"after 5 elements, and here \.take\(4\) ends before"):
            iter(one.take(4)).set_state(iterator.get_state())


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda one: one.take(0), ValueError, "count must be at least 1"),
        (lambda one: one.skip(-1), ValueError, "count must be at least 0"),
        (lambda one: one.repeat(0), ValueError, "num_epochs must be at least 1"),
        (
            lambda one: one.concatenate([1]),
            TypeError,
            r"datasets\[1\] must be an IterDataset or a MapDataset, got list",
        ),
        (lambda one: one.zip(3), TypeError, r"datasets\[1\] must be an IterDataset"),
        (lambda one: one.prefetch(4), TypeError, r"got 4. Write .mp_prefetch\(4\) for worker processes, or .prefetch"),
        (lambda one: one.options(on_eror="skip"), TypeError, "on_eror"),
        (lambda one: one.options(on_error="ignore"), ValueError, "on_error must be 'raise' or 'skip'"),
        (lambda one: list(one.zip(one.skip(1))), ValueError, "must end together"),
        (lambda _: MapDataset.range(3).zip(MapDataset.range(4)), ValueError, "equal lengths, got .3, 4."),
        (lambda _: MapDataset.range(3).shard(2, 2), ValueError, "index must be at most 1"),
        (lambda _: MapDataset.range(3).shard(0, 0), ValueError, "count must be at least 1"),
        (lambda _: MapDataset.range(3).window_shuffle(4), ValueError, r"window_shuffle\(..., seed=0\)"),
    ],
)
def test_wrong_arguments_are_refused(build: Callable[[Any], object], error: type[Exception], text: str) -> None:
    """When the dataset is built, if possible; the error names the argument, the rule and the value."""
    with pytest.raises(error, match=text):
        build(streams(INLINE)[0])


def each_epoch(dataset: MapDataset[Any], num_epochs: int) -> Iterator[list[Any]]:
    for epoch in range(num_epochs):
        yield list(dataset.__getitems__(range(epoch * len(dataset), (epoch + 1) * len(dataset))))


@settings(max_examples=40)
@given(length=st.integers(1, 50), count=st.integers(1, 9), seed=st.integers(0, 3))
def test_shards_together_are_each_epoch(length: int, count: int, seed: int) -> None:
    """Each element is in one shard, of neighbours one is in each, and the choice differs by group, epoch and seed."""
    dataset = MapDataset.range(length).seed(seed)
    shards = [list(each_epoch(dataset.shard(index, count), 2)) for index in range(count)]
    for epoch in range(2):
        read = [shard[epoch] for shard in shards if shard[epoch]]
        assert sorted(itertools.chain.from_iterable(read)) == list(range(length))
        assert all(element // count == group for shard in read for group, element in enumerate(shard))


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_shards_of_a_mixture_have_its_proportions(count: int) -> None:
    """Whatever period the mixture has, each host gets its share of each dataset, in any few batches and epoch."""
    parts = {name: MapDataset.source([name] * 600).shuffle(seed=0) for name in "ab"}
    for weights in ({"a": 1, "b": 1}, {"a": 3, "b": 1}):
        mixed = MapDataset.mix(parts, weights)
        mixed = mixed[: len(mixed) // count * count]
        for index in range(count):
            (read,) = each_epoch(mixed.shard(index, count), 1)
            share = collections.Counter(read)["a"] / len(read)
            assert abs(share - weights["a"] / sum(weights.values())) < 0.15
    assert len(MapDataset.range(10).repeat().shard(1, 3)) == len(MapDataset.range(10).repeat())


def test_shards_of_unlike_length_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Hosts that end at different steps wait for each other: the numbers and the remedy are logged at construction."""
    with caplog.at_level("WARNING", "millstream"):
        MapDataset.range(10).shard(0, 5)
        assert not caplog.records
        MapDataset.range(10).shard(0, 4)
        MapDataset.range(3).shard(0, 4)
    assert "2 of 4 shards of a dataset of 10 elements have one more element" in caplog.text
    assert "1 of 4 shards of a dataset of 3 elements are empty" in caplog.text


def test_an_endless_dataset_that_is_shuffled_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """`.repeat().shuffle()` draws with replacement, which is logged at construction; the other order is right."""
    with caplog.at_level("WARNING", "millstream"):
        MapDataset.range(10).shuffle(seed=0).repeat()
        MapDataset.range(10).repeat(2).shuffle(seed=0)
        assert not caplog.records
        MapDataset.range(10).repeat().shuffle(seed=0)
    assert "draws its elements with replacement" in caplog.text
    assert "Write .shuffle(...) before .repeat()" in caplog.text


def test_every_way_to_a_batch_pads_alike() -> None:
    """`pad_remainder` of `load`, of both kinds of chains and of `Batch` make the same batches, and has one rule."""
    data = MapDataset.range(5)
    ways = [
        list(load(range(5), num_epochs=1, batch_size=2, pad_remainder=True)),
        list(load(range(5), num_epochs=1, transformations=[Batch(2, pad_remainder=True)])),
        list(data.batch(2, pad_remainder=True)),
        list(data.to_iter_dataset().batch(2, pad_remainder=True)),
    ]
    padded = [[(batch.tolist(), mask.tolist()) for batch, mask in way] for way in ways]

    assert padded == [[([0, 1], [True, True]), ([2, 3], [True, True]), ([4, 0], [True, False])]] * 4
    with pytest.raises(ValueError, match="pad_remainder needs a batch_size"):
        load(range(5), pad_remainder=True)
    with pytest.raises(ValueError, match="Cannot combine pad_remainder=True"):
        data.batch(2, pad_remainder=True, drop_remainder=True)


class Doubled(IterDataset[Any]):
    """A stream of one's own, whose iterator has the shortest `set_state`."""

    def __iter__(self) -> DatasetIterator[Any]:
        return DoubledIterator(iter(self._parent))


class DoubledIterator(DatasetIterator[Any]):
    def __next__(self) -> Any:
        return 2 * next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])


def test_strict_and_allow_are_taken_by_the_iterator_of_any_chain() -> None:
    """`set_state(state, allow=…, strict=…)` is one signature: of maps, filters, joins, and what follows one's own."""
    numbers = MapDataset.range(9).to_iter_dataset()
    chains = [
        numbers.map(abs),
        numbers.filter(bool).batch(2),
        numbers.zip(numbers),
        IterDataset.mix([numbers, numbers]),
        IterDataset.interleave([numbers, numbers], cycle_length=2),
        numbers.take(3),
        numbers.repeat(2),
        numbers.cache(),
        IterDataset.source([1, 2, 3]),
        Doubled(numbers).map(abs),
        Doubled(numbers).take(4),
    ]
    for chain in chains:
        with iter(chain) as first, iter(chain) as second:
            next(first)
            second.set_state(first.get_state(), allow={"operations"}, strict=True)
            assert repr(next(second)) == repr(next(first))


OWNED: dict[str, Callable[[Any], IterDataset[Any]]] = {
    "skip": lambda one: one.skip(3),
    "take": lambda one: one.take(4).skip(2),
    "cache": lambda one: one.cache().repeat(2),
    "mix": lambda one: IterDataset.mix([one, one]),
    "mix, and drop those that end": lambda one: IterDataset.mix([one, one], stop="drop_exhausted"),
    "interleave": lambda one: IterDataset.interleave([one, one], cycle_length=2),
}


@pytest.mark.parametrize("name", OWNED)
def test_what_a_join_yields_is_the_trainers(name: str) -> None:
    """An array that a source keeps does not change with an element that a join yields."""
    kept = [np.zeros(1 << 18) for _ in range(6)]
    for element in OWNED[name](MapDataset.source(kept).to_iter_dataset(INLINE)):
        np.add(element, 1, out=element)
    assert not any(array.any() for array in kept)


class Closed(IterDataset[int]):
    """Numbers whose iterators write down that they are closed, or fail instead."""

    def __init__(self, closed: list[str], name: str, fails: bool = False) -> None:
        super().__init__()
        self.closed, self.name, self.fails = closed, name, fails

    def __iter__(self) -> DatasetIterator[int]:
        return ClosedIterator(self)


class ClosedIterator(DatasetIterator[int]):
    """Yields numbers from 0 without end."""

    def __init__(self, dataset: Closed) -> None:
        super().__init__()
        self.dataset, self.number = dataset, -1

    def __next__(self) -> int:
        assert self.dataset.name not in self.dataset.closed
        self.number += 1
        return self.number

    def get_state(self) -> Any:
        return self.number

    def set_state(self, state: Any) -> None:
        self.number = state

    def close(self) -> None:
        if self.dataset.fails:
            raise OSError("cannot be closed")
        self.dataset.closed.append(self.dataset.name)


JOINS: dict[str, Callable[[Any, Any], IterDataset[Any]]] = {
    "mix": lambda one, two: IterDataset.mix([one, two]),
    "mix, and drop those that end": lambda one, two: IterDataset.mix([one, two], stop="drop_exhausted"),
    "zip": lambda one, two: one.zip(two),
    "interleave": lambda one, two: IterDataset.interleave([one, two], cycle_length=2),
    "interleave of a zip": lambda one, two: IterDataset.interleave([one.zip(one).take(8), two], cycle_length=2),
}


@pytest.mark.parametrize("name", JOINS)
@pytest.mark.parametrize("is_followed", [False, True])
def test_all_streams_of_a_join_are_closed_whatever_one_raises(name: str, is_followed: bool) -> None:
    """The error of a user's `close` comes once all others are closed: it leaves no thread and no worker."""
    closed: list[str] = []
    dataset = JOINS[name](Closed(closed, "one", fails=True), Closed(closed, "two"))
    iterator = iter(dataset.map(repr) if is_followed else dataset)
    next(iterator)
    with pytest.raises(OSError, match="cannot be closed"):
        iterator.close()
    assert closed == ["two"]


class CannotBeOpened(Closed):
    """The same, without an iterator."""

    def __iter__(self) -> DatasetIterator[int]:
        raise OSError("cannot be opened")


@pytest.mark.parametrize("name", JOINS)
def test_what_a_join_has_opened_is_closed_if_another_stream_cannot_be_opened(name: str) -> None:
    """The error comes at once, or at the turn of the stream, and leaves no thread and no worker."""
    closed: list[str] = []
    dataset = JOINS[name](Closed(closed, "one"), CannotBeOpened(closed, "two"))

    def draw() -> None:
        with iter(dataset) as iterator:
            list(itertools.islice(iterator, 3))

    with pytest.raises(OSError, match="cannot be opened"):
        draw()
    assert set(closed) == {"one"}


class OpenedSlowly(Closed):
    """The same, of which another thread closes the join while an iterator of it is made."""

    join: Any

    def __iter__(self) -> DatasetIterator[int]:
        closing = threading.Thread(target=self.join.close)
        closing.start()
        closing.join()
        return ClosedIterator(self)


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_stream_that_is_opened_while_another_thread_closes_the_join_is_closed(is_followed: bool) -> None:
    """Its `next` raises ValueError, as of any closed iterator, and draws nothing from the stream."""
    closed: list[str] = []
    late = OpenedSlowly(closed, "late")
    dataset = MapDataset.range(2).to_iter_dataset(INLINE).concatenate(late)
    late.join = iterator = iter(dataset.map(int) if is_followed else dataset)
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(ValueError, match="closed"):
        next(iterator)
    assert closed == ["late"]


def test_an_iterator_without_a_length_says_why() -> None:
    """The reason is in the terms of a chain: it repeats without end, or elements of a dataset are missing."""
    numbers = MapDataset.range(10).repeat()
    for dataset, reason in (
        (numbers, r"it is endless\. Pass num_epochs to the sampler, or to \.repeat\(\)"),
        (numbers[:20].filter(bool), "the number of outputs depends on missing elements"),
    ):
        with pytest.raises(TypeError, match=reason):
            len(iter(dataset.to_iter_dataset().map(abs)))
