"""The record of each position of a chain, and the positions of each record, through shuffles, slices and joins."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

import millstream
from millstream import MapDataset
from millstream.dataset.node_source import node_of


def identity(value: int) -> int:
    return value


def numbers(count: int = 9, start: int = 100) -> MapDataset[int]:
    return MapDataset.source(range(start, start + count))


def joined(one: MapDataset[int]) -> list[MapDataset[int]]:
    return [one, numbers(5, 200)]


STEPS: dict[str, Callable[[MapDataset[int]], MapDataset[int]]] = {
    "shuffle": lambda one: one.shuffle(seed=3),
    "window_shuffle": lambda one: one.window_shuffle(4, seed=1),
    "shard": lambda one: one.shard(1, 2),
    "every second": lambda one: one[1::2],
    "backwards": lambda one: one[::-1],
    "repeat": lambda one: one.repeat(2),
    "repeat the first": lambda one: one.shuffle(seed=0).repeat(3, reseed_each_epoch=False),
    "endless": lambda one: one.repeat()[2:17],
    "positions": lambda one: one.slice([2, 0, 2, 1]),
    "seed and map": lambda one: one.seed(0).map(identity),
    "random": lambda one: one.random_map(lambda value, _: value, seed=0),
    "concatenate": lambda one: MapDataset.concatenate(joined(one)),
    "mix": lambda one: MapDataset.mix(joined(one), [2, 1]),
    "mix to the end": lambda one: MapDataset.mix(joined(one), stop="all_exhausted"),
    "mix and drop": lambda one: MapDataset.mix(joined(one), stop="drop_exhausted"),
    "reweighted": lambda one: MapDataset.mix(joined(one)).reweighted(3, [0, 1]),
    "select": lambda one: MapDataset.select_from_datasets(joined(one), [(1, 4), (0, 0), (0, 1), (1, 4)]),
}


@pytest.mark.parametrize("second", STEPS)
@pytest.mark.parametrize("first", STEPS)
def test_positions_of_records_are_the_inverse_of_records_at_positions(first: str, second: str) -> None:
    """For each two steps, over several epochs: each position is that of its record, and of no other."""
    chain = STEPS[second](STEPS[first](numbers()))
    # A part of an endless dataset has one epoch.
    node, stop = node_of(chain), min(8, len(chain)) if "endless" in (first, second) else 2 * len(chain) + 1
    sources = node.traced or ()
    starts = dict(zip(map(id, sources), itertools.accumulate(map(len, sources), initial=0), strict=False))
    records = list(itertools.chain.from_iterable(sources))
    keys = node.record_keys(np.arange(stop), starts)
    found = node.occurrences(np.arange(len(records)), starts, stop)

    assert [records[key] for key in keys] == [chain[position] for position in range(stop)]
    assert sorted(set(zip(found.positions.tolist(), found.rows.tolist(), strict=True))) == list(
        enumerate(keys.tolist())
    )


CHAINS: dict[str, MapDataset[int]] = {
    "shuffle": numbers(12).shuffle(seed=0).map(identity),
    "slice of a shuffle": numbers(12).shuffle(seed=3)[:8],
    "mix": MapDataset.mix([numbers(5).shuffle(seed=1), numbers(7, 105)], [2, 1]),
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_a_loader_knows_the_records_of_a_reordered_chain(name: str, shuffle: bool) -> None:
    """The records of each step are those that it reads, and the steps of each record those that have it."""
    loader = millstream.load(CHAINS[name], num_epochs=3, batch_size=4, shuffle=shuffle, seed=5)
    batches: list[list[int]] = [batch.tolist() for batch in loader]
    steps = loader.steps_of(np.arange(12))

    assert [(loader.record_keys(step) + 100).tolist() for step in range(len(batches))] == batches
    for key in range(12):
        expected = {step for step, batch in enumerate(batches) if 100 + key in batch}
        assert {step for step in steps[key].tolist() if step >= 0} == expected
    assert [location.record for location in loader.locate([0, 3])] == [0, 3]
