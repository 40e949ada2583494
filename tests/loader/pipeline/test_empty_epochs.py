"""A Filter that keeps nothing is named in the log, at growing intervals; one that keeps something never is."""

import itertools
import re
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.transforms import Batch, Filter, FlatMap


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
    index = millstream.MapWithIndexTransform(lambda index, _: index)
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
