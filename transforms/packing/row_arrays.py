"""The arrays of packed rows: tokens, segment ids and positions, computed for many rows in one call."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate

Array = NDArray[Any]

_CELLS_PER_STEP = 1 << 17
"""Approximate number of tokens whose segment ids and positions are computed in one step."""


@functools.lru_cache(maxsize=4)
def _counting(length: int) -> NDArray[np.int32]:
    counting = np.arange(length, dtype=np.int32)
    counting.flags.writeable = False
    return counting


@final
class SegmentLayout:
    """The positions of one feature's segments in rows, and the padding after each segment.

    Args:
        sizes: the length of each segment, shape (segments,).
        starts: the offsets of each row's segments, shape (rows + 1,).
        length: the length of a row.
        alignment: the multiple at which the segments of a row begin.
        allocate: allocates the memory of the tokens.
    """

    def __init__(
        self, sizes: NDArray[np.int64], starts: NDArray[np.int64], length: int, alignment: int, allocate: Allocate
    ) -> None:
        self._starts = starts
        self._length = length
        self._allocate = allocate
        # The number of tokens of each segment, and of the padding after it.
        self._runs = np.empty((len(sizes), 2), dtype=np.int64)
        self._runs[:, 0] = sizes
        self._sizes, self._gaps = self._runs.T
        self._gaps[:] = -self._sizes % alignment
        row_of = np.repeat(np.arange(len(starts) - 1), starts[1:] - starts[:-1])
        ends = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(self._sizes + self._gaps, out=ends[1:])
        # The number of each segment in its row, and its start there.
        self._numbers = np.arange(1, len(sizes) + 1) - starts[row_of]
        self._begins = ends[:-1] - ends[starts[row_of]]
        # The last segment of a row is followed by all of the remaining space.
        lasts = starts[1:] - 1
        self._gaps[lasts] = length - self._begins[lasts] - self._sizes[lasts]
        self._begins_in_all = row_of * length + self._begins
        # The segments that padding follows, and its length.
        padded = self._gaps.nonzero()[0]
        self._padded = list(zip(padded.tolist(), self._gaps[padded].tolist(), strict=True))

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The starts of the non-empty segments, as offsets into the concatenated rows."""
        firsts: NDArray[np.int64] = self._begins_in_all[self._sizes > 0]
        return firsts

    def tokens(self, segments: Sequence[Array], padding: Any) -> Array:
        """Returns the rows, padded, of shape (rows, length, …)."""
        first = segments[0]
        gap = np.full((int(self._gaps.max(initial=0)), *first.shape[1:]), padding, dtype=first.dtype)
        shape = (len(self._starts) - 1, self._length, *first.shape[1:])
        rows = np.empty(shape, first.dtype) if first.dtype.hasobject else self._allocate(shape, first.dtype)
        arrays: list[Array] = []
        done = 0
        for segment, missing in self._padded:
            arrays += segments[done : segment + 1]
            arrays.append(gap[:missing])
            done = segment + 1
        arrays += segments[done:]
        np.concatenate(arrays, axis=0, out=rows.reshape(-1, *first.shape[1:]), casting="no")
        return rows

    def segment_ids(self) -> NDArray[np.int32]:
        """Returns the number of each token's segment in its row, from 1; 0 for padding. Shape (rows, length)."""
        numbers = self._companion()
        for rows, spread in self._spread(self._numbers):
            numbers[rows] = spread
        return numbers

    def positions(self) -> NDArray[np.int32]:
        """Returns the offset of each token in its segment; 0 for padding. Shape (rows, length)."""
        positions, counting = self._companion(), _counting(self._length)
        for rows, spread in self._spread(self._begins):
            np.subtract(counting, spread, out=positions[rows])
        flat, ends = positions.reshape(-1), self._begins_in_all + self._sizes
        for segment, missing in self._padded:
            flat[ends[segment] : ends[segment] + missing] = 0
        return positions

    def _companion(self) -> NDArray[np.int32]:
        return self._allocate((len(self._starts) - 1, self._length), np.dtype(np.int32))

    def _spread(self, per_segment: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[np.int32]]]:
        """Repeats the number of each segment for each of its tokens, and 0 for padding; yields consecutive rows."""
        numbers = np.zeros((len(per_segment), 2), dtype=np.int32)
        numbers[:, 0] = per_segment
        # In steps, so that temporary arrays stay small.
        step = max(1, _CELLS_PER_STEP // self._length)
        for first in range(0, len(self._starts) - 1, step):
            starts = self._starts[first : first + step + 1]
            own = slice(int(starts[0]), int(starts[-1]))
            spread = np.repeat(numbers[own].reshape(-1), self._runs[own].reshape(-1)).reshape(-1, self._length)
            yield slice(first, first + len(spread)), spread
