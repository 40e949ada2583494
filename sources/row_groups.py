"""Decoded row groups, and rows that lie in several of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.arrow_memory import Rows


@final
@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RowGroup:
    """A decoded row group.

    Attributes:
        path: the file that it is in.
        start: its first row in the file.
        chunks: its record batches, nearly always one.
        table: where their buffers are, a row for each.
        is_valid: whether all texts in it are UTF-8.
    """

    path: str
    start: int
    chunks: Sequence[Any]
    table: NDArray[np.int64]
    is_valid: bool

    @property
    def num_records(self) -> int:
        """How many rows it has."""
        return sum(map(len, self.chunks))

    @property
    def num_bytes(self) -> int:
        """How much memory it takes."""
        return int(sum(chunk.nbytes for chunk in self.chunks))


def rows_in(groups: Sequence[RowGroup], which: NDArray[np.int64], within: NDArray[np.int64]) -> Rows:
    """Returns rows, given which of the groups each is in, and its number there."""
    chunks = [chunk for group in groups for chunk in group.chunks]
    table = groups[0].table if len(groups) == 1 else np.concatenate([group.table for group in groups])
    if len(chunks) == len(groups):
        return Rows(chunks, table, which, within)
    ends = np.cumsum([len(chunk) for chunk in chunks])
    group_ends = np.cumsum([group.num_records for group in groups])
    places = within + (group_ends - [group.num_records for group in groups])[which]
    chunk = np.searchsorted(ends, places, side="right")
    return Rows(chunks, table, chunk, places - (ends - [len(chunk) for chunk in chunks])[chunk])
