"""Packed rows through the loader: laid out as planned, 1:1, sought, sharded, named in errors."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import (
    Batch,
    DataLoader,
    FilterTransform,
    IndexSampler,
    MapWithIndexTransform,
    Pack,
    PackingSampler,
    RandomMapTransform,
    ShardOptions,
)
from millstream.transforms import Map
from support.laws import INLINE, assert_shards_agree, inline_loader

ROW = 24
ORDER: Any = {"shuffle": True, "seed": 0, "num_epochs": 1}


def lengths_of(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(count).integers(0, 41, count)


def documents(count: int) -> list[np.ndarray[Any, Any]]:
    return [100 * key + 1 + np.arange(length, dtype=np.int64) for key, length in enumerate(lengths_of(count))]


def plain_rows(sampler: PackingSampler, source: list[np.ndarray[Any, Any]], start: int, stop: int) -> Any:
    """Returns tokens, segment ids and positions of rows: the oracle."""
    starts, keys, begins, ends = (np.asarray(column).tolist() for column in sampler.segments(start, stop))
    rows = []
    for first, last in itertools.pairwise(starts):
        cells: list[tuple[int, int, int]] = []
        for number, piece in enumerate(range(first, last), 1):
            tokens = source[keys[piece]][begins[piece] : ends[piece]].tolist()
            cells += [(token, number, place) for place, token in enumerate(tokens)]
        rows.append(cells + [(0, 0, 0)] * (ROW - len(cells)))
    table = np.array(rows).reshape(-1, ROW, 3)
    return {
        name: table[..., column] for column, name in enumerate(("tokens", "tokens_segment_ids", "tokens_positions"))
    }


def assert_same(row: Any, expected: Any) -> None:
    assert list(row) == list(expected)
    for name, array in expected.items():
        assert np.array_equal(row[name], array), name


def loader_of(count: int = 60, batch: int = 3, operations: list[Any] | None = None, **options: Any) -> DataLoader:
    sampler_options = {name: options.pop(name) for name in ("num_epochs", "overflow", "seed") if name in options}
    return DataLoader(
        data_source=documents(count),
        sampler=PackingSampler(lengths_of(count), ROW, **ORDER | {"overflow": "split", **sampler_options}),
        operations=[Pack({"tokens": ROW}), Batch(batch)] if operations is None else operations,
        **options,
    )


@pytest.mark.parametrize("options", [{"read_options": INLINE}, {}, {"worker_count": 2}], ids=str)
@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
def test_rows_are_laid_out_as_planned(options: Any, overflow: str) -> None:
    """Every batch of two epochs is the one planned, whichever executor makes it."""
    with loader_of(num_epochs=2, overflow=overflow, **options) as loader:
        sampler = loader.sampler
        assert isinstance(sampler, PackingSampler)
        batches = list(loader)
        assert len(batches) == len(loader) == -(-len(sampler) // 3)
        for step, batch in enumerate(batches):
            start, stop = 3 * step, min(3 * step + 3, len(sampler))
            assert_same(batch, plain_rows(sampler, documents(60), start, stop))
            assert loader.record_keys(step).tolist() == sampler.segments(start, stop).elements.tolist()
        assert batches[0]["tokens"].dtype == np.int64
        assert batches[0]["tokens_segment_ids"].dtype == batches[0]["tokens_positions"].dtype == np.int32


@settings(max_examples=6)
@given(pads=st.booleans(), step=st.integers(0, 5))
def test_any_number_of_shards_makes_the_same_global_batches(pads: bool, step: int) -> None:
    """Any number of shards makes the same global batches, resumes from any other's state, and knows its documents."""

    def part(index: int, count: int) -> DataLoader:
        return loader_of(
            operations=[Pack({"tokens": ROW}), Batch(6 // count, pad_remainder=pads)],
            shard_options=ShardOptions(index, count),
            read_options=INLINE,
        )

    whole = part(0, 1)
    step = min(step, len(whole) - 1)
    assert_shards_agree(part, (2, 3, 6), step)
    keys = np.concatenate([part(index, 3).record_keys(step) for index in range(3)])
    assert keys.tolist() == whole.record_keys(step).tolist()


def test_operations_before_see_documents_and_those_after_see_rows() -> None:
    """Operations see documents before Pack and rows after it, each with their own indices and draws, batched or not."""

    def index_of(index: int, document: Any) -> Any:
        return {"tokens": document, "index": np.full(len(document), index), "other": "text"}

    def draw(document: Any, rng: np.random.Generator) -> Any:
        return {**document, "drawn": np.full(len(document["tokens"]), rng.integers(1, 2**40))}

    def mark(index: int, row: Any) -> Any:
        return {**row, "row": index}

    pack = Pack(
        {"tokens": ROW, "index": ROW + 2, "drawn": ROW}, meta_features=["drawn", "index"], padding_struct={"index": -1}
    )
    operations = [
        MapWithIndexTransform(index_of),
        RandomMapTransform(draw),
        pack,
        MapWithIndexTransform(mark),
        RandomMapTransform(lambda row, rng: {**row, "later": rng.integers(2**40)}),
    ]
    rows = list(loader_of(operations=operations))
    sampler = PackingSampler(lengths_of(60), ROW, overflow="split", **ORDER)
    assert len(rows) == len(sampler)
    expected = plain_rows(sampler, documents(60), 0, len(sampler))
    drawn = []
    for position, row in enumerate(rows):
        assert set(row) == {*expected, "index", "drawn", "row", "later"}
        assert all(np.array_equal(row[name], expected[name][position]) for name in expected)
        assert row["row"] == position
        segments = row["tokens_segment_ids"]
        assert row["index"].tolist() == [
            ROW * position + number - 1 if number else -1 for number in [*segments.tolist(), 0, 0]
        ]
        drawn += [*{*row["drawn"].tolist()} - {0}, row["later"]]
    assert len(set(drawn)) == len(drawn) == sampler.segments(0, len(sampler)).offsets[-1] + len(sampler)


def test_rows_of_several_axes_and_of_lists() -> None:
    """Axes after the first are kept, and lists become arrays."""
    lengths = [2, 1]
    source = [{"x": np.ones((2, 3), np.float32), "y": [1, 2]}, {"x": np.zeros((1, 3), np.float32), "y": [3]}]
    sampler = PackingSampler(lengths, 4, shuffle=False, num_epochs=1)
    (row,) = DataLoader(data_source=source, sampler=sampler, operations=[Pack({"x": 4, "y": 4})])
    assert row["x"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert row["x"].dtype == np.float32
    assert row["y"].tolist() == [1, 2, 3, 0]
    assert row["x_segment_ids"].tolist() == row["y_segment_ids"].tolist() == [1, 1, 2, 0]
    assert row["x_positions"].tolist() == [0, 1, 0, 0]


def test_a_windowed_plan_reads_each_unit_once_an_epoch() -> None:
    """A source that keeps two windows of units reads none twice; for rows of any documents, it reads nearly always."""
    reads, source = {}, documents(600)
    for window in (4, None):
        options: dict[str, Any] = {"overflow": "split", "unit_sizes": [10] * 60, "window_units": window}
        sampler = PackingSampler(lengths_of(600), ROW, **ORDER, **options)
        loader = inline_loader(source, sampler, Pack({"tokens": ROW}), Batch(4))
        tokens = np.concatenate([batch["tokens"] for batch in loader])
        assert sorted(tokens[tokens > 0].tolist()) == sorted(np.concatenate(source).tolist())
        read, kept = list[int](), list[int]()
        for unit in (key // 10 for step in range(len(loader)) for key in loader.record_keys(step).tolist()):
            if unit not in kept:
                read.append(unit)
                kept = [*kept, unit][-8:]
        reads[window] = read
    assert sorted(reads[4]) == sorted({key // 10 for key in np.flatnonzero(lengths_of(600)).tolist()})
    assert len(reads[None]) > 5 * len(reads[4])


def test_batches_that_are_made_together_are_those_that_are_made_alone() -> None:
    """Small batches of rows come several of a call; each, and the state after it, is as if it was made alone."""
    calls: list[int] = []

    def read(batch: list[Any]) -> list[Any]:
        calls.append(len(batch))
        return batch

    loader = loader_of(
        600, num_epochs=2, operations=[Map(read, batched=True), Pack({"tokens": ROW}), Batch(3)], read_options=INLINE
    )
    together = iter(loader)
    found = [(batch, together.get_state()) for batch in together]
    assert len(calls) < len(found) / 4
    alone = iter(loader)
    for step, (batch, state) in enumerate(found):
        alone.seek(step)
        assert_same(next(alone), batch)
        assert alone.get_state() == state


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("options", [{"read_options": INLINE}, {}, {"worker_count": 1}], ids=str)
def test_an_error_in_a_document_comes_at_its_row(options: Any, batch_size: int) -> None:
    """All batches before the row of a failing document are delivered, and what was read of that row is no row."""
    sampler = PackingSampler(lengths_of(600), ROW, overflow="drop", **ORDER)
    rows = sampler.segments(0, len(sampler))
    row = next(row for row in range(120, 200) if rows.offsets[row + 1] - rows.offsets[row] > 1)
    bad = int(rows.elements[rows.offsets[row + 1] - 1])

    def fails(document: Any) -> Any:
        if document[0] // 100 == bad:
            raise RuntimeError("bad")
        return document

    operations = [fails, Pack({"tokens": ROW}), Batch(batch_size)]
    with loader_of(600, operations=operations, overflow="drop", **options) as loader:
        iterator = iter(loader)
        for step in range(row // batch_size):
            start = batch_size * step
            assert_same(next(iterator), plain_rows(sampler, documents(600), start, start + batch_size))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="bad") as caught:
                next(iterator)
        assert iterator.step == row // batch_size
        assert any(f"record key {bad} (position {row})" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda document: document[:-1], "has .* 'tokens', but according to the sampler's lengths it has"),
        (lambda document: document.sum(), r"of shape \(\)"),
        (
            lambda document: np.ma.masked_less(document, 3),
            "MaskedArray of feature 'tokens': its mask would",
        ),
        (lambda document: {"ids": document}, "The feature 'tokens' is missing: got 'ids'"),
        (lambda document: document.astype(np.int32 if document[0] % 200 == 1 else np.int64), "must agree in dtype"),
    ],
)
def test_documents_that_do_not_fit_are_errors(operation: Any, message: str) -> None:
    """A document that is not as planned is an error with its record key; nothing is silently cut or padded."""
    loader = loader_of(operations=[operation, Pack({"tokens": ROW}), Batch(20)])
    with pytest.raises(ValueError, match=message):
        list(loader)


def of(source: list[int], sampler: Any) -> DataLoader:
    return DataLoader(data_source=source, sampler=sampler, operations=[Pack({"tokens": 3})])


UNTYPED: Any = Pack
ROWS = Pack({"tokens": ROW})
REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("exactly one Pack is needed, got 0", lambda: loader_of(operations=[Batch(2)])),
    ("got 2", lambda: loader_of(operations=[ROWS, ROWS])),
    (r"operations\[0\], Batch\(batch_size=2\), comes before", lambda: loader_of(operations=[Batch(2), ROWS])),
    ("Filter ahead", lambda: loader_of(operations=[FilterTransform(len), ROWS])),
    ("of length 23, but the sampler plans rows of length", lambda: loader_of(operations=[Pack({"tokens": ROW - 1})])),
    ("the sampler is not a PackingSampler", lambda: of([1], IndexSampler(1))),
    ("lengths are of 2 documents, but data_source has 3", lambda: of([1, 2, 3], PackingSampler([1, 1], 3))),
    ("map features to row lengths", lambda: UNTYPED("tokens")),
    ("at least one feature", lambda: Pack({})),
    ("at least 1", lambda: Pack({"a": 0})),
    ("a list of names", lambda: UNTYPED({"a": 3}, meta_features="a")),
    ("a list of names", lambda: UNTYPED({"a": 3}, meta_features=3)),
    ("meta_features names 'b'", lambda: Pack({"a": 3}, meta_features=["b"])),
    ("padding_struct names 'b'", lambda: Pack({"a": 3}, padding_struct={"b": 0})),
]


@pytest.mark.parametrize(("message", "make"), REFUSED)
def test_what_does_not_go_with_rows_is_refused(message: str, make: Callable[[], object]) -> None:
    """Wrong arguments of Pack, and operations, samplers and sources that cannot work on rows, are errors when built."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_rows_far_away_are_refused_where_indices_would_overflow() -> None:
    """A row whose document indices exceed int64 is an error."""
    sampler = PackingSampler([5, 5], ROW, num_epochs=None, shuffle=True, seed=0)
    iterator = iter(inline_loader([[*range(5)]] * 2, sampler, np.array, Pack({"tokens": ROW}), Batch(1)))
    iterator.seek(2**63 // ROW - 1)
    assert next(iterator)["tokens_positions"].max() == 4
    iterator.seek(2**63 // ROW + 1)
    with pytest.raises(OverflowError, match=r"above 2\*\*63"):
        next(iterator)
