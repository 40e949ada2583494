"""A chain as the source of a loader: each epoch reads that epoch of the chain, whatever order, place or door."""

import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import (
    BalancedSampler,
    Batch,
    ConcatenatedDataSource,
    DataLoader,
    HierarchicalSampler,
    IndexSampler,
    MapDataset,
    MixtureSampler,
    RecordMetadata,
)
from millstream.dataset.map_dataset import dataset_of
from millstream.dataset.node_source import node_of
from millstream.dataset.nodes.index_nodes import Shuffle
from millstream.transforms import Filter, RandomMap
from support.draw.chains import Chain, chains

COUNT = 6
POSITIONS = MapDataset.range(COUNT).map_with_index(lambda position, _: position)
"""A chain whose elements are its positions: `epoch * COUNT + key`."""
KEYS = [5, 0, 2]


@settings(max_examples=40, deadline=None)
@given(chains(), st.integers(1, 3))
def test_a_loader_reads_the_epochs_of_the_chain(chain: Chain, num_epochs: int) -> None:
    """All epochs, in one stream, epoch by epoch and sought, are the chain's own; a missing element is an error."""
    count = chain.oracle.length
    expected = [chain.oracle.first((epoch + 1) * count)[epoch * count :] for epoch in range(num_epochs)]
    whole = list(itertools.chain.from_iterable(expected))
    if not chain.is_dense:
        with contextlib.suppress(ValueError):
            assert list(millstream.load(chain.dataset, num_epochs=num_epochs)) == whole
            assert None not in whole
        return
    loader = millstream.load(chain.dataset, num_epochs=num_epochs)
    assert list(loader) == whole
    assert [list(batches) for _, batches in loader.epochs(num_epochs)] == expected
    with iter(loader) as iterator:
        iterator.seek(len(whole) // 2)
        assert list(iterator) == whole[len(whole) // 2 :]


class EndlessKeys:
    """A user's order without epochs."""

    def __getitem__(self, position: int) -> RecordMetadata:
        return RecordMetadata(position, position % COUNT, None)


class Epochs(EndlessKeys):
    """A user's order with epochs."""

    num_records = COUNT

    def of_epoch(self, number: int) -> IndexSampler:
        return IndexSampler(COUNT, shuffle=True, seed=number, num_epochs=1)


SHUFFLED = IndexSampler(COUNT, shuffle=True, seed=3)
ORDERS: dict[str, tuple[Any, int]] = {
    "shuffled": (SHUFFLED, COUNT),
    "some keys": (IndexSampler(len(KEYS), shuffle=True, seed=3, keys=KEYS), len(KEYS)),
    "windows": (HierarchicalSampler([3, 1, 2], window_units=2, seed=3), COUNT),
    "balanced": (BalancedSampler(SHUFFLED, costs=np.arange(1, 7), global_batch_size=2, parts=2), COUNT),
    "a user's": (Epochs(), COUNT),
}
"""Endless orders with the number of positions per epoch."""


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_counts_the_epochs(name: str) -> None:
    """Key k comes in epoch e as element e * len + k, and record_keys stay keys; also in a loop over epochs."""
    order, per_epoch = ORDERS[name]
    loader = DataLoader(data_source=POSITIONS, sampler=order, operations=[Batch(2)])
    rows = np.concatenate(list(itertools.islice(iter(loader), 9)))
    keys = np.concatenate([loader.record_keys(step) for step in range(9)])
    assert rows.tolist() == (keys + COUNT * (np.arange(18) // per_epoch)).tolist()
    for epoch, batches in loader.epochs(3):
        rows = np.concatenate(list(batches))
        assert sorted(rows - epoch * COUNT) == sorted(KEYS if "keys" in name else range(COUNT))


OWN = {"a": POSITIONS, "b": MapDataset.range(100, 104).map_with_index(lambda position, _: 1000 + position)}


def mixture_of(stop: str, num_epochs: int | None) -> Any:
    return millstream.load(OWN, weights={"a": 1, "b": 2}, stop=stop, num_epochs=num_epochs, shuffle=True, seed=0)


@pytest.mark.parametrize("door", ["mixture", "nested", "balanced", "plain"])
def test_components_count_their_own_epochs(door: str) -> None:
    """Each component of a mixture passes through its own epochs; a list beside it has none."""
    sources: Any = ConcatenatedDataSource({**OWN, "list": [-1, -2]})
    orders = {name: IndexSampler(len(part), shuffle=True, seed=3) for name, part in sources.parts.items()}
    order: Any = MixtureSampler(orders, {"a": 1, "b": 2, "list": 1})
    if door == "nested":
        inner = MixtureSampler({name: orders[name] for name in OWN}, {"a": 1, "b": 2})
        sources = ConcatenatedDataSource({"chains": ConcatenatedDataSource(OWN), "list": [-1, -2]})
        order = MixtureSampler({"chains": inner, "list": orders["list"]}, [3, 1])
    if door == "balanced":
        order = BalancedSampler(order, costs=np.ones(12), global_batch_size=4, parts=2)
    if door == "plain":
        order = IndexSampler(12, shuffle=True, seed=0)
    loader = DataLoader(data_source=sources, sampler=order, operations=[Batch(4)])
    # Whole epochs of each component.
    found = [row for batch in itertools.islice(iter(loader), 12) for row in batch.tolist()]
    assert {-1, -2} == {row for row in found if row < 0}
    for start, length in ((0, 6), (1000, 4)):
        own = [row - start for row in found if start <= row < start + 1000]
        assert len(own) >= 2 * length
        assert sorted(own) == list(range(len(own)))


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "drop_exhausted"])
def test_epochs_of_mixtures_share_no_element(stop: str) -> None:
    """In a loop over epochs, each epoch begins with that of each chain; one that starts over repeats nothing."""
    epochs = [list(batches) for _, batches in mixture_of(stop, None).epochs(3)]
    rows = [row for epoch in epochs for row in epoch]
    assert len(set(rows)) == len(rows)
    for number, epoch in enumerate(epochs):
        assert sorted(row for row in epoch if 1000 <= row < 1100)[:4] == [1000 + number * 4 + key for key in range(4)]


class Noise(RandomMap):
    """A step with draws."""

    def random_map(self, element: Any, rng: np.random.Generator) -> float:
        return float(element) + float(rng.random())


def keep(element: Any) -> Any:
    return element


@pytest.mark.parametrize("operations", [[Batch(4)], [Filter(keep), Batch(4)]])
def test_workers_and_resumes_know_the_epoch(operations: list[Any]) -> None:
    """Worker processes, another number of them after a resume, and a process without any read the same elements."""
    chain = MapDataset.range(1, 11).shuffle(seed=1).random_map(Noise(), seed=2)
    order = IndexSampler(10, shuffle=True, seed=0, num_epochs=4)
    expected = [
        chain[epoch * 10 + key] for epoch, key in zip(np.arange(40) // 10, order.record_keys(0, 40), strict=True)
    ]
    made = [DataLoader(data_source=chain, sampler=order, operations=operations, worker_count=n) for n in (0, 1)]
    with made[1] as loader, iter(made[0]) as here, iter(loader) as there:
        first = list(itertools.islice(there, 5))
        here.set_state(there.get_state())
        rest = list(here)
        there.set_state(there.get_state())
        assert np.concatenate(list(there)).tolist() == np.concatenate(rest).tolist()
        assert np.concatenate([*first, *rest]).tolist() == expected


def test_a_skipped_record_is_replaced_in_its_epoch() -> None:
    """The next key that works comes in the epoch of the one that failed."""

    def fails(position: int) -> int:
        if position == COUNT + 2:
            raise OSError
        return position

    loader = millstream.load(POSITIONS.map(fails), num_epochs=2, on_error="skip")
    assert list(loader) == [0, 1, 2, 3, 4, 5, 6, 7, 9, 9, 10, 11]


def test_an_order_without_epochs_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Keys of an endless order without epochs come back with the same elements, which the log says once."""
    with caplog.at_level(logging.WARNING, "millstream"):
        for source, order in (
            (POSITIONS, EndlessKeys()),
            (ConcatenatedDataSource([POSITIONS]), MixtureSampler([EndlessKeys()], [1], source_lengths=[COUNT])),
        ):
            loader = DataLoader(data_source=source, sampler=order)
            assert list(itertools.islice(iter(loader), 7)) == [0, 1, 2, 3, 4, 5, 0]
    assert [record.message.count("EndlessKeys has no num_records") for record in caplog.records] == [1, 1]


GAPS: dict[str, Callable[[MapDataset[int]], Any]] = {
    "filter": lambda numbers: numbers.filter(lambda number: number > 2).map(float),
    "flat map": lambda numbers: numbers.flat_map(lambda number: [number] * number, 3),
    "component": lambda numbers: ConcatenatedDataSource({"x": numbers.filter(lambda number: number > 2)}),
}


@pytest.mark.parametrize("name", GAPS)
def test_a_loader_refuses_a_chain_with_gaps(name: str) -> None:
    """A filter or flat_map leaves positions empty: the error at construction names it and the stream."""
    source = GAPS[name](MapDataset.range(4))
    with pytest.raises(ValueError, match=r"after \.f\w+\(.*dataset\.to_iter_dataset\(\)"):
        millstream.load(source, num_epochs=1)
    with pytest.raises(ValueError, match=r"after \.f\w+\(.*dataset\.to_iter_dataset\(\)"):
        DataLoader(data_source=source, sampler=IndexSampler(len(source)), operations=[Batch(4)])


@pytest.mark.parametrize(("operations", "workers"), [([], 0), ([keep], 0), ([Batch(4)], 0), ([Batch(4)], 1)])
def test_a_map_that_returns_none_is_an_error_with_its_key(operations: list[Any], workers: int) -> None:
    """No batch and no operation sees None: the error names the record key; skipped, another key replaces it."""
    chain = MapDataset.range(1, 9).map(lambda number: number if number % 7 else None)
    sources: list[Any] = [chain, ConcatenatedDataSource({"x": chain})]
    for source in sources[: 2 - workers]:
        order = IndexSampler(8, num_epochs=1)
        with DataLoader(data_source=source, sampler=order, operations=operations, worker_count=workers) as loader:
            with pytest.raises(ValueError, match="An element of a MapDataset is None") as raised:
                list(loader)
            assert any("record key 6" in note for note in raised.value.__notes__)
    assert list(millstream.load(chain, num_epochs=1, on_error="skip")) == [1, 2, 3, 4, 5, 6, 8, 8]


LOCATED: list[int] = []


class CountedShuffle(Shuffle):
    """A shuffle that notes the number of positions of each call."""

    def parent_positions(self, positions: Any) -> Any:
        LOCATED.append(len(positions))
        return super().parent_positions(positions)


def test_later_epochs_are_located_in_advance_too() -> None:
    """Permutations of later epochs take a share of one NumPy call per block, as those of the first do."""
    chain = dataset_of(CountedShuffle(node_of(MapDataset.range(2000)), seed=0)).map(keep)
    assert len(list(millstream.load(chain, num_epochs=10, batch_size=8))) == 2500
    assert len(LOCATED) < 50


@pytest.mark.parametrize("step", ["shuffle", "mix"])
def test_lineage_over_reordered_chains_of_several_records_is_refused(step: str) -> None:
    """If an element is made of several records, or the chain is one of several sources: the error names the step."""
    numbers = MapDataset.range(8)
    chain = numbers.shuffle(seed=0).map(keep) if step == "shuffle" else MapDataset.mix([numbers, numbers])
    for source in (chain.batch(2), ConcatenatedDataSource({"a": chain, "b": [1]})):
        loader = millstream.load(source, num_epochs=1, batch_size=2)
        for call, argument in ((loader.record_keys, 0), (loader.steps_of, [1])):
            with pytest.raises(TypeError, match=rf"{step}\(.* in the chain .*load\(source, shuffle=True\)"):
                call(argument)  # type: ignore[arg-type]
