"""Balanced orders: the same global batches, dealt to parts that cost alike."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import millstream
from millstream import BalancedSampler, IndexSampler, MixtureSampler, PackingSampler, ShardOptions
from support.draw.orders import balanced, mixtures, records_at
from support.laws import assert_shards_agree, inline_loader


def imbalance(costs: Any, parts: int) -> Any:
    """Returns the cost of the slowest part in relation to the mean of all parts, for each row of costs."""
    sums = costs.reshape(len(costs), parts, -1).sum(axis=2)
    return sums.max(axis=1) / sums.mean(axis=1)


@pytest.mark.parametrize("parts", [4, 8, 16, 64])
def test_parts_cost_alike(parts: int) -> None:
    """At 16 records a part of log-normal costs: within 15 % of the mean, or of the largest record."""
    size, num_batches = 16 * parts, 50
    costs = np.random.default_rng(0).lognormal(0, 1.2, size * num_batches)
    order = IndexSampler(len(costs), shuffle=True, seed=0, num_epochs=1)
    sampler = BalancedSampler(order, costs=costs, global_batch_size=size, parts=parts)

    dealt = costs[sampler.record_keys(0, len(costs))].reshape(num_batches, size)
    plain = costs[order.record_keys(0, len(costs))].reshape(num_batches, size)
    assert np.array_equal(np.sort(dealt, axis=1), np.sort(plain, axis=1))
    largest = np.maximum(1, dealt.max(axis=1) / (dealt.sum(axis=1) / parts))
    assert (imbalance(dealt, parts) <= largest * 1.15).all()
    for number in (parts, parts // 2, parts // 4):
        assert imbalance(dealt, number).mean() <= (1 + imbalance(plain, number).mean()) / 2
        assert (imbalance(dealt, number) <= imbalance(dealt, parts) + 1e-6).all()
    if parts <= 8:
        assert imbalance(dealt, parts).mean() <= 1.15
        assert imbalance(plain, parts).mean() > 1.35


@settings(max_examples=12)
@given(drawn=balanced(mixtures() | mixtures(rows=True)))
def test_global_batches_are_those_of_the_order(drawn: tuple[Any, int]) -> None:
    """Each has the same records, the last one in the same order."""
    sampler = drawn[0]
    order, size = sampler.order, sampler.global_batch_size
    assert (sampler.length, sampler.row_length) == (order.length, getattr(order, "row_length", None))

    length = 60 if order.length is None else min(order.length, 60)
    found, plain = (records_at(each, np.arange(length)) for each in (sampler, order))
    whole = length // size * size
    for start in range(0, whole, size):
        assert sorted(found[start : start + size]) == sorted(plain[start : start + size])
    if length == order.length:
        assert found[whole:] == plain[whole:]


@pytest.mark.parametrize("kind", ["records", "mixture", "rows"])
def test_any_number_of_processes_has_the_same_global_batch(kind: str) -> None:
    """1, 4 and 16 shards, one after another, yield the same rows and draws from a step in the middle on, and resume."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 32, 4000)
    documents = [{"tokens": np.full(length, key)} for key, length in enumerate(lengths.tolist())]
    source: Any = documents
    order: Any = IndexSampler(4000, shuffle=True, seed=1, num_epochs=1)
    operations: list[Any] = [lambda document: document["tokens"][0], Jitter()]
    if kind == "mixture":
        source = millstream.ConcatenatedDataSource([documents[:3000], documents[3000:]])
        parts = [IndexSampler(3000, shuffle=True, seed=1), IndexSampler(1000, shuffle=True, seed=2)]
        order = MixtureSampler(parts, [3, 1])
    if kind == "rows":
        order = PackingSampler(lengths, 32, shuffle=True, seed=1, num_epochs=1)
        operations = [millstream.Pack({"tokens": 32}), lambda row: row["tokens"]]
    sampler = BalancedSampler(order, costs=lengths**2, global_batch_size=64, parts=16)

    def loader(index: int, count: int) -> millstream.DataLoader:
        shard = ShardOptions(index, count, drop_remainder=True)
        return inline_loader(source, sampler, *operations, millstream.Batch(64 // count), shard_options=shard)

    assert_shards_agree(loader, (4, 16), step=7, num_steps=1)


class Jitter(millstream.RandomMap):
    def random_map(self, element: int, rng: np.random.Generator) -> float:
        return element + rng.random()


def test_costs_are_part_of_the_stream() -> None:
    """A state is accepted for costs in the same proportions, and refused for others; compositions follow the rows."""
    costs = np.arange(1, 61)

    def loader(costs: Any) -> millstream.DataLoader:
        order = MixtureSampler([IndexSampler(40, shuffle=True, seed=1), IndexSampler(20, shuffle=True, seed=2)], [1, 1])
        sampler = BalancedSampler(order, costs=costs, global_batch_size=8, parts=4)
        source = millstream.ConcatenatedDataSource([range(40), range(100, 120)])
        return millstream.DataLoader(data_source=source, sampler=sampler, operations=[millstream.Batch(8)])

    with iter(loader(costs)) as batches, iter(loader(costs * 3)) as same, iter(loader(costs[::-1])) as other:
        same.set_state(batches.get_state())
        with pytest.raises(millstream.CheckpointError, match="costs"):
            other.set_state(batches.get_state())
    assert [count.documents for count in loader(costs).composition(2, 7).components.values()] == [20, 20]


class Turned:
    """A custom order of a shard, without record_keys_at."""

    shard_options = ShardOptions(1, 2)
    largest_key = 7

    def __len__(self) -> int:
        return 8

    def __getitem__(self, position: int) -> millstream.RecordMetadata:
        return millstream.RecordMetadata(position, 7 - position)


def test_a_custom_order_keeps_its_members() -> None:
    """Its shard is read, and its largest key known; it is neither a mixture nor rows."""
    order = Turned()
    sampler = BalancedSampler(order, costs=np.ones(8), global_batch_size=4, parts=2)
    assert (sampler.order, sampler.largest_key, sampler.shard_options) == (order, 7, order.shard_options)
    assert (sampler.names, sampler.row_length, hasattr(sampler, "source_lengths")) == ((), None, False)
    loader = millstream.DataLoader(data_source=range(8), sampler=sampler, operations=[millstream.Batch(2)])
    assert [sorted(batch.tolist()) for batch in loader] == [[4, 6], [0, 2]]


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1.0, 1e300])
def test_costs_count_in_proportion(scale: float) -> None:
    """Very small and very large ones are dealt alike."""
    order = IndexSampler(8, shuffle=True, seed=0)
    costs = np.array([9, 1, 1, 5, 1, 7, 1, 1])
    plain, scaled = (BalancedSampler(order, costs=own, global_batch_size=8, parts=2) for own in (costs, costs * scale))
    assert scaled.record_keys(0, 24).tolist() == plain.record_keys(0, 24).tolist()


def loader_of(*operations: Any, shards: int = 1) -> None:
    """Builds a loader of a balanced order of global batches of 8 records in 4 parts."""
    order = IndexSampler(8, shuffle=True, seed=0, num_epochs=1)
    millstream.DataLoader(
        data_source=range(8),
        sampler=BalancedSampler(order, costs=np.ones(8), global_batch_size=8, parts=4),
        operations=operations,
        shard_options=ShardOptions(0, shards, drop_remainder=True),
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: loader_of(millstream.Batch(4)), ValueError, r"the batch size of the pipeline times .*, 4 \* 1, got 8"),
        (lambda: loader_of(millstream.Batch(1), shards=8), ValueError, "a multiple of the number of shards, 8"),
        (lambda: loader_of(millstream.Filter(bool), millstream.Batch(8)), ValueError, "needs a 1:1 pipeline"),
    ],
)
def test_a_loader_that_does_not_fit_is_refused(make: Any, error: type[Exception], message: str) -> None:
    """The global batch is that of the loader, whose pipeline is 1:1."""
    with pytest.raises(error, match=message):
        make()
