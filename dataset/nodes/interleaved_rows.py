"""The order of interleaved rows of several files, with random access."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.nodes.index_nodes import IndexNode
from millstream.dataset.nodes.node import Positions, divided, joined

Table = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@dataclasses.dataclass(frozen=True, eq=False)
class InterleavedRows(IndexNode):
    """Interleaves the rows of concatenated files, one row of each of `cycle_length` files at a time.

    Once a file has ended, the next one replaces it from its next turn on: the order of `InterleaveIterDataset`.

    Attributes:
        sizes: the number of rows of each file.
        cycle_length: the number of files that are interleaved.
    """

    sizes: tuple[int, ...]
    cycle_length: int

    @functools.cached_property
    def _table(self) -> Table:
        """The runs of positions in which the same files are interleaved.

        Consists of their first positions, shape (runs,); the number of files in each; and the first row of each file
        in the parent, shape (runs, cycle_length).
        """
        bounds = itertools.pairwise(itertools.accumulate(self.sizes, initial=0))
        turns = list(itertools.islice(bounds, self.cycle_length))
        starts, counts, rows, position = [], [], [], 0
        while turns:
            count = len(turns)
            # The run ends at the turn of the first file without more rows.
            length, ended = min(((end - begin) * count + turn, turn) for turn, (begin, end) in enumerate(turns))
            if length:
                starts.append(position)
                counts.append(count)
                rows.append([begin for begin, _ in turns] + [0] * (self.cycle_length - count))
            position += length
            drawn = [begin + (length - turn + count - 1) // count for turn, (begin, _) in enumerate(turns)]
            left = [(begin, end) for begin, (_, end) in zip(drawn, turns, strict=True)]
            turns = [*left[ended + 1 :], *left[:ended], *itertools.islice(bounds, 1)]
        return np.array(starts), np.array(counts), np.array(rows).reshape(len(rows), self.cycle_length)

    def parent_positions(self, positions: Positions) -> Positions:
        """Returns the rows of the concatenated files at positions."""
        epochs, offsets = divided(positions, self.length)
        if not offsets.size:
            return positions
        starts, counts, rows = self._table
        runs = np.searchsorted(starts, offsets, side="right") - 1
        rounds, turns = np.divmod(offsets - starts[runs], counts[runs])
        return joined(epochs, self.length, rows[runs, turns] + rounds)

    def parent_position(self, position: int) -> int:
        """Returns the row at one position."""
        (parent_position,) = self.parent_positions(np.array([position])).tolist()
        return int(parent_position)

    @property
    def text(self) -> str:
        """The number of files."""
        return f".interleave({len(self.sizes)} files, cycle_length={self.cycle_length})"

    def identities(self) -> Iterator[str]:
        """Yields the sizes of the files."""
        yield f"InTurn(sizes: {list(self.sizes)}, cycle_length: {self.cycle_length})"
