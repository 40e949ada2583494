"""Pieces by length: the rank of each is its number in a sorted list, in however many parts they are sorted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.samplers.rows import packing_plan
from millstream.samplers.rows.packing_plan import ByLength


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=60), size=st.integers(1, 70))
def test_pieces_are_found_as_in_a_sorted_list(lengths: list[int], size: int) -> None:
    """Any ranks, in any order, give the pieces that a stable sort puts there, and `firsts` where each length begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_plan, "_BUCKET_SIZE", size)
        patch.setattr(packing_plan, "_LENGTHS_IN_BUCKET", 0)
        pieces = ByLength.of(np.array(lengths), 9)
    expected = sorted(range(len(lengths)), key=lengths.__getitem__)
    assert pieces.at(np.arange(len(lengths))).tolist() == expected
    assert pieces.at(np.arange(len(lengths))[::-2]).tolist() == expected[::-2]
    assert pieces.firsts.tolist() == [sum(length < limit for length in lengths) for limit in range(11)]


@pytest.mark.parametrize("row_length", [10, 255, 256, 8191, 8192, 100_000])
def test_many_pieces_take_little_memory(row_length: int) -> None:
    """However long a row is, all is found, at 7 bytes a piece at most; at 5, in rows of up to 8,191."""
    lengths = np.random.default_rng(row_length).integers(0, row_length, 1_500_000, endpoint=True)
    pieces = ByLength.of(lengths, row_length)
    chosen = np.random.default_rng(1).integers(0, len(lengths), 10_000)
    assert np.array_equal(pieces.at(chosen), np.argsort(lengths, kind="stable")[chosen])
    held = sum(array.nbytes for array in (pieces._offsets, pieces._ranks, pieces._shifts))
    assert held <= len(lengths) * (7 if row_length > 8191 else 5)
