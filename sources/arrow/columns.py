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
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate, stack_objects, stack_texts

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


@final
class Numbers(Column):
    """Numbers, dates and times, as NumPy scalars; `stored` is the dtype in Arrow's buffers if it is a different one."""

    def __init__(self, slot: int, dtype: Any, stored: Any = None) -> None:
        super().__init__(slot)
        self.dtype = np.dtype(dtype)
        self._stored = self.dtype if stored is None else np.dtype(stored)
        self.type_name = str(self.dtype)

    def _describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        slots[self.slot + 1] = memory.address_of(array.buffers()[1]) // self._stored.itemsize + array.offset

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        batch = allocate((len(rows),), self.dtype)
        positions = rows.within + rows.slot(self.slot + 1)
        if self._stored == self.dtype:
            rows.memory.take(positions, self._stored, batch)
        else:
            batch.view(np.int64)[...] = rows.memory.take(positions, self._stored)
        return batch

    def batch_lists(self, rows: Rows, starts: Integers, length: int, allocate: Allocate) -> NDArray[Any] | None:
        """Returns lists of these values as an array of shape (n, length), length > 0, or None if a value may be null.

        `starts` has the start of each list among the values of its chunk.
        """
        if self._stored != self.dtype or rows.has_nonzero(self.slot):
            return None
        batch = allocate((len(starts), length), self.dtype)
        rows.memory.take_runs(starts + rows.slot(self.slot + 1), batch)
        return batch


@final
class Flags(Column):
    """Booleans, one bit each, as `np.bool_`."""

    type_name = "bool"

    def _describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        values = array.buffers()[1]
        slots[self.slot + 1] = memory.address_of(values) * 8 + array.offset

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        batch = allocate((len(rows),), np.dtype(np.bool_))
        batch[...] = rows.memory.bits(rows.within + rows.slot(self.slot + 1))
        return batch


class _Offsets(Column):
    """Concatenated values of different lengths, delimited by offsets."""

    def __init__(self, slot: int, offset_dtype: Any) -> None:
        super().__init__(slot)
        self._offset_dtype = np.dtype(offset_dtype)

    def _describe_offsets(self, array: Any, slots: Integers, memory: Memory) -> None:
        slots[self.slot + 1] = memory.address_of(array.buffers()[1]) // self._offset_dtype.itemsize + array.offset

    def _bounds(self, rows: Rows) -> tuple[Integers, Integers]:
        if (cached := rows.bounds.get(self.slot)) is not None:
            return cached
        positions = rows.within + rows.slot(self.slot + 1)
        starts, stops = (
            rows.memory.take(at, self._offset_dtype).astype(np.int64, copy=False) for at in (positions, positions + 1)
        )
        if ((starts < 0) | (starts > stops) | (stops > rows.slot(self.slot + 2))).any():
            raise ValueError(f"a column of {self.type_name} is damaged: an offset exceeds its values")
        rows.bounds[self.slot] = starts, stops - starts
        return rows.bounds[self.slot]


@final
class Strings(_Offsets):
    """Texts, as `str`, or byte strings."""

    def __init__(self, slot: int, offset_dtype: Any, is_text: bool) -> None:
        super().__init__(slot, offset_dtype)
        self.end_slot = slot + 4
        self._is_text = is_text
        self.type_name = "text" if is_text else "bytes"

    def _describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        self._describe_offsets(array, slots, memory)
        data = array.buffers()[2]
        slots[self.slot + 2 : self.slot + 4] = 0 if data is None else data.size, memory.address_of(data)

    def _values(self, rows: Rows) -> list[Any]:
        starts, lengths = self._bounds(rows)
        return _strings(rows.memory.slices(starts + rows.slot(self.slot + 3), lengths), self._is_text)

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        values = self._values(rows)
        return stack_texts(values, allocate) if self._is_text else stack_objects(values)


@final
class FixedBytes(Column):
    """Byte strings of one length."""

    def __init__(self, slot: int, width: int) -> None:
        super().__init__(slot)
        self._width = width
        self.type_name = "bytes"

    def _describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        slots[self.slot + 1] = memory.address_of(array.buffers()[1]) + array.offset * self._width

    def _values(self, rows: Rows) -> list[Any]:
        starts = rows.slot(self.slot + 1) + rows.within * self._width
        return _strings(rows.memory.slices(starts, np.full(len(rows), self._width)), is_text=False)

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:  # noqa: ARG002  (objects have their own memory)
        return stack_objects(self._values(rows))


def _strings(slices: list[memoryview], is_text: bool) -> list[Any]:
    return [str(content, "utf-8") for content in slices] if is_text else list(map(bytes, slices))


