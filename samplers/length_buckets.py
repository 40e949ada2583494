"""Pieces sorted by length, in parts that fit a processor's cache.

Each part is sorted by itself, in a fifth of the time that it takes to sort all, and a piece is then two bytes: its
place in its part. A table of how many pieces of each length the parts have says where the piece of any rank is.
"""

import dataclasses
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

_PART = 1 << 15
"""A part has this many pieces: what sorting it takes stays in the cache, and needs no new pages from the system."""

_LENGTHS_IN_PART = 8
"""Or this many times as many as there may be lengths: so the table is small beside the pieces."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ByLength:
    """All pieces by rank: shorter ones first, equally long ones as they come.

    Attributes:
        firsts: the rank of the first piece of each length from 0 on, and the number of all; shape (row_length + 2,).
    """

    firsts: Numbers
    _part: int
    _places: NDArray[np.unsignedinteger]
    _ranks: Numbers
    _shifts: Numbers

    @classmethod
    def of(cls, lengths: Numbers, row_length: int) -> Self:
        """Returns pieces of lengths 0 … row_length, at least one."""
        part = max(_PART, _LENGTHS_IN_PART * (row_length + 1))
        starts = np.arange(0, len(lengths), part)
        counts = np.empty((len(starts), row_length + 1), dtype=np.int64)
        places = np.empty(len(lengths), dtype=np.min_scalar_type(part - 1))
        for own, start in zip(counts, starts.tolist(), strict=True):
            some = lengths[start : start + part]
            own[:] = np.bincount(some, minlength=row_length + 1)
            # As small as can be: these are sorted by counting.
            places[start : start + part] = np.argsort(some.astype(np.min_scalar_type(row_length)), kind="stable")
        # Length by length, and part by part: the rank of the first piece, and how far from there it is in its part.
        ranks = np.concatenate([[0], np.cumsum(counts.T)])
        begins = np.cumsum(counts, axis=1) - counts + starts[:, np.newaxis]
        return cls(ranks[:: len(starts)].copy(), part, places, ranks, begins.T.ravel() - ranks[:-1])

    def at(self, ranks: Numbers) -> Numbers:
        """Returns the pieces of some ranks, shape (m,)."""
        places = ranks + self._shifts[np.searchsorted(self._ranks, ranks, side="right") - 1]
        pieces: Numbers = places - places % self._part + self._places[places]
        return pieces
