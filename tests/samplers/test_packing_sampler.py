"""PackingSampler: every token once, no row too long, rows nearly full, other rows each epoch, any position alone."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import PackingSampler
from millstream.core.segments import Segments
from millstream.samplers.rows.packing_plan import ByLength

ORDER: Any = {"shuffle": True, "seed": 0, "num_epochs": 1}


def listed(rows: Segments) -> list[list[tuple[int, int, int]]]:
    triples = list(zip(*(np.asarray(column).tolist() for column in rows[1:]), strict=True))
    return [triples[start:stop] for start, stop in itertools.pairwise(rows.offsets.tolist())]


def plain_best_fit(lengths: list[int], row_length: int) -> list[int]:
    """Returns how full each row is: the longest piece first, each into the fullest row that has space for it."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if row + length <= row_length]
        if fitting:
            rows.remove(max(fitting))
        rows.append(max(fitting, default=0) + length)
    return sorted(rows)


@st.composite
def samplers(draw: st.DrawFn) -> PackingSampler:
    """Draws a sampler of documents in units, some of them empty, and a window of these; or none."""
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any))
    strategy, overflow = draw(
        st.sampled_from([("best_fit", "truncate"), ("best_fit", "split"), ("concat_then_split", "error")])
    )
    ends = sorted(draw(st.lists(st.integers(0, len(lengths)), max_size=6)))
    return PackingSampler(
        lengths,
        draw(st.integers(1, 40)),
        strategy=strategy,
        overflow=overflow,
        shuffle=draw(st.booleans()),
        seed=3,
        unit_sizes=np.diff([0, *ends, len(lengths)]),
        window_units=draw(st.none() | st.integers(1, 4)),
    )


@given(sampler=samplers(), epoch=st.integers(0, 2))
def test_every_token_once_and_no_row_too_long(sampler: PackingSampler, epoch: int) -> None:
    """Each epoch has every token once, of a truncated document those at its beginning, and no row is too long."""
    rows = listed(sampler.segments(epoch * sampler.num_records, (epoch + 1) * sampler.num_records))
    seen = Counter((key, token) for row in rows for key, begin, end in row for token in range(begin, end))
    lengths, row_length = sampler.lengths.tolist(), sampler.row_length
    limit = row_length if sampler.overflow == "truncate" else 30
    assert seen == Counter((key, token) for key, length in enumerate(lengths) for token in range(min(length, limit)))
    sizes = [sum(end - begin for _, begin, end in row) for row in rows]
    assert min(sizes) > 0
    assert max(sizes) <= row_length
    if sampler.strategy == "concat_then_split":
        assert sum(size < row_length for size in sizes) <= len(sampler._window_rows)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), row_length=st.integers(20, 50))
def test_best_fit_is_best_fit_decreasing(lengths: list[int], row_length: int) -> None:
    """The plan over the histogram fills its rows as a plan document by document does, in each epoch."""
    sampler = PackingSampler(lengths, row_length, num_epochs=2, shuffle=True, seed=0)
    rows = listed(sampler.segments(0, len(sampler)))
    for epoch in (rows[: sampler.num_records], rows[sampler.num_records :]):
        assert sorted(sum(lengths[key] for key, _, _ in row) for row in epoch) == plain_best_fit(lengths, row_length)


@settings(max_examples=20)
@given(sampler=samplers(), start=st.integers(0, 60), count=st.integers(0, 200))
def test_tokens_between_positions_are_those_of_their_rows(sampler: PackingSampler, start: int, count: int) -> None:
    """Within an epoch and over several: as many as the documents of the rows have there."""
    assert sampler.tokens_between(start, start + count) == sampler.segments(start, start + count).lengths.sum()
    for wrong in ((-1, 2), (2, 1)):
        with pytest.raises(IndexError, match=r"Asked for positions"):
            sampler.tokens_between(*wrong)
    # A mixture may go on after the last epoch of a component.
    assert PackingSampler([6, 6], 6, num_epochs=1).tokens_between(1, 3) == 12


