"""Options of whole chains: how much filters may drop, and whose options count."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import millstream as grain
from millstream import experimental
from millstream.experimental import DatasetOptions, WithOptionsIterDataset
from support.streams import drain


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
    own = DatasetOptions(on_error="skip", max_errors=1024)
    other = DatasetOptions(on_error="skip", max_errors=512, filter_warn_threshold_ratio=None)
    merged = own.merge(other)
    assert (merged.max_errors, merged.filter_warn_threshold_ratio) == (1024, None)
    assert own.merge(None) == own
    with pytest.raises(TypeError, match="other must be DatasetOptions, or None, got 3 of type int"):
        own.merge(3)  # type: ignore[arg-type]
    assert DatasetOptions(filter_warn_threshold_ratio=0.9).merge(other).filter_warn_threshold_ratio == 0.9

    strict = thinning(filter_raise_threshold_ratio=0.9)
    assert list(WithOptionsIterDataset(strict, DatasetOptions(filter_raise_threshold_ratio=None))) == KEPT
    with pytest.raises(ValueError, match="left 100"):
        list(WithOptionsIterDataset(strict, DatasetOptions(on_error="skip")))


class Eager(grain.IterDataset[int]):
    """A user's dataset that opens its parent as its iterator."""

    def __iter__(self) -> Any:
        return iter(self._parent)


class Late(grain.IterDataset[int]):
    """A user's dataset that opens one dataset after another, while it is read."""

    def __init__(self, datasets: Any) -> None:
        super().__init__()
        self.datasets = {"all": list(datasets)}

    def __iter__(self) -> Any:
        for dataset in self.datasets["all"]:
            yield from dataset


INTERLEAVED = experimental.InterleaveIterDataset
JOINS: dict[str, Callable[[list[Any]], Any]] = {
    "one": lambda parts: parts[0],
    "mix": lambda parts: grain.IterDataset.mix(parts, [1, 2, 1]),
    "zip": experimental.ZipIterDataset,
    "interleave": lambda parts: INTERLEAVED(parts, cycle_length=1),
    "later datasets": lambda parts: INTERLEAVED(
        grain.MapDataset.range(3).map(lambda number: parts[number]), cycle_length=2
    ),
    "limit": lambda parts: experimental.LimitIterDataset(parts[0], 7),
    "repeat": lambda parts: experimental.RepeatIterDataset(INTERLEAVED(parts, cycle_length=2), 2),
    "cache": lambda parts: experimental.RepeatIterDataset(experimental.CacheIterDataset(parts[1]), 2),
    "eager": lambda parts: Eager(Eager(parts[0])),
    "late": Late,
    "eager over late": lambda parts: Eager(Late([INTERLEAVED(parts, cycle_length=1)])),
    "interleave of own": lambda parts: INTERLEAVED([Late(parts), Eager(parts[2])], cycle_length=1),
}


def fails_at_three(number: int) -> int:
    if number % 5 == 3:
        raise ValueError(number)
    return number


def is_whole(number: int) -> bool:
    return number % 5 != 3


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("join", JOINS)
def test_options_reach_every_dataset_below_them(join: str, batched: bool) -> None:
    """Whatever joins datasets, and whenever it opens them, elements that fail are skipped as if they were not there."""
    ranges = [grain.MapDataset.range(100 * part, 100 * part + 12) for part in range(3)]
    kinds: list[Callable[[Any], Any]] = [lambda dataset: dataset, lambda dataset: dataset.to_iter_dataset()]
    for convert in kinds:
        failing = JOINS[join]([convert(one.map(fails_at_three)) for one in ranges])
        if not isinstance(failing, grain.IterDataset):
            failing = failing.to_iter_dataset()
        whole = list(JOINS[join]([convert(one.filter(is_whole)) for one in ranges]))
        options = DatasetOptions(on_error="skip")
        skipping = WithOptionsIterDataset(failing, options)
        for _ in range(2):
            found = list(skipping.batch(2, batch_fn=list)) if batched else list(skipping)
            assert (list(itertools.chain.from_iterable(found)) if batched else found) == whole
        with pytest.raises(ValueError, match="3"):
            list(failing)


@pytest.mark.parametrize("join", ["mix", "interleave", "late"])
def test_limits_of_filters_reach_every_dataset(join: str) -> None:
    """A filter that drops too much is an error in a dataset that opens late, too, here and in workers."""
    parts = [NUMBERS.filter(thinned).to_iter_dataset()] * 3
    dataset = WithOptionsIterDataset(JOINS[join](parts), DatasetOptions(filter_raise_threshold_ratio=0.9))
    for stream in [dataset] if join == "late" else [dataset, dataset.batch(9).mp_prefetch(1)]:
        with iter(stream) as iterator, pytest.raises(ValueError, match="left 100 of 1000 records"):
            list(iterator)


@pytest.mark.parametrize("batched", [False, True])
def test_a_stream_below_a_mixture_has_options_of_its_own(batched: bool) -> None:
    """Its elements that fail are skipped, and those of the other streams are errors, whatever follows the mixture."""
    skipping = grain.MapDataset.range(8).map(fails_at_three).to_iter_dataset().options(on_error="skip")
    others = [
        grain.MapDataset.range(10, 18).to_iter_dataset(),
        grain.MapDataset.range(3, 5).map(fails_at_three).to_iter_dataset(),
    ]
    for other, error in zip(others, (None, ValueError), strict=True):
        mixture: Any = grain.IterDataset.mix([skipping, other])
        expected, raised = drain(iter(mixture.filter(lambda _: True)))
        found, same = drain(iter(mixture.map(abs).batch(1, batch_fn=list).map(sum) if batched else mixture.map(abs)))
        assert (found, same) == (expected, raised)
        assert (raised, len(found) > 12) == (error, error is None)
