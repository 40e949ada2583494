"""Costs of chains below others, counted: the size and time of a state, of opening a stream, and of one element."""

import itertools
import json
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from millstream import IterDataset, MapDataset, MapTransform, ReadOptions, load
from millstream.dataset.chain_rendering import sketch_of, text_of
from millstream.dataset.map_dataset import dataset_of
from millstream.dataset.node_source import Blocks, node_of
from millstream.dataset.nodes.index_nodes import Shuffle
from millstream.dataset.nodes.node import Positions
from millstream.dataset.opening import first_element_of
from millstream.experimental import InterleaveIterDataset, ZipMapDataset

NUM_STREAMS = 64


def is_kept(number: int) -> bool:
    return number % 3 > 0


def chains(
    *, filtered: bool = True, seed: int = 0, length: int = 40, num_streams: int = NUM_STREAMS
) -> list[IterDataset[Any]]:
    """Returns chains over numbers that say which one they are of."""
    numbers = [
        MapDataset.range(1000 * stream, 1000 * stream + length).seed(seed).shuffle().to_iter_dataset()
        for stream in range(num_streams)
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
        state["states"].append(0)
        (state["stream"] or state).clear()
        next(iterator)
        assert calls_of(iterator.get_state) < 4 * NUM_STREAMS
        state = iterator.get_state()
        following = [repr(next(iterator)) for _ in range(3)]
        iterator.set_state(state)
        assert iterator.get_state() == state
        assert [repr(next(iterator)) for _ in range(3)] == following


def test_the_state_of_a_mixture_of_64_takes_a_call_for_each_chain_that_moved() -> None:
    """If no chain filters, its position follows from its number of elements. All of them have moved here."""
    with iter(IterDataset.mix(chains(filtered=False)).batch(NUM_STREAMS)) as iterator:
        for _ in range(2):
            next(iterator)
            num_calls = calls_of(iterator.get_state)
        assert num_calls < NUM_STREAMS + 100


def straight() -> IterDataset[Any]:
    return MapDataset.range(1000).shuffle(seed=0).map(abs).repeat().to_iter_dataset().map(float).batch(64)


def at_positions() -> MapDataset[Any]:
    return MapDataset.range(1000).shuffle(seed=0).map(abs).batch(64)


@pytest.mark.parametrize(
    ("build", "limit"), [(straight, 120), (at_positions, 140), (lambda: IterDataset.mix([straight()] * 2), 400)]
)
def test_a_further_iterator_of_a_chain_compiles_nothing(build: Callable[[], Any], limit: int) -> None:
    """The plan, the stream and the description of a chain are made once, so that an evaluation may iter it often."""
    dataset = build()
    first = [batch.tolist() for batch in itertools.islice(dataset, 3)]
    assert calls_of(lambda: iter(dataset)) <= limit
    assert [batch.tolist() for batch in itertools.islice(dataset, 3)] == first


def nested(levels: int) -> IterDataset[int]:
    """Returns mixtures of mixtures, one in the other."""
    dataset = MapDataset.range(100).to_iter_dataset(ReadOptions(0, 0))
    for _ in range(levels):
        dataset = IterDataset.mix([dataset, MapDataset.range(100).to_iter_dataset(ReadOptions(0, 0))])
    return dataset


@pytest.mark.parametrize("build", [nested, lambda count: IterDataset.mix(chains(num_streams=count))])
def test_a_state_of_many_streams_costs_their_number(build: Callable[[int], IterDataset[int]]) -> None:
    """Reading the first elements, saving and restoring, of mixtures in mixtures and of many in one."""

    def costs(count: int) -> list[int]:
        dataset = build(count)
        with iter(dataset) as one, iter(dataset) as two:
            states: list[Any] = []
            following: list[list[int]] = []
            steps: list[Callable[[], object]] = [
                lambda: list(itertools.islice(one, 3)),
                lambda: states.append(one.get_state()),
                lambda: two.set_state(json.loads(json.dumps(states[0]))),
                lambda: following.append(list(itertools.islice(two, 3))),
            ]
            counts = [calls_of(step) for step in steps]
            assert following[0] == list(itertools.islice(one, 3))
        return counts

    costs(2)
    assert all(many < 6 * few for few, many in zip(costs(20), costs(80), strict=True))


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


class CountedShuffle(Shuffle):
    """A shuffle that counts how often positions are located, and how many."""

    located: list[int]

    def parent_positions(self, positions: Positions) -> Positions:
        self.located.append(len(positions))
        return super().parent_positions(positions)


def test_the_end_of_one_of_many_streams_costs_as_that_of_one_of_few() -> None:
    """In a mixture to the end of all, a stream that begins again asks no other one for its position."""

    def calls(count: int) -> int:
        streams = [MapDataset.range(3).to_iter_dataset(ReadOptions(0, 0)) for _ in range(count)]
        with iter(IterDataset.mix(streams, stop="all_exhausted")) as iterator:
            next(iterator)
            return calls_of(lambda: list(iterator)) // count

    assert calls(160) < 1.2 * calls(40)


def counted_shuffle(length: int) -> CountedShuffle:
    node = CountedShuffle(node_of(MapDataset.range(length)), seed=0)
    object.__setattr__(node, "located", [])
    return node


@pytest.mark.parametrize("size", [1, 3, 4, 15, 16, 64])
@pytest.mark.parametrize("order", ["in order", "as threads finish", "two readers"])
def test_small_blocks_are_located_in_advance(size: int, order: str) -> None:
    """Blocks of any size that cover the positions are located together, whatever order neighbours are read in."""
    node = counted_shuffle(6_000)
    starts = list(range(0, 6_000 - size, size))
    if order == "as threads finish":
        starts = [start for group in range(0, len(starts), 7) for start in reversed(starts[group : group + 7])]
    elif order == "two readers":
        half = len(starts) // 2
        starts = [start for pair in zip(starts, starts[half:], strict=False) for start in pair]
    blocks = Blocks(node)
    for start in starts:
        found = list(blocks.block(np.arange(start, start + size)))
        if start % 997 < size:
            assert found == [node.at(position) for position in range(start, start + size)]
    assert len(node.located) < 60


def test_scattered_small_blocks_locate_no_more_than_they_read() -> None:
    """A block far from all others is located alone, because nothing shows that its neighbours will be read."""
    node = counted_shuffle(10**9)
    blocks = Blocks(node)
    for start in range(0, 10**9, 10**7):
        blocks.block(np.arange(start, start + 4))
    assert set(node.located) == {4}


@pytest.mark.parametrize(("batch_size", "num_threads"), [(4, 0), (4, 16), (64, 16), (64, 64), (256, 32), (256, 64)])
def test_threads_that_share_a_batch_do_not_locate_its_parts_one_by_one(batch_size: int, num_threads: int) -> None:
    """Locating costs one large call for thousands of elements, whatever number of threads divides the batches."""
    node = counted_shuffle(2_000)
    dataset = dataset_of(node).map(str)
    mixed = MapDataset.mix([dataset, MapDataset.range(2_000).map(str)])
    with iter(mixed.to_iter_dataset(ReadOptions(num_threads)).batch(batch_size)) as batches:
        num_elements = sum(len(batch) for batch in batches)
    assert num_elements == 4_000
    # A thread does not wait while another one locates.
    assert len(node.located) < 100


CHOSEN = np.random.default_rng(0).permutation(100_000)
PAIRS = np.stack([CHOSEN % 2, CHOSEN // 2], axis=1)


@pytest.mark.parametrize(
    ("choose", "at_most"),
    [
        (lambda: MapDataset.range(100_000).slice(CHOSEN), 10),
        (lambda: MapDataset.range(100_000).slice(CHOSEN.tolist()), 10),
        (lambda: MapDataset.range(100_000).slice(CHOSEN.astype(np.uint32)), 10),
        (lambda: MapDataset.range(100_000).shuffle(seed=0).slice(CHOSEN).map(str), 10),
        (lambda: MapDataset.select_from_datasets([MapDataset.range(50_000)] * 2, PAIRS), 18),
        (lambda: MapDataset.select_from_datasets([MapDataset.range(50_000)] * 2, PAIRS.tolist()), 18),
    ],
)
def test_a_chosen_position_costs_no_python_call_and_its_number(
    choose: Callable[[], MapDataset[Any]], at_most: int
) -> None:
    """A subset of a hundred million records is built in seconds, and kept as an array of its positions."""
    assert calls_of(choose) < 5_000
    tracemalloc.start()
    try:
        chosen = choose()
        kept, _ = tracemalloc.get_traced_memory()
        assert chosen.fingerprint() == choose().fingerprint()
        block = chosen.__getitems__(np.arange(40_000, 40_064))
        assert block == [chosen[position] for position in range(40_000, 40_064)]
    finally:
        tracemalloc.stop()
    assert kept < at_most * len(CHOSEN)


def test_chosen_positions_are_those_of_the_call() -> None:
    """An array or list that its owner changes later does not change the dataset."""
    rows, pairs = np.arange(8)[::-1].copy(), [[0, 3], [1, 1]]
    taken = MapDataset.range(8).slice(rows)
    picked = MapDataset.select_from_datasets([MapDataset.range(8), MapDataset.range(8, 10)], pairs)
    rows[:], pairs[0][1] = 0, 7
    assert (list(taken), list(picked)) == ([7, 6, 5, 4, 3, 2, 1, 0], [3, 9])


def test_a_position_in_one_of_many_datasets_costs_as_in_one_of_few() -> None:
    """Positions are grouped by one sort, so that a concatenation of thousands of files is no slower than one of ten."""

    def calls(count: int) -> int:
        node = node_of(MapDataset.concatenate([MapDataset.range(50).map(str)] * count))
        positions = np.array([70, 3, 71, 4])
        node.locate(positions)
        return calls_of(lambda: node.locate(positions))

    assert calls(2_000) < calls(4) + 10


class Absolute(MapTransform):
    """A map that says what its results are like."""

    def map(self, element: Any) -> Any:
        return abs(element)

    def output_spec(self, input_spec: Any) -> Any:
        return input_spec


class First(Absolute):
    """The first of each."""

    def map(self, element: Any) -> Any:
        return element[0]

    def output_spec(self, input_spec: Any) -> Any:
        return input_spec[0]


class Alternating(MapDataset[Any]):
    """A dataset of a user's own class over several others."""

    def __len__(self) -> int:
        return sum(map(len, self._parents))

    def __getitem__(self, position: Any) -> Any:
        return self._parents[position % 2][position // 2]


JOINS: dict[str, Callable[[MapDataset[Any], MapDataset[Any]], MapDataset[Any]]] = {
    "concatenate": lambda one, two: MapDataset.concatenate([one, two]),
    "mix": lambda one, two: MapDataset.mix({"one": one, "two": two}, {"one": 2, "two": 1}),
    "select": lambda one, two: MapDataset.select_from_datasets([one, two], [(0, 0), (1, 1), (0, 1), (1, 0)]),
    "own": lambda one, two: Alternating([one, two]),
    "zip": lambda one, two: ZipMapDataset([one, two]).map(First()),
}


def doubled(join: str, levels: int) -> MapDataset[Any]:
    """Returns a dataset with 2**levels paths from its end to its source."""
    dataset = MapDataset.range(4).seed(0).shuffle()
    for _ in range(levels):
        dataset = JOINS[join](dataset, dataset.map(Absolute()))
    return dataset


EXAMINED: dict[str, Callable[[MapDataset[Any]], object]] = {
    "fingerprint": lambda dataset: (dataset.fingerprint(), dataset.content_marks()),
    "text": repr,
    "page": lambda dataset: dataset._repr_html_(),
    "text of a stream": lambda dataset: repr(dataset.to_iter_dataset().batch(2)),
    "elements": lambda dataset: text_of("", sketch_of(node_of(dataset), first_element_of)),
    "seeds": lambda dataset: dataset.random_map(lambda element, _: element).shuffle().batch(2),
    "loader": lambda dataset: load(dataset, batch_size=2),
    "iterator": lambda dataset: iter(dataset.to_iter_dataset(ReadOptions(0)).batch(2)).close(),
    "states": lambda dataset: next(batches := iter(dataset.to_iter_dataset(ReadOptions(0)))) and batches.get_state(),
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("what", EXAMINED)
def test_a_dataset_that_is_used_twice_is_examined_once(join: str, what: str) -> None:
    """Twice the levels of datasets that are each used twice cost a few times as much, and not a thousand times."""
    if join == "zip" and what in {"elements", "states"}:
        pytest.skip("an element of a zip is itself made of each use")
    few, many = (calls_of(lambda: EXAMINED[what](doubled(join, levels))) for levels in (10, 20))  # noqa: B023
    assert many < 8 * few


@pytest.mark.parametrize("join", JOINS)
def test_using_one_dataset_twice_is_using_two_equal_ones(join: str) -> None:
    """A state is accepted whichever way a program has built the same chain, small or large."""
    for levels in (1, 5, 20):
        one, two = doubled(join, levels), doubled(join, levels)
        used_twice, separate = JOINS[join](one, one.map(str)), JOINS[join](one, two.map(str))
        assert used_twice.fingerprint() == separate.fingerprint() != JOINS[join](one.map(str), one).fingerprint()
        other = JOINS[join](one, doubled(join, levels - 1).map(str).map(repr))
        assert other.fingerprint() != used_twice.fingerprint()
