"""An iterator for any number of shards: the same global batches, the same state on all, any resume."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from millstream import CheckpointError, IterDataset, MapDataset, MultiprocessingOptions, ShardOptions
from millstream.experimental import ElasticIterator, ZipMapDataset

GLOBAL = 12


def draw(number: int, rng: np.random.Generator) -> tuple[int, float]:
    return number, rng.random()


def dataset(count: int = 50, epochs: int = 2) -> MapDataset[Any]:
    return MapDataset.range(count).shuffle(seed=3).random_map(draw, seed=5).repeat(epochs)


def shards(count: int, workers: int = 0, ds: MapDataset[Any] | None = None) -> list[ElasticIterator]:
    """Returns the iterators of all shards."""
    options = MultiprocessingOptions(workers)
    return [
        ElasticIterator(ds or dataset(), GLOBAL, ShardOptions(shard, count), multiprocessing_options=options)
        for shard in range(count)
    ]


def global_batches(iterators: list[ElasticIterator]) -> list[list[tuple[int, float]]]:
    """Returns what all shards yield together, to the end."""
    steps = zip(*iterators, strict=True)
    return [
        list(zip(*(np.concatenate(leaf).tolist() for leaf in zip(*step, strict=True)), strict=True)) for step in steps
    ]


@pytest.mark.parametrize(("before", "after", "workers"), [(1, 4, 0), (3, 1, 2), (2, 6, 0)])
def test_any_number_of_shards_resumes(before: int, after: int, workers: int) -> None:
    """The global batches are those of the dataset in its order; a state of any shard restores on all of others."""
    elements = list(dataset())
    expected = [elements[start : start + GLOBAL] for start in range(0, 96, GLOBAL)]
    first, second = shards(before), shards(after, workers)
    try:
        begun = [list(map(next, [iterator] * 3)) for iterator in first]
        (state,) = {json.dumps(iterator.get_state()) for iterator in first}
        for iterator in second:
            iterator.set_state(json.loads(state))
            assert json.dumps(iterator.get_state()) == state
        assert len(begun) == before
        assert global_batches(first) == global_batches(second) == expected[3:]
        assert len(first[0]) == 0
        for iterator in second:
            iterator.seek(0)
            assert len(iterator) == len(expected)
        assert global_batches(second) == expected
    finally:
        for iterator in [*first, *second]:
            iterator.close()


@pytest.mark.parametrize(
    ("other", "global_batch", "steps", "words"),
    [
        (dataset(60), GLOBAL, 1, "belongs to another stream"),
        (dataset(), 8, 1, "where no global batch of 12 begins"),
        (dataset(epochs=3), GLOBAL, 12, "lies beyond the end"),
    ],
)
def test_another_state_is_refused(other: MapDataset[Any], global_batch: int, steps: int, words: str) -> None:
    """A state of another dataset, between batches, or beyond the end is refused without moving."""
    with ElasticIterator(other, global_batch, ShardOptions(0, 1)) as saved:
        saved.seek(steps)
        state = saved.get_state()
    with ElasticIterator(dataset(), GLOBAL, ShardOptions(0, 1)) as iterator:
        own = iterator.get_state()
        with pytest.raises(CheckpointError, match=words):
            iterator.set_state(state)
        assert iterator.get_state() == own


def test_absent_elements_are_refused() -> None:
    """A filter at construction, a map that returns None at its turn; and shards that do not divide the batch."""
    with pytest.raises(ValueError, match="filter"):
        ElasticIterator(dataset().filter(bool), GLOBAL, ShardOptions(0, 1))
    with pytest.raises(ValueError, match="multiple of shard_count"):
        ElasticIterator(dataset(), GLOBAL, ShardOptions(0, 5))
    holed = MapDataset.range(20).map(lambda number: number if number != 7 else None)
    with ElasticIterator(holed, 5, ShardOptions(0, 1)) as iterator:
        assert next(iterator).tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(ValueError, match="None"):
            next(iterator)


MIXED = {name: MapDataset.source([name] * 120).shuffle(seed=0) for name in "abc"}
HOST_MIXTURES: dict[str, Any] = {
    "1:1": MapDataset.mix([MIXED["a"], MIXED["b"]]),
    "3:1": MapDataset.mix([MIXED["a"], MIXED["b"]], [3, 1]),
    "mapped and nested": MapDataset.mix([MapDataset.mix([MIXED["a"], MIXED["b"]]).map(str), MIXED["c"]], [2, 2]).map(
        str
    ),
    "zipped": ZipMapDataset([MapDataset.mix([MIXED["a"], MIXED["b"]])]).map(lambda pair: pair[0]),
}


@pytest.mark.parametrize("mixture", HOST_MIXTURES)
def test_shards_of_a_mixture_read_all_its_datasets(mixture: str, caplog: pytest.LogCaptureFixture) -> None:
    """Global batches are the same rows for any number of shards; no shard reads one dataset only, and a slice warns."""
    dataset = HOST_MIXTURES[mixture]
    whole = [sorted(dataset[k] for k in range(8 * step, 8 * step + 8)) for step in range(15)]
    kinds = set(itertools.chain.from_iterable(whole))
    first: Any = None
    for count in (1, 2, 4, 8):
        options = [ShardOptions(index, count) for index in range(count)]
        rows = [[batch.tolist() for batch in ElasticIterator(dataset, 8, shard)] for shard in options]
        joined = [list(itertools.chain.from_iterable(parts)) for parts in zip(*rows, strict=True)]
        first = first or joined[:15]
        assert joined[:15] == first
        assert [sorted(batch) for batch in first] == whole
        assert all(set(itertools.chain.from_iterable(shard)) == kinds for shard in rows)
    with caplog.at_level("WARNING", "millstream"):
        assert len(set(dataset[1::4])) < len(kinds)
        assert [record.message.count("of other proportions") for record in caplog.records] == [1]
        caplog.clear()
        for proportional in (dataset[3:50], dataset.shuffle(seed=1)[::4], dataset.batch(2)[1::2], dataset[::3]):
            assert len(proportional)
        assert not caplog.records


class Elastic(IterDataset[Any]):
    """The batches of a shard as a dataset."""

    def __iter__(self) -> Any:
        return ElasticIterator(MapDataset.range(24), 4, ShardOptions(0, 1))


@pytest.mark.parametrize("above", [lambda one: one.zip(one), lambda one: one.map(np.negative)], ids=["zip", "map"])
def test_other_datasets_draw_from_a_shard_and_resume(above: Callable[[Any], IterDataset[Any]]) -> None:
    """Joins and operations save its position, and go on from there."""
    with iter(above(Elastic())) as iterator:
        first, state = next(iterator), iterator.get_state()
        rest = list(iterator)
        iterator.set_state(state)
        np.testing.assert_array_equal(list(iterator), rest)
    assert len(rest) == 5
    assert np.min(np.abs(rest)) == 4 == 1 + np.max(np.abs(first))
