"""Arrow tables in memory or mapped from files, of which rows are read at random."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.tables.arrow_library import columns_of, described, normalised, num_slots, plain_types
from millstream.sources.tables.arrow_memory import Column, Memory, Rows


@final
class ArrowTable:
    """Some columns of a table, whose chunks are looked at when the first row of them is read.

    Any number of threads may read, and so may forked processes: there is no lock.

    Args:
        table: the table.
        names: the names of the columns.

    Attributes:
        columns: how the values of each column are read.
    """

    def __init__(self, table: Any, names: Sequence[str]) -> None:
        self.columns: Mapping[str, Column] = columns_of(table.schema, names)
        self._names = tuple(names)
        self._types = plain_types(table.schema, names)
        self._chunks = [chunk for chunk in table.select(list(names)).to_batches() if len(chunk)]
        lengths = np.array([len(chunk) for chunk in self._chunks], np.int64)
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._table = np.zeros((len(lengths), num_slots(self.columns)), np.int64)
        self._is_known = np.zeros(len(lengths), np.bool_)
        self._memory = Memory()

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        """Returns the rows of some keys, numbers from 0."""
        chunk = np.searchsorted(self._ends, keys, side="right")
        if not self._is_known[chunk].all():
            for number in np.unique(chunk[~self._is_known[chunk]]).tolist():
                self._look_at(number)
        return Rows(self._memory, self._chunks, self._table, chunk, keys - self._starts[chunk])

    def _look_at(self, number: int) -> None:
        chunk = normalised(self._chunks[number], self._names, self._types)
        # Two threads may do this for the same chunk. Either's buffers will do: the memory keeps both.
        self._chunks[number] = chunk
        self._table[number] = described(self.columns, chunk, self._memory)
        self._is_known[number] = True
