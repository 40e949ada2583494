"""The record of each position of a chain, and the positions of each record, through shuffles, slices and joins."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

import millstream
from millstream import Batch, DataLoader, IndexSampler, MapDataset
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
    "concatenate nothing": lambda one: MapDataset.concatenate([one, MapDataset.source([]), one[:0]]),
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


ENDLESS: dict[str, MapDataset[int]] = {
    "shuffle": numbers(8).shuffle(seed=0).repeat(),
    "window_shuffle": numbers(8).repeat().window_shuffle(4, seed=0),
    "shard": numbers(8).shuffle(seed=0).repeat().shard(1, 2),
    "mix": MapDataset.mix([numbers(5).shuffle(seed=1).repeat(), numbers(3, 105).repeat()], [2, 1]),
}


@pytest.mark.parametrize("sampler", [None, IndexSampler(20), IndexSampler(20, shuffle=True, seed=0)])
@pytest.mark.parametrize("name", ENDLESS)
def test_a_loader_knows_the_records_of_an_endless_chain(name: str, sampler: IndexSampler | None) -> None:
    """The steps of a record, up to a step, are those that have it; what is beyond them is not searched."""
    chain = ENDLESS[name]
    order = IndexSampler(len(chain), num_epochs=1) if sampler is None else sampler
    loader = DataLoader(data_source=chain, sampler=order, operations=[Batch(4)])
    batches = [batch.tolist() for _, batch in zip(range(9), loader, strict=False)]
    steps = loader.steps_of(np.arange(8), stop=9)

    assert [(loader.record_keys(step) + 100).tolist() for step in range(9)] == batches
    for key in range(8):
        expected = [step for step, batch in enumerate(batches) if 100 + key in batch]
        assert [step for step in steps[key].tolist() if step >= 0] == expected


@pytest.mark.filterwarnings("ignore:the shuffle of an endless dataset")
def test_the_shuffle_of_an_endless_chain_cannot_be_searched() -> None:
    """Each record is at about 2**60 positions, in the chain or in the loader: an error with the remedy."""
    endless = numbers(8).repeat()
    for loader in (
        millstream.load(endless.shuffle(seed=0), batch_size=2),
        millstream.load(numbers(8).shuffle(seed=0).repeat(), batch_size=2, shuffle=True, seed=0),
    ):
        assert len(loader.record_keys(0)) == 2
        with pytest.raises(TypeError, match=r"endless dataset.* [Ww]rite \.shuffle\(.*\) before \.repeat\(\)"):
            loader.steps_of([1], stop=4)


def test_a_loader_reads_a_shuffled_chain_with_an_empty_part() -> None:
    """Records of the others are found; there are none of the empty one."""
    loader = millstream.load(MapDataset.concatenate([numbers(4), MapDataset.source([])]).shuffle(seed=0), num_epochs=1)

    assert [int(loader.record_keys(step)[0]) + 100 for step in range(4)] == list(loader)
    assert sorted(loader.steps_of(range(4))[:, 0].tolist()) == [0, 1, 2, 3]
