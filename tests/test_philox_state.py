"""A generator set to the start of a stream is a new one, whichever way it was set."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import philox_state
from millstream.philox_state import Start, starter

words = st.integers(0, 2**64 - 1)


def start_by_property(bit_generator: np.random.Philox) -> Start:
    """Returns what sets a bit generator as NumPy intends it."""
    return lambda *stream: philox_state._start_by_property(bit_generator, *stream)


@pytest.mark.parametrize("way", [starter, start_by_property])
@given(
    stream=st.tuples(*[words] * 6),
    before=st.lists(st.sampled_from([np.uint8, np.uint32, np.uint64]), max_size=5),
)
@settings(deadline=None, max_examples=100)
def test_a_start_leaves_nothing_of_what_was(
    way: Callable[[np.random.Philox], Start], stream: tuple[int, int, int, int, int, int], before: list[type]
) -> None:
    """Key and counter are those that were asked for, and no buffered word is left of earlier draws."""
    used = np.random.Philox(7)
    for dtype in before:
        np.random.Generator(used).integers(0, 100, size=3, dtype=dtype)
    way(used)(*stream)
    new = np.random.Philox(key=np.array(stream[:2], np.uint64), counter=np.array(stream[2:], np.uint64))

    assert repr(used.state) == repr(new.state)
    assert used.random_raw(9).tolist() == new.random_raw(9).tolist()


def test_the_layout_of_this_numpy_is_known() -> None:
    """Where this fails, NumPy has moved things: all is as correct as before, and random operations take longer."""
    assert philox_state._layout_is_known()
    assert philox_state._start_in_memory(np.random.Philox(0)) is not None


def test_unknown_memory_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pointers point elsewhere, the state is set by NumPy itself."""
    monkeypatch.setattr(philox_state, "_address_offset", lambda: 0)
    # Not asked here: the answer, which is kept, would be that of this test.
    monkeypatch.setattr(philox_state, "_layout_is_known", lambda: True)
    used, new = np.random.Philox(7), np.random.Philox(key=np.array([1, 2]), counter=np.array([3, 4, 5, 6]))
    assert philox_state._start_in_memory(used) is None
    starter(used)(1, 2, 3, 4, 5, 6)
    assert repr(used.state) == repr(new.state)


def test_what_sets_a_generator_keeps_it() -> None:
    """The memory that is written to belongs to a bit generator that nobody else may need any more."""
    bit_generator = np.random.Philox(7)
    start = philox_state._start_in_memory(bit_generator)
    assert isinstance(start, functools.partial)
    assert start.args[0].owner is bit_generator
