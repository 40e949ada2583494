"""Rows that are laid out are a batch already: whoever stacks them gets what stacking them one by one gives."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.segments import Segments
from millstream.transforms import Pack
from millstream.transforms.batching.stack import stack
from millstream.transforms.packing.rows import RowFormat

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
    for name, array in batch.items():
        assert array.dtype == expected[name].dtype
        assert np.array_equal(array, expected[name])
        assert np.shares_memory(array, laid_out[0][name])
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
