"""HierarchicalSampler: units shuffled, records shuffled within windows of units, any position alone."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import HierarchicalSampler

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


@settings(max_examples=40)
@given(sizes=SIZES, window=st.integers(1, 14), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 3))
def test_each_epoch_has_every_record_once_window_by_window(
    sizes: list[int], window: int, seed: int, epoch: int
) -> None:
    """The units of a window are whole: the window holds exactly their records, in some order."""
    sampler = HierarchicalSampler(sizes, window_units=window, seed=seed)
    total = sum(sizes)
    keys = sampler.record_keys(epoch * total, (epoch + 1) * total).tolist()
    assert sorted(keys) == list(range(total))
    unit_of = [unit for unit, size in enumerate(sizes) for _ in range(size)]
    # From one position where no unit is half read to the next: no more than a window, and often less.
    start = 0
    while start < total:
        inside: set[int] = set()
        stop = start
        while not inside or stop - start < sum(sizes[unit] for unit in inside):
            inside.add(unit_of[keys[stop]])
            stop += 1
        assert len(inside) <= window
        start = stop


def test_epochs_and_seeds_differ_and_records_mix() -> None:
    """Units and records are shuffled, with another order for each epoch and seed."""
    sampler = HierarchicalSampler([50] * 40, window_units=8, seed=1)
    epochs = sampler.record_keys(0, 4000).reshape(2, 2000)
    other = HierarchicalSampler([50] * 40, window_units=8, seed=2).record_keys(0, 2000)
    orders = [*epochs, other]
    for one, two in itertools.combinations(orders, 2):
        assert np.mean(one == two) < 0.01
    for keys in orders:
        assert np.mean(np.diff(keys) == 1) < 0.02
        units = keys.reshape(5, 400) // 50
        assert [len(np.unique(window)) for window in units] == [8] * 5
        # Each window begins with all of its units: 16 records are of 7 of 8 units on average.
        assert np.mean([len(np.unique(window[:16])) for window in units]) > 5


def test_a_window_that_holds_all_is_uniform() -> None:
    """Each record comes first as often as any other: 1,000 seeds over 8 records, chi-squared below 1 in 10,000."""
    firsts = [HierarchicalSampler([3, 5], window_units=2, seed=seed)[0].record_key for seed in range(1000)]
    counts = np.bincount(firsts, minlength=8)
    assert ((counts - 125) ** 2 / 125).sum() < 29.9


def test_windows_without_records_have_numbers_too() -> None:
    """Numbers of windows are counted modulo 2**64, in as many epochs as there are positions."""
    sampler = HierarchicalSampler([1, 0, 0, 0, 0, 0, 0, 0], window_units=1, seed=0)
    assert sampler.record_keys(2**63 - 2, 2**63).tolist() == [0, 0]


def test_epochs_go_on_in_an_endless_order() -> None:
    """An endless order begins as one of two epochs; other windows are another order."""
    sampler = HierarchicalSampler([5, 3], window_units=1, seed=0)
    ended = HierarchicalSampler([5, 3], window_units=1, seed=0, num_epochs=2)
    assert ended.endless().record_keys(0, 40)[:16].tolist() == ended.record_keys(0, 16).tolist()
    assert ended.fingerprint() == sampler.fingerprint()
    assert HierarchicalSampler([5, 3], window_units=2, seed=0).fingerprint() != sampler.fingerprint()


@settings(max_examples=40)
@given(sizes=SIZES, window=st.integers(1, 14), seed=st.integers(0, 9), data=st.data())
def test_only_the_given_keys_come_and_a_window_holds_no_more_units(
    sizes: list[int], window: int, seed: int, data: st.DataObject
) -> None:
    """Each given key comes as often as it is given, in any order of giving; a unit's keys are in one window."""
    keys = data.draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=30))
    numbers = data.draw(st.none() | st.lists(st.integers(0, 4), min_size=len(sizes), max_size=len(sizes)))
    sampler = HierarchicalSampler(sizes, window_units=window, seed=seed, keys=keys, unit_numbers=numbers)
    found = sampler.record_keys(0, len(keys)).tolist()
    assert sorted(found) == sorted(keys)
    unit_of = [unit for unit, size in zip(numbers or range(len(sizes)), sizes, strict=True) for _ in range(size)]
    last_seen = {unit_of[key]: position for position, key in enumerate(found)}
    open_units = [
        {unit_of[key] for key in found[: position + 1] if last_seen[unit_of[key]] >= position}
        for position in range(len(found))
    ]
    assert max(map(len, open_units)) <= window


def test_all_keys_are_the_order_without_keys() -> None:
    """Naming every record in order changes nothing but the fingerprint; numbers that differ are units of their own."""
    plain = HierarchicalSampler([5, 3, 4], window_units=2, seed=0)
    named = HierarchicalSampler([5, 3, 4], window_units=2, seed=0, keys=range(12))
    numbered = HierarchicalSampler([5, 3, 4], window_units=2, seed=0, unit_numbers=[7, 1, 3])
    assert named.record_keys(0, 36).tolist() == plain.record_keys(0, 36).tolist()
    assert numbered.fingerprint() == plain.fingerprint() != named.fingerprint()
