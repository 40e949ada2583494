"""Filtering ahead gives the stream that filtering on the fly gives, and makes it 1:1."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.samplers import IndexSampler, SequentialSampler
from millstream.transforms import Batch, Transformation
from support.draw.random_pipelines import AddIndex, DropMultiples, FailOn, Jitter, Scale, Split
from support.laws import inline_loader
from support.streams import drain

deterministic = st.lists(
    st.one_of(st.builds(Scale, st.integers(2, 5)), st.builds(DropMultiples, st.integers(2, 4))), max_size=4
)


@given(
    size=st.integers(1, 700),
    operations=deterministic,
    threads=st.sampled_from([0, 3]),
    batch_size=st.integers(1, 5),
)
@settings(max_examples=80)
def test_surviving_keys_are_the_records_whose_element_is_left(
    size: int, operations: list[Transformation], threads: int, batch_size: int
) -> None:
    """The keys are those of the records that survive; a pipeline over them gives the batches of one that filters."""
    options = millstream.ReadOptions(num_threads=threads)
    keys = millstream.surviving_keys(range(size), operations, read_options=options)
    filtered = inline_loader(range(size), SequentialSampler(size), *operations, Batch(batch_size))

    assert keys.dtype == np.int64
    if not len(keys):
        assert list(filtered) == []
        return
    ahead = inline_loader(range(size), SequentialSampler(len(keys), keys=keys), *operations, Batch(batch_size))

    assert drain(iter(ahead)) == drain(iter(filtered))


def test_workers_find_the_same_and_read_it(tmp_path: Path) -> None:
    """Worker processes give the same keys; saved, loaded and given to a sampler, they cross to workers again."""
    operations: list[Transformation] = [Scale(3), DropMultiples(2)]
    keys = millstream.surviving_keys(range(1000), operations, worker_count=2)
    np.save(tmp_path / "odd.npy", keys)
    mapped = np.load(tmp_path / "odd.npy", mmap_mode="r")
    sampler = IndexSampler(len(mapped), shuffle=True, seed=4, num_epochs=1, keys=mapped)

    assert keys.tolist() == millstream.surviving_keys(range(1000), operations).tolist() == list(range(1, 1000, 2))
    with iter(inline_loader(range(1000), sampler, Batch(64), worker_count=1)) as batches:
        assert drain(batches) == drain(iter(inline_loader(range(1000), sampler, Batch(64))))


def test_other_keys_are_another_stream() -> None:
    """A state says which keys it belongs to, by their number and a digest of all; others are refused."""
    keys = np.arange(100_000)
    other = keys.copy()
    other[54_321] = 7
    states = [
        iter(inline_loader(range(100_000), IndexSampler(100_000, keys=chosen), Batch(8))).get_state()
        for chosen in (keys, other, None)
    ]
    again = iter(inline_loader(range(100_000), IndexSampler(100_000, keys=list(range(100_000))), Batch(8)))
    again.set_state(states[0])

    for state in states[1:]:
        with pytest.raises(millstream.CheckpointError, match=r"sampler.keys: saved .*, here 100000#"):
            again.set_state(state)


@pytest.mark.parametrize("operation", [Split(2), Jitter(), AddIndex(), Batch(2)])
def test_operations_without_a_verdict_on_a_record_are_refused(operation: Transformation) -> None:
    """Operations that split records or depend on the position are an error."""
    with pytest.raises(
        TypeError, match=r"must be Maps and Filters, got .* as operations\[1\]: .*place it after the Filters"
    ):
        millstream.surviving_keys(range(5), [abs, operation])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: millstream.surviving_keys([], []), ValueError, "at least one record"),
        (lambda: millstream.surviving_keys(range(3), abs), TypeError, "operations must be a list"),  # type: ignore[arg-type]
        (lambda: millstream.surviving_keys(range(30), [FailOn(4)]), KeyError, "4"),
    ],
)
def test_mistakes_are_errors(make: Callable[[], object], error: type[Exception], text: str) -> None:
    """Wrong arguments are refused as by DataLoader, and an operation's error is raised."""
    with pytest.raises(error, match=text):
        make()
