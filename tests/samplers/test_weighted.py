"""WeightedSampler: exact shares in each epoch, other weights from a position on, and its use by `load`."""

import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import IndexSampler, MixtureSampler, ShardOptions, WeightedSampler
from support.draw.orders import weighted

WEIGHTS = st.lists(
    st.integers(0, 3) | st.floats(0, 9) | st.sampled_from([1 / 3, 5e-324, 1e300, 2**60]), min_size=1, max_size=30
).filter(any)


def counts_of(sampler: Any, epoch: int, num_source_records: int) -> list[int]:
    size = sampler.num_records
    keys = sampler.record_keys(epoch * size, (epoch + 1) * size)
    return [int(count) for count in np.bincount(keys, minlength=num_source_records)]


@settings(max_examples=60)
@given(weights=WEIGHTS, seed=st.integers(0, 2**64 - 1), num_records=st.none() | st.integers(1, 300))
def test_each_epoch_has_the_shares_of_the_weights(weights: list[float], seed: int, num_records: int | None) -> None:
    """Record k comes e times in every epoch, rounded up or down, e in fractions without error; weight 0 never."""
    sampler = WeightedSampler(weights, seed=seed, num_records=num_records)
    total = sum(map(Fraction, weights))
    for epoch in (0, 1, 7):
        for weight, count in zip(weights, counts_of(sampler, epoch, len(weights)), strict=True):
            expected = sampler.num_records * Fraction(weight) / total
            assert expected // 1 <= count <= -(-expected // 1)


def test_over_epochs_a_record_comes_as_often_as_its_weight_says() -> None:
    """A record of 0.3 draws an epoch comes in 0.3 of all epochs, and every position has each record equally often."""
    weights = np.array([0.3, 0.7, 1.5, 2.5, 0, 5])
    sampler = WeightedSampler(weights, seed=3, num_records=10)
    keys = sampler.record_keys(0, 40_000).reshape(4000, 10)
    shares = np.stack([(keys == key).mean(axis=0) for key in range(6)])
    assert np.abs(shares - (weights / 10)[:, np.newaxis]).max() < 0.03
    assert np.abs(shares.mean(axis=1) - weights / 10).max() < 0.002
    assert len(np.unique(keys, axis=0)) > 3000


@pytest.mark.parametrize("num_records", [None, 1000, 3_000_000])
def test_a_weight_takes_eight_bytes_and_a_batch_three_times_that_of_a_shuffle(num_records: int | None) -> None:
    """The arrays of a million weights have at most 8.1 MB, whatever the number of draws; and no more are pickled."""
    sampler = WeightedSampler(np.random.default_rng(0).random(1_000_000), seed=0, num_records=num_records)
    shares = sampler._changes[0][1]
    assert shares.ends.nbytes + shares.firsts.nbytes <= 8_100_000
    expected = [1, 2, 4][[1000, None, 3_000_000].index(num_records)]
    assert np.bincount(sampler.record_keys(0, sampler.num_records)).max() <= 2 * expected


@settings(max_examples=25)
@given(data=st.data(), num_epochs=st.none() | st.integers(2, 3))
def test_other_weights_hold_from_a_position_on(data: st.DataObject, num_epochs: int | None) -> None:
    """Before it, nothing changes; from the next epoch on, it is the order of the new weights; `of_epoch` follows."""
    before = data.draw(weighted(6, 5, num_epochs))
    last = 2 * before.num_records - 1
    position, other = data.draw(st.integers(0, last)), data.draw(st.permutations([0, 0, 1, 2.5, 3, 4]))
    after = before.reweighted(position, other)
    plain = WeightedSampler(other, seed=5, num_records=before.num_records, num_epochs=num_epochs)
    length = 2 * before.num_records
    found = after.record_keys(0, length)
    assert found[:position].tolist() == before.record_keys(0, position).tolist()
    assert found[position:].tolist() == plain.record_keys(position, length).tolist()
    first, second = (after.of_epoch(number) for number in (0, 1))
    assert first.record_keys(0, before.num_records).tolist() == found[: before.num_records].tolist()
    begin = max(0, position - before.num_records)
    assert second.record_keys(begin, before.num_records).tolist() == (
        plain.of_epoch(1).record_keys(begin, before.num_records).tolist()
    )
    assert len(second) == before.num_records


def test_changes_are_checked() -> None:
    """They must be of as many records, and before the end."""
    sampler = WeightedSampler([1, 2], seed=0, num_epochs=2)
    with pytest.raises(ValueError, match="weights must have 2 numbers, as before, got 3"):
        sampler.reweighted(1, [1, 2, 3])
    with pytest.raises(ValueError, match="position must be below 4, because the order ends there, got 4"):
        sampler.reweighted(4, [1, 2])


