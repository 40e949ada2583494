"""The end of each shard: the table of docs/ends-and-padding.md, for every small combination."""

import itertools
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, Filter, PaddedBatch, Transformation
from support.draw.random_pipelines import DropMultiples, Split
from support.laws import inline_loader
from support.streams import comparable

RULES = ["keep", "drop in Batch", "drop in shard", "pad"]


def loaders(
    source: Any,
    *operations: Any,
    shard_count: int = 2,
    drop_remainder: bool = False,
    sampler: IndexSampler | None = None,
) -> list[millstream.DataLoader]:
    sampler = IndexSampler(len(source), num_epochs=1) if sampler is None else sampler
    shards = [ShardOptions(index, shard_count, drop_remainder) for index in range(shard_count)]
    return [inline_loader(source, sampler, *operations, shard_options=shard) for shard in shards]


def rows_of(batch: Any) -> list[int]:
    """Returns the records of a batch of numbers; of a padded one, the real ones."""
    return list(np.ravel(batch.batch[batch.mask] if isinstance(batch, PaddedBatch) else batch).tolist())


def documented(positions: list[int], batch_size: int, shard_count: int, rule: str) -> list[list[list[int]]]:
    """Returns, for each shard and each of its batches, the positions in it, as the document says."""
    global_batch = batch_size * shard_count
    whole, rest = divmod(len(positions), global_batch)
    share, extra = divmod(rest, shard_count)
    last = positions[whole * global_batch :]
    shards = []
    for s in range(shard_count):
        batches = [positions[(k * shard_count + s) * batch_size :][:batch_size] for k in range(whole)]
        match rule:
            case "keep" if share + (s < extra):
                batches.append(last[s * share + min(s, extra) :][: share + (s < extra)])
            case "drop in shard" if share:
                batches.append(last[s * share :][:share])
            case "pad" if rest:
                batches.append(last[s * batch_size :][:batch_size])
        shards.append(batches)
    return shards


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shard_count", [1, 2, 3, 4])
def test_every_small_combination_is_as_documented(shard_count: int, rule: str) -> None:
    """Each shard yields the batches of the documented table, of one record without a Batch, and `len` counts them."""
    batches = [Batch(size, drop_remainder=rule == "drop in Batch", pad_remainder=rule == "pad") for size in range(1, 5)]
    kinds = [*batches, *([None] if rule in {"keep", "drop in shard"} else [])]
    for num_records, batch, num_epochs in itertools.product(range(1, 14), kinds, (1, 2)):
        sampler = IndexSampler(num_records, num_epochs=num_epochs)
        shards: dict[str, Any] = {"shard_count": shard_count, "drop_remainder": rule == "drop in shard"}
        made = loaders(range(num_records), *([] if batch is None else [batch]), sampler=sampler, **shards)
        batch_size = 1 if batch is None else batch.batch_size
        streams = [list(loader) for loader in made]
        got = [[rows_of(batch) for batch in stream] for stream in streams]

        assert got == documented([*range(num_records)] * num_epochs, batch_size, shard_count, rule)
        assert [len(loader) for loader in made] == [len(stream) for stream in streams]
        if rule != "keep":
            assert len({len(stream) for stream in streams}) == 1
        if rule == "pad":
            assert sorted(key for stream in got for batch in stream for key in batch) == sorted(
                [*range(num_records)] * num_epochs
            )
            assert {batch.batch.shape for stream in streams for batch in stream} == {(batch_size,)}
            assert [[loader.record_keys(k).tolist() for k in range(len(loader))] for loader in made] == got


def test_columns_are_padded_as_records_are() -> None:
    """A source of columns, whose batches are never taken apart, gives the padded batches of its records."""
    columns: dict[str, Any] = {"x": np.arange(14, dtype=np.int32).reshape(7, 2), "y": np.arange(7) / 2}
    records = [{"x": columns["x"][row], "y": columns["y"][row]} for row in range(7)]

    def batches(source: Any) -> list[Any]:
        return [comparable(batch) for loader in loaders(source, Batch(3, pad_remainder=True)) for batch in loader]

    assert batches(millstream.InMemoryDataSource(columns)) == batches(records)
    assert len(batches(records)) == 4


def test_a_template_that_fails_is_an_error_at_its_turn() -> None:
    """A shard without a record in the last global batch processes the last record, and raises its error there."""

    def refuse_last(record: int) -> int:
        if record == 9:
            raise KeyError("nine")
        return record

    for loader in loaders(range(10), refuse_last, Batch(2, pad_remainder=True), shard_count=4):
        stream = iter(loader)
        assert next(stream).mask.all()
        with pytest.raises(KeyError, match="nine") as caught:
            next(stream)
        assert "operation 0, Map(refuse_last), at record key 9 (position 9)" in caught.value.__notes__[0]
        stream.seek(2)
        assert list(stream) == []


@pytest.mark.parametrize("operation", [DropMultiples(3), Split(2)])
def test_shards_that_may_end_apart_are_warned_of(operation: Transformation) -> None:
    """A finite, sharded pipeline with a Filter or FlatMap warns, in the user's line, with the remedies."""
    sharded: Any = {"sampler": IndexSampler(9, ShardOptions(0, 2), num_epochs=1), "operations": [abs, operation]}
    with pytest.warns(UserWarning, match=r"operations\[1\], .*2 shards .*surviving_keys .*num_epochs=None") as caught:
        millstream.DataLoader(data_source=range(9), **sharded)
    assert [warning.filename for warning in caught] == [__file__]
    loaders(range(9), operation, Batch(2), shard_count=1)
    loaders(range(9), operation, Batch(2), sampler=IndexSampler(9))
    loaders(range(9), Batch(2), sampler=IndexSampler(2, num_epochs=1, keys=[4, 5]))


EMPTY: dict[str, Any] = {
    "a list": [],
    "a range": range(0),
    "a RangeDataSource": millstream.RangeDataSource(3, 3),
    "records": millstream.InMemoryDataSource([]),
    "columns": millstream.InMemoryDataSource({"x": np.zeros((0, 3))}),
    "an array": np.zeros((0, 2)),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("num_epochs", [None, 2])
def test_a_loader_of_no_record_ends_at_once(name: str, num_epochs: int | None) -> None:
    """A loader without records warns at construction and has length 0 and a state, for any epochs and order."""
    for options in ({}, {"shuffle": True, "seed": 0}, {"transformations": [Filter(bool)]}):
        with pytest.warns(UserWarning, match="data_source has no record, got an empty"):
            loader = millstream.load(EMPTY[name], num_epochs=num_epochs, batch_size=2, **options)
        with iter(loader) as batches:
            batches.set_state(batches.get_state())
            assert list(batches) == []
            assert batches.epoch == 0
    assert len(IndexSampler(0, keys=[])) == 0
