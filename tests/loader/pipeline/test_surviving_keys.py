"""Filtering ahead gives the stream that filtering on the fly gives, and makes it 1:1."""

from pathlib import Path
from typing import Any

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
    iterators = [
        iter(inline_loader(range(100_000), IndexSampler(100_000, keys=chosen), Batch(8)))
        for chosen in (keys.tolist(), keys, other, None)
    ]
    iterators[0].set_state(iterators[1].get_state())
    for iterator in iterators[2:]:
        with pytest.raises(millstream.CheckpointError, match=r"sampler.keys: saved .*, here 100000#"):
            iterators[0].set_state(iterator.get_state())


NO_VERDICT = r"must be Maps and Filters, got .* as operations\[1\]: .*place it after the Filters"


@pytest.mark.parametrize(
    ("source", "operations", "error", "text"),
    [
        *((range(5), [abs, one], TypeError, NO_VERDICT) for one in (Split(2), Jitter(), AddIndex(), Batch(2))),
        ([], [], ValueError, "at least one record"),
        (range(3), abs, TypeError, "operations must be a list"),
        (range(30), [FailOn(4)], KeyError, "4"),
    ],
)
def test_mistakes_are_errors(source: Any, operations: Any, error: type[Exception], text: str) -> None:
    """Operations that split records or depend on the position are refused, other mistakes as by DataLoader."""
    with pytest.raises(error, match=text):
        millstream.surviving_keys(source, operations)
