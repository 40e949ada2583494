"""The way back from records to positions and steps: what a scan of the order finds."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import BalancedSampler, HierarchicalSampler, IndexSampler, MixtureSampler, PackingSampler, ShardOptions
from millstream.loader.pipeline import locator


@st.composite
def orders(draw: st.DrawFn, *, rows: bool = False) -> tuple[Any, int]:
    """Draws a sampler of one source, and the number of records of that."""
    seed, shuffle = draw(st.integers(0, 9)), draw(st.booleans())
    num_epochs = draw(st.none() | st.integers(1, 3))
    if rows:
        lengths = draw(
            st.lists(st.integers(0, 25), min_size=1, max_size=30).filter(lambda some: any(0 < n < 9 for n in some))
        )
        strategy, overflow = draw(
            st.sampled_from(
                [("concat_then_split", "error"), *(("best_fit", how) for how in ("split", "truncate", "drop"))]
            )
        )
        ends = sorted(draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
        units = {"unit_sizes": np.diff([0, *ends, len(lengths)]), "window_units": draw(st.none() | st.integers(1, 3))}
        options = {"strategy": strategy, "overflow": overflow, "num_epochs": num_epochs, **units}
        return PackingSampler(lengths, 10, shuffle=shuffle, seed=seed, **options), len(lengths)  # type: ignore[arg-type]
    size = draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["all", "some", "units"]))
    if kind == "some":
        keys = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=30))
        return IndexSampler(len(keys), shuffle=shuffle, seed=seed, num_epochs=num_epochs, keys=keys), size
    if kind == "units":
        sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any))
        window = draw(st.integers(1, 4))
        return HierarchicalSampler(sizes, window_units=window, seed=seed, num_epochs=num_epochs), sum(sizes)
    return IndexSampler(size, shuffle=shuffle, seed=seed, num_epochs=num_epochs), size


@st.composite
def mixtures(draw: st.DrawFn, *, rows: bool = False, depth: int = 1) -> tuple[Any, int]:
    """Draws a mixture whose weights change, or one sampler."""
    if not draw(st.integers(0, 3)) or not depth:
        return draw(orders(rows=rows))
    parts = draw(st.lists(mixtures(rows=rows, depth=depth - 1), min_size=1, max_size=4))
    weights = st.lists(st.integers(0, 6) | st.sampled_from([70_000]), min_size=len(parts), max_size=len(parts)).filter(
        any
    )
    mixture = MixtureSampler(
        [sampler for sampler, _ in parts],
        draw(weights),
        stop=draw(st.sampled_from(["first_exhausted", "all_exhausted", "drop_exhausted"])),
        source_lengths=[length for _, length in parts],
    )
    for position in sorted(draw(st.sets(st.integers(1, 60), max_size=4))):
        if mixture.length is None or position <= mixture.length:
            mixture = mixture.reweighted(position, draw(weights))
    return mixture, sum(length for _, length in parts)


def scanned(sampler: Any, stop: int, num_keys: int) -> list[list[int]]:
    """Returns the positions of each key, found by asking for every position: the oracle."""
    found: list[set[int]] = [set() for _ in range(num_keys)]
    for position in range(stop):
        at = np.array([position])
        is_row = getattr(sampler, "row_length", None) is not None
        keys = sampler.segments_at(at).elements if is_row else sampler.record_keys_at(at)
        for key in keys.tolist():
            found[key].add(position)
    return [sorted(positions) for positions in found]


@settings(max_examples=50)
@given(drawn=mixtures() | mixtures(rows=True), stop=st.integers(0, 70))
def test_positions_are_those_that_a_scan_finds(drawn: tuple[Any, int], stop: int) -> None:
    """`positions_of` is, for all orders, mixtures and rows, the ascending list that a scan finds."""
    sampler, num_records = drawn
    asked = [*range(num_records), num_records + 3, -1, 0]
    table = sampler.positions_of(asked, stop)
    assert table.dtype == np.int64
    listed = [[position for position in row if position >= 0] for row in table.tolist()]
    until = stop if sampler.length is None else min(stop, sampler.length)
    expected = scanned(sampler, until, num_records)
    assert listed == [*expected, [], [], expected[0]]
    assert table.shape[1] == max(map(len, listed))
    assert all(
        row[len(some) :] == [-1] * (len(row) - len(some)) for row, some in zip(table.tolist(), listed, strict=True)
    )


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
        patch.setattr(locator, "CHUNK_KEYS", 64)
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
    filtered = millstream.load(range(3), transformations=[millstream.FilterTransform(bool)])
    with pytest.raises(TypeError, match=r"steps_of\(keys\) needs a 1:1 pipeline: the batches after operations\[0\]"):
        filtered.steps_of([1], stop=3)


def test_a_million_keys_of_a_billion_are_found_without_a_scan() -> None:
    """Each key of an order of 10**9 leads to a position that has it."""
    sampler = IndexSampler(10**9, shuffle=True, seed=0, num_epochs=1)
    keys = np.random.default_rng(0).integers(0, 10**9, 10**6)
    positions = sampler.positions_of(keys)
    assert positions.shape == (10**6, 1)
    assert np.array_equal(sampler.record_keys_at(positions[::1000, 0]), keys[::1000])
