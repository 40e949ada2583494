"""Columns of Arrow tables: numbers, texts, bytes, and lists, each gathered for all rows of a batch at once."""

from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate, stack_objects, stack_texts
from millstream.sources.tables.arrow_memory import Column, Memory, Places, Rows


@final
class Numbers(Column):
    """Numbers, dates and times: NumPy scalars of their dtype.

    Args:
        slot: the first slot.
        dtype: of the values.
        stored: how Arrow holds them, if it is otherwise.
    """

    def __init__(self, slot: int, dtype: Any, stored: Any = None) -> None:
        super().__init__(slot)
        self.dtype = np.dtype(dtype)
        self._stored = self.dtype if stored is None else np.dtype(stored)
        self.words = str(self.dtype)

    @property
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""
        return self.slot + 2

    def describe(self, array: Any, slots: Places, memory: Memory) -> None:
        """Writes where in a memory the buffers of an Arrow array are."""
        self._describe_validity(array, slots, memory)
        slots[self.slot + 1] = memory.address_of(array.buffers()[1]) // self._stored.itemsize + array.offset

    def _values(self, rows: Rows) -> list[Any]:
        return list(self.batch(rows, np.empty))

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        """Returns the values of rows, which are not null, stacked."""
        batch = allocate((len(rows),), self.dtype)
        places = rows.within + rows.slot(self.slot + 1)
        if self._stored == self.dtype:
            rows.memory.take(places, self._stored, batch)
        else:
            batch.view(np.int64)[...] = rows.memory.take(places, self._stored)
        return batch

    def lists_of(self, rows: Rows, starts: Places, length: int, allocate: Allocate) -> NDArray[Any] | None:
        """Returns lists of one length, at least 1, given their rows: shape (n, length). None if there are nulls."""
        if self._stored != self.dtype or rows.has_any(self.slot):
            return None
        batch = allocate((len(starts), length), self.dtype)
        rows.memory.take_runs(starts + rows.slot(self.slot + 1), batch)
        return batch


@final
class Flags(Column):
    """Truth values, a bit each: NumPy's `bool_`."""

    words = "bool"

    @property
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""
        return self.slot + 2

    def describe(self, array: Any, slots: Places, memory: Memory) -> None:
        """Writes where in a memory the buffers of an Arrow array are."""
        self._describe_validity(array, slots, memory)
        values = array.buffers()[1]
        slots[self.slot + 1] = memory.address_of(values) * 8 + array.offset

    def _values(self, rows: Rows) -> list[Any]:
        return list(self.batch(rows, np.empty))

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        """Returns the values of rows, which are not null, stacked."""
        batch = allocate((len(rows),), np.dtype(np.bool_))
        batch[...] = rows.memory.bits(rows.within + rows.slot(self.slot + 1))
        return batch


class _Offsets(Column):
    """Values of any lengths, laid end to end, with an offset between each two."""

    def __init__(self, slot: int, offset_dtype: Any) -> None:
        super().__init__(slot)
        self._offset_dtype = np.dtype(offset_dtype)

    def _describe_offsets(self, array: Any, slots: Places, memory: Memory) -> None:
        self._describe_validity(array, slots, memory)
        slots[self.slot + 1] = memory.address_of(array.buffers()[1]) // self._offset_dtype.itemsize + array.offset

    def _bounds(self, rows: Rows) -> tuple[Places, Places]:
        """Returns where the values of rows start, and their lengths."""
        if (known := rows.bounds.get(self.slot)) is not None:
            return known
        places = rows.within + rows.slot(self.slot + 1)
        starts, stops = (
            rows.memory.take(at, self._offset_dtype).astype(np.int64, copy=False) for at in (places, places + 1)
        )
        if ((starts < 0) | (starts > stops) | (stops > rows.slot(self.slot + 2))).any():
            raise ValueError(f"An offset in a column of {self.words} is beyond its values: the data are damaged.")
        rows.bounds[self.slot] = starts, stops - starts
        return rows.bounds[self.slot]


@final
class Strings(_Offsets):
    """Texts as `str`, or bytes."""

    def __init__(self, slot: int, offset_dtype: Any, is_text: bool) -> None:
        super().__init__(slot, offset_dtype)
        self._is_text = is_text
        self.words = "text" if is_text else "bytes"

    @property
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""
        return self.slot + 4

    def describe(self, array: Any, slots: Places, memory: Memory) -> None:
        """Writes where in a memory the buffers of an Arrow array are."""
        self._describe_offsets(array, slots, memory)
        data = array.buffers()[2]
        slots[self.slot + 2 : self.slot + 4] = 0 if data is None else data.size, memory.address_of(data)

    def _values(self, rows: Rows) -> list[Any]:
        starts, lengths = self._bounds(rows)
        return _strings(rows.memory.pieces(starts + rows.slot(self.slot + 3), lengths), self._is_text)

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        """Returns the values of rows, which are not null, stacked."""
        values = self._values(rows)
        return stack_texts(values, allocate) if self._is_text else stack_objects(values)


@final
class FixedBytes(Column):
    """Bytes of one length."""

    def __init__(self, slot: int, width: int) -> None:
        super().__init__(slot)
        self._width = width
        self.words = "bytes"

    @property
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""
        return self.slot + 2

    def describe(self, array: Any, slots: Places, memory: Memory) -> None:
        """Writes where in a memory the buffers of an Arrow array are."""
        self._describe_validity(array, slots, memory)
        slots[self.slot + 1] = memory.address_of(array.buffers()[1]) + array.offset * self._width

    def _values(self, rows: Rows) -> list[Any]:
        starts = rows.slot(self.slot + 1) + rows.within * self._width
        return _strings(rows.memory.pieces(starts, np.full(len(rows), self._width)), is_text=False)

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:  # noqa: ARG002  (objects have their own memory)
        """Returns the values of rows, which are not null, stacked."""
        return stack_objects(self._values(rows))


