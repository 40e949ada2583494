"""The laws of every order: any positions alone, and the way back from records to positions and steps."""

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import BalancedSampler, IndexSampler, MixtureSampler, NoSharding, ShardOptions
from millstream.core.randomness import generator
from millstream.loader.pipeline import order
from support.draw.orders import balanced, buckets, mixtures, orders, records_at

PLAIN = orders() | orders(rows=True) | mixtures(batches=True) | mixtures(rows=True, batches=True) | buckets()
LARGE = st.builds(
    lambda size, *options: (IndexSampler(size, NoSharding(), *options), size),
    st.sampled_from([257, 1000, 10**9, 2**40 + 1, 2**63 - 1, 2**63]),
    st.booleans(),
    st.none() | st.integers(1, 5) | st.just(2**70),
    st.integers(0, 2**64 - 1),
)


KINDS = pytest.mark.parametrize("kind", [PLAIN, balanced(PLAIN)], ids=["plain", "balanced"])


@KINDS
@settings(max_examples=25)
@given(data=st.data())
def test_any_positions_alone_give_the_same(kind: st.SearchStrategy[Any], data: st.DataObject) -> None:
    """A range, any positions, one position and a pickled copy agree, up to the end; beyond it is an IndexError.

    Each position of an order with a seed has a generator of its own.
    """
    sampler, num_records = data.draw(kind | LARGE)
    beyond = 2**63 if sampler.length is None else min(sampler.length, 2**63)
    first = data.draw(st.sampled_from([0, max(0, beyond - 100)]))
    length = min(beyond - first, 100)
    everything = records_at(sampler, first + np.arange(length))
    keys = sampler.record_keys(first, first + length)
    start = data.draw(st.integers(0, length))
    rows = data.draw(st.lists(st.integers(0, length - 1), max_size=4)) if length else []
    positions = first + np.array(rows, dtype=np.int64)
    for each in (sampler, pickle.loads(pickle.dumps(sampler))):
        assert each.fingerprint() == sampler.fingerprint()
        assert records_at(each, positions) == [everything[row] for row in rows]
        assert each.record_keys(first + start, first + length).tolist() == keys[start:].tolist()
        assert each.record_keys_at(positions).tolist() == keys[rows].tolist()
        single: list[Any] = [each[position] for position in positions.tolist()]
        assert [metadata.record_key for metadata in single] == keys[rows].tolist()
        assert [metadata.index for metadata in single] == positions.tolist()
        seed: Any = sampler.seed
        for metadata in single if seed is not None else ():
            expected = generator(seed, metadata.index // sampler.num_records, metadata.index)
            assert metadata.rng.random(3).tolist() == expected.random(3).tolist()
    assert [row[0][0] for row in everything] == keys.tolist()
    assert max(keys, default=0) <= getattr(sampler, "largest_key", num_records - 1) < num_records
    for position in (-1, beyond):
        with pytest.raises(IndexError, match=rf"0 to {beyond} \(exclusive\)"):
            sampler[position]
    with pytest.raises(IndexError):
        sampler.record_keys_at(np.array([0, -1]))


@KINDS
@settings(max_examples=40)
@given(data=st.data(), stop=st.integers(0, 70))
def test_positions_are_those_that_a_scan_finds(kind: st.SearchStrategy[Any], data: st.DataObject, stop: int) -> None:
    """`positions_of` is, for all orders, mixtures and rows, the ascending list that a scan finds."""
    sampler, num_records = data.draw(kind)
    asked = [*range(num_records), num_records + 3, -1, 0]
    table = sampler.positions_of(asked, stop)
    assert table.dtype == np.int64
    expected: list[list[int]] = [[] for _ in range(num_records)]
    for position in range(stop if sampler.length is None else min(stop, sampler.length)):
        for key in {segment[0] for segment in records_at(sampler, [position])[0]}:
            expected[key].append(position)
    expected += [[], [], expected[0]]
    width = max(map(len, expected))
    assert sampler.positions_of([], stop).shape == (0, 0)
    assert table.tolist() == [row + [-1] * (width - len(row)) for row in expected]


@settings(max_examples=15)
@given(
    drawn=mixtures(),
    batches=st.lists(st.integers(1, 4), max_size=2),
    ending=st.sampled_from(["keep", "drop", "pad", "trim"]),
    shards=st.integers(1, 3),
    start=st.integers(0, 4),
    is_balanced=st.booleans(),
)
def test_steps_are_those_whose_batches_have_the_record(
    *, drawn: tuple[Any, int], batches: list[int], ending: str, shards: int, start: int, is_balanced: bool
) -> None:
    """`steps_of` is the inverse of `record_keys` over all shards, for every ending and from any step."""
    sampler, num_records = drawn
    if ending == "pad":
        batches = batches[:1]
    if is_balanced:
        size = shards * math.prod(batches)
        sampler = BalancedSampler(sampler, costs=range(num_records), global_batch_size=size, parts=shards)
    operations = [
        millstream.Batch(size, drop_remainder=ending == "drop", pad_remainder=ending == "pad") for size in batches
    ]
    with pytest.MonkeyPatch.context() as patch:
        # Orders of a few records have thousands of epochs in the usual look-ahead, each of which takes a millisecond.
        patch.setattr(order, "CHUNK_KEYS", 64)
        loaders = [
            millstream.DataLoader(
                data_source=list(range(num_records)),
                sampler=sampler,
                operations=operations,
                shard_options=ShardOptions(index, shards, drop_remainder=ending == "trim"),
            )
            for index in range(shards)
        ]
    stop = 12
    expected: list[set[int]] = [set() for _ in range(num_records)]
    for loader, step in itertools.product(loaders, range(start, stop)):
        try:
            keys = loader.record_keys(step).tolist()
        except IndexError:
            continue
        for key in keys:
            expected[key].add(step)
    found = [
        [step for step in row if step >= 0] for row in loaders[0].steps_of(range(num_records), start, stop).tolist()
    ]
    assert found == list(map(sorted, expected))
    assert loaders[0].steps_of([], start, stop).shape == (0, 0)


def test_what_is_not_known_backwards_is_an_error_that_says_why() -> None:
    """Endless orders without a stop, custom samplers and filters cannot be inverted: the error has the cause."""

    class Own:
        def __getitem__(self, position: int) -> millstream.RecordMetadata:
            return millstream.RecordMetadata(position, position % 3, None)

    with pytest.raises(ValueError, match="stop must be given for an endless order"):
        IndexSampler(3).positions_of([1])
    with pytest.raises(TypeError, match="keys must be a list or array of integers"):
        IndexSampler(3, num_epochs=1).positions_of([1.5])
    with pytest.raises(TypeError, match="Own has no positions_of"):
        millstream.DataLoader(data_source=range(3), sampler=Own()).steps_of([1], stop=3)
    with pytest.raises(TypeError, match=r"component 0 is not known: its sampler, .* has no positions_of|component 0"):
        MixtureSampler([Own()], [1], source_lengths=[3]).positions_of([1], 5)
    filtered = millstream.load(range(3), transformations=[millstream.Filter(bool)])
    with pytest.raises(TypeError, match=r"steps_of\(keys\) needs a 1:1 pipeline: the batches after operations\[0\]"):
        filtered.steps_of([1], stop=3)


def test_the_way_back_ends_where_positions_do() -> None:
    """Of an order that is longer than 2**63, or searched further, positions are those that an int64 holds."""
    whole = IndexSampler(3 << 61, shuffle=True, seed=0, num_epochs=2)
    largest = IndexSampler(1 << 63, shuffle=True, seed=0)
    for sampler in (whole, whole.endless(), IndexSampler(1 << 62, num_epochs=4), largest):
        table = sampler.positions_of(range(8), 2**70)
        assert np.array_equal(sampler.record_keys_at(table[table >= 0]), np.nonzero(table >= 0)[0])
        assert (table[:, 0] >= 0).all()
    mixture = MixtureSampler([IndexSampler(1 << 61), IndexSampler(1 << 61)], [1, 2])
    assert mixture.positions_of([5], 2**70).tolist() == [[16, (3 << 61) + 16]]


def test_a_million_keys_of_a_billion_are_found_without_a_scan() -> None:
    """Each key of an order of 10**9 leads to a position that has it."""
    sampler = IndexSampler(10**9, shuffle=True, seed=0, num_epochs=1)
    keys = np.random.default_rng(0).integers(0, 10**9, 10**6)
    positions = sampler.positions_of(keys)
    assert positions.shape == (10**6, 1)
    assert np.array_equal(sampler.record_keys_at(positions[::1000, 0]), keys[::1000])
