"""Rows of Arrow tables, wherever they are, and the memory that they are in.

An Arrow table is made of chunks, each of which has a few buffers for each column
(arrow.apache.org/docs/format/Columnar.html). A batch at random takes a row here and a row there from up to as many
chunks, so anything done chunk by chunk costs more than the rows. Here a table says where in memory the buffers of each
chunk are, and a column of a batch is gathered from all chunks by one call of NumPy.

Guarantees:
    - Only buffers of chunks that `Rows` holds are read, within their bounds.
    - What comes out is a copy: it may be changed and kept. (The arrays of lists share their memory with other lists of
      one read, none of it twice.)
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate

Places = NDArray[np.int64]

_BASE = 4096
"""The address at which the arrays of all memory begin: nothing is below it."""

_END = 1 << 60


@final
class _AllMemory:
    """What NumPy makes an array of, without a look at the memory."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        shape = ((_END - _BASE) // dtype.itemsize,)
        self.__array_interface__ = {"data": (_BASE, True), "shape": shape, "typestr": dtype.str, "version": 3}


@functools.cache
def memory_of(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns an array of a dtype over all of this process's memory, read-only: only what is known is looked at."""
    return np.asarray(_AllMemory(dtype))


BYTES = np.dtype(np.uint8)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a table.

    Attributes:
        chunks: the record batches of Arrow that the rows are in; they keep the memory alive.
        table: where the buffers of each chunk are: int64, shape (chunks, slots), filled by `Column.describe`.
        chunk: which chunk each row is in, shape (n,).
        within: its number there, shape (n,).
        bounds: where the values of the rows start and how many they are, by the slot of the column: what was found out
            about these rows once.
    """

    chunks: Sequence[Any]
    table: Places
    chunk: Places
    within: Places
    bounds: dict[int, tuple[Places, Places]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.within)

    def slot(self, number: int) -> Any:
        """Returns what the chunks of the rows have in a slot: shape (n,), or one number if they are in one chunk."""
        return self.table[0, number] if len(self.table) == 1 else self.table[self.chunk, number]

    def take(self, which: Any) -> "Rows":
        """Returns some of the rows: a slice, a mask, or an array of places."""
        return Rows(self.chunks, self.table, self.chunk[which], self.within[which])

    def expanded(self, starts: Places, lengths: Places) -> "Rows":
        """Returns the rows of a child: for each row here, as many from a start on as it has."""
        shifts = starts - (np.cumsum(lengths) - lengths)
        within = np.repeat(shifts, lengths) + np.arange(int(lengths.sum()))
        return Rows(self.chunks, self.table, np.repeat(self.chunk, lengths), within)


class Column(abc.ABC):
    """How the values of one type are found in the buffers of a chunk.

    Args:
        slot: the first of its slots in the table: where the bits begin that say which values are not null, or 0.

    Attributes:
        words: what the values are, in words that are equal for equal records.
    """

    words: str
    has_batch: ClassVar[bool] = True
    """Whether there is any array for such values."""

    def __init__(self, slot: int) -> None:
        self.slot = slot

    @property
    @abc.abstractmethod
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""

    @abc.abstractmethod
    def describe(self, array: Any, slots: Places) -> None:
        """Writes where the buffers of an Arrow array are."""

    @abc.abstractmethod
    def _values(self, rows: Rows) -> list[Any]:
        """Returns the values of rows that are not null, for records."""

    def _stacks(self, rows: Rows) -> bool:  # noqa: ARG002  (most columns stack any rows)
        """Returns whether the values of rows that are not null have a batch here."""
        return self.has_batch

    def batch(self, rows: Rows, allocate: Allocate) -> Any:  # noqa: ARG002
        """Returns what stacking the values of rows gives, if `stacks` says that it is known here."""
        raise TypeError(f"Values of {self.words} are stacked one by one.")

    def values(self, rows: Rows) -> list[Any]:
        """Returns the values of rows, for records: None for those that are null."""
        null = self.nulls(rows)
        if null is None:
            return self._values(rows)
        found = iter(self._values(rows.take(~null)))
        return [None if is_null else next(found) for is_null in null.tolist()]

    def stacks(self, rows: Rows) -> bool:
        """Returns whether `batch` can be asked for: there is no null, and lists are equally long."""
        return self.nulls(rows) is None and self._stacks(rows)

    def nulls(self, rows: Rows) -> NDArray[np.bool_] | None:
        """Returns which of the rows are null, shape (n,), or None if none is."""
        bits = rows.slot(self.slot)
        if not bits.any():
            return None
        bits = np.broadcast_to(bits, len(rows))
        known = np.flatnonzero(bits)
        null = np.zeros(len(rows), np.bool_)
        null[known] = ~bits_at(bits[known] + rows.within[known])
        return null if null.any() else None

    def _describe_validity(self, array: Any, slots: Places) -> None:
        validity = array.buffers()[0]
        slots[self.slot] = validity.address * 8 + array.offset if validity is not None and array.null_count else 0


def bits_at(places: Places) -> NDArray[np.bool_]:
    """Returns bits of memory, counted from address 0."""
    byte = memory_of(BYTES).take((places >> 3) - _BASE)
    return (byte >> (places & 7).astype(np.uint8) & 1).astype(np.bool_)


def address_of(buffer: Any) -> int:
    """Returns where a buffer begins, counted from _BASE; one that is not there has nothing to read."""
    return 0 if buffer is None else buffer.address - _BASE
