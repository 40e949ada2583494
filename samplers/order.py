"""The base class of orders of positions: ranges of positions, ends, and the inverse."""

import abc
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.descriptions import Rendered
from millstream.samplers.base import check_range, checked_positions
from millstream.samplers.occurrences import Occurrences, checked_keys, checked_stop


class Order(Rendered, abc.ABC):
    """An order whose methods follow from its length, from the record keys at positions, and from their inverse."""

    _card_kind = "order"

    @property
    @abc.abstractmethod
    def length(self) -> int | None:
        """The number of positions; None if the order is endless."""

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
