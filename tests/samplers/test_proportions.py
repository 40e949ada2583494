"""Which component stands at which position: exact shares, dense indices, and the way back."""

from collections import Counter
from fractions import Fraction
from math import ceil, floor, gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.samplers.proportions import TABLE_LIMIT, Proportions, Table, Tree, proportions

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=9).map(
    lambda numbers: tuple(number // gcd(*numbers) for number in numbers)
)
KINDS = pytest.mark.parametrize("kind", [Table, Tree])


def listed(order: Proportions, length: int) -> list[tuple[int, int]]:
    components, indices = order.locate(np.arange(length))
    return list(zip(components.tolist(), indices.tolist(), strict=True))


@KINDS
@given(weights=WEIGHTS)
def test_each_component_is_counted_without_a_gap(kind: type[Table | Tree], weights: tuple[int, ...]) -> None:
    """A component's elements come in their order, each once; in each period as many as its weight says."""
    period = sum(weights)
    seen: Counter[int] = Counter()
    for component, index in listed(kind(weights), 3 * period):
        assert index == seen[component]
        seen[component] += 1
    assert [seen[component] for component in range(len(weights))] == [3 * weight for weight in weights]


@given(weights=WEIGHTS)
def test_every_prefix_of_a_table_is_less_than_one_element_off(weights: tuple[int, ...]) -> None:
    """Among the first k positions, a component has k times its share, rounded up or down."""
    seen: Counter[int] = Counter()
    for position, (component, _) in enumerate(listed(Table(weights), 2 * sum(weights))):
        seen[component] += 1
        shares = [Fraction((position + 1) * weight, sum(weights)) for weight in weights]
        assert all(floor(share) <= seen[c] <= ceil(share) for c, share in enumerate(shares))


@given(weights=WEIGHTS)
def test_every_prefix_of_a_tree_is_less_than_1_7_elements_off(weights: tuple[int, ...]) -> None:
    """Every prefix of a tree is less than 1.7 elements off the exact shares."""
    seen: Counter[int] = Counter()
    for position, (component, _) in enumerate(listed(Tree(weights), sum(weights))):
        seen[component] += 1
        assert all(abs(seen[c] * sum(weights) - (position + 1) * w) < 1.7 * sum(weights) for c, w in enumerate(weights))


@KINDS
@given(weights=WEIGHTS, start=st.integers(0, 2**63 - 9))
def test_any_position_alone_and_the_way_back(kind: type[Table | Tree], weights: tuple[int, ...], start: int) -> None:
    """Locating a position up to 2**63 and going back gives the position; counts exclude its own element."""
    order = kind(weights)
    components, indices = order.locate(start + np.arange(8))
    for position, component, index in zip(range(start, start + 8), components.tolist(), indices.tolist(), strict=True):
        assert order.position_of(component, index) == position
        assert order.counts(position)[component] == index
        assert sum(order.counts(position)) == position


@KINDS
@given(weights=WEIGHTS, component=st.integers(0, 8), index=st.integers(0, 2**70))
def test_counts_reach_beyond_64_bits(
    kind: type[Table | Tree], weights: tuple[int, ...], component: int, index: int
) -> None:
    """Positions and counts are exact beyond 64 bits."""
    component %= len(weights)
    order = kind(weights)
    position = order.position_of(component, index)
    assert order.counts(position)[component] == index
    assert order.counts(position + 1)[component] == index + 1


@given(weights=st.lists(st.integers(1, 2**27), min_size=1, max_size=15))
def test_long_periods_are_located_within_62_bits(weights: list[int]) -> None:
    """Weights of a sum near 2**31 at positions near 2**63: nothing overflows, as the way back shows."""
    order = Tree([*weights, 2**31 - 1 - sum(weights)])
    start = 2**63 - 5
    components, indices = order.locate(start + np.arange(4))
    found = [order.position_of(*pair) for pair in zip(components.tolist(), indices.tolist(), strict=True)]
    assert found == list(range(start, start + 4))


def test_the_period_decides_which_serves() -> None:
    """Periods up to the limit are served by a table, longer ones by a tree."""
    assert isinstance(proportions((TABLE_LIMIT - 1, 1)), Table)
    assert isinstance(proportions((TABLE_LIMIT, 1)), Tree)
