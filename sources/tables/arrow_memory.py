"""Rows of Arrow tables, wherever they are, and the memory that they are in.

An Arrow table is made of chunks, each of which has a few buffers for each column
(arrow.apache.org/docs/format/Columnar.html). A batch at random takes a row here and a row there from up to as many
chunks, so anything done chunk by chunk costs more than the rows. But the buffers of most tables are parts of very few
larger ones: those of a mapped file are parts of the mapping. Here a table says where in these the buffers of each chunk
begin, and a column of a batch is gathered from all chunks by one call of NumPy.

Guarantees:
    - What is read is within the buffers that Arrow gave, or there is an error.
    - What comes out is a copy: it may be changed and kept. (The arrays of lists share their memory with other lists of
      one read, none of it twice.)
"""

import abc
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate

Places = NDArray[np.int64]

BYTES = np.dtype(np.uint8)

_REGION_BITS = 40
"""An address is the number of a region, and the place of a byte in it: this many bits, a terabyte."""

_ALIGNED = 8


@final
class Memory:
    """The buffers of some chunks, as regions: arrays of bytes. Every byte has an address, a number of up to 60 bits.

    Threads may add buffers while others read: there is no lock, which a forked process could inherit.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)  # No buffer has the address 0.
        self._regions: dict[int, NDArray[np.uint8]] = {0: np.empty(0, np.uint8)}
        self._arrays: dict[tuple[int, np.dtype[Any]], NDArray[Any]] = {}
        self._known: dict[tuple[int, int], int] = {}

    def address_of(self, buffer: Any) -> int:
        """Returns where a buffer of Arrow begins, which is kept; 0 for one that is not there, and so has no bytes."""
        if buffer is None or not buffer.size:
            return 0
        whole = buffer
        while whole.parent is not None:
            whole = whole.parent
        if whole.address % _ALIGNED:
            whole = buffer
        key = (whole.address, whole.size)
        number = self._known.get(key)
        if number is None:
            # Two threads may add it twice: either number is as good.
            number = next(self._numbers)
            if whole.size >> _REGION_BITS:
                raise ValueError(f"A table in one piece must have less than a terabyte, got {whole.size:,} bytes.")
            self._regions[number] = np.frombuffer(whole, np.uint8)
            self._known[key] = number
        return (number << _REGION_BITS) + int(buffer.address - whole.address)

    def take(self, places: Places, dtype: np.dtype[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Returns the numbers at some places: addresses divided by the size of the dtype.

        Args:
            places: shape (n,).
            dtype: of the numbers; its size is a power of two.
            out: where to write them, shape (n,).

        Raises:
            IndexError: a place is beyond the buffers.
        """
        values = np.empty(len(places), dtype) if out is None else out
        if not len(places):
            return values
        shift = _shift(dtype)
        first = int(places[0]) >> shift
        array = self._array(first, dtype)
        within = places - (first << shift)
        # Read without a sign, what lies before is too large: one pass finds all that is elsewhere.
        if int(within.view(np.uint64).max()) < len(array):
            return array.take(within, out=values, mode="clip")
        numbers = places >> shift
        for number in np.unique(numbers).tolist():
            some = np.flatnonzero(numbers == number)
            values[some] = self._array(number, dtype)[places[some] - (number << shift)]
        return values

    def take_runs(self, places: Places, out: NDArray[Any]) -> None:
        """Fills an array with numbers that lie one after the other.

        Args:
            places: where each run begins, as for `take`, shape (n,).
            out: what is filled, C-contiguous, of the dtype of the numbers: shape (n, length), none of them 0.

        Raises:
            IndexError: a run ends beyond the buffers.
        """
        length, shift = out.shape[1], _shift(out.dtype)
        first = int(places[0]) >> shift
        array = self._array(first, out.dtype)
        within = places - (first << shift)
        if int(within.view(np.uint64).max()) + length > len(array):
            numbers = places >> shift
            different = np.unique(numbers).tolist()
            if len(different) == 1:
                raise IndexError(f"A list of {length} numbers is not within its buffer.")
            for number in different:
                some = np.flatnonzero(numbers == number)
                part = np.empty((len(some), length), out.dtype)
                self.take_runs(places[some], part)
                out[some] = part
            return
        # A run is one element, so that it is copied at once.
        run = np.dtype((np.void, length * out.dtype.itemsize))
        runs = out.view(run).reshape(-1)
        phase = int(within[0]) % length
        turns, rest = np.divmod(within - phase, length)
        if not rest.any():
            table = array[phase : phase + (len(array) - phase) // length * length].view(run)
            table.take(turns, out=runs, mode="clip")
        else:
            # Element i of this array is the run that begins at number i.
            shape = (len(array) - length + 1,)
            runs[...] = np.ndarray(shape, run, array.view(BYTES).data, strides=(out.dtype.itemsize,))[within]

    def pieces(self, starts: Places, lengths: Places) -> list[memoryview]:
        """Returns the bytes from some addresses on, this many each.

        Raises:
            IndexError: a piece ends beyond the buffers.
        """
        numbers = starts >> _REGION_BITS
        found = [memoryview(b"")] * len(starts)
        for number in np.unique(numbers[lengths > 0]).tolist():
            view = self._regions[number].data
            some = np.flatnonzero((numbers == number) & (lengths > 0))
            begins = starts[some] - (number << _REGION_BITS)
            ends = begins + lengths[some]
            if int(ends.max()) > len(view):
                raise IndexError("A text or some bytes are not within their buffer.")
            cut = [view[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
            if len(some) == len(found):
                return cut
            for place, piece in zip(some.tolist(), cut, strict=True):
                found[place] = piece
        return found

    def bits(self, places: Places) -> NDArray[np.bool_]:
        """Returns the bits at some places: eight times an address, and the number of the bit."""
        return (self.take(places >> 3, BYTES) >> (places & 7).astype(np.uint8) & 1).astype(np.bool_)

    def _array(self, number: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns a region as an array of numbers."""
        key = (number, dtype)
        array = self._arrays.get(key)
        if array is None:
            region = self._regions[number]
            array = self._arrays[key] = region[: len(region) // dtype.itemsize * dtype.itemsize].view(dtype)
        return array


def _shift(dtype: np.dtype[Any]) -> int:
    """Returns how many bits of a place are not the number of its region."""
    return _REGION_BITS - dtype.itemsize.bit_length() + 1


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a table.

    Attributes:
        memory: what the buffers of the chunks are in.
        chunks: the record batches of Arrow that the rows are in.
        table: where the buffers of each chunk are: int64, shape (chunks, slots), filled by `Column.describe`.
        chunk: which chunk each row is in, shape (n,).
        within: its number there, shape (n,).
        bounds: where the values of the rows start and how many they are, by the slot of the column: what was found out
            about these rows once.
    """

    memory: Memory
    chunks: Sequence[Any]
    table: Places
    chunk: Places
    within: Places
    bounds: dict[int, tuple[Places, Places]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.within)

    def slot(self, number: int) -> Any:
        """Returns what the chunks of the rows have in a slot: shape (n,), or an int if they are in one chunk."""
        return self.table.item(0, number) if len(self.table) == 1 else self.table[self.chunk, number]

    def has_any(self, number: int) -> bool:
        """Returns whether a slot is not 0 in any of the chunks of the rows."""
        value = self.slot(number)
        return bool(value if isinstance(value, int) else value.any())

    def take(self, which: Any) -> "Rows":
        """Returns some of the rows: a slice, a mask, or an array of places."""
        return Rows(self.memory, self.chunks, self.table, self.chunk[which], self.within[which])

    def expanded(self, starts: Places, lengths: Places) -> "Rows":
        """Returns the rows of a child: for each row here, as many from a start on as it has."""
        shifts = starts - (np.cumsum(lengths) - lengths)
        within = np.repeat(shifts, lengths) + np.arange(int(lengths.sum()))
        return Rows(self.memory, self.chunks, self.table, np.repeat(self.chunk, lengths), within)


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
    def describe(self, array: Any, slots: Places, memory: Memory) -> None:
        """Writes where in a memory the buffers of an Arrow array are."""

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
        if not rows.has_any(self.slot):
            return None
        bits = np.broadcast_to(np.int64(rows.slot(self.slot)), len(rows))
        known = np.flatnonzero(bits)
        null = np.zeros(len(rows), np.bool_)
        null[known] = ~rows.memory.bits(bits[known] + rows.within[known])
        return null if null.any() else None

    def _describe_validity(self, array: Any, slots: Places, memory: Memory) -> None:
        validity = array.buffers()[0]
        has_nulls = validity is not None and array.null_count
        slots[self.slot] = memory.address_of(validity) * 8 + array.offset if has_nulls else 0
