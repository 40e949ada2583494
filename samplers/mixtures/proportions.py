"""The component at each position of a mixture: exact proportions, as a pure function of the position.

The weights are whole numbers w[0] … w[n - 1] without a common divisor. In each period of sum(w) positions, component i
has exactly w[i]. For any position, the component and the number of its earlier elements are computed; for any
element of a component, its position.

`Table` holds one period, in which among the first k positions component i has k * w[i] / sum(w), rounded up or down:
every prefix is less than one element away from the weights. It is made by giving each position to the element with the
earliest deadline: element j of component i may stand from position floor(j * sum(w) / w[i]) on, and must stand before
ceil((j + 1) * sum(w) / w[i]). That such a schedule exists, and that the earliest deadline first finds it, is in Baruah,
Cohen, Plaxton, Varvel, "Proportionate progress: a notion of fairness in resource allocation", Algorithmica 15, 1996,
and Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980.

`Tree` serves periods that are too long for a table. It is Huffman's tree over the weights. At a node that has S
positions a period, of which a go left, L(k) = (k * a + S // 2) // S of its first k positions do: a line on a grid
(Bresenham, "Algorithm for computer control of a digital plotter", 1965). Element k goes left where L(k + 1) > L(k), and
is number L(k) there; else it is number k - L(k) on the right. A prefix is off by at most half an element at each node
above a component, of which deeper nodes see their share only. In a tree of Huffman's these shares fall as Fibonacci's
numbers rise, so that the whole is below 1.7 elements; the worst that a search found is 1.45.
"""

import functools
import heapq
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from millstream.samplers.order import spread

_PLACED_PER_SEARCH = 64
"""The number of positions of a table that are built in the time in which one element is found without it."""

TABLE_LIMIT = 1 << 16
"""Periods up to this have a table, which is made in some hundredths of a second."""


