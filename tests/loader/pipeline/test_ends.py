"""The end of each shard: the table of docs/several-hosts.md, for every small combination."""

import contextlib
import itertools
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, reject, settings
from hypothesis import strategies as st

import millstream
from millstream.errors import StackError
from millstream.samplers import IndexSampler
from millstream.sharding import ShardBySharding, ShardOptions
from millstream.transforms import Batch, Filter, Pack, PaddedBatch, Transformation, WindowShuffle
from support.draw.orders import mixtures, orders
from support.draw.random_pipelines import DropMultiples, Split, dropping_operations
from support.laws import INLINE, inline_loader
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
    """Each shard yields the batches of the documented table, of one record without a Batch, and `len` counts them.

    An odd number of records is read twice: the remainders of two epochs are one.
    """
    batches = [Batch(size, drop_remainder=rule == "drop in Batch", pad_remainder=rule == "pad") for size in range(1, 5)]
    kinds = [*batches, *([None] if rule in {"keep", "drop in shard"} else [])]
    for num_records, batch in itertools.product(range(1, 14), kinds):
        num_epochs = 1 + num_records % 2
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


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Yields the texts of what the library logs and warns of."""
    texts: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("millstream")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]  # a short class
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: texts.append(str(message))
            yield texts
    finally:
        logger.removeHandler(handler)


def shapes_of(loader: Any) -> list[tuple[int, ...] | None]:
    """Returns the shape of each batch; the last one is None if the stream ends with an error."""
    shapes: list[tuple[int, ...] | None] = []
    try:
        for batch in loader:
            padded = batch.batch if isinstance(batch, PaddedBatch) else batch
            shapes.append(np.shape(padded["tokens"] if isinstance(padded, dict) else padded))
    except StackError:
        shapes.append(None)
    return shapes


@st.composite
def any_order(draw: st.DrawFn) -> tuple[Any, Any, list[Transformation]]:
    """Draws a source, an order of its records, and the operations that make elements of them."""
    if draw(st.integers(0, 3)):
        order, size = draw(orders() | mixtures())
        return range(size), order, []
    order, size = draw(orders(rows=True))
    return [{"tokens": np.zeros(n, int)} for n in order.lengths], order, [Pack({"tokens": order.row_length})]


BATCHES = st.builds(
    lambda size, rule: Batch(size, drop_remainder=rule == "drop", pad_remainder=rule == "pad"),
    st.sampled_from([6, 12]),
    st.sampled_from(["keep", "drop", "pad"]),
)


@settings(max_examples=60)
@given(
    drawn=any_order(),
    before=st.lists(st.builds(WindowShuffle, st.integers(1, 5), st.just(0)) | dropping_operations, max_size=1),
    batches=st.lists(BATCHES | st.builds(Batch, st.integers(1, 3)), max_size=2),
    after=st.lists(st.builds(WindowShuffle, st.integers(1, 5), st.just(0)), max_size=1),
    shards=st.tuples(
        st.integers(1, 4), st.none() | st.integers(1, 3), st.booleans(), st.sampled_from(["loader", "epochs"])
    ),
)
@example(
    drawn=(range(7), IndexSampler(7, num_epochs=1), []),
    before=[WindowShuffle(3, 0)],
    batches=[Batch(4, drop_remainder=True)],
    after=[],
    shards=(2, None, False, "loader"),
)
def test_all_shards_have_the_same_rows_at_each_step_or_are_told(
    drawn: tuple[Any, Any, list[Transformation]],
    before: list[Transformation],
    batches: list[Batch],
    after: list[Transformation],
    shards: tuple[int, int | None, bool, str],
) -> None:
    """For any order, operations and shards: equal row counts at each step, or a warning with the true numbers.

    There is no warning if positions decide the ends, and these are equal: they always are if a Batch drops its
    remainder, whatever regroups elements before it. A shard of global arrays is refused instead of a warning.
    """
    source, order, making = drawn
    if making:
        before = [operation for operation in before if operation.keeps_count]
    operations = [*making, *before, *batches, *after]
    count, share, drops, front = shards
    length = (order.of_epoch(0) if front == "epochs" else order).length
    assume(length is not None and length < 200)

    with told() as texts:

        def build(shard: ShardOptions) -> Any:
            loader = millstream.DataLoader(
                data_source=source, sampler=order, operations=operations, shard_options=shard, read_options=INLINE
            )
            if front == "loader":
                return loader
            if order.length != length:
                # The loader's own stream is another one.
                texts.clear()
            return (batch for _, batches in loader.epochs(1) for batch in batches)

        shapes: list[Any] = []
        for index in range(count):
            try:
                built = build(ShardOptions(index, count, drops, share and share * count))
            except ValueError:  # Another rule than that of ends.
                reject()
            shapes.append(shapes_of(built))
        are_even = all(of_host == shapes[0] for of_host in shapes)
        if not all(operation.keeps_count for operation in operations):
            assert are_even or any("may end at different steps" in text for text in texts)
            return
        assert are_even or not batches or not batches[0].drop_remainder, shapes
        differences = {text for text in texts if "hosts end differently" in text}
        are_shuffled = batches and any(isinstance(one, WindowShuffle) for one in operations)
        assert are_even == (not differences) or (are_even and are_shuffled), (shapes, texts)
        for text in differences:
            if len(batches) < 2 and not are_shuffled:
                pairs = re.findall(r"(?:has|have) (\d+)|, (\d+) on", text)
                numbers = {int(number) for pair in pairs for number in pair if number}
                lasts = {of_host[-1][:1] for of_host in shapes if of_host}
                assert numbers == {len(of_host) for of_host in shapes} or {(number,) for number in numbers} == lasts
            shard = object.__new__(ShardBySharding)
            ShardOptions.__init__(shard, 0, count, drops, share and share * count)
            with pytest.raises(ValueError, match=r"Cannot build a global array of the last step: .*host"):
                build(shard)


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


@pytest.mark.parametrize("count", [1, 2])
def test_a_loader_whose_records_fill_no_batch_says_so(count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Records that are fewer than a global batch that may not be short are reported, if the order has an end."""
    shard = ShardOptions(0, count)
    for size, num_epochs, is_said in ((20, 1, True), (10, 1, False), (20, 2, False), (20, None, False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "millstream"):
            loader = millstream.load(
                range(10), num_epochs=num_epochs, batch_size=size // count, drop_remainder=True, shard_options=shard
            )
        assert ("yields nothing, because 10 records cannot fill one global batch" in caplog.text) == is_said
        assert (num_epochs is not None and len(loader) == 0) == is_said
    with caplog.at_level(logging.WARNING, "millstream"):
        assert [list(batches) for _, batches in loader.epochs(1)] == [[]]
    assert "cannot fill one global batch" in caplog.text