def loader(sampler: Any, *, shards: int = 1, index: int = 0, size: int = 100, **options: Any) -> millstream.DataLoader:
    shard = ShardOptions(index, shards, drop_remainder=True)
    operations = [millstream.Batch(8 // shards)]
    source = np.arange(size)
    return millstream.DataLoader(
        data_source=source, sampler=sampler, operations=operations, shard_options=shard, **options
    )


def test_states_resume_with_weights_that_change_later_and_on_other_hosts() -> None:
    """All weights count: one that differs is refused by name, of 100,000 weights too; one that changes later is not."""
    weights = np.ones(100_000)
    other = weights.copy()
    other[77_777] = 2
    sampler = WeightedSampler(weights, seed=1)
    batches = iter(loader(sampler, size=100_000))
    for _ in range(3):
        next(batches)
    state, expected = batches.get_state(), next(batches)
    parts = []
    for index in (0, 1):
        resumed = iter(loader(sampler.reweighted(32, other), shards=2, index=index, size=100_000))
        resumed.set_state(state)
        parts.append(next(resumed))
    assert np.concatenate(parts).tolist() == expected.tolist()
    for changed in (WeightedSampler(other, seed=1), sampler.reweighted(23, other)):
        with pytest.raises(millstream.CheckpointError, match=r"sampler.weights_from_(0|23)"):
            iter(loader(changed, size=100_000)).set_state(state)


def test_load_draws_the_records_of_one_source_by_weights() -> None:
    """Every class has the same share, in each of the epochs; the way back and the composition know it."""
    labels = np.repeat([0, 1, 2], [90, 9, 1])
    weights = 1 / np.bincount(labels)[labels]
    made = millstream.load(labels, weights=weights, seed=0, batch_size=30)
    for _, batches in made.epochs(2):
        assert np.bincount(np.concatenate(list(batches))).tolist() in ([33, 33, 34], [34, 33, 33], [33, 34, 33])
    assert (made.steps_of([99], stop=20) >= 0).sum() == sum(99 in made.record_keys(step) for step in range(20))
    assert made.composition(stop=10).components["ndarray"].epochs == 3.0


@pytest.mark.parametrize(
    ("source", "options", "error", "text"),
    [
        (range(3), {"weights": [1, 2], "seed": 0}, ValueError, "for each of the 3 records, got 2. To mix"),
        (range(2), {"weights": [1, 2]}, ValueError, "seed must be given with weights of records"),
        (range(2), {"weights": {"a": 1}, "seed": 0}, TypeError, "source must be a mapping from names to sources"),
        (range(2), {"weights": [1, 1], "seed": 0, "stop": "all_exhausted"}, ValueError, "stop must be left out"),
        (
            [millstream.RangeDataSource(0, 9, 1)] * 2,
            {"weights": [1, 1], "seed": 0},
            TypeError,
            "source must be a mapping from names to sources to mix them, got list",
        ),
    ],
)
def test_wrong_weights_of_load_are_named(source: Any, options: Any, error: type[Exception], text: str) -> None:
    """Each has an error that says what to write."""
    with pytest.raises(error, match=text):
        millstream.load(source, **options)


class FailsAt:
    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 6

    def __getitem__(self, key: int) -> int:
        if key in self.bad:
            raise ValueError(f"record {key} is broken")
        return key


def test_a_record_that_fails_is_replaced_by_one_with_a_weight() -> None:
    """Never by one of weight 0: those were left out for a reason."""
    made = millstream.load(FailsAt({1}), weights=[1, 1, 0, 0, 1, 0], seed=0, batch_size=30, on_error="skip")
    assert set(next(iter(made)).tolist()) == {0, 4}


@settings(max_examples=40)
@given(
    weights=WEIGHTS,
    copies=st.sampled_from([1, 300, 4000]),
    other=st.none() | st.lists(st.integers(0, 1), min_size=1, max_size=30),
)
def test_substitutes_go_round_all_records_with_a_weight(weights: list[float], copies: int, other: Any) -> None:
    """From one to the next, past any number of records of weight 0, and from the last one to the first."""
    # A weight may be too small to be drawn, beside others.
    spread = np.zeros(len(weights) * copies)
    spread[::copies] = weights
    sampler = WeightedSampler(spread, seed=0, num_records=len(weights))
    if other is not None:
        sampler = sampler.reweighted(5, np.resize(np.array([1.0, *other]), len(spread)))
    drawn = {int(key) for shares in sampler._changes for key in np.flatnonzero(_owned(shares[1]))}
    cycles = sampler.key_cycles()
    assert cycles.count == len(drawn)
    around = [min(drawn)]
    for _ in range(min(len(drawn), 100)):
        around += cycles.following(np.array(around[-1:])).tolist()
    assert around == [*sorted(drawn), min(drawn)][:101]


def _owned(shares: Any) -> Any:
    """Returns the points that each record owns."""
    cells = np.repeat(np.arange(len(shares.firsts) - 1), np.diff(shares.firsts))
    ends = np.append(cells, np.full(len(shares.ends) - len(cells), len(shares.firsts) - 1))
    return np.diff((ends << 32) + shares.ends, prepend=0)


def test_building_needs_no_memory_beside_the_result_and_substitutes_need_none() -> None:
    """A billion weights fit where 8 bytes for each do, in each worker as well."""
    weights = np.zeros(1_000_000, np.float32)
    weights[::300_000] = 1
    tracemalloc.start()
    try:
        sampler = WeightedSampler(weights, seed=0)
        built = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        cycles = sampler.key_cycles()
        assert [cycles.count, *cycles.following(np.array([0, 900_000]))] == [4, 300_000, 0]
        searched = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert built < 16_000_000  # 6.7 MB of it for a chunk, whatever the number of weights
    assert searched < 5_000_000


def test_it_is_a_component_of_a_mixture() -> None:
    """The mixture has its records at its own positions, and so do random operations."""
    sampler = WeightedSampler([3, 0, 1], seed=2)
    mixture = MixtureSampler([IndexSampler(5), sampler], [1, 1])
    components, indices = mixture.locate(np.arange(40))
    own = indices[components == 1]
    assert (mixture.record_keys(0, 40)[components == 1] - 5).tolist() == sampler.record_keys_at(own).tolist()