def earliest_position(period: int, weight: int, index: int) -> int:
    """Returns a position before which element number `index` of a component cannot stand, without building the order.

    No prefix of an order is two elements away from the weights.
    """
    return max(0, (index - 2) * period // weight)


@functools.lru_cache(maxsize=64)
def proportions(weights: tuple[int, ...]) -> "Proportions":
    """Returns the order for weights, whole numbers above 0 without a common divisor, of a sum below 2**31.

    The cache keeps the tables of the weights in use. Nothing that visits all parts of a mixture may rely on it: a
    mixture can have thousands.
    """
    return Table(weights) if sum(weights) <= TABLE_LIMIT else Tree(weights)


class Table:
    """The order for a short period. Its table is built when a position is located; counting does not need it."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._period = sum(weights)
        self._weights = tuple(weights)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        rows = self._rows
        periods, offsets = np.divmod(positions, self._period)
        components = rows.components[offsets]
        return components, periods * rows.weights[components] + rows.ranks[offsets]

    def counts(self, length: int) -> list[int]:
        periods, rest = divmod(length, self._period)
        # A mixture that locates positions has the table: its states are counted often.
        rows = vars(self).get("_rows")
        if rows is not None:
            in_last_one = np.bincount(rows.components[:rest], minlength=len(self._weights))
            counted: list[int] = (periods * rows.weights + in_last_one).tolist()
            return counted
        begun = self._counted(rest)
        return [periods * weight + more for weight, more in zip(self._weights, begun, strict=True)]

    def position_of(self, component: int, index: int) -> int:
        """Returns the position of element number `index` of a component: any integers, also beyond 64 bits."""
        periods, rank = divmod(index, self._weights[component])
        return periods * self._period + self._within_period(component, rank)

    def positions_of(self, component: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        periods, ranks = np.divmod(indices, self._weights[component])
        distinct, inverse = np.unique(ranks, return_inverse=True)
        positions: NDArray[np.int64]
        if "_rows" in vars(self) or len(distinct) * _PLACED_PER_SEARCH > self._period:
            positions = self._rows.positions[self._rows.starts[component] + ranks]
        else:
            found = [self._within_period(component, rank) for rank in distinct.tolist()]
            positions = np.array(found, dtype=np.int64)[inverse]
        return periods * self._period + positions

    def _counted(self, length: int) -> list[int]:
        """Returns the numbers of elements before a position of the period, without the table."""
        period = self._period
        released = [-(-length * weight // period) for weight in self._weights]
        # All earlier elements of a component are through, and so is one whose deadline has passed.
        pending = [
            component
            for component, (weight, count) in enumerate(zip(self._weights, released, strict=True))
            if -(-count * period // weight) > length
        ]
        if len(pending) * _PLACED_PER_SEARCH > length:
            begun: list[int] = np.bincount(_fair_period(self._weights, length), minlength=len(self._weights)).tolist()
            return begun
        for component in pending:
            released[component] -= self._within_period(component, released[component] - 1) >= length
        return released

    def _within_period(self, component: int, rank: int) -> int:
        """Returns the position of an element within the period: from the table, or without building it.

        Elements with earlier deadlines come as if there were no others. From the position on before which all elements
        that were ready are such ones, each takes the first free position at which it is ready; this one takes the first
        position after its start that they leave free.
        """
        if (rows := vars(self).get("_rows")) is not None:
            return int(rows.positions[rows.starts[component] + rank])
        period, weights = self._period, self._array
        ready = rank * period // self._weights[component]
        deadline = -(-(rank + 1) * period // self._weights[component])
        # The number of elements of each component with an earlier deadline, or the same one and a lower number.
        earlier = np.minimum((deadline - (np.arange(len(weights)) >= component)) * weights // period, weights)
        earlier[component] = rank
        others = np.flatnonzero(earlier < weights)
        begin = int((earlier[others] * period // weights[others]).min())
        begun = -(-begin * weights // period)
        owners, numbers = spread(begun, np.maximum(begun, earlier))
        arriving = np.bincount(numbers * period // weights[owners] - begin, minlength=deadline - begin)
        # Those that were ready before and have not come yet.
        arriving[0] += int(begun.sum()) - begin
        # It falls wherever no element is waiting for the position.
        lowest = np.minimum.accumulate(np.cumsum(arriving - 1))
        before = min(0, int(lowest[ready - begin - 1])) if ready > begin else 0
        return ready + int(np.argmax(lowest[ready - begin :] < before))

    @functools.cached_property
    def _array(self) -> NDArray[np.int64]:
        return np.array(self._weights, dtype=np.int64)

    @functools.cached_property
    def _rows(self) -> "_Rows":
        components = _fair_period(self._weights, self._period)
        weights = np.array(self._weights, dtype=np.int64)
        starts = np.cumsum(weights) - weights
        positions = np.argsort(components, kind="stable")
        ranks = np.empty(self._period, dtype=np.int64)
        ranks[positions] = np.arange(self._period) - np.repeat(starts, weights)
        return _Rows(weights, components, ranks, starts, positions)


class _Rows(NamedTuple):
    """One period of a table.

    Attributes:
        weights: the weight of each component.
        components: the component at each position.
        ranks: the number of its elements that come before, within the period.
        starts: for each component, the index of its first position in `positions`.
        positions: the positions of all components, one component after another.
    """

    weights: NDArray[np.int64]
    components: NDArray[np.intp]
    ranks: NDArray[np.int64]
    starts: NDArray[np.int64]
    positions: NDArray[np.intp]


def _fair_period(weights: Sequence[int], length: int) -> NDArray[np.intp]:
    """Returns the component at each of the first `length` positions of a period: the earliest deadline first."""
    period = sum(weights)
    placed = [0] * len(weights)
    ready = [(-(-period // weight), component) for component, weight in enumerate(weights)]
    heapq.heapify(ready)
    waiting: list[tuple[int, int]] = []
    order = np.empty(length, dtype=np.intp)
    for position in range(length):
        while waiting and waiting[0][0] <= position:
            component = heapq.heappop(waiting)[1]
            deadline = -(-(placed[component] + 1) * period // weights[component])
            heapq.heappush(ready, (deadline, component))
        component = heapq.heappop(ready)[1]
        order[position] = component
        placed[component] += 1
        heapq.heappush(waiting, (placed[component] * period // weights[component], component))
    return order


class Tree:
    """The order for any period below 2**31: a step down the tree for each bit, about, of how rare a component is."""

    def __init__(self, weights: Sequence[int]) -> None:
        heap = [(weight, leaf) for leaf, weight in enumerate(weights)]
        heapq.heapify(heap)
        # Node by node: its children, of how many positions a period it has how many go left.
        self._num_leaves = len(weights)
        left, right = list(range(len(weights))), list(range(len(weights)))
        to_left, period = [1] * len(weights), [1] * len(weights)
        while len(heap) > 1:
            lighter, heavier = heapq.heappop(heap), heapq.heappop(heap)
            left.append(heavier[1])
            right.append(lighter[1])
            to_left.append(heavier[0])
            period.append(lighter[0] + heavier[0])
            heapq.heappush(heap, (period[-1], len(period) - 1))
        self._root = heap[0][1]
        self._left, self._right = np.array(left, dtype=np.intp), np.array(right, dtype=np.intp)
        self._to_left, self._period = np.array(to_left, dtype=np.int64), np.array(period, dtype=np.int64)
        self._parents = {child: node for node in range(len(weights), len(left)) for child in (left[node], right[node])}

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        components = np.full(len(positions), self._root, dtype=np.intp)
        indices = np.array(positions, dtype=np.int64)
        moving = np.arange(len(positions) if self._root >= self._num_leaves else 0)
        node, number = components[moving], indices[moving]
        while len(moving):
            to_left, period = self._to_left[node], self._period[node]
            # Taken apart, so that nothing exceeds 62 bits.
            periods, rest = np.divmod(number, period)
            product = rest * to_left + (period >> 1)
            lefts = product // period
            goes_left = product - lefts * period + to_left >= period
            lefts += periods * to_left
            number = np.where(goes_left, lefts, number - lefts)
            node = np.where(goes_left, self._left[node], self._right[node])
            components[moving], indices[moving] = node, number
            still = np.flatnonzero(node >= self._num_leaves)
            moving, node, number = moving[still], node[still], number[still]
        return components, indices

    def counts(self, length: int) -> list[int]:
        counts = [0] * self._num_leaves
        pending = [(self._root, length)]
        while pending:
            node, count = pending.pop()
            if node < self._num_leaves:
                counts[node] = count
            else:
                lefts = self._lefts(node, count)
                pending += [(int(self._left[node]), lefts), (int(self._right[node]), count - lefts)]
        return counts

    def position_of(self, component: int, index: int) -> int:
        node, number = component, index
        while node != self._root:
            parent = self._parents[node]
            goes_left = self._left[parent] == node
            to_left, period = int(self._to_left[parent]), int(self._period[parent])
            half = period >> 1
            # The least count of positions of which this many go to this side: L(count) > number on the left, where L is
            # as at the head of this file, and count - L(count) > number on the right.
            if goes_left:
                count = -((half - (number + 1) * period) // to_left)
            else:
                count = (number * period + half) // (period - to_left) + 1
            node, number = parent, count - 1
        return number

    def positions_of(self, component: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns `position_of` of each: on the way up, products exceed 64 bits."""
        found = (self.position_of(component, index) for index in indices.tolist())
        return np.fromiter(found, np.int64, len(indices))

    def _lefts(self, node: int, count: int) -> int:
        return (count * int(self._to_left[node]) + (int(self._period[node]) >> 1)) // int(self._period[node])


Proportions: TypeAlias = Table | Tree
"""An endless order of components."""
