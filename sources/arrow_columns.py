"""Columns of Arrow tables: numbers, texts, bytes, and lists, each gathered for all rows of a batch at once."""

from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate, stack_objects, stack_texts
from millstream.sources.arrow_memory import BYTES, Column, Places, Rows, address_of, bits_at, memory_of

_MOST_BYTES = 1 << 62
"""NumPy makes no array that would have more bytes, if its elements did not overlap."""


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

    def describe(self, array: Any, slots: Places) -> None:
        """Writes where the buffers of an Arrow array are."""
        self._describe_validity(array, slots)
        slots[self.slot + 1] = address_of(array.buffers()[1]) // self._stored.itemsize + array.offset

    def _values(self, rows: Rows) -> list[Any]:
        return list(self.batch(rows, np.empty))

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        """Returns the values of rows, which are not null, stacked."""
        batch = allocate((len(rows),), self.dtype)
        places = rows.within + rows.slot(self.slot + 1)
        if self._stored == self.dtype:
            memory_of(self._stored).take(places, out=batch, mode="clip")
        else:
            batch.view(np.int64)[...] = memory_of(self._stored).take(places)
        return batch

    def rows_of(self, rows: Rows, starts: Places, length: int) -> NDArray[Any] | None:
        """Returns lists of one length, given the rows of the lists: shape (n, length). None if there are nulls here."""
        if not length or self._stored != self.dtype or rows.slot(self.slot).any():
            return None
        places = starts + rows.slot(self.slot + 1)
        first, last = int(places.min()), int(places.max())
        row = np.dtype((np.void, length * self.dtype.itemsize))
        if (last - first + 1) * row.itemsize >= _MOST_BYTES:
            return None
        # Element i of this array is as many numbers as a list has, from number i on: each list is one copy.
        memory = memory_of(self.dtype)[first : last + length].data
        windows = np.ndarray((last - first + 1,), row, memory, strides=(self.dtype.itemsize,))
        values: NDArray[Any] = windows[places - first].view(self.dtype).reshape(len(starts), length)
        return values


@final
class Flags(Column):
    """Truth values, a bit each: NumPy's `bool_`."""

    words = "bool"

    @property
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""
        return self.slot + 2

    def describe(self, array: Any, slots: Places) -> None:
        """Writes where the buffers of an Arrow array are."""
        self._describe_validity(array, slots)
        values = array.buffers()[1]
        slots[self.slot + 1] = 0 if values is None else values.address * 8 + array.offset

    def _values(self, rows: Rows) -> list[Any]:
        return list(self.batch(rows, np.empty))

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        """Returns the values of rows, which are not null, stacked."""
        batch = allocate((len(rows),), np.dtype(np.bool_))
        batch[...] = bits_at(rows.within + rows.slot(self.slot + 1))
        return batch


class _Offsets(Column):
    """Values of any lengths, laid end to end, with an offset between each two."""

    def __init__(self, slot: int, offset_dtype: Any) -> None:
        super().__init__(slot)
        self._offset_dtype = np.dtype(offset_dtype)

    def _describe_offsets(self, array: Any, slots: Places) -> None:
        self._describe_validity(array, slots)
        slots[self.slot + 1] = address_of(array.buffers()[1]) // self._offset_dtype.itemsize + array.offset

    def _bounds(self, rows: Rows) -> tuple[Places, Places]:
        """Returns where the values of rows start, and their lengths."""
        if (known := rows.bounds.get(self.slot)) is not None:
            return known
        places = rows.within + rows.slot(self.slot + 1)
        memory = memory_of(self._offset_dtype)
        starts, stops = memory.take(places).astype(np.int64), memory.take(places + 1).astype(np.int64)
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

    def describe(self, array: Any, slots: Places) -> None:
        """Writes where the buffers of an Arrow array are."""
        self._describe_offsets(array, slots)
        data = array.buffers()[2]
        slots[self.slot + 2 : self.slot + 4] = 0 if data is None else data.size, address_of(data)

    def _values(self, rows: Rows) -> list[Any]:
        starts, lengths = self._bounds(rows)
        starts = starts + rows.slot(self.slot + 3)
        return _strings(starts, starts + lengths, self._is_text)

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

    def describe(self, array: Any, slots: Places) -> None:
        """Writes where the buffers of an Arrow array are."""
        self._describe_validity(array, slots)
        slots[self.slot + 1] = address_of(array.buffers()[1]) + array.offset * self._width

    def _values(self, rows: Rows) -> list[Any]:
        starts = rows.slot(self.slot + 1) + rows.within * self._width
        return _strings(starts, starts + self._width, is_text=False)

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:  # noqa: ARG002  (objects have their own memory)
        """Returns the values of rows, which are not null, stacked."""
        return stack_objects(self._values(rows))


