"""Changes between saving and resuming: the numbers of shards and of epochs may change, and no parameter."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, ConcatThenSplit, FlatMap, Map
from support.draw.random_pipelines import (
    UNEVEN_ENDS,
    AddIndex,
    DropMultiples,
    Jitter,
    Pipeline,
    Scale,
    dealt_pipelines,
    pipelines,
)
from support.laws import assert_shards_agree, expected_of, loader_of, with_epochs
from support.streams import drain


def nested(number: Any) -> dict[str, Any]:
    """Returns an element with leaves of several kinds, decided by a number."""
    number = int(number)
    image = np.full((2,), number, np.float32)
    return {"number": number, "image": image, "text": "x" * (number % 4), "flag": number % 2 == 0, "none": None}


@pytest.mark.parametrize("rule", [{}, {"drop_remainder": True}, {"pad_remainder": True}], ids=["keep", "drop", "pad"])
@given(
    pipeline=pipelines(st.one_of(st.builds(Scale, st.integers(2, 5)), st.just(Jitter()), st.just(AddIndex()))),
    last=st.sampled_from([(), (nested,)]),
    data=st.data(),
)
@settings(deadline=None, max_examples=12)
def test_global_batches_are_those_of_any_number_of_shards(
    rule: dict[str, Any], pipeline: Pipeline, last: tuple[Any, ...], data: st.DataObject
) -> None:
    """The batches of 1, 2, 3, 4, 8 and 24 shards laid end to end are the same bytes, from any shard's state on."""

    def make(index: int, count: int) -> millstream.DataLoader:
        operations = (*pipeline.operations, *last, Batch(24 // count, **rule))
        return loader_of(dataclasses.replace(pipeline, operations=operations, shard=ShardOptions(index, count)))

    step = data.draw(st.integers(0, len(pipeline.sampler) // 24))
    assert_shards_agree(make, (2, 3, 4, 8, 24), step)


@UNEVEN_ENDS
@given(pipeline=pipelines() | dealt_pipelines(fails=False), epochs=st.integers(1, 4), data=st.data())
@settings(deadline=None, max_examples=120)
def test_a_state_resumes_under_another_number_of_epochs_exactly_or_is_refused(
    pipeline: Pipeline, epochs: int, data: st.DataObject
) -> None:
    """A state under another number of epochs continues that stream exactly, or is an error."""
    other = with_epochs(pipeline, epochs)
    before, _ = expected_of(pipeline)
    after, error = expected_of(other)
    step = data.draw(st.integers(0, len(before)) | st.just(len(before)))
    saved, resumed = iter(loader_of(pipeline)), iter(loader_of(other))
    for _ in range(step):
        next(saved)
    refusal = ""
    try:
        resumed.set_state(saved.get_state())
    except millstream.CheckpointError as error_here:
        refusal = str(error_here)
    if "here the sampler ends at" in refusal:
        assert epochs < (pipeline.sampler.num_epochs or 0)
    elif refusal:
        assert epochs != pipeline.sampler.num_epochs
        if pipeline.shard.logical_shards is not None:
            assert "before the first short batch" in refusal
            return
        assert f"call seek({step - 1})" in refusal
        assert before[: step - 1] == after[: step - 1]
        resumed.seek(step - 1)
        assert (after[step - 1 :], error) == drain(resumed)
    else:
        assert before[:step] == after[:step]
        assert (after[step:], error) == drain(resumed)


def document(number: int) -> dict[str, Any]:
    return {"tokens": np.full(1 + number % 5, number)}


def twice(row: Any) -> list[Any]:
    return [row["tokens"]] * 2


ROWS = (Map(document), ConcatThenSplit({"tokens": 4}))


@pytest.mark.parametrize(
    ("operations", "size", "first_refused"),
    [
        # Two batches of four elements, and one of two.
        ((DropMultiples(11), Batch(4), FlatMap(list, 4)), 11, 9),
        # Four rows, and one that is padded; in parts, also within that one, but not before it.
        (ROWS, 7, 5),
        ((*ROWS, FlatMap(twice, 2)), 7, 9),
    ],
    ids=["parts of batches", "rows", "parts of rows"],
)
def test_a_state_within_what_the_end_has_cut_short_is_not_prolonged(
    operations: tuple[Any, ...], size: int, first_refused: int
) -> None:
    """An order of more epochs refuses the states after any output of the last, short group, and resumes all others."""
    pipeline = Pipeline(range(size), IndexSampler(size, num_epochs=1, seed=0), operations, ShardOptions(0, 1))
    longer = with_epochs(pipeline, 2)
    whole, _ = expected_of(longer)
    with iter(loader_of(pipeline)) as saved:
        states = [saved.get_state(), *(saved.get_state() for _ in saved)]
    for step, state in enumerate(states):
        with iter(loader_of(longer)) as resumed:
            if step < first_refused:
                resumed.set_state(state)
                assert drain(resumed)[0] == whole[step:]
            else:
                with pytest.raises(millstream.CheckpointError, match="after a short or padded batch"):
                    resumed.set_state(state)
    assert len(states) > first_refused


def test_only_the_end_of_a_stream_keeps_it_from_being_prolonged() -> None:
    """A finished run resumes with more epochs unless its last batch was short or padded."""
    for batch, is_refused in (
        (Batch(5), False),
        (Batch(4, drop_remainder=True), False),
        (Batch(4), True),
        (Batch(4, pad_remainder=True), True),
    ):
        for operations in ((batch,), (DropMultiples(11), batch)):
            pipeline = Pipeline(range(10), IndexSampler(10, num_epochs=1, seed=0), operations, ShardOptions(0, 1))
            finished = iter(loader_of(pipeline))
            drain(finished)
            longer = with_epochs(pipeline, 2)
            resumed = iter(loader_of(longer))
            is_short = is_refused or (len(operations) == 2 and not batch.drop_remainder)
            if is_short:
                with pytest.raises(millstream.CheckpointError, match="after a short or padded batch"):
                    resumed.set_state(finished.get_state())
            else:
                resumed.set_state(finished.get_state())
                assert drain(resumed)[0] == expected_of(longer)[0][finished.step :]
