"""Rows dealt to parts of equal count that cost alike."""

import heapq
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_COST = 1 << 31
"""Costs become integers up to this bound, whose sums are the same on every machine."""


def as_integer_costs(costs: Any) -> NDArray[np.int64]:
    """Returns costs in proportion to the given ones, as integers from 0 to `LARGEST_COST`."""
    array = np.asarray(costs)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"costs must be a one-dimensional array of numbers, got an array of shape {array.shape}.")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"costs must be numbers, got an array of dtype {array.dtype}.")
    array = array.astype(np.float64)
    if not (np.isfinite(array).all() and array.min() >= 0):
        raise ValueError(f"costs must be finite numbers from 0 on, got {array.min()} to {array.max()}.")
    scale = LARGEST_COST / (array.max() or 1.0)
    scaled: NDArray[np.int64] = np.rint(array * scale).astype(np.int64)
    return scaled


def dealt(costs: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Returns rows in an order in which contiguous parts of equal count cost alike, nested."""
    size = len(costs) // parts
    rows = np.argsort(-costs, kind="stable")
    # The dearest row that is left goes to the cheapest part that has room.
    open_parts: list[tuple[int, int]] = [(0, part) for part in range(parts)]
    totals, members = [0] * parts, [list[int]() for _ in range(parts)]
    for row, cost in zip(rows.tolist(), costs[rows].tolist(), strict=True):
        total, part = open_parts[0]
        totals[part] = total + cost
        members[part].append(row)
        if len(members[part]) == size:
            heapq.heappop(open_parts)
        else:
            heapq.heapreplace(open_parts, (totals[part], part))
    groups = list(zip(totals, members, strict=True))
    while len(groups) > 1 and len(groups) % 2 == 0:
        ordered = sorted(groups, key=operator.itemgetter(0), reverse=True)
        half = len(groups) // 2
        pairs = zip(ordered[:half], reversed(ordered[half:]), strict=True)
        groups = [(dear + cheap, first + second) for (dear, first), (cheap, second) in pairs]
    return np.array([row for _, rows_of_group in groups for row in rows_of_group], dtype=np.int64)