def _strings(pieces: list[memoryview], is_text: bool) -> list[Any]:
    return [str(piece, "utf-8") for piece in pieces] if is_text else list(map(bytes, pieces))


class Lists(_Offsets):
    """Lists: of numbers, an array each, which share memory; of others, or with nulls in them, a Python list each."""

    def __init__(self, slot: int, offset_dtype: Any, make_child: Callable[[int], Column]) -> None:
        super().__init__(slot, offset_dtype)
        self.child = make_child(slot + 5)
        self.words = f"list<{self.child.words}>"

    @property
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""
        return self.child.end_slot

    def describe(self, array: Any, slots: Places, memory: Memory) -> None:
        """Writes where in a memory the buffers of an Arrow array are."""
        self._describe_offsets(array, slots, memory)
        slots[self.slot + 2] = len(array.values)
        slots[self.slot + 3 : self.slot + 5] = self._all_alike(array) or (-1, 0)
        self.child.describe(array.values, slots, memory)

    def _all_alike(self, array: Any) -> tuple[int, int] | None:
        """Returns the length of all lists of an array, and where the first one starts, if they are equally long."""
        offsets = array.buffers()[1]
        if offsets is None or not len(array):
            return None
        place = array.offset * self._offset_dtype.itemsize
        starts = np.frombuffer(offsets, self._offset_dtype, len(array) + 1, place)
        first, length = int(starts[0]), int(starts[1]) - int(starts[0])
        is_within = first >= 0 <= length and int(starts[-1]) <= len(array.values)
        return (length, first) if is_within and (np.diff(starts) == length).all() else None

    def bounds(self, rows: Rows) -> tuple[Places, Places]:
        """Returns where the values of rows that are not null start in the child, and how many they are."""
        length = self._length_of_all(rows)
        if length < 0:
            return self._bounds(rows)
        return rows.within * length + rows.slot(self.slot + 4), np.full(len(rows), length)

    def _length_of_all(self, rows: Rows) -> int:
        """Returns how long all lists in the chunks of the rows are; -1 if that differs, or is not known."""
        lengths = rows.slot(self.slot + 3)
        if isinstance(lengths, int):
            return lengths
        return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else -1

    def _equal_length(self, rows: Rows) -> int:
        """Returns how long the lists of the rows are; -1 if that differs, or there are none."""
        if not len(rows) or (length := self._length_of_all(rows)) >= 0:
            return length if len(rows) else -1
        _, lengths = self.bounds(rows)
        return int(lengths[0]) if (lengths == lengths[0]).all() else -1

    def _values(self, rows: Rows) -> list[Any]:
        if (table := self._table(rows, np.empty)) is not None:
            return list(table)
        starts, lengths = self.bounds(rows)
        inner = rows.expanded(starts, lengths)
        ends = np.cumsum(lengths)
        slices = list(map(slice, (ends - lengths).tolist(), ends.tolist()))
        if not isinstance(self.child, Numbers | Flags):
            values = self.child.values(inner)
            return [values[part] for part in slices]
        array = self.child.batch(inner, np.empty)
        null = self.child.nulls(inner)
        if null is None:
            return [array[part] for part in slices]
        # A list is what it is, whatever others are read with it.
        values = self.child.values(inner)
        return [values[part] if null[part].any() else array[part] for part in slices]

    def _stacks(self, rows: Rows) -> bool:
        if not isinstance(self.child, Numbers | Flags):
            return False
        if len(rows) and self._equal_length(rows) < 0:
            return False
        return not rows.has_any(self.child.slot) or self.child.nulls(rows.expanded(*self.bounds(rows))) is None

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        """Returns the lists, which are equally long: shape (n, length)."""
        batch = self._table(rows, allocate)
        if batch is None:
            starts, lengths = self.bounds(rows)
            values = self.child.batch(rows.expanded(starts, lengths), np.empty).reshape(len(rows), int(lengths[0]))
            batch = allocate(values.shape, values.dtype)
            batch[...] = values
        return batch

    def _table(self, rows: Rows, allocate: Allocate) -> NDArray[Any] | None:
        """Returns lists of numbers, if they are equally long and there are no nulls near them: shape (n, length)."""
        if not isinstance(self.child, Numbers) or (length := self._equal_length(rows)) <= 0:
            return None
        return self.child.lists_of(rows, self.bounds(rows)[0], length, allocate)


@final
class FixedLists(Lists):
    """Lists of one length, which need no offsets."""

    def __init__(self, slot: int, size: int, make_child: Callable[[int], Column]) -> None:
        super().__init__(slot, np.int64, make_child)
        self._size = size

    def describe(self, array: Any, slots: Places, memory: Memory) -> None:
        """Writes where in a memory the buffers of an Arrow array are."""
        self._describe_validity(array, slots, memory)
        slots[self.slot + 1] = array.offset
        self.child.describe(array.values, slots, memory)

    def bounds(self, rows: Rows) -> tuple[Places, Places]:
        """Returns where the values of rows start in the child, and their number."""
        starts = (rows.within + rows.slot(self.slot + 1)) * self._size
        return starts, np.full(len(rows), self._size)

    def _length_of_all(self, rows: Rows) -> int:  # noqa: ARG002
        return self._size
