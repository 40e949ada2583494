"""Memory is reused, and never while anything refers to it."""

import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.loader.pipeline import recycled_memory
from millstream.loader.pipeline.recycled_memory import ALIGNMENT, MIN_BYTES, RecycledMemory, round_up
from support.processes.arena_pairs import address


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.booleans()), max_size=40))
@settings(deadline=None, max_examples=50)
def test_arrays_in_use_never_share_memory(requests: list[tuple[int, bool]]) -> None:
    """Whatever is kept and dropped in between, an array keeps what was written into it; all are aligned."""
    memory = RecycledMemory()
    kept: list[tuple[int, np.ndarray]] = []
    for number, (size, keep) in enumerate(requests):
        array = memory.allocate((size, MIN_BYTES // 8), np.dtype(np.int64))
        array[...] = number
        assert address(array) % ALIGNMENT == 0
        if keep:
            kept.append((number, array[0, 1:]))  # A view keeps the whole array alive.
        del array
        assert all((view == value).all() for value, view in kept)


def test_what_lies_idle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many arrays dropped together, some are kept for the next; sizes no longer asked for are not kept for long."""
    monkeypatch.setattr(recycled_memory, "MAX_IDLE_BYTES", 8 * MIN_BYTES)
    memory = RecycledMemory()
    for size in (1, 2, 5, 30):
        arrays = [memory.allocate((size, MIN_BYTES), np.dtype(np.uint8)) for _ in range(20)]
        del arrays
        pieces = [len(piece) for idle in memory._idle.values() for piece in idle]
        assert sum(pieces) <= 8 * MIN_BYTES or len(pieces) == 1
        assert max(pieces) >= size * MIN_BYTES


def test_idle_memory_serves_somewhat_smaller_arrays() -> None:
    """Batches padded to their longest element differ in size: each lies where a longer one was."""
    memory = RecycledMemory()
    array = memory.allocate((MIN_BYTES * 3,), np.dtype(np.uint8))
    first = address(array)
    del array
    second = memory.allocate((MIN_BYTES * 2,), np.dtype(np.uint8))
    third = memory.allocate((MIN_BYTES * 2,), np.dtype(np.uint8))

    assert address(second) == first
    assert address(third) != first


def test_an_array_that_is_kept_keeps_no_idle_memory() -> None:
    """When an executor is gone, so is the memory that it kept for its next batches."""
    memory = RecycledMemory()
    kept, dropped = (memory.allocate((MIN_BYTES,), np.dtype(np.uint8)) for _ in range(2))
    del dropped
    idle = weakref.ref(next(iter(memory._idle.values()))[0])
    assert idle() is not None
    del memory

    assert idle() is None
    assert len(kept) == MIN_BYTES


@given(st.integers(1, 1 << 40))
def test_sizes_are_few_and_close(num_bytes: int) -> None:
    """A rounded size is large enough, wastes at most a quarter beyond whole pages, and rounds to itself."""
    size = round_up(num_bytes)

    assert num_bytes <= size <= max(num_bytes * 1.25, num_bytes + 4096)
    assert round_up(size) == size
