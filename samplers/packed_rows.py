"""The documents of packed rows, and the segment of each document."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Pieces(NamedTuple):
    """The documents of rows; int64 arrays.

    Attributes:
        row_starts: the first segment of each row, shape (rows + 1,): row r has the segments
            row_starts[r] … row_starts[r + 1] - 1.
        record_keys: the document of each segment, shape (segments,), as are the next two.
        begins: the first token of the segment.
        ends: the end of the segment: one more than its last token.

    Examples:
        >>> sampler = millstream.PackingSampler([3, 5, 2], row_length=8, shuffle=False)
        >>> pieces = sampler.pieces(0, 2)
        >>> pieces.record_keys, pieces.row_starts
        (array([1, 0, 2]), array([0, 2, 3]))
    """

    row_starts: NDArray[np.int64]
    record_keys: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]


def put_together(found: Sequence[tuple[NDArray[np.intp] | slice, Pieces]], num_rows: int) -> Pieces:
    """Returns the documents of rows, given those of several subsets of them.

    Args:
        found: the numbers of the rows of each subset, and their documents in that order. Each row is in one subset.
        num_rows: the number of rows.
    """
    if len(found) == 1 and isinstance(found[0][0], slice):
        return found[0][1]
    widths = np.zeros(num_rows + 1, dtype=np.int64)
    for rows, pieces in found:
        widths[1:][rows] = np.diff(pieces.row_starts)
    starts = np.cumsum(widths)
    whole = np.empty((3, int(starts[-1])), dtype=np.int64)
    for rows, pieces in found:
        own = np.diff(pieces.row_starts)
        places = np.repeat(starts[:-1][rows] - pieces.row_starts[:-1], own) + np.arange(int(own.sum()))
        whole[:, places] = pieces[1:]
    return Pieces(starts, *whole)
