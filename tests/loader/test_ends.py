"""What each shard yields at the end: the table of docs/ends-and-padding.md, for every small combination."""

import itertools
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, Filter, FlatMap, PaddedBatch, Transformation
from support.draw.random_pipelines import DropMultiples, Split
from support.streams import comparable

RULES = ["keep", "drop in Batch", "drop in shard", "pad"]
INLINE = millstream.ReadOptions(num_threads=0)


def loaders(
    source: Any, batch: Batch | None, shard_count: int, drop_remainder: bool = False, **options: Any
) -> list[millstream.DataLoader]:
    """Returns the loaders of all shards."""
    arguments: dict[str, Any] = {"sampler": IndexSampler(len(source), num_epochs=1), "read_options": INLINE}
    arguments |= options
    operations = [*arguments.pop("operations", []), *([] if batch is None else [batch])]
    return [
        millstream.DataLoader(
            data_source=source,
            operations=operations,
            shard_options=ShardOptions(index, shard_count, drop_remainder),
            **arguments,
        )
        for index in range(shard_count)
    ]


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
    """Every shard yields the batches of the documented table, and `len` counts them, for all small sizes."""
    for num_records, batch_size, num_epochs in itertools.product(range(1, 14), range(1, 5), (1, 2)):
        made = loaders(
            range(num_records),
            Batch(batch_size, drop_remainder=rule == "drop in Batch", pad_remainder=rule == "pad"),
            shard_count,
            drop_remainder=rule == "drop in shard",
            sampler=IndexSampler(num_records, num_epochs=num_epochs),
        )
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


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("shard_count", [1, 2, 3, 4])
def test_without_a_batch_every_small_combination_is_as_documented(shard_count: int, drop_remainder: bool) -> None:
    """A loader without a Batch follows the documented table with batches of one record."""
    for num_records, num_epochs in itertools.product(range(1, 14), (1, 2)):
        sampler = IndexSampler(num_records, num_epochs=num_epochs)
        made = loaders(range(num_records), None, shard_count, drop_remainder, sampler=sampler)
        rule = "drop in shard" if drop_remainder else "keep"
        expected = documented([*range(num_records)] * num_epochs, 1, shard_count, rule)

        assert [[[record] for record in loader] for loader in made] == expected


def test_columns_are_padded_as_records_are() -> None:
    """A source of columns, whose batches are never taken apart, gives the padded batches of its records."""
    columns: dict[str, Any] = {"x": np.arange(14, dtype=np.int32).reshape(7, 2), "y": np.arange(7) / 2}
    records = [{"x": columns["x"][row], "y": columns["y"][row]} for row in range(7)]

    def batches(source: Any) -> list[Any]:
        made = loaders(source, Batch(3, pad_remainder=True), 2)
        return [comparable(batch) for loader in made for batch in loader]

    assert batches(millstream.InMemoryDataSource(columns)) == batches(records)
    assert len(batches(records)) == 4


def test_a_template_that_fails_is_an_error_at_its_turn() -> None:
    """A shard without a record in the last global batch processes the last record, and raises its error there."""

    def refuse_last(record: int) -> int:
        if record == 8:
            raise KeyError("eight")
        return record

    everyone = loaders(range(9), Batch(2, pad_remainder=True), 4, operations=[refuse_last])
    for loader in everyone:
        stream = iter(loader)
        assert next(stream).mask.all()
        with pytest.raises(KeyError, match="eight") as caught:
            next(stream)
        assert "operation 0, Map(refuse_last), at record key 8 (position 8)" in caught.value.__notes__[0]
        stream.seek(2)
        assert list(stream) == []


@pytest.mark.parametrize(
    "operation", [Filter(lambda number: number % 3 != 0), FlatMap(lambda number: [number] * (number % 3), 2)]
)
def test_behind_a_filter_the_last_batch_is_padded(operation: Transformation) -> None:
    """After a Filter, too, batches have `batch_size` rows and hold every element once; no element means no batch."""
    kept = [number for number in range(11) for _ in range(number % 3 if isinstance(operation, FlatMap) else 1)]
    kept = [number for number in kept if number % 3]
    (loader,) = loaders(range(11), Batch(4, pad_remainder=True), 1, operations=[operation])
    stream = list(loader)

    assert [number for batch in stream for number in rows_of(batch)] == kept
    assert [batch.mask.tolist() for batch in stream[:-1]] == [[True] * 4] * (len(kept) // 4)
    assert stream[-1].batch.tolist() == [*kept[len(kept) // 4 * 4 :], *[0] * (-len(kept) % 4)]
    assert list(loaders(range(3), Batch(4, pad_remainder=True), 1, operations=[Filter(lambda _: False)])[0]) == []


def test_operations_behind_a_padded_batch_see_it_whole() -> None:
    """A later Map sees batch and mask of every batch, full ones too; a later Filter drops whole batches."""

    def count(padded: PaddedBatch) -> tuple[int, int]:
        return len(padded.batch), int(padded.mask.sum())

    (counted,) = loaders(range(7), None, 1, operations=[Batch(3, pad_remainder=True), count])
    (filtered,) = loaders(range(7), None, 1, operations=[Batch(3, pad_remainder=True), Filter(lambda b: b.mask.all())])

    assert list(counted) == [(3, 3), (3, 3), (3, 1)]
    assert [rows_of(batch) for batch in filtered] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("operation", [DropMultiples(3), Split(2)])
def test_shards_that_may_end_apart_are_warned_of(operation: Transformation) -> None:
    """A finite, sharded pipeline with a Filter or FlatMap warns at construction, in the user's line, and says why.

    It says what to do; once that is done, and where there is one shard or no end, there is no warning.
    """
    with pytest.warns(UserWarning, match=r"operations\[1\], .*2 shards .*surviving_keys .*num_epochs=None") as caught:
        loaders(range(9), Batch(2, drop_remainder=True), 2, operations=[abs, operation])

    assert [warning.filename for warning in caught] == [__file__] * 2
    loaders(range(9), Batch(2), 1, operations=[operation])
    loaders(range(9), Batch(2), 2, operations=[operation], sampler=IndexSampler(9))
    loaders(range(9), Batch(2), 2, sampler=IndexSampler(2, num_epochs=1, keys=[4, 5]))


def test_the_short_way_warns_as_well() -> None:
    """`load` has the warning of `DataLoader`."""
    with pytest.warns(
        UserWarning, match=r"operations\[0\], DropMultiples\(of=3\), drops or adds elements on each of the 2 shards"
    ):
        millstream.load(range(9), num_epochs=1, transformations=[DropMultiples(3)], shard_options=ShardOptions(0, 2))


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
