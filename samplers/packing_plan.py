"""Which pieces of documents go into which rows: decided for all of them before the first is read.

`BestFit` is best-fit decreasing, not over the pieces but over how many there are of each length. From the longest length
down, pieces go into the rows that have the least space that suffices, as many of them at once as there are such rows
and as fit; where there are none, new rows begin. So rows come in *kinds*, those with the same lengths, of which there
are a few thousand however many pieces; a row is number t of its kind, and takes the next pieces of each of its lengths.
Best-fit decreasing needs at most 11/9 of the fewest rows that there could be (Johnson, "Near-Optimal Bin Packing
Algorithms", 1973); of realistic lengths, nearly all rows are full.

`Stream` is all pieces laid end to end and cut into rows: full rows, and a cut at nearly each row's end.
"""

import bisect
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


class Kind(NamedTuple):
    """Rows that hold pieces of the same lengths.

    Attributes:
        count: how many rows there are of it.
        lengths: the lengths of the pieces in one, longest first.
    """

    count: int
    lengths: tuple[int, ...]


def best_fit(histogram: list[int], row_length: int) -> list[Kind]:
    """Returns the kinds of rows that take, for each length 1 … row_length, so many pieces as the histogram says."""
    open_rows: defaultdict[int, list[Kind]] = defaultdict(list)
    spaces: list[int] = []
    kinds: list[Kind] = []

    def put(space: int, kind: Kind) -> None:
        if not space:
            kinds.append(kind)
            return
        if not open_rows[space]:
            bisect.insort(spaces, space)
        open_rows[space].append(kind)

    for length in range(row_length, 0, -1):
        left = histogram[length]
        while left:
            number = bisect.bisect_left(spaces, length)
            space = spaces[number] if number < len(spaces) else row_length
            found = open_rows[space].pop() if number < len(spaces) else Kind(left, ())
            if number < len(spaces) and not open_rows[space]:
                spaces.pop(number)
            # A row is filled with equals before the next one gets any.
            each = min(space // length, left)
            count = min(found.count, left // each)
            left -= count * each
            if found.lengths and found.count > count:
                put(space, Kind(found.count - count, found.lengths))
            put(space - each * length, Kind(count, (*found.lengths, *(length,) * each)))
    for rows in open_rows.values():
        kinds += rows
    return kinds


@dataclasses.dataclass(frozen=True, eq=False)
class BestFit:
    """Rows by best fit.

    Attributes:
        num_rows: how many rows there are.
        order: the pieces, sorted by length.
    """

    num_rows: int
    order: Numbers
    _row_ends: Numbers
    _counts: Numbers
    _slots: Numbers
    _lengths: Numbers
    _groups: Numbers
    _used: Numbers
    _each: Numbers
    _places: Numbers

    @classmethod
    def of(cls, lengths: Numbers, row_length: int) -> "BestFit":
        """Returns the plan for pieces of lengths 1 … row_length, at least one."""
        histogram = np.bincount(lengths, minlength=row_length + 1)
        kinds = best_fit(histogram.tolist(), row_length)
        used: Counter[int] = Counter()
        columns: list[tuple[int, int, int, int]] = []
        for kind in kinds:
            each = Counter(kind.lengths)
            seen: Counter[int] = Counter()
            for length in kind.lengths:
                columns.append((length, used[length], each[length], seen[length]))
                seen[length] += 1
            for length, count in each.items():
                used[length] += count * kind.count
        of_slots = np.array(columns, dtype=np.int64).T
        counts = np.array([kind.count for kind in kinds], dtype=np.int64)
        # As small as can be: it is then sorted by counting.
        order = np.argsort(lengths.astype(np.min_scalar_type(row_length)), kind="stable")
        return cls(
            int(counts.sum()),
            order,
            np.cumsum(counts),
            counts,
            np.concatenate([[0], np.cumsum([len(kind.lengths) for kind in kinds])]),
            of_slots[0],
            np.concatenate([[0], np.cumsum(histogram)]),
            *of_slots[1:],
        )

    def pieces(self, rows: Numbers, among_equals: Callable[[Numbers, Numbers], Numbers]) -> tuple[Numbers, Numbers]:
        """Returns where the pieces of each row begin, shape (m + 1,), and the pieces of all rows.

        Args:
            rows: numbers of rows, shape (m,).
            among_equals: given how many pieces of a length there are, and numbers of some of them, says which stand in
                their places: a permutation for each length, given for each piece.
        """
        kinds = np.searchsorted(self._row_ends, rows, side="right")
        number_in_kind = rows - (self._row_ends[kinds] - self._counts[kinds])
        widths = self._slots[kinds + 1] - self._slots[kinds]
        starts = np.concatenate([[0], np.cumsum(widths)])
        slots = np.repeat(self._slots[kinds] - starts[:-1], widths) + np.arange(starts[-1])
        ranks = self._used[slots] + np.repeat(number_in_kind, widths) * self._each[slots] + self._places[slots]
        lengths = self._lengths[slots]
        firsts = self._groups[lengths]
        return starts, self.order[firsts + among_equals(self._groups[lengths + 1] - firsts, ranks)]
