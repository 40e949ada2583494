"""Pieces of a source, against lists."""

import pickle
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millstream.sources.pieces import Pieces, cut


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_a_batch_is_cut_by_piece_and_put_back(lengths: Sequence[int], data: st.DataObject) -> None:
    """The oracle is a list of (piece, number): each key is found in it, and a cut batch comes back in its order."""
    records = [(piece, number) for piece, length in enumerate(lengths) for number in range(length)]
    keys = data.draw(st.lists(st.sampled_from(range(len(records))), max_size=9)) if records else []
    pieces = pickle.loads(pickle.dumps(Pieces(lengths)))
    numbers, within = pieces.locate(np.array(keys, np.int64))
    batch = [records[key] for key in keys]

    assert [pieces.find(key) for key in keys] == batch == list(zip(numbers.tolist(), within.tolist(), strict=True))
    order, runs = by_piece = cut(numbers, len(lengths))
    assert [piece for piece, _, _ in runs] == sorted({piece for piece, _ in batch})
    read = [(piece, int(within[row])) for piece, start, stop in runs for row in order[start:stop]]
    assert by_piece.put_back(read) == batch


def test_the_end_of_all_records_may_be_two_to_the_63() -> None:
    """The end of the last piece exceeds 64 bits, and its last record is found."""
    pieces = Pieces([1, 2**63 - 1])
    key = 2**63 - 1

    assert pieces.find(key) == (1, key - 1)
    assert [found.tolist() for found in pieces.locate(np.array([0, key]))] == [[0, 1], [0, key - 1]]
