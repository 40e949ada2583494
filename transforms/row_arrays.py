"""Where the pieces of documents lie in rows: their tokens, segment ids and positions, by whole arrays."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate

Array = NDArray[Any]

_CELLS_AT_ONCE = 1 << 17
"""Segment ids and positions are made for about this many tokens at a time."""


@functools.lru_cache(maxsize=4)
def _counting(length: int) -> NDArray[np.int32]:
    """Returns 0, 1, 2, …; not to be written to."""
    counting = np.arange(length, dtype=np.int32)
    counting.flags.writeable = False
    return counting


@final
class Layout:
    """Where the pieces of one feature lie in some rows, and the padding after each of them.

    Args:
        sizes: how long each piece is, shape (pieces,).
        starts: where the pieces of each row begin, and one more.
        length: how long a row is.
        alignment: the pieces of a row begin at multiples of this.
        allocate: gives the memory of the tokens.
    """

    def __init__(
        self, sizes: NDArray[np.int64], starts: NDArray[np.int64], length: int, alignment: int, allocate: Allocate
    ) -> None:
        self._starts = starts
        self._length = length
        self._allocate = allocate
        # Of each piece, its tokens, and the padding after it.
        self._runs = np.empty((len(sizes), 2), dtype=np.int64)
        self._runs[:, 0] = sizes
        self._sizes, self._gaps = self._runs.T
        self._gaps[:] = -self._sizes % alignment
        row_of = np.repeat(np.arange(len(starts) - 1), starts[1:] - starts[:-1])
        ends = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(self._sizes + self._gaps, out=ends[1:])
        # Of each piece, its number in its row, and where it begins there.
        self._numbers = np.arange(1, len(sizes) + 1) - starts[row_of]
        self._begins = ends[:-1] - ends[starts[row_of]]
        # The last one of a row has all the rest after it.
        lasts = starts[1:] - 1
        self._gaps[lasts] = length - self._begins[lasts] - self._sizes[lasts]
        self._begins_in_all = row_of * length + self._begins
        # The pieces after which there is padding, and how much.
        padded = self._gaps.nonzero()[0]
        self._padded = list(zip(padded.tolist(), self._gaps[padded].tolist(), strict=True))

    @property
    def firsts(self) -> NDArray[np.int64]:
        """Where the pieces begin that are not empty, in all rows laid end to end."""
        firsts: NDArray[np.int64] = self._begins_in_all[self._sizes > 0]
        return firsts

    def tokens(self, parts: Sequence[Array], padding: Any) -> Array:
        """Returns the pieces laid out, of shape (rows, length, …), filled up with padding."""
        first = parts[0]
        gap = np.full((int(self._gaps.max(initial=0)), *first.shape[1:]), padding, dtype=first.dtype)
        whole = (len(self._starts) - 1, self._length, *first.shape[1:])
        rows = np.empty(whole, first.dtype) if first.dtype.hasobject else self._allocate(whole, first.dtype)
        laid: list[Array] = []
        done = 0
        for piece, missing in self._padded:
            laid += parts[done : piece + 1]
            laid.append(gap[:missing])
            done = piece + 1
        laid += parts[done:]
        np.concatenate(laid, axis=0, out=rows.reshape(-1, *first.shape[1:]), casting="no")
        return rows

    def segment_ids(self) -> NDArray[np.int32]:
        """Returns the number of the piece in its row, from 1, for each token; 0 for padding. Shape (rows, length)."""
        numbers = self._companion()
        for rows, spread in self._spread(self._numbers):
            numbers[rows] = spread
        return numbers

    def positions(self) -> NDArray[np.int32]:
        """Returns for each token how many of its piece come before it; 0 for padding. Shape (rows, length)."""
        positions, counting = self._companion(), _counting(self._length)
        for rows, spread in self._spread(self._begins):
            np.subtract(counting, spread, out=positions[rows])
        flat, ends = positions.reshape(-1), self._begins_in_all + self._sizes
        for piece, missing in self._padded:
            flat[ends[piece] : ends[piece] + missing] = 0
        return positions

    def _companion(self) -> NDArray[np.int32]:
        """Returns memory for a number of each token, of shape (rows, length)."""
        return self._allocate((len(self._starts) - 1, self._length), np.dtype(np.int32))

    def _spread(self, of_pieces: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[np.int32]]]:
        """Yields a number of each piece for each of its tokens, and 0 for padding, some rows at a time."""
        numbers = np.zeros((len(of_pieces), 2), dtype=np.int32)
        numbers[:, 0] = of_pieces
        # Some rows at a time, so that what is made for them alone stays small.
        step = max(1, _CELLS_AT_ONCE // self._length)
        for first in range(0, len(self._starts) - 1, step):
            starts = self._starts[first : first + step + 1]
            own = slice(int(starts[0]), int(starts[-1]))
            spread = np.repeat(numbers[own].reshape(-1), self._runs[own].reshape(-1)).reshape(-1, self._length)
            yield slice(first, first + len(spread)), spread