def test_documents_that_are_too_long_are_cut_or_dropped() -> None:
    """As `overflow` says, which by default refuses them; concatenation always cuts."""
    lengths = [3, 10, 0, 25]
    options: dict[str, Any] = {"num_epochs": 1}
    expected = {
        "truncate": [(0, 0, 3), (1, 0, 10), (3, 0, 10)],
        "drop": [(0, 0, 3), (1, 0, 10)],
        "split": [(0, 0, 3), (1, 0, 10), (3, 0, 10), (3, 10, 20), (3, 20, 25)],
    }
    for overflow, pieces in expected.items():
        sampler = PackingSampler(lengths, 10, overflow=overflow, **options)
        assert sorted(itertools.chain(*listed(sampler.segments(0, len(sampler))))) == pieces
    stream = PackingSampler(lengths, 10, strategy="concat_then_split", **options)
    assert listed(stream.segments(0, 4)) == [
        [(0, 0, 3), (1, 0, 7)],
        [(1, 7, 10), (3, 0, 7)],
        [(3, 7, 17)],
        [(3, 17, 25)],
    ]


@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
def test_rows_of_realistic_lengths_are_full(overflow: str) -> None:
    """Rows of documents with log-normal lengths, as of web text, are 99.9 % full; 99 % in windows of 8,000."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 1.1, 80_000).astype(np.int64), 8, None)
    windows: dict[str, Any] = {"unit_sizes": [1000] * 80, "window_units": 8}
    for units, share in (({}, 0.999), (windows, 0.99)):
        sampler = PackingSampler(lengths, 2048, overflow=overflow, num_epochs=1, **units)
        assert sampler.tokens_between(0, len(sampler)) >= share * 2048 * len(sampler)


@pytest.mark.parametrize("row_length", [10, 255, 256, 8191, 8192, 100_000])
def test_many_documents_are_sorted_in_little_memory(row_length: int) -> None:
    """By length, as by a stable sort, at 7 bytes a segment at most; at 5, in rows of up to 8,191."""
    lengths = np.random.default_rng(row_length).integers(0, row_length, 1_500_000, endpoint=True)
    by_length = ByLength.of(lengths, row_length)
    chosen = np.random.default_rng(1).integers(0, len(lengths), 10_000)
    assert np.array_equal(by_length.at(chosen), np.argsort(lengths, kind="stable")[chosen])
    assert np.array_equal(np.diff(by_length.firsts), np.bincount(lengths, minlength=row_length + 1))
    held = sum(array.nbytes for array in (by_length._offsets, by_length._ranks, by_length._shifts))
    assert held <= len(lengths) * (7 if row_length > 8191 else 5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("strategy", ["best_fit", "concat_then_split"])
def test_each_epoch_and_seed_has_other_rows(strategy: str, window: int | None) -> None:
    """Hardly a row has the pieces of one of another epoch or seed, and they come in another order."""
    lengths = np.random.default_rng(0).integers(5, 60, 5000)
    one, two = (
        PackingSampler(
            lengths,
            128,
            shuffle=True,
            seed=seed,
            num_epochs=2,
            strategy=strategy,
            unit_sizes=[500] * 10,
            window_units=window,
        )
        for seed in (1, 2)
    )
    count = one.num_records
    orders = [listed(s.segments(start, start + count)) for s, start in ((one, 0), (one, count), (two, 0))]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        same = {tuple(sorted(row)) for row in orders[first]} & {tuple(sorted(row)) for row in orders[second]}
        assert len(same) < 0.02 * count
        assert orders[first][0] != orders[second][0]


@pytest.mark.parametrize("strategy", ["best_fit", "concat_then_split"])
def test_rows_come_window_by_window(strategy: str) -> None:
    """100 rows have documents of two windows at most; windows come in another order each epoch."""
    lengths = np.random.default_rng(0).integers(5, 60, 40_000)
    sampler = PackingSampler(
        lengths, 128, shuffle=True, seed=3, strategy=strategy, unit_sizes=[100] * 400, window_units=8
    )
    orders = []
    for epoch in range(2):
        rows = sampler.segments(epoch * sampler.num_records, (epoch + 1) * sampler.num_records)
        units = rows.elements // 100
        parts = np.split(units, rows.offsets[100:-1:100])
        assert max(len(np.unique(part)) for part in parts) <= 16
        windows = units % 50
        assert all(len(np.unique(row)) == 1 for row in np.split(windows, rows.offsets[1:-1]))
        orders.append(windows[np.flatnonzero(np.diff(windows, prepend=-1))].tolist())
        assert sorted(orders[epoch]) == list(range(50))
        # The rows of a window are those of all its units, mixed: 100 rows have documents of nearly all of them.
        assert np.median([len(np.unique(part)) for part in parts]) >= 8
    assert orders[0] != orders[1]
    everywhere = PackingSampler(lengths, 128, shuffle=True, seed=3, strategy=strategy).segments(0, 100)
    assert strategy == "concat_then_split" or len(np.unique(everywhere.elements // 100)) > 200


def test_one_window_is_no_window() -> None:
    """Units of which all fit into a window change no row and no word of the fingerprint."""
    plain = PackingSampler([3, 5, 2, 7], 8, **ORDER)
    for options in ({"unit_sizes": [2, 2]}, {"unit_sizes": [1, 3], "window_units": 2}):
        sampler = PackingSampler([3, 5, 2, 7], 8, **ORDER, **options)
        assert listed(sampler.segments(0, len(sampler))) == listed(plain.segments(0, len(plain)))
        assert sampler.fingerprint() == plain.fingerprint()


def test_partners_of_a_document_are_like_drawn() -> None:
    """Over 300 epochs, each of 276 pairs of equal documents shares a row equally often."""
    sampler = PackingSampler([5] * 24, 10, num_epochs=300, shuffle=True, seed=0)
    partners = Counter(frozenset((first[0], second[0])) for first, second in listed(sampler.segments(0, len(sampler))))
    assert sum(partners.values()) == 3600
    expected = 3600 / 276
    assert len(partners) == 276
    assert sum((count - expected) ** 2 / expected for count in partners.values()) < 275 + 4 * np.sqrt(2 * 275)


def test_documents_of_a_shuffled_row_come_in_any_order() -> None:
    """Over 6,000 rows of five documents of five lengths, each of the 120 orders comes equally often."""
    lengths = [1, 2, 4, 8, 16]
    sampler = PackingSampler(lengths * 60, 31, num_epochs=100, seed=1, shuffle=True)
    rows = sampler.segments(0, len(sampler))
    orders = Counter(map(tuple, rows.lengths.reshape(-1, 5).tolist()))
    assert len(sampler) == 6000
    assert len(orders) == 120
    assert sum((count - 50) ** 2 / 50 for count in orders.values()) < 119 + 4 * np.sqrt(2 * 119)
    plain = PackingSampler(lengths * 60, 31, shuffle=False, num_epochs=1).segments(0, 60)
    assert plain.lengths.reshape(-1, 5).tolist() == [lengths[::-1]] * 60


def test_lengths_of_any_integer_dtype_and_words() -> None:
    """The rows follow the numbers, not how they are stored; what decides them is in the fingerprint."""
    lengths = [3, 200, 7, 90]
    plain = PackingSampler(lengths, 255, **ORDER)
    small = PackingSampler(np.array(lengths, dtype=np.uint8), 255, **ORDER)
    assert plain.fingerprint() == small.fingerprint()
    assert listed(plain.segments(0, len(plain))) == listed(small.segments(0, len(small)))
    assert plain.fingerprint() == PackingSampler(lengths, 255, num_epochs=9, shuffle=True, seed=0).fingerprint()
    others = [
        PackingSampler([3, 200, 90, 7], 255, **ORDER),
        PackingSampler(lengths, 256, **ORDER),
        PackingSampler(lengths, 255, seed=1, shuffle=True, num_epochs=1),
        PackingSampler(lengths, 255, shuffle=False, num_epochs=1),
        PackingSampler(lengths, 255, overflow="drop", **ORDER),
        PackingSampler(lengths, 255, strategy="concat_then_split", **ORDER),
    ]
    others += [PackingSampler(lengths, 255, **ORDER, unit_sizes=[2, 2], window_units=1)]
    others += [PackingSampler(lengths, 255, **ORDER, unit_sizes=[1, 1, 2], window_units=size) for size in (1, 2)]
    assert len({sampler.fingerprint() for sampler in (plain, *others)}) == 10
