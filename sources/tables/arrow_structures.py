"""Columns of structs, tensors and Python objects, and the records that all columns form."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate, ColumnarRecords
from millstream.sources.base import explained
from millstream.sources.tables.arrow_columns import Lists
from millstream.sources.tables.arrow_memory import Column, Integers, Memory, Rows


@final
class Structs(Column):
    """Structs, as dicts."""

    def __init__(self, slot: int, make_members: Mapping[str, Callable[[int], Column]]) -> None:
        super().__init__(slot)
        self._members: dict[str, Column] = {}
        end = slot + 1
        for name, make_member in make_members.items():
            self._members[name] = make_member(end)
            end = self._members[name].end_slot
        self.end_slot = end
        self.type_name = (
            "struct<" + ",".join(f"{name}:{member.type_name}" for name, member in self._members.items()) + ">"
        )

    def _describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        for number, member in enumerate(self._members.values()):
            member.describe(array.field(number), slots, memory)

    def _values(self, rows: Rows) -> list[Any]:
        return dicts(self._members, rows)

    def _stacks(self, rows: Rows) -> bool:
        return all(member.stacks(rows) for member in self._members.values())

    def batch(self, rows: Rows, allocate: Allocate) -> dict[str, Any]:
        return {name: member.batch(rows, allocate) for name, member in self._members.items()}


@final
class Tensors(Column):
    """Arrays of one shape, which Arrow stores as nested lists."""

    def __init__(self, slot: int, shape: tuple[int, ...], make_lists: Callable[[int], Column]) -> None:
        super().__init__(slot)
        self._shape = shape
        self._lists = make_lists(slot)
        self.end_slot = self._lists.end_slot
        self.type_name = f"tensor<{self._lists.type_name}>{list(shape)}"

    def _describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        self._lists.describe(array, slots, memory)

    def _values(self, rows: Rows) -> list[Any]:
        if not self._has_nulls(rows):
            return [array.copy() for array in self.batch(rows, np.empty)]
        singles = (rows.take([row]) for row in range(len(rows)))
        return [self._with_nulls(one) if self._has_nulls(one) else self.batch(one, np.empty)[0] for one in singles]

    def _has_nulls(self, rows: Rows) -> bool:
        """Returns True if one of the arrays has a null in it."""
        columns: list[Column] = [self._lists]
        while isinstance(columns[-1], Lists):
            columns.append(columns[-1].child)
        if not any(rows.has_nonzero(column.slot) for column in columns[1:]):
            return False
        for lists, child in itertools.pairwise(columns):
            rows = rows.expand(*lists.bounds(rows))  # type: ignore[attr-defined]  # All but the last one are lists.
            if child.nulls(rows) is not None:
                return True
        return False

    def _with_nulls(self, row: Rows) -> NDArray[Any]:
        array = np.empty(self._shape, object)
        (values,) = self._lists.values(row)
        # Arrow has flat lists, and `datasets` has nested ones.
        is_nested = isinstance(self._lists, Lists) and isinstance(self._lists.child, Lists)
        _fill(array if is_nested else array.reshape(-1), values)
        return array

    def _stacks(self, rows: Rows) -> bool:
        return not self._has_nulls(rows)

    def batch(self, rows: Rows, allocate: Allocate) -> NDArray[Any]:
        column, inner = self._lists, rows
        while isinstance(column, Lists):
            inner, column = inner.expand(*column.bounds(inner)), column.child
        values: NDArray[Any] = column.batch(inner, np.empty)
        batch = allocate((len(rows), *self._shape), values.dtype)
        batch[...] = values.reshape(batch.shape)
        return batch


def _fill(array: NDArray[Any], nested: Any) -> None:
    """Fills an array of objects with the values of nested lists, some of which are None."""
    if nested is None or array.ndim == 1:
        array[...] = nested
        return
    for row, inner in zip(array, nested, strict=True):
        _fill(row, inner)


@final
class Objects(Column):
    """Values without a NumPy dtype, as the Python objects of pyarrow."""

    can_batch = False

    def __init__(self, slot: int, number: int, type_name: str) -> None:
        super().__init__(slot)
        self._number = number
        self.type_name = type_name

    def _describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        pass  # pyarrow reads the values.

    def _values(self, rows: Rows) -> list[Any]:
        arrays = {number: rows.chunks[number].column(self._number) for number in np.unique(rows.chunk).tolist()}
        return [
            arrays[chunk][row].as_py() for chunk, row in zip(rows.chunk.tolist(), rows.within.tolist(), strict=True)
        ]


@final
class Decoded(Column):
    """The results of a function that is called with each value of another column. Nulls stay None."""

    can_batch = False

    def __init__(self, column: Column, decode: Callable[[Any], Any], type_name: str) -> None:
        super().__init__(column.slot)
        self.end_slot = column.end_slot
        self._column = column
        self._decode = decode
        self.type_name = type_name

    def _describe(self, array: Any, slots: Integers, memory: Memory) -> None:
        self._column.describe(array, slots, memory)

    def _values(self, rows: Rows) -> list[Any]:
        return [None if value is None else self._decode(value) for value in self._column.values(rows)]


def dicts(columns: Mapping[str, Column], rows: Rows) -> list[dict[str, Any]]:
    values = [column.values(rows) for column in columns.values()]
    # A struct may have no members.
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)] or [{} for _ in range(len(rows))]


Explain = Callable[[int, ValueError], Exception]
"""Returns the error for a record key, from the error of its row."""


@final
class ArrowRecords(ColumnarRecords):
    """The records of rows, built on demand, as dicts or as one batch."""

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
        try:
            return {name: column.batch(self._rows, allocate) for name, column in self._columns.items()}
        except ValueError:
            dicts_or_error(self._columns, self._rows, self._keys, self._explain)
            raise


def records_of(columns: Mapping[str, Column], rows: Rows, keys: NDArray[np.int64], explain: Explain) -> Sequence[Any]:
    """Returns the records of rows, as `ArrowRecords` if all columns stack to arrays, else as a list of dicts."""
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
    """Returns a dict for each row, or raises the error of the first damaged row."""
    return explained(lambda: dicts(columns, rows), lambda row: dicts(columns, rows.take([row])), keys, explain)
