"""Columns of Arrow tables that hold other columns, or what NumPy has no array for; and the records of all columns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate, ColumnarRecords
from millstream.sources.tables.arrow_columns import Lists
from millstream.sources.tables.arrow_memory import Column, Memory, Places, Rows


@final
class Structs(Column):
    """Dicts by the names of the fields."""

    def __init__(self, slot: int, make_members: Mapping[str, Callable[[int], Column]]) -> None:
        super().__init__(slot)
        self._members: dict[str, Column] = {}
        end = slot + 1
        for name, make_member in make_members.items():
            self._members[name] = make_member(end)
            end = self._members[name].end_slot
        self._end_slot = end
        self.words = "struct<" + ",".join(f"{name}:{member.words}" for name, member in self._members.items()) + ">"

    @property
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""
        return self._end_slot

    def describe(self, array: Any, slots: Places, memory: Memory) -> None:
        """Writes where in a memory the buffers of an Arrow array are."""
        self._describe_validity(array, slots, memory)
        for number, member in enumerate(self._members.values()):
            member.describe(array.field(number), slots, memory)

    def _values(self, rows: Rows) -> list[Any]:
        return dicts(self._members, rows)

    def _stacks(self, rows: Rows) -> bool:
        return all(member.stacks(rows) for member in self._members.values())

    def batch(self, rows: Rows, allocate: Allocate) -> dict[str, Any]:
        """Returns the values of rows, which are not null, stacked."""
        return {name: member.batch(rows, allocate) for name, member in self._members.items()}


@final
class Tensors(Column):
    """Arrays of one shape, which Arrow holds as lists within lists.

    Args:
        slot: the first slot.
        shape: the shape of each array.
        make_lists: makes the column of the lists.
    """

    def __init__(self, slot: int, shape: tuple[int, ...], make_lists: Callable[[int], Column]) -> None:
        super().__init__(slot)
        self._shape = shape
        self._lists = make_lists(slot)
        self.words = f"tensor<{self._lists.words}>{list(shape)}"

    @property
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""
        return self._lists.end_slot

    def describe(self, array: Any, slots: Places, memory: Memory) -> None:
        """Writes where in a memory the buffers of an Arrow array are."""
        self._lists.describe(array, slots, memory)

    def _values(self, rows: Rows) -> list[Any]:
        return [array.copy() for array in self.batch(rows, np.empty)]

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        """Returns the values of rows, which are not null, stacked."""
        column, inner = self._lists, rows
        while isinstance(column, Lists):
            inner, column = inner.expanded(*column.bounds(inner)), column.child
            if column.nulls(inner) is not None:
                raise ValueError(f"There is a null within an array of shape {self._shape}.")
        values: NDArray[Any] = column.batch(inner, np.empty)
        batch = allocate((len(rows), *self._shape), values.dtype)
        batch[...] = values.reshape(batch.shape)
        return batch


@final
class Objects(Column):
    """Python objects, as Arrow makes them: what NumPy has no dtype for.

    Args:
        slot: the first slot; it needs none.
        number: which column of the table it is.
        words: what it is.
    """

    has_batch = False

    def __init__(self, slot: int, number: int, words: str) -> None:
        super().__init__(slot)
        self._number = number
        self.words = words

    @property
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""
        return self.slot

    def describe(self, array: Any, slots: Places, memory: Memory) -> None:
        """Writes nothing: Arrow itself is asked for the values."""

    def nulls(self, rows: Rows) -> None:
        """Returns None: nulls are among the objects."""

    def _values(self, rows: Rows) -> list[Any]:
        values = np.empty(len(rows), np.object_)
        for number in np.unique(rows.chunk).tolist():
            places = np.flatnonzero(rows.chunk == number)
            for place, value in zip(
                places.tolist(),
                rows.chunks[number].column(self._number).take(rows.within[places]).to_pylist(),
                strict=True,
            ):
                values[place] = value
        return values.tolist()


@final
class Decoded(Column):
    """What a function makes of the values of another column; null stays None.

    Args:
        column: the other one.
        decode: called with each value.
        words: what it makes.
    """

    has_batch = False

    def __init__(self, column: Column, decode: Callable[[Any], Any], words: str) -> None:
        super().__init__(column.slot)
        self._column = column
        self._decode = decode
        self.words = words

    @property
    def end_slot(self) -> int:
        """The slot after the last one of this column and of those within it."""
        return self._column.end_slot

    def describe(self, array: Any, slots: Places, memory: Memory) -> None:
        """Writes where in a memory the buffers of an Arrow array are."""
        self._column.describe(array, slots, memory)

    def nulls(self, rows: Rows) -> None:
        """Returns None: nulls are among the values."""

    def _values(self, rows: Rows) -> list[Any]:
        return [None if value is None else self._decode(value) for value in self._column.values(rows)]


def dicts(columns: Mapping[str, Column], rows: Rows) -> list[dict[str, Any]]:
    """Returns the values of some columns as a dict for each row."""
    values = [column.values(rows) for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


Explain = Callable[[int, ValueError], Exception]
"""Returns the error of the record of a key, from that of its row."""


@final
class ArrowRecords(ColumnarRecords):
    """The records of some rows, made when they are asked for: as dicts, or as one batch.

    Args:
        columns: what the records are made of.
        rows: where their values are.
        keys: the record key of each row.
        explain: makes the error of a damaged row.
    """

    def __init__(self, columns: Mapping[str, Column], rows: Rows, keys: NDArray[np.int64], explain: Explain) -> None:
        self._columns = columns
        self._rows = rows
        self._keys = keys
        self._explain = explain

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return ArrowRecords(self._columns, self._rows.take(index), self._keys[index], self._explain)
        (record,) = dicts_or_error(self._columns, self._rows.take([index]), self._keys[[index]], self._explain)
        return record

    def __iter__(self) -> Iterator[Any]:
        return iter(dicts_or_error(self._columns, self._rows, self._keys, self._explain))

    def stack(self, allocate: Allocate) -> dict[str, Any]:
        """Returns the batch: a dict of arrays of shape (n, …)."""
        try:
            return {name: column.batch(self._rows, allocate) for name, column in self._columns.items()}
        except ValueError:
            dicts_or_error(self._columns, self._rows, self._keys, self._explain)
            raise


def records_of(columns: Mapping[str, Column], rows: Rows, keys: NDArray[np.int64], explain: Explain) -> Sequence[Any]:
    """Returns the records of some rows: as columns where they stack to arrays, else as a list of dicts.

    The keys, and what makes errors, are those of `ArrowRecords`.
    """
    try:
        stacks = all(column.stacks(rows) for column in columns.values())
    except ValueError:
        stacks = False
    if stacks:
        return ArrowRecords(columns, rows, keys, explain)
    return dicts_or_error(columns, rows, keys, explain)


def dicts_or_error(
    columns: Mapping[str, Column], rows: Rows, keys: NDArray[np.int64], explain: Explain
) -> list[dict[str, Any]]:
    """Returns the values as a dict for each row, or raises the error of the first row that is damaged."""
    try:
        return dicts(columns, rows)
    except ValueError:
        for place, key in enumerate(keys.tolist()):
            try:
                dicts(columns, rows.take([place]))
            except ValueError as error:
                raise explain(key, error) from error
        raise
