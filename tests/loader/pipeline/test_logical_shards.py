"""A stream that is not 1:1 is dealt to logical shards: the global batches depend on their number alone."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.state import LoaderState, combined
from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, ConcatThenSplit, FirstFitPack, Map, Transformation, WindowShuffle
from support.draw.random_pipelines import UNEVEN_ENDS, DropMultiples, Jitter, Pipeline, Scale, Split
from support.laws import INLINE, loader_of
from support.streams import comparable, end_to_end

pytestmark = UNEVEN_ENDS


def on_shards(pipeline: Pipeline, shard_count: int) -> list[Pipeline]:
    """Returns what each of several shards runs of the stream of another number of them."""
    number, batch = [(n, one) for n, one in enumerate(pipeline.operations) if isinstance(one, Batch)][-1]
    size = batch.batch_size * pipeline.shard.shard_count // shard_count
    operations = list(pipeline.operations)
    operations[number] = dataclasses.replace(batch, batch_size=size)
    drop_remainder, logical_shards = pipeline.shard.drop_remainder, pipeline.shard.logical_shards
    return [
        dataclasses.replace(
            pipeline,
            operations=tuple(operations),
            shard=ShardOptions(index, shard_count, drop_remainder, logical_shards),
        )
        for index in range(shard_count)
    ]


def states_at(shards: Sequence[Pipeline], step: int) -> list[bytes]:
    states = []
    for shard in shards:
        with iter(loader_of(shard)) as saver:
            saver.seek(step)
            states.append(saver.get_state())
    return states


def divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def global_batches(streams: Sequence[Any]) -> list[Any]:
    """Returns the batches of all shards, step by step, and how many of them there are in each."""
    steps = itertools.zip_longest(*streams)
    return [comparable(end_to_end([batch for batch in step if batch is not None])) for step in steps]


def document(number: int) -> dict[str, Any]:
    return {"tokens": np.arange(number * 7 % 9, dtype=np.int32) + 10 * number}


STREAMS: dict[str, list[Transformation]] = {
    "filter": [DropMultiples(3), Jitter(), Batch(12)],
    "filter, dropping": [DropMultiples(2), Batch(12, drop_remainder=True), Scale(3)],
    "flat map": [Split(3), Split(2), WindowShuffle(5, 1), Batch(12)],
    "batches within": [Batch(2, drop_remainder=True), DropMultiples(3), Batch(2, drop_remainder=True), Batch(12)],
    "first fit": [DropMultiples(4), Map(document), FirstFitPack({"tokens": 9}, num_packing_bins=2), Batch(12)],
    "concatenated": [Map(document), ConcatThenSplit({"tokens": 7}), Batch(12)],
}
"""Pipelines of one shard, to be run by others."""


@pytest.mark.parametrize("name", STREAMS)
@given(
    size=st.integers(1, 150),
    epochs=st.integers(1, 2),
    drop_remainder=st.booleans(),
    logical=st.sampled_from([4, 6]),
)
@settings(max_examples=5)
def test_global_batches_depend_on_the_logical_shards_alone(
    name: str, size: int, epochs: int, drop_remainder: bool, logical: int
) -> None:
    """The k-th batches of all shards laid end to end are the same bytes on every number of shards that divides them."""
    sampler = IndexSampler(size, shuffle=True, num_epochs=epochs, seed=size)
    shard = ShardOptions(0, 1, drop_remainder, logical)
    pipeline = Pipeline(range(size), sampler, tuple(STREAMS[name]), shard)
    made = {count: [list(loader_of(one)) for one in on_shards(pipeline, count)] for count in divisors(logical)}
    common = {count: min(map(len, streams)) for count, streams in made.items()}
    if name.endswith("dropping"):
        assert len(set(common.values())) == 1
        made = {count: [stream[: common[count]] for stream in streams] for count, streams in made.items()}
    whole = global_batches(made[logical])
    assert all(global_batches(streams) == whole for streams in made.values())


@pytest.mark.parametrize("name", STREAMS)
@given(data=st.data(), size=st.integers(1, 150), logical=st.sampled_from([4, 6]))
@settings(max_examples=5)
def test_every_number_of_shards_resumes_where_another_saved(
    name: str, data: st.DataObject, size: int, logical: int
) -> None:
    """The states of all shards at a step, in any order, are one position of the stream on any number of shards."""
    sampler = IndexSampler(size, shuffle=True, num_epochs=2, seed=size)
    pipeline = Pipeline(range(size), sampler, tuple(STREAMS[name]), ShardOptions(0, 1, False, logical))
    before, after = (data.draw(st.sampled_from(divisors(logical))) for _ in range(2))
    expected = global_batches([list(loader_of(one)) for one in on_shards(pipeline, before)])
    steps = min(len(list(loader_of(one))) for one in on_shards(pipeline, before))
    step = data.draw(st.integers(0, steps))
    states = states_at(on_shards(pipeline, before), step)
    resumed = [iter(loader_of(one)) for one in on_shards(pipeline, after)]
    for iterator in resumed:
        iterator.set_states(data.draw(st.permutations(states)))
        assert iterator.step == step
    again = [LoaderState.decode(iterator.get_state()) for iterator in resumed]
    assert combined(again) == combined([LoaderState.decode(state) for state in states])
    rest = global_batches([list(iterator) for iterator in resumed])
    if not name.endswith("dropping"):
        assert rest == expected[step:]
    else:
        # Shards beyond the end of another one go on, each to its own end.
        assert rest[: steps - step] == expected[step:steps]


WHOLE = Pipeline(
    range(1000), IndexSampler(1000, shuffle=True, seed=5), (DropMultiples(3), Split(3), Jitter(), Batch(12)),
    ShardOptions(0, 1, logical_shards=4),
)  # fmt: skip
"""An endless stream."""


def test_the_logical_shards_stay_together_however_different_they_are() -> None:
    """None is read far ahead of the others, not even where all the elements are in one of them."""
    read: list[int] = []

    def note(number: int) -> int:
        read.append(number)
        return number

    # Of every 4 blocks of 1 position, one is of each logical shard: number 2 keeps a tenth of its records.
    kept = millstream.transforms.Filter(lambda number: number % 4 != 2 or number % 40 == 2)
    loader = millstream.DataLoader(
        data_source=range(100_000),
        sampler=millstream.SequentialSampler(100_000),
        operations=[note, kept, Batch(4)],
        shard_options=ShardOptions(0, 1, logical_shards=4),
        read_options=INLINE,
    )
    with iter(loader) as iterator:
        for step in range(50):
            batch = next(iterator)
            assert batch.tolist() == [4 * step, 4 * step + 1, 40 * step + 2, 4 * step + 3]
        positions = [cursor.position for cursor in LoaderState.decode(iterator.get_state()).cursors]
    assert positions == [200, 200, 49 * 40 + 4, 200]
    ahead = [max(number for number in read if number % 4 == shard) for shard in (0, 1, 3)]
    assert all(number < 200 + 4 * 256 for number in ahead)


def test_the_epoch_is_that_of_the_logical_shard_that_is_behind() -> None:
    """`epoch` is that of the first record that is not consumed in any of them."""
    with iter(loader_of(WHOLE)) as iterator:
        iterator.seek(100)
        cursors = LoaderState.decode(iterator.get_state()).cursors
        assert iterator.epoch == min(cursor.position for cursor in cursors) // 1000 > 0


def test_a_one_to_one_pipeline_needs_no_logical_shards() -> None:
    """Logical shards change neither batches nor states of a 1:1 pipeline."""
    plain = dataclasses.replace(WHOLE, operations=(Jitter(), Batch(6)), shard=ShardOptions(1, 2))
    dealt = dataclasses.replace(plain, shard=ShardOptions(1, 2, logical_shards=6))
    with iter(loader_of(plain)) as first, iter(loader_of(dealt)) as second:
        for _ in range(5):
            assert comparable(next(first)) == comparable(next(second))
        assert first.get_state() == second.get_state()
        second.set_states(states_at([dataclasses.replace(plain, shard=ShardOptions(index, 2)) for index in (0, 1)], 3))
        first.seek(3)
        assert comparable(next(first)) == comparable(next(second))


@pytest.mark.parametrize(
    ("operations", "text"),
    [
        ([DropMultiples(3)], "A Batch must concatenate their elements"),
        ([DropMultiples(3), Batch(8), DropMultiples(3)], "A Batch must concatenate their elements"),
        ([Batch(8), DropMultiples(3)], "A Batch must concatenate their elements"),
        ([DropMultiples(3), Batch(6)], r"batch_size of operations\[1\] must be a multiple of 4, got 6"),
    ],
    ids=["no batch", "filter after", "filter last", "batch size"],
)
def test_what_cannot_be_laid_end_to_end_is_refused(operations: list[Transformation], text: str) -> None:
    """Without a Batch at the end that all logical shards fill alike there is an error when the loader is built."""
    with pytest.raises(ValueError, match=text):
        loader_of(dataclasses.replace(WHOLE, operations=tuple(operations)))
    # Where each shard runs one of them, nothing is laid end to end.
    loader_of(dataclasses.replace(WHOLE, operations=tuple(operations), shard=ShardOptions(1, 4, logical_shards=4)))


def test_states_of_other_streams_are_refused_and_change_nothing() -> None:
    """Another global batch, states that lack some and a state alone each have an error that says so."""
    states, one_of_two = states_at(on_shards(WHOLE, 4), 1), iter(loader_of(on_shards(WHOLE, 2)[0]))
    before = one_of_two.get_state()
    with pytest.raises(CheckpointError, match="shards 1, 2, 3 are missing"):
        one_of_two.set_states(states[:1])
    with pytest.raises(CheckpointError, match=r"the logical shards 0 to 0, but 0 to 1 are needed\. .* to set_states"):
        one_of_two.set_state(states[0])
    larger = dataclasses.replace(WHOLE, operations=(*WHOLE.operations[:3], Batch(24)))
    with pytest.raises(CheckpointError, match=r"batch_size: saved 12 over all shards, here 24 over all shards"):
        iter(loader_of(larger)).set_states(states)
    assert one_of_two.get_state() == before
    next(one_of_two)


def test_device_put_takes_all_states() -> None:
    """An iterator on the device resumes from the states of another number of shards, too."""
    states = states_at(on_shards(WHOLE, 4), 6)
    with millstream.device_put(iter(loader_of(WHOLE))) as on_device, iter(loader_of(WHOLE)) as plain:
        on_device.set_states(iter(states))
        plain.seek(6)
        assert on_device.step == 6
        assert np.array_equal(np.asarray(next(on_device)), next(plain).astype(np.int32))
