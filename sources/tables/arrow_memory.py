"""Addresses in the memory of Arrow tables, and rows that are gathered from many chunks in one call.

See README.md in this folder for the idea and the layout of addresses and slots.

Guarantees:
    - Reads stay within the memory that Arrow returned, or raise a ValueError: positions are checked against the end of
      their region, the large buffer that theirs is a slice of.
    - Results are copies, which the caller may change and keep. (Lists of numbers from one read are views of one array,
      but do not overlap.)
"""

import abc
import ctypes
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate

Integers = NDArray[np.int64]

BYTES = np.dtype(np.uint8)

REGION_BITS = 40
"""An address is the number of a region, shifted by this many bits, plus the offset of a byte in the region."""

REGION_ALIGNMENT = 8
"""The alignment of regions of numbers, in bytes."""


class RegionNumbers(NamedTuple):
    """The numbers of one dtype in several regions.

    Attributes:
        array: one array of all of them.
        ends: the position after the last number of each region, shape (regions,).
        shifts: the index of a number in the array minus its position, for each region, shape (regions,).
    """

    array: NDArray[Any]
    ends: Integers
    shifts: Integers


@final
class JoinedRegions:
    """Several regions as parts of one array, so that NumPy gathers rows of all of them in one call.

    The array begins at the first region and ends with the last one. What lies between them is never read. It does not
    own the memory, so the regions must outlive it.
    """

    def __init__(self, regions: Sequence[NDArray[np.uint8]]) -> None:
        self.size = len(regions)
        addresses = np.array([region.ctypes.data for region in regions], np.int64)
        self._sizes = np.array([len(region) for region in regions], np.int64)
        # Regions of numbers are aligned, those of bytes need not be.
        first = int(addresses[self._sizes > 0].min()) // REGION_ALIGNMENT * REGION_ALIGNMENT
        # A region without bytes has no address.
        self._starts = np.where(self._sizes > 0, addresses - first, 0)
        num_bytes = int((self._starts + self._sizes).max())
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(first))
        self._numbers: dict[np.dtype[Any], RegionNumbers] = {}

    def numbers(self, dtype: np.dtype[Any]) -> RegionNumbers:
        numbers = self._numbers.get(dtype)
        if numbers is None:
            firsts = np.arange(self.size) << region_shift(dtype)
            starts, counts = self._starts // dtype.itemsize, self._sizes // dtype.itemsize
            numbers = RegionNumbers(values_of(self._bytes, dtype), firsts + counts, starts - firsts)
            self._numbers[dtype] = numbers
        return numbers


