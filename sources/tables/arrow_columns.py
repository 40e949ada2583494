"""Columns of numbers, texts, bytes and lists, each gathered for all rows of a batch together."""

from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate, stack_objects, stack_texts
from millstream.sources.tables.arrow_memory import Column, Integers, Memory, Rows


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
