"""What is free is known exactly, whatever was taken and given back, in any order."""

from hypothesis import given
from hypothesis import strategies as st

from millstream.loader.transport.free_space import FreeSpace

SIZE = 64


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.integers(0, 10)), max_size=60))
def test_pieces_in_use_are_apart_and_neighbours_that_are_free_are_one(steps: list[tuple[int, bool, int]]) -> None:
    """Against a list of bytes: a piece comes from the smallest extent that has room for it, or there is none."""
    space, free, used = FreeSpace(), [True] * SIZE, []
    space.add(0, SIZE)
    for num_bytes, takes, which in steps:
        if takes:
            extents = [len(extent) for extent in "".join("f" if byte else " " for byte in free).split()]
            smallest = min((size for size in extents if size >= num_bytes), default=None)
            start = space.take(num_bytes)
            assert (start is None) == (smallest is None)
            if start is not None:
                assert all(free[start : start + num_bytes])
                assert extent_at(free, start) == smallest
                free[start : start + num_bytes] = [False] * num_bytes
                used.append((start, num_bytes))
        elif used:
            start, size = used.pop(which % len(used))
            space.add(start, size)
            free[start : start + size] = [True] * size
        assert space.num_bytes == sum(free)
    for start, num_bytes in used:
        space.add(start, num_bytes)

    assert space.take_largest() == (0, SIZE)
    assert space.num_bytes == 0


def extent_at(free: list[bool], start: int) -> int:
    first = start - [*free[start::-1], False].index(False) + 1
    return [*free[first:], False].index(False)
