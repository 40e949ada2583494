"""Filters: a pass that keeps nothing is named in the log; filtering ahead gives the same stream, and makes it 1:1."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.samplers import IndexSampler, SequentialSampler
from millstream.transforms import Batch, Filter, FlatMap, Transformation
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


def lines_of(caplog: pytest.LogCaptureFixture, *operations: Any, **options: Any) -> tuple[list[str], list[Any]]:
    """Returns what a pass over 100 records, for some epochs, writes to the log, and its first two outputs."""
    caplog.clear()
    with iter(millstream.load(range(100), transformations=operations, **options)) as iterator:
        outputs = list(itertools.islice(iterator, 2))
    return caplog.messages, outputs


@pytest.mark.parametrize("options", [{"read_options": millstream.ReadOptions(0)}, {}, {"worker_count": 1}])
def test_a_filter_that_keeps_nothing_is_named_once_in_ten_times_as_many_epochs(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """An endless stream logs it after 1, 10 and 100 epochs without an output, with the records read, and continues."""
    index = millstream.MapWithIndex(lambda index, _: index)
    lines, outputs = lines_of(caplog, index, Filter(lambda index: index >= 30_000), Batch(4), **options)

    assert [batch.tolist() for batch in outputs] == [[30_000, 30_001, 30_002, 30_003], [30_004, 30_005, 30_006, 30_007]]
    assert len(lines) == 3
    for line, epochs in zip(lines, [("100", "an epoch"), ("1000", "10 epochs"), ("10000", "100 epochs")], strict=True):
        said = f"millstream: operations[1], Filter(<lambda>) dropped all {epochs[0]} records of {epochs[1]}."
        assert line.startswith(said)


def test_a_stream_that_ends_without_an_output_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """One epoch logs one line, even where a shard or a Batch leaves some records out, and whatever comes after."""
    for operations in (
        [Filter(lambda _: False)],
        [FlatMap(lambda _: [], max_fan_out=2), Batch(7)],
        [Filter(lambda _: False), Batch(7), Filter(lambda _: True), Batch(2)],
        [Batch(7, drop_remainder=True), Filter(lambda _: False)],
        [Filter(lambda _: True), Batch(7), Filter(lambda _: False)],
    ):
        lines, outputs = lines_of(caplog, *operations, num_epochs=1)
        assert (len(lines), outputs) == (1, [])
        assert re.search(r"dropped all (100|98) records of an epoch", lines[0])


def test_a_chain_names_the_operations_that_its_user_wrote(caplog: pytest.LogCaptureFixture) -> None:
    """Steps that a chain adds, and packers, which drop nothing, are not named; the records are those of an epoch."""
    documents = [{"tokens": np.arange(3)}] * 50
    for operation in (Batch(4), millstream.FirstFitPack({"tokens": 8}, num_packing_bins=2)):
        caplog.clear()
        chain = millstream.MapDataset.source(documents).repeat(3).to_iter_dataset().filter(lambda _: False)
        assert list(chain.apply(operation)) == []
        (message,) = caplog.messages
        assert message.startswith("millstream: operations[0], Filter(<lambda>) dropped all 50 records of an epoch.")


def test_a_filter_that_keeps_something_is_never_named(caplog: pytest.LogCaptureFixture) -> None:
    """One record an epoch is enough, and so is a batch that takes many epochs to fill."""
    lines, outputs = lines_of(caplog, Filter(lambda number: number == 50), Batch(30))

    assert (lines, len(outputs)) == ([], 2)


def test_what_fails_is_not_said_to_let_nothing_through(caplog: pytest.LogCaptureFixture) -> None:
    """An error before anything has come, in a call that reads a whole epoch, is the error alone."""
    loader = millstream.load(range(1), transformations=[Filter(lambda number: 1 // number > 0)])
    with pytest.raises(ZeroDivisionError):
        next(iter(loader))
    assert not caplog.messages
