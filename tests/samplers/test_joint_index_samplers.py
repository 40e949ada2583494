"""ManyOrders: what many IndexSamplers say, asked at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream
from millstream.samplers.joint_index_samplers import ManyOrders, can_join

SIZES = st.one_of(
    st.integers(1, 40),
    st.integers(1, 5000),
    st.sampled_from([(1 << 32) - 1, 1 << 32, (1 << 32) + 1, 1 << 63]),
    st.integers(1, 1 << 32),
    st.integers(1 << 32, 1 << 63),
)
SEEDS = st.one_of(st.none(), st.integers(0, 3), st.integers(0, (1 << 64) - 1))


@st.composite
def index_samplers(draw: st.DrawFn) -> millstream.IndexSampler:
    """Returns a sampler of any size; shuffled where it has a seed."""
    seed = draw(SEEDS)
    return millstream.IndexSampler(draw(SIZES), shuffle=seed is not None, seed=seed)


@given(st.lists(index_samplers(), min_size=1, max_size=9), st.data())
def test_each_sampler_says_the_same_by_itself(samplers: list[millstream.IndexSampler], data: st.DataObject) -> None:
    """For any samplers and positions, in any order and epochs, also when asked again in other ones."""
    orders = ManyOrders(samplers)
    for _ in range(3):
        start = data.draw(st.integers(0, 1 << 62))
        positions = st.one_of(st.integers(0, 50), st.integers(start, start + 5000), st.integers(0, (1 << 63) - 1))
        asked = data.draw(st.lists(st.tuples(st.integers(0, len(samplers) - 1), positions), max_size=60))
        expected = [samplers[number].record_keys_at(np.array([position]))[0] for number, position in asked]
        numbers, where = np.array(asked, dtype=np.int64).reshape(-1, 2).T
        assert orders.record_keys(numbers, np.ascontiguousarray(where)).tolist() == expected


class Doubled(millstream.IndexSampler):
    """Says something else of its keys."""


@pytest.mark.parametrize(
    ("sampler", "joins"),
    [
        (millstream.IndexSampler(8, shuffle=True, seed=1), True),
        (millstream.SequentialSampler(1 << 32), True),
        (millstream.IndexSampler(1 << 63, shuffle=True, seed=1), True),
        (millstream.IndexSampler(2, keys=[5, 7]), False),
        (Doubled(8), False),
        (millstream.HierarchicalSampler([4, 4], window_units=2, seed=1), False),
    ],
    ids=["shuffled", "in order", "large", "with keys", "a subclass", "another kind"],
)
def test_others_are_asked_themselves(sampler: object, joins: bool) -> None:
    """A sampler whose keys are anything else than this arithmetic is not one of them."""
    assert can_join(sampler) is joins
