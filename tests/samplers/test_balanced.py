"""Balanced orders: the same global batches, dealt to parts that cost alike."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import BalancedSampler, IndexSampler, MixtureSampler, PackingSampler, ShardOptions
from support.draw.orders import mixtures, records_at


def costs_of(rng: np.random.Generator, num_records: int) -> Any:
    """Returns costs as documents have them: many small ones and few large ones."""
    return rng.lognormal(0, 1.2, num_records)


def imbalance(costs: Any, parts: int) -> Any:
    """Returns the cost of the slowest part in relation to the mean of all parts, for each row of costs."""
    sums = costs.reshape(len(costs), parts, -1).sum(axis=2)
    return sums.max(axis=1) / sums.mean(axis=1)


@pytest.mark.parametrize("parts", [4, 8, 16, 64])
def test_parts_cost_alike(parts: int) -> None:
    """At 16 records a part of log-normal costs: within 15 % of the mean, or of the largest record."""
    size, num_batches = 16 * parts, 50
    costs = costs_of(np.random.default_rng(0), size * num_batches)
    order = IndexSampler(len(costs), shuffle=True, seed=0, num_epochs=1)
    balanced = BalancedSampler(order, costs=costs, global_batch_size=size, parts=parts)

    dealt = costs[balanced.record_keys(0, len(costs))].reshape(num_batches, size)
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
@given(
    drawn=mixtures() | mixtures(rows=True),
    parts=st.integers(1, 4),
    size=st.integers(1, 4),
    seed=st.integers(0, 9),
    stop=st.integers(0, 60),
)
def test_global_batches_are_those_of_the_order(
    drawn: tuple[Any, int], parts: int, size: int, seed: int, stop: int
) -> None:
    """Each has the same records, the last one in the same order; all ways to ask agree, backwards too."""
    order, num_records = drawn
    costs = costs_of(np.random.default_rng(seed), num_records)
    balanced = BalancedSampler(order, costs=costs, global_batch_size=parts * size, parts=parts)
    row_length = getattr(order, "row_length", None)
    assert (balanced.length, getattr(balanced, "row_length", None)) == (order.length, row_length)

    length = 60 if order.length is None else min(order.length, 60)
    everything = np.arange(length)
    found, plain = records_at(balanced, everything), records_at(order, everything)
    whole = length // (parts * size) * parts * size
    for start in range(0, whole, parts * size):
        batch = slice(start, start + parts * size)
        assert sorted(found[batch]) == sorted(plain[batch])
    if length == order.length:
        assert found[whole:] == plain[whole:]
    assert records_at(balanced, everything[::-1]) == found[::-1]
    firsts = [segments[0][0] for segments in found]
    assert balanced.record_keys(0, length).tolist() == firsts
    assert [balanced[position].record_key for position in range(0, length, 9)] == firsts[::9]
    table = balanced.positions_of(range(num_records), min(stop, length)).tolist()
    assert [[position for position in row if position >= 0] for row in table] == [
        [position for position, segments in enumerate(found[:stop]) if key in {segment[0] for segment in segments}]
        for key in range(num_records)
    ]


@pytest.mark.parametrize("kind", ["records", "mixture", "rows"])
def test_any_number_of_processes_has_the_same_global_batch(kind: str) -> None:
    """1, 4 and 16 shards, one after another, yield the same rows at a step in the middle, with the same draws."""
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
    balanced = BalancedSampler(order, costs=lengths**2, global_batch_size=64, parts=16)
    batches = {}
    for count in (1, 4, 16):
        shares = []
        for index in range(count):
            loader = millstream.DataLoader(
                data_source=source,
                sampler=balanced,
                operations=[*operations, millstream.Batch(64 // count)],
                shard_options=ShardOptions(index, count, drop_remainder=True),
            )
            with iter(loader) as iterator:
                iterator.seek(7)
                shares.append(next(iterator))
        batches[count] = np.concatenate(shares)
    assert np.array_equal(batches[1], batches[4])
    assert np.array_equal(batches[1], batches[16])


class Jitter(millstream.RandomMapTransform):
    def random_map(self, element: int, rng: np.random.Generator) -> float:
        return element + rng.random()


def test_a_state_resumes_and_steps_are_found() -> None:
    """Of a mixture, after some steps: the same batches; other costs are another stream; lineage follows the rows."""
    costs = np.arange(1, 61)

    def loader(costs: Any) -> millstream.DataLoader:
        order = MixtureSampler([IndexSampler(40, shuffle=True, seed=1), IndexSampler(20, shuffle=True, seed=2)], [1, 1])
        return millstream.DataLoader(
            data_source=millstream.ConcatenatedDataSource([range(40), range(100, 120)]),
            sampler=BalancedSampler(order, costs=costs, global_batch_size=8, parts=4),
            operations=[millstream.Batch(8)],
        )

    with iter(loader(costs)) as batches, iter(loader(costs * 3)) as resumed, iter(loader(costs[::-1])) as other:
        for _ in range(3):
            next(batches)
        resumed.set_state(batches.get_state())
        assert np.array_equal(next(resumed), next(batches))
        with pytest.raises(millstream.CheckpointError, match="costs"):
            other.set_state(batches.get_state())
    made = loader(costs)
    for key, row in enumerate(made.steps_of(range(60), stop=12).tolist()):
        assert [step for step in row if step >= 0] == [
            step for step in range(12) if key in made.record_keys(step).tolist()
        ]
    assert [count.documents for count in made.composition(2, 7).components.values()] == [20, 20]


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
    balanced = BalancedSampler(order, costs=np.ones(8), global_batch_size=4, parts=2)
    assert (balanced.order, balanced.largest_key, balanced.shard_options) == (order, 7, order.shard_options)
    assert (balanced.names, balanced.row_length, hasattr(balanced, "source_lengths")) == ((), None, False)
    loader = millstream.DataLoader(data_source=range(8), sampler=balanced, operations=[millstream.Batch(2)])
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


def balanced_of(costs: Any, parts: int = 4) -> None:
    BalancedSampler(IndexSampler(8, num_epochs=1), costs=costs, global_batch_size=8, parts=parts)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: balanced_of(np.ones(8), 3), ValueError, "global_batch_size must be a multiple of parts=3, got 8"),
        (lambda: balanced_of(np.ones(5)), ValueError, "for each record key, up to 7, got 5 numbers"),
        (lambda: balanced_of([1, -1] * 4), ValueError, r"costs must be finite numbers from 0 on, got -1.0 to 1.0"),
        (lambda: balanced_of(["a"] * 8), TypeError, "costs must be numbers"),
        (lambda: loader_of(millstream.Batch(4)), ValueError, r"the batch size of the pipeline times .*, 4 \* 1, got 8"),
        (lambda: loader_of(millstream.Batch(1), shards=8), ValueError, "a multiple of the number of shards, 8"),
        (lambda: loader_of(millstream.FilterTransform(bool), millstream.Batch(8)), ValueError, "needs a 1:1 pipeline"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(make: Any, error: type[Exception], message: str) -> None:
    """Costs, parts, and the global batch of the loader."""
    with pytest.raises(error, match=message):
        make()