def _strings(starts: Places, stops: Places, is_text: bool) -> list[Any]:
    view = memory_of(BYTES).data
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    if is_text:
        return [str(view[start:stop], "utf-8") for start, stop in pairs]
    return [view[start:stop].tobytes() for start, stop in pairs]


class Lists(_Offsets):
    """Lists: of numbers, an array each, which share memory; of others, or with nulls in them, a Python list each."""

    def __init__(self, slot: int, offset_dtype: Any, make_child: Callable[[int], Column]) -> None:
        super().__init__(slot, offset_dtype)
        self.child = make_child(slot + 3)
        self.words = f"list<{self.child.words}>"

    @property
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""
        return self.child.end_slot

    def describe(self, array: Any, slots: Places) -> None:
        """Writes where the buffers of an Arrow array are."""
        self._describe_offsets(array, slots)
        slots[self.slot + 2] = len(array.values)
        self.child.describe(array.values, slots)

    def bounds(self, rows: Rows) -> tuple[Places, Places]:
        """Returns where the values of rows that are not null start in the child, and how many they are."""
        return self._bounds(rows)

    def _values(self, rows: Rows) -> list[Any]:
        starts, lengths = self.bounds(rows)
        if (table := self._table(rows, starts, lengths)) is not None:
            return list(table)
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
        starts, lengths = self.bounds(rows)
        if len(lengths) and (lengths != lengths[0]).any():
            return False
        return not rows.slot(self.child.slot).any() or self.child.nulls(rows.expanded(starts, lengths)) is None

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        """Returns the lists, which are equally long: shape (n, length)."""
        starts, lengths = self.bounds(rows)
        values = self._table(rows, starts, lengths)
        if values is None:
            values = self.child.batch(rows.expanded(starts, lengths), np.empty).reshape(len(rows), int(lengths[0]))
        batch = allocate(values.shape, values.dtype)
        batch[...] = values
        return batch

    def _table(self, rows: Rows, starts: Places, lengths: Places) -> NDArray[Any] | None:
        """Returns lists of numbers, if they are equally long and there are no nulls near them: shape (n, length)."""
        if not isinstance(self.child, Numbers) or not len(lengths) or (lengths != lengths[0]).any():
            return None
        return self.child.rows_of(rows, starts, int(lengths[0]))


@final
class FixedLists(Lists):
    """Lists of one length, which need no offsets."""

    def __init__(self, slot: int, size: int, make_child: Callable[[int], Column]) -> None:
        super().__init__(slot, np.int64, make_child)
        self._size = size

    def describe(self, array: Any, slots: Places) -> None:
        """Writes where the buffers of an Arrow array are."""
        self._describe_validity(array, slots)
        slots[self.slot + 1] = array.offset
        self.child.describe(array.values, slots)

    def bounds(self, rows: Rows) -> tuple[Places, Places]:
        """Returns where the values of rows start in the child, and their number."""
        starts = (rows.within + rows.slot(self.slot + 1)) * self._size
        return starts, np.full(len(rows), self._size)
