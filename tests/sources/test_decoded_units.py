"""Units that are decoded once, several at a time, and kept as long as there is room."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.sources.keyed_pool import UnitCache


class Unit(NamedTuple):
    number: int
    num_bytes: int = 10
    num_records: int = 10


def test_those_that_are_missing_are_decoded_at_the_same_time() -> None:
    """Missing units are decoded in at most the given number of threads, once, however many readers want them."""
    both = threading.Barrier(2)
    loads: list[int] = []

    def load(number: int) -> Unit:
        loads.append(number)
        both.wait(30)
        return Unit(number)

    cache = UnitCache[int, Unit](1000)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: cache.get_all(dict.fromkeys(range(4), 1), load, 2), range(3)))
    assert found == [[Unit(number) for number in range(4)]] * 3
    assert sorted(loads) == [0, 1, 2, 3]


def test_one_that_cannot_be_decoded_is_tried_again() -> None:
    """A unit that fails raises its error and is decoded again at the next read; the others are kept."""
    cache = UnitCache[int, Unit](1000)
    loads: list[int] = []

    def load(number: int) -> Unit:
        loads.append(number)
        if loads.count(2) == 1 and number == 2:
            raise OSError("not now")
        return Unit(number)

    with pytest.raises(OSError, match="not now"):
        cache.get_all(dict.fromkeys(range(4), 1), load, 2)
    assert cache.get_all(dict.fromkeys(range(4), 1), load, 2) == [Unit(number) for number in range(4)]
    assert loads.count(2) == 2


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), max_size=30), st.integers(0, 60))
def test_the_least_recently_used_are_dropped(reads: list[list[int]], max_bytes: int) -> None:
    """The oracle is a list in the order of use; one unit is kept whatever its size, and all of one read are given."""
    cache = UnitCache[int, Unit](max_bytes)
    kept: list[int] = []
    for numbers in reads:
        missing = [number for number in numbers if number not in kept]
        assert cache.get_all(dict.fromkeys(numbers, 1), Unit, 1) == [Unit(number) for number in numbers]
        kept = [number for number in kept if number not in numbers] + numbers
        while missing and len(kept) > 1 and len(kept) * 10 > max_bytes:
            kept.pop(0)
        assert list(cache._entries) == kept