def values_of(region: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[Any]:
    return region[: len(region) // dtype.itemsize * dtype.itemsize].view(dtype)


def region_shift(dtype: np.dtype[Any]) -> int:
    """Returns the number of bits of a position below the number of its region."""
    return REGION_BITS - dtype.itemsize.bit_length() + 1


@final
class Memory:
    """The buffers of Arrow chunks as regions, which are arrays of bytes. Every byte has an address of up to 60 bits.

    Threads may add buffers while others read. There is no lock, because a forked process could inherit a held one.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)  # No buffer has the address 0.
        self._regions: dict[int, NDArray[np.uint8]] = {0: np.empty(0, np.uint8)}
        self._arrays: dict[tuple[int, np.dtype[Any]], NDArray[Any]] = {}
        self._region_numbers: dict[tuple[int, int], int] = {}
        self._joined: JoinedRegions | None = None

    def address_of(self, buffer: Any) -> int:
        """Returns the address of an Arrow buffer, which is kept alive; 0 for a buffer without bytes or None."""
        if buffer is None or not buffer.size:
            return 0
        parent = buffer
        while parent.parent is not None:
            parent = parent.parent
        if parent.address % REGION_ALIGNMENT:
            parent = buffer
        key = (parent.address, parent.size)
        number = self._region_numbers.get(key)
        if number is None:
            # Two threads may add a region twice. Both numbers are valid.
            number = next(self._numbers)
            if parent.size >> REGION_BITS:
                raise ValueError(f"An Arrow buffer must have less than a terabyte, got {parent.size:,} bytes.")
            self._regions[number] = np.frombuffer(parent, np.uint8)
            self._region_numbers[key] = number
        return (number << REGION_BITS) + int(buffer.address - parent.address)

    def take(self, positions: Integers, dtype: np.dtype[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Returns the numbers at positions, addresses divided by the size of the dtype, which is a power of two."""
        values = np.empty(len(positions), dtype) if out is None else out
        if not len(positions):
            return values
        array, indices = self._located(positions, dtype, 1)
        return array.take(indices, out=values, mode="clip")

    def take_runs(self, positions: Integers, out: NDArray[Any]) -> None:
        """Fills the rows of a C-contiguous array, shape (n, length), with contiguous numbers from each position on."""
        length = out.shape[1]
        array, indices = self._located(positions, out.dtype, length)
        # NumPy copies a row in one step if it is one element.
        run = np.dtype((np.void, length * out.dtype.itemsize))
        runs = out.view(run).reshape(-1)
        phase = int(indices[0]) % length
        multiples, remainders = np.divmod(indices - phase, length)
        if not remainders.any():
            table = array[phase : phase + (len(array) - phase) // length * length].view(run)
            table.take(multiples, out=runs, mode="clip")
        else:
            # Element i of this view is the row that begins at number i.
            shape = (len(array) - length + 1,)
            runs[...] = np.ndarray(shape, run, array.view(BYTES).data, strides=(out.dtype.itemsize,))[indices]

    def slices(self, starts: Integers, lengths: Integers) -> list[memoryview]:
        """Returns the bytes from each start address on, without a copy: they end with this object."""
        regions = np.where(lengths > 0, starts >> REGION_BITS, 0)
        if not regions.any():
            return [memoryview(b"")] * len(starts)
        numbers = self._joined_with(int(regions.view(np.uint64).max())).numbers(BYTES)
        if ((starts + lengths > numbers.ends.take(regions)) & (lengths > 0)).any():
            raise ValueError("a text or byte string exceeds its buffer")
        begins = np.where(lengths > 0, starts + numbers.shifts.take(regions), 0)
        view = numbers.array.data
        return [view[begin:end] for begin, end in zip(begins.tolist(), (begins + lengths).tolist(), strict=True)]

    def bits(self, positions: Integers) -> NDArray[np.bool_]:
        """Returns the bits at the given positions: eight times an address, plus the number of the bit."""
        return (self.take(positions >> 3, BYTES) >> (positions & 7).astype(np.uint8) & 1).astype(np.bool_)

    def _located(self, positions: Integers, dtype: np.dtype[Any], length: int) -> tuple[NDArray[Any], Integers]:
        """Returns an array, and the index of each position in it; ValueError if they exceed the buffers."""
        shift = region_shift(dtype)
        first = int(positions[0]) >> shift
        array = self._array(first, dtype)
        within = positions - (first << shift)
        # As unsigned integers, negative values are too large: one pass finds all positions outside the first region.
        if int(within.view(np.uint64).max()) + length <= len(array):
            return array, within
        regions = positions >> shift
        numbers = self._joined_with(int(regions.view(np.uint64).max())).numbers(dtype)
        if int((numbers.ends.take(regions) - positions).min()) < length:
            raise ValueError(f"a run of {length} numbers exceeds its buffer")
        return numbers.array, positions + numbers.shifts.take(regions)

    def _joined_with(self, number: int) -> JoinedRegions:
        joined = self._joined
        if joined is not None and number < joined.size:
            return joined
        regions = self._regions.copy()
        if number not in regions or len(regions) == 1:
            raise ValueError("a number is outside of all buffers")
        joined = JoinedRegions([regions.get(known, regions[0]) for known in range(max(regions) + 1)])
        if len(regions) == joined.size:
            # Otherwise another thread is about to add a region.
            self._joined = joined
        return joined

    def _array(self, number: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        key = (number, dtype)
        array = self._arrays.get(key)
        if array is None:
            array = self._arrays[key] = values_of(self._regions[number], dtype)
        return array


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table.

    Attributes:
        memory: the memory of the chunks' buffers.
        chunks: the Arrow record batches of the table.
        table: the slots of each chunk, int64, shape (slots, chunks), filled by `Column.describe`.
        chunk: the chunk of each row, shape (n,).
        within: the index of each row in its chunk, shape (n,).
        bounds: the starts and lengths of the values of these rows, by the slot of the column; a cache.
    """

    memory: Memory
    chunks: Sequence[Any]
    table: Integers
    chunk: Integers
    within: Integers
    bounds: dict[int, tuple[Integers, Integers]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.within)

    def slot(self, number: int) -> Any:
        """Returns the value of a slot for each row: shape (n,), or an int if there is one chunk."""
        return self.table.item(number) if self.table.shape[1] == 1 else self.table[number].take(self.chunk)

    def has_nonzero(self, number: int) -> bool:
        value = self.slot(number)
        return bool(value if isinstance(value, int) else value.any())

    def take(self, selection: Any) -> "Rows":
        return Rows(self.memory, self.chunks, self.table, self.chunk[selection], self.within[selection])

    def expand(self, starts: Integers, lengths: Integers) -> "Rows":
        """Returns the rows of a child column: for each row, `length` of them from `start` on."""
        shifts = starts - (np.cumsum(lengths) - lengths)
        within = np.repeat(shifts, lengths) + np.arange(int(lengths.sum()))
        return Rows(self.memory, self.chunks, self.table, np.repeat(self.chunk, lengths), within)


class Column(abc.ABC):
    """The way to read the values of one Arrow type from the buffers of a chunk.

    Args:
        slot: the first of its slots, which holds the position of the validity bits, or 0 if no value is null.

    Attributes:
        end_slot: the slot after the last one of this column and its children.
        type_name: the type of the values. Equal types have equal names.
    """

    type_name: str
    can_batch: ClassVar[bool] = True
    """True if NumPy has arrays of such values. Otherwise None is one of the values."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.end_slot = slot + 2

    def describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        """Writes the addresses of the buffers of an Arrow array to the slots of its chunk."""
        validity = array.buffers()[0]
        has_nulls = validity is not None and array.null_count
        slots[self.slot] = memory.address_of(validity) * 8 + array.offset if has_nulls else 0
        self._describe(array, slots, memory)

    @abc.abstractmethod
    def _describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        """Writes the slots after that of the validity bits."""

    def _values(self, rows: Rows) -> list[Any]:
        """Returns the values of rows without nulls, for records."""
        return list(self.batch(rows, np.empty))

    def _stacks(self, rows: Rows) -> bool:  # noqa: ARG002  (most columns stack any rows)
        """Returns True if `batch` can stack the values of rows without nulls."""
        return self.can_batch

    def batch(self, rows: Rows, allocate: Allocate) -> Any:  # noqa: ARG002
        raise TypeError(f"Values of {self.type_name} are stacked one by one.")

    def values(self, rows: Rows) -> list[Any]:
        """Returns the values of rows, for records, with None for nulls."""
        null = self.nulls(rows)
        if null is None:
            return self._values(rows)
        values = iter(self._values(rows.take(~null)))
        return [None if is_null else next(values) for is_null in null.tolist()]

    def stacks(self, rows: Rows) -> bool:
        """Returns True if `batch` can stack the rows: there is no null, and lists have equal lengths."""
        return self.nulls(rows) is None and self._stacks(rows)

    def nulls(self, rows: Rows) -> NDArray[np.bool_] | None:
        """Returns a mask of the rows that are null, shape (n,), or None if none is."""
        if not self.can_batch or not rows.has_nonzero(self.slot):
            return None
        bits = np.broadcast_to(np.int64(rows.slot(self.slot)), len(rows))
        checked = np.flatnonzero(bits)
        null = np.zeros(len(rows), np.bool_)
        null[checked] = ~rows.memory.bits(bits[checked] + rows.within[checked])
        return null if null.any() else None
