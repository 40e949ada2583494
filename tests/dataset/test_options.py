"""Options of whole chains: how much filters may drop, and whose options count."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import millstream as grain
from millstream.experimental import DatasetOptions, WithOptionsIterDataset


def thinned(number: int) -> bool:
    """Keeps one in ten of the numbers from 2000 to 2999, and of the others half."""
    return number % 10 == 0 if 2000 <= number < 3000 else number % 2 == 0


def thinning(**options: Any) -> Any:
    dataset = grain.MapDataset.range(4500).filter(thinned).to_iter_dataset()
    return WithOptionsIterDataset(dataset, DatasetOptions(**options))


KEPT = [number for number in range(4500) if thinned(number)]

NUMBERS = grain.MapDataset.range(4500)
STREAM = NUMBERS.to_iter_dataset()
HALVES = [grain.MapDataset.range(start, 4500, 2).to_iter_dataset() for start in (0, 1)]
THREADS = grain.ReadOptions(3, 100)

PLACES: dict[str, Callable[[DatasetOptions], Any]] = {
    "after": lambda options: WithOptionsIterDataset(STREAM.filter(thinned), options),
    "before": lambda options: WithOptionsIterDataset(STREAM, options).filter(thinned),
    "in a dataset": lambda options: WithOptionsIterDataset(NUMBERS.filter(thinned), options),
    "threads": lambda options: WithOptionsIterDataset(
        NUMBERS.to_iter_dataset(THREADS).filter(thinned).map(abs), options
    ),
    "workers": lambda options: WithOptionsIterDataset(STREAM, options).filter(thinned).mp_prefetch(2),
    "after a mixture": lambda options: WithOptionsIterDataset(grain.IterDataset.mix(HALVES).filter(thinned), options),
    "below a mixture": lambda options: WithOptionsIterDataset(grain.IterDataset.mix([STREAM.filter(thinned)]), options),
}


@pytest.mark.parametrize("place", PLACES)
def test_too_much_dropped_is_an_error(place: str) -> None:
    """The error follows the remaining elements of the thousand records, for any filter and position of the options."""
    iterator = iter(PLACES[place](DatasetOptions(filter_raise_threshold_ratio=0.9)))
    until = KEPT.index(3000)

    assert list(itertools.islice(iterator, until)) == KEPT[:until]
    with pytest.raises(ValueError, match=r"left 100 of 1000 records, those at the positions 2000 to 2999: 90.0%"):
        next(iterator)
    iterator.close()


@pytest.mark.parametrize("ratio", [None, 0.91, 1, np.float32(0.95)])
def test_less_is_none(ratio: float | None) -> None:
    """Below the limit, all that the filter leaves is delivered."""
    assert list(thinning(filter_raise_threshold_ratio=ratio)) == KEPT


@pytest.mark.parametrize("after", ["batches", "children"])
def test_whole_outputs_come_before_the_error(after: str) -> None:
    """Complete batches are delivered, an incomplete one is not; the children of a record count as one record."""
    iterator: Any = thinning(filter_raise_threshold_ratio=0.9)
    iterator = iter(iterator.batch(300) if after == "batches" else iterator.flat_map(lambda number: [number] * 20, 20))
    outputs = list(itertools.islice(iterator, 3 if after == "batches" else 20 * 1100))
    with pytest.raises(ValueError, match=r"an error is 90\.0%"):
        next(iterator)

    expected = KEPT[:900] if after == "batches" else np.repeat(KEPT[:1100], 20).tolist()
    assert np.array(outputs).ravel().tolist() == expected


@pytest.mark.parametrize(("options", "lines"), [({}, 1), ({"filter_warn_threshold_ratio": None}, 0)])
def test_much_dropped_is_said(options: dict[str, None], lines: int, caplog: pytest.LogCaptureFixture) -> None:
    """A large share of dropped records is logged once per iterator, by default from 90 %, unless disabled."""
    with caplog.at_level(logging.WARNING, "millstream"):
        assert list(thinning(**options)) == KEPT

    assert [record.message for record in caplog.records if "left 100 of 1000 records" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == lines


def test_a_resumed_stream_counts_whole_thousands() -> None:
    """After a resume within a thousand records, only complete thousands count, and the elements are the same."""
    dataset = thinning(filter_raise_threshold_ratio=0.9)
    first = iter(dataset)
    for _ in range(700):
        next(first)
    state = first.get_state()
    fresh = iter(dataset)
    fresh.set_state(state)
    until = KEPT.index(3000)

    assert list(itertools.islice(fresh, until - 700)) == KEPT[700:until]
    with pytest.raises(ValueError, match="left 100"):
        next(fresh)


def test_options_that_were_given_count() -> None:
    """One's own before another's, one's own defaults after them; in a chain, the last ones say most."""
    own = DatasetOptions(min_shm_size=1024)
    other = DatasetOptions(min_shm_size=512, filter_warn_threshold_ratio=None)
    merged = own.merge(other)
    assert (merged.min_shm_size, merged.filter_warn_threshold_ratio) == (1024, None)
    assert own.merge(None) == own
    assert DatasetOptions(filter_warn_threshold_ratio=0.9).merge(other).filter_warn_threshold_ratio == 0.9

    strict = thinning(filter_raise_threshold_ratio=0.9)
    assert list(WithOptionsIterDataset(strict, DatasetOptions(filter_raise_threshold_ratio=None))) == KEPT
    with pytest.raises(ValueError, match="left 100"):
        list(WithOptionsIterDataset(strict, DatasetOptions(min_shm_size=3)))
