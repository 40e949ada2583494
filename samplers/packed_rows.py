"""What rows are made of: the documents in each, and which part of each document."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Pieces(NamedTuple):
    """What some rows are made of; int64 arrays.

    Attributes:
        row_starts: where the pieces of each row begin, shape (rows + 1,): those of row r are the pieces
            row_starts[r] … row_starts[r + 1] - 1.
        record_keys: the document that each piece is of, shape (pieces,), as are the next two.
        begins: the first token of it.
        ends: where it ends: one more than the last token.

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
    """Returns what rows are made of, given which of them come where.

    Args:
        found: numbers of rows, and what these are made of, in that order. Each row is in one of the parts.
        num_rows: how many rows there are.
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
