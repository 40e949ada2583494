"""A generator set to the start of a stream is as good as a new one, whichever way it was set."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import philox_state
from millstream.philox_state import at_streams

words = st.integers(0, 2**64 - 1)
streams = st.lists(st.lists(words, min_size=6, max_size=6), max_size=4)


@pytest.mark.parametrize("in_memory", [True, False])
@given(streams=streams, drawn=st.lists(st.sampled_from([np.uint8, np.uint32, np.uint64]), max_size=5))
@settings(deadline=None, max_examples=100)
def test_a_start_leaves_nothing_of_what_was(in_memory: bool, streams: list[list[int]], drawn: list[type]) -> None:
    """Key and counter are those that were asked for, and no buffered word is left of earlier draws."""
    used = np.random.Generator(np.random.Philox(7))
    rows = np.array(streams, np.uint64).reshape(-1, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(philox_state, "_layout_is_known", lambda: in_memory)
        for row, rng in zip(rows, at_streams(used, rows), strict=True):
            new = np.random.Philox(key=row[:2], counter=row[2:])
            assert rng is used
            assert repr(used.bit_generator.state) == repr(new.state)
            for dtype in drawn:
                assert rng.integers(0, 100, dtype=dtype) == np.random.Generator(new).integers(0, 100, dtype=dtype)
            assert used.bit_generator.random_raw(9).tolist() == new.random_raw(9).tolist()


def test_the_layout_of_this_numpy_is_known() -> None:
    """Where this fails, NumPy has moved things: all is as correct as before, and random operations take longer."""
    assert philox_state._layout_is_known()
    assert philox_state._memory_of(np.random.Philox(0)) is not None


def test_unknown_memory_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pointers point elsewhere, the state is set by NumPy itself."""
    monkeypatch.setattr(philox_state, "_address_offset", lambda: 0)
    # Not asked here: the answer, which is kept, would be that of this test.
    monkeypatch.setattr(philox_state, "_layout_is_known", lambda: True)
    used, new = np.random.Philox(7), np.random.Philox(key=np.array([1, 2]), counter=np.array([3, 4, 5, 6]))
    assert philox_state._memory_of(used) is None
    list(at_streams(np.random.Generator(used), np.array([[1, 2, 3, 4, 5, 6]], np.uint64)))
    assert repr(used.state) == repr(new.state)
