"""Rows that are laid out are a batch already, and the older operation packs and batches in one."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream
from millstream.core.segments import Segments
from millstream.transforms import FirstFitPack, Pack, PackAndBatchOperation
from millstream.transforms.batching.stack import stack
from millstream.transforms.packing.rows import RowFormat
from support.laws import assert_resumes_everywhere
from support.streams import equal_streams

ROW_LENGTH = 9


@given(rows=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=5))
def test_the_batch_of_rows_is_that_of_the_rows_one_by_one(rows: list[list[int]]) -> None:
    """The same names, dtypes, shapes and bytes, in the memory that the rows are in."""
    lengths = [length for row in rows for length in row]
    documents = [np.arange(10, 10 + length, dtype=np.uint16) for length in lengths]
    starts = np.cumsum([0, *map(len, rows)])
    pieces = Segments(starts, np.arange(len(documents)), np.zeros(len(documents), np.int64), np.array(lengths))
    pack = Pack({"tokens": ROW_LENGTH})
    laid_out = pack.make(pack.prepare(documents).values, pieces)

    batch, expected = stack(laid_out), stack(list(laid_out))
    assert list(batch) == list(expected) == ["tokens", "tokens_segment_ids", "tokens_positions"]
    assert equal_streams([expected], [batch])
    assert all(np.shares_memory(array, laid_out[0][name]) for name, array in batch.items())
    assert [row["tokens"].sum() for row in laid_out] == [
        sum(documents[piece].sum() for piece in range(start, stop)) for start, stop in itertools.pairwise(starts)
    ]


@given(num_rows=st.integers(1, 40), bounds=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_the_batch_of_some_rows_is_theirs(num_rows: int, bounds: tuple[int, int]) -> None:
    """Rows that follow one another are a part of the columns; a small part is copied, and keeps nothing else alive."""
    documents = [(np.full(3, number),) for number in range(num_rows)]
    rows = RowFormat({"tokens": 4}, (), None).lay_out(
        documents, Segments(np.arange(num_rows + 1), np.arange(num_rows)), np.empty
    )
    some = rows[slice(*bounds)]
    assert [row["tokens"].tolist() for row in some] == [row["tokens"].tolist() for row in list(rows)[slice(*bounds)]]
    if len(some):
        batch = stack(some)
        assert batch["tokens"].tolist() == [[number] * 3 + [0] for number in range(num_rows)[slice(*bounds)]]
        assert np.shares_memory(batch["tokens"], rows[bounds[0]]["tokens"]) == (len(some) * 16 >= num_rows)


@pytest.mark.parametrize("carried", [(), ("name",)])
def test_rows_with_lists_are_stacked_one_by_one(carried: tuple[str, ...]) -> None:
    """Rows with lists of values have no prepared batch, and each row has its own list."""
    made = RowFormat({"tokens": 4}, (), None, carried=carried)
    documents: list[Any] = [(np.arange(2), *("ab"[number] for _ in carried)) for number in range(2)]
    rows = made.lay_out(documents, Segments(np.array([0, 2]), np.arange(2)), np.empty)
    assert (rows.stack(np.empty) is None) == bool(carried)
    assert [row.get("name") for row in rows] == [["a", "b"] if carried else None]


def documents(count: int) -> list[dict[str, Any]]:
    return [{"a": np.full(1 + number * 5 % 6, number), "left out": 3} for number in range(1, count + 1)]


def made_of(source: list[Any], *operations: Any, **options: Any) -> list[Any]:
    return list(millstream.load(source, num_epochs=1, transformations=operations, **options))


@pytest.mark.parametrize("worker_count", [0, 2])
@pytest.mark.parametrize("most", [None, 2])
def test_batches_are_the_rows_of_first_fit(worker_count: int, most: int | None) -> None:
    """Three dicts a batch: tokens, segment ids and positions, for any number of workers."""
    first_fit = FirstFitPack({"a": 6}, num_packing_bins=4, shuffle_bins=False, max_sequences_per_bin=most)
    rows = made_of(documents(31), first_fit)
    made = made_of(documents(31), PackAndBatchOperation({"a": 6}, 4, most), worker_count=worker_count)

    assert all(len(batch) == 3 and {*map(len, batch)} == {1} for batch in made)
    assert {len(batch[0]["a"]) for batch in made} == {4}
    for part, name in enumerate(("a", "a_segment_ids", "a_positions")):
        whole = np.concatenate([batch[part]["a"] for batch in made])
        assert whole[: len(rows)].tolist() == [row[name].tolist() for row in rows]
        assert not whole[len(rows) :].any()


def test_it_resumes_and_refuses() -> None:
    """A state at any batch resumes with the same batches; a document longer than a row is an error."""
    pack = PackAndBatchOperation(length_struct={"a": 6}, batch_size=4)
    assert_resumes_everywhere(millstream.load(documents(31), num_epochs=1, transformations=[pack]))
    with pytest.raises(ValueError, match="longer row"):
        made_of(documents(5), PackAndBatchOperation(length_struct={"a": 3}, batch_size=4))
    with pytest.raises(ValueError, match=r"padding_struct\['a'\] must be a value of int64"):
        made_of(documents(5), FirstFitPack({"a": 6}, num_packing_bins=4, padding_struct={"a": 0.5}))
