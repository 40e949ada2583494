"""Pieces of a source, such as its files: the piece of each record, and batches that are cut by piece."""

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.base import items_at

_T = TypeVar("_T")

Integers = NDArray[np.int64]


@final
class Pieces:
    """Pieces of a source, one after another, of which some may be empty.

    Attributes:
        lengths: the number of records of each piece, shape (pieces,).
        ends: the record key after the last record of each piece, shape (pieces,).
        starts: the first record key of each piece, shape (pieces,).
    """

    def __init__(self, lengths: Iterable[int] | Integers) -> None:
        self.lengths = np.array(lengths if isinstance(lengths, np.ndarray) else list(lengths), np.int64)
        self.ends = np.cumsum(self.lengths)
        self.starts = self.ends - self.lengths
        # Python's integers are found in a tenth of the time.
        self._starts: list[int] = self.starts.tolist()

    def __reduce__(self) -> tuple[Any, ...]:
        return Pieces, (self.lengths,)

    def find(self, key: int) -> tuple[int, int]:
        """Returns the piece of a record key, and the record's number in it."""
        piece = bisect.bisect_right(self._starts, key) - 1
        return piece, key - self._starts[piece]

    def locate(self, keys: Integers) -> tuple[Integers, Integers]:
        """Returns the piece of each record key, and the record's number in it, both of shape (n,)."""
        # By the starts: the end of all records may be 2**63.
        pieces: Integers = self.starts.searchsorted(keys, side="right") - 1
        return pieces, keys - self.starts[pieces]


class Cut(NamedTuple):
    """A batch that is sorted by piece.

    Attributes:
        order: the row in the batch of each sorted record, shape (n,).
        runs: each piece that has records, and the start and stop of its records in `order`.
    """

    order: NDArray[np.intp]
    runs: list[tuple[int, int, int]]

    @property
    def rows(self) -> NDArray[np.intp]:
        """The number of each row of the batch in `order`, shape (n,)."""
        rows = np.empty_like(self.order)
        rows[self.order] = np.arange(len(self.order))
        return rows

    def put_back(self, records: Sequence[_T]) -> list[_T]:
        """Returns sorted records in the order of the batch."""
        return list(items_at(records, self.rows.tolist()))


def cut(pieces: NDArray[Any], count: int) -> Cut:
    """Sorts a batch by piece, given the piece of each of its records, a number below `count`."""
    # Small integers are sorted in a tenth of the time.
    order = pieces.astype(np.min_scalar_type(count), copy=False).argsort(kind="stable")
    found = pieces[order]
    stops = [*((found[1:] != found[:-1]).nonzero()[0] + 1).tolist(), len(found)] if len(found) else []
    starts = [0, *stops[:-1]] if stops else []
    return Cut(order, list(zip(found[starts].tolist(), starts, stops, strict=True)))


def window_of(unit_bytes: int, cache_bytes: int) -> int:
    """Returns the number of units that fit into half of a cache, because one window is read while another one ends."""
    return max(1, cache_bytes // (2 * max(1, unit_bytes)))


def window_units(num_bytes: float, unit_bytes: int, cache_bytes: int) -> int | None:
    """Returns the number of units that a shuffle should keep together.

    None if everything fits into the cache, because any order is then equally fast.
    """
    return None if num_bytes <= cache_bytes else window_of(unit_bytes, cache_bytes)