class Lists(_Offsets):
    """Lists. Lists of numbers are arrays, which are views of one array, or of objects if one is null; others, lists."""

    def __init__(self, slot: int, offset_dtype: Any, make_child: Callable[[int], Column]) -> None:
        super().__init__(slot, offset_dtype)
        self.child = make_child(slot + 5)
        self.end_slot = self.child.end_slot
        self.type_name = f"list<{self.child.type_name}>"

    def _describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        self._describe_offsets(array, slots, memory)
        slots[self.slot + 2] = len(array.values)
        slots[self.slot + 3 : self.slot + 5] = self._uniform_length(array) or (-1, 0)
        self.child.describe(array.values, slots, memory)

    def _uniform_length(self, array: Any) -> tuple[int, int] | None:
        """Returns the length of all lists of an array and the start of the first one; None if lengths differ."""
        offsets = array.buffers()[1]
        if offsets is None or not len(array):
            return None
        position = array.offset * self._offset_dtype.itemsize
        starts = np.frombuffer(offsets, self._offset_dtype, len(array) + 1, position)
        first, length = int(starts[0]), int(starts[1]) - int(starts[0])
        is_within = first >= 0 <= length and int(starts[-1]) <= len(array.values)
        return (length, first) if is_within and (np.diff(starts) == length).all() else None

    def bounds(self, rows: Rows) -> tuple[Integers, Integers]:
        """Returns the starts of the lists of rows without nulls among the child's values, and their lengths."""
        length = self._length_of_all(rows)
        if length < 0:
            return self._bounds(rows)
        return rows.within * length + rows.slot(self.slot + 4), np.full(len(rows), length)

    def _length_of_all(self, rows: Rows) -> int:
        lengths = rows.slot(self.slot + 3)
        if isinstance(lengths, int):
            return lengths
        return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else -1

    def _equal_length(self, rows: Rows) -> int:
        """Returns the length of the lists of the rows; -1 if lengths differ, or there are no rows."""
        if not len(rows):
            return -1
        if (length := self._length_of_all(rows)) >= 0:
            return length
        _, lengths = self.bounds(rows)
        return int(lengths[0]) if (lengths == lengths[0]).all() else -1

    def _values(self, rows: Rows) -> list[Any]:
        if (table := self._table(rows, np.empty)) is not None:
            return list(table)
        starts, lengths = self.bounds(rows)
        inner = rows.expand(starts, lengths)
        ends = np.cumsum(lengths)
        slices = list(map(slice, (ends - lengths).tolist(), ends.tolist()))
        if not isinstance(self.child, Numbers | Flags):
            values = self.child.values(inner)
            return [values[bounds] for bounds in slices]
        array = self.child.batch(inner, np.empty)
        null = self.child.nulls(inner)
        if null is None:
            return [array[bounds] for bounds in slices]
        # The type of a list must not depend on the other lists of the read.
        objects = stack_objects(self.child.values(inner))
        return [objects[bounds] if null[bounds].any() else array[bounds] for bounds in slices]

    def _stacks(self, rows: Rows) -> bool:
        if not isinstance(self.child, Numbers | Flags):
            return False
        if len(rows) and self._equal_length(rows) < 0:
            return False
        return not rows.has_nonzero(self.child.slot) or self.child.nulls(rows.expand(*self.bounds(rows))) is None

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        batch = self._table(rows, allocate)
        if batch is None:
            starts, lengths = self.bounds(rows)
            values = self.child.batch(rows.expand(starts, lengths), np.empty).reshape(len(rows), int(lengths[0]))
            batch = allocate(values.shape, values.dtype)
            batch[...] = values
        return batch

    def _table(self, rows: Rows, allocate: Allocate) -> NDArray[Any] | None:
        """Returns lists of numbers as an array of shape (n, length); None if lengths differ or a number may be null."""
        if not isinstance(self.child, Numbers) or (length := self._equal_length(rows)) <= 0:
            return None
        return self.child.batch_lists(rows, self.bounds(rows)[0], length, allocate)


@final
class FixedLists(Lists):
    """Lists of one length, without offsets."""

    def __init__(self, slot: int, size: int, make_child: Callable[[int], Column]) -> None:
        super().__init__(slot, np.int64, make_child)
        self._size = size

    def _describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        slots[self.slot + 1] = array.offset
        self.child.describe(array.values, slots, memory)

    def bounds(self, rows: Rows) -> tuple[Integers, Integers]:
        starts = (rows.within + rows.slot(self.slot + 1)) * self._size
        return starts, np.full(len(rows), self._size)

    def _length_of_all(self, rows: Rows) -> int:  # noqa: ARG002
        return self._size
