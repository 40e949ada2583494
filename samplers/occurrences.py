"""Occurrences of records in an order: the inverse, from record keys to positions."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer
from millstream.samplers.base import position_limit

Numbers = NDArray[np.int64]


class Occurrences(NamedTuple):
    """Positions, and the index of the key among the given ones that occurs there; in any order, int64, shape (m,)."""

    rows: Numbers
    positions: Numbers

    def table(self, num_keys: int) -> Numbers:
        """Returns a row for each key, its positions ascending, padded with -1; each position once."""
        if len(self.rows) == num_keys and (np.diff(self.rows) == 1).all():
            return self.positions[:, np.newaxis]
        order = np.lexsort((self.positions, self.rows))
        rows, positions = self.rows[order], self.positions[order]
        is_first = np.ones(len(rows), dtype=np.bool_)
        is_first[1:] = (rows[1:] != rows[:-1]) | (positions[1:] != positions[:-1])
        rows, positions = rows[is_first], positions[is_first]
        counts = np.bincount(rows, minlength=num_keys)
        found = np.full((num_keys, int(counts.max(initial=0))), -1, dtype=np.int64)
        found[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = positions
        return found

    @classmethod
    def concatenate(cls, all_found: "list[Occurrences]") -> "Occurrences":
        nothing = np.empty(0, dtype=np.int64)
        return cls(*map(np.concatenate, zip((nothing, nothing), *all_found, strict=True)))


def checked_keys(keys: Any) -> Numbers:
    array = np.asarray(keys)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"keys must be a list or array of integers, got {keys!r}.")
    checked: Numbers = array.astype(np.int64)
    return checked


def checked_stop(stop: Any, length: int | None) -> int:
    if stop is None and length is None:
        raise ValueError("stop must be given for an endless order: each record comes again and again.")
    limit = position_limit(length)
    return limit if stop is None else min(as_integer(stop, "stop", minimum=0), limit)


def equal_to(values: Numbers, asked: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the pairs of an index into `asked` and an index into `values` at which both are equal."""
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    starts, stops = np.searchsorted(in_order, asked, "left"), np.searchsorted(in_order, asked, "right")
    rows, numbers = spread(starts, stops)
    return rows, order[numbers]


def by_number(numbers: NDArray[np.integer[Any]]) -> list[tuple[int, NDArray[np.intp] | slice]]:
    """Returns each of the numbers, with the indices at which it is."""
    if not len(numbers):
        return []
    if (numbers == numbers[0]).all():
        return [(int(numbers[0]), slice(None))]
    return [(number, np.flatnonzero(numbers == number)) for number in np.unique(numbers).tolist()]


def spread(starts: Numbers, stops: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the numbers from each start to before each stop, one range after another, with the range of each."""
    counts = stops - starts
    rows = np.repeat(np.arange(len(starts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - starts, counts)
