"""The base class of orders of positions: ranges of positions, ends, and the inverse, from record keys to positions."""

import abc
import itertools
import operator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.core.descriptions import Rendered
from millstream.samplers.base import check_range, checked_positions, position_limit

Numbers = NDArray[np.int64]


class Occurrences(NamedTuple):
    """Positions, and the index of the key among the given ones that occurs there; in any order, int64, shape (m,)."""

    rows: Numbers
    positions: Numbers

    def table(self, num_keys: int) -> Numbers:
        """Returns a row for each key, its positions ascending, padded with -1; each position once."""
        if 0 < num_keys == len(self.rows) and (np.diff(self.rows) == 1).all():
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


class Order(Rendered, abc.ABC):
    """An order whose methods follow from its length, from the record keys at positions, and from their inverse."""

    _card_kind = "order"

    @property
    @abc.abstractmethod
    def length(self) -> int | None:
        """The number of positions; None if the order is endless."""

    @property
    def given_batch(self) -> tuple[str, int] | None:
        """The name of the argument with the size of the global batch, and that size; None if it may have any."""
        return None

    @abc.abstractmethod
    def _record_keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the record keys of positions that are checked."""

    @abc.abstractmethod
    def occurrences(self, keys: NDArray[np.int64], stop: int) -> Occurrences:
        """Returns the occurrences of keys before a position, in any order."""

    def __len__(self) -> int:
        length = self.length
        if length is None:
            raise TypeError(
                f"This {type(self).__name__} is endless and has no len(): give num_epochs to it or to its samplers."
            )
        return length

    def record_keys(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the record keys of the positions [start, stop), of one or of several epochs; shape (stop - start,).

        Args:
            start: the first position, from 0 on.
            stop: the position after the last one.

        Raises:
            IndexError: start is negative or above stop, or stop is beyond the end.
        """
        return self._record_keys(positions_between(start, stop, self.length))

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the record keys of any positions, shape (m,), in their order.

        Args:
            positions: any positions, from 0 on, shape (m,), in any order; they may repeat.

        Raises:
            IndexError: a position is negative or beyond the end.
        """
        return self._record_keys(checked_positions(positions, self.length))

    def positions_of(self, keys: Any, stop: int | None = None) -> NDArray[np.int64]:
        """Returns the positions at which records come, a row for each key: int64, shape (keys, occurrences).

        Nothing is enumerated: the shuffle is run backwards, and changes of weights are followed. Rows are ascending,
        and padded with -1 if other keys come more often.

        Args:
            keys: record keys, shape (m,). A key that never comes has a row of -1.
            stop: the position before which to search, from 0 on; None for the end of the order.

        Raises:
            TypeError: keys are not integers, or the order, or that of a component, cannot be inverted.
            ValueError: the order is endless, and stop is None.
        """
        wanted = checked_keys(keys)
        return self.occurrences(wanted, checked_stop(stop, self.length)).table(len(wanted))


def positions_between(start: int, stop: int, length: int | None) -> NDArray[np.int64]:
    """Returns the positions [start, stop) of an order of some length, None for endless; shape (stop - start,)."""
    start, stop = operator.index(start), operator.index(stop)
    check_range(start, stop, length)
    if start == stop:
        return np.empty(0, dtype=np.int64)
    # Not np.arange(start, stop): stop may be 2**63, one more than an int64 holds.
    return np.arange(stop - start, dtype=np.int64) + start


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
    """Returns each of the numbers, ascending, with the indices at which it is, ascending; all of them as a slice."""
    if not len(numbers):
        return []
    first, last = int(numbers.min()), int(numbers.max())
    if first == last:
        return [(first, slice(None))]
    # Sorted as small integers, which takes a tenth of the time.
    small = (numbers - first).astype(np.min_scalar_type(last - first))
    order = np.argsort(small, kind="stable")
    starts = [0, *(np.flatnonzero(np.diff(small[order])) + 1).tolist(), len(order)]
    return [(int(numbers[order[start]]), order[start:stop]) for start, stop in itertools.pairwise(starts)]


def spread(starts: Numbers, stops: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the numbers from each start to before each stop, one range after another, with the range of each."""
    counts = stops - starts
    rows = np.repeat(np.arange(len(starts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - starts, counts)
