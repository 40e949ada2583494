"""Tables of pyarrow: the columns for their types, the rows of many chunks in any order, and the records that they form.

pyarrow is imported when it is first needed.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate, ColumnarRecords
from millstream.sources.arrow.columns import (
    Column,
    FixedBytes,
    FixedLists,
    Flags,
    Integers,
    Lists,
    Memory,
    Numbers,
    Rows,
    Strings,
)
from millstream.sources.pieces import Pieces
from millstream.sources.reads import explained


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
        arrays = {number: rows.chunks[number].column(self._number) for number in set(rows.chunk.tolist())}
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


_ALIGNMENT = 8
"""Alignment of numbers in memory, in bytes. Arrow recommends 64 bytes, and its IPC format requires 8."""


@final
class ArrowTable:
    """Columns of a table, whose chunks are normalised and described when a row of them is first read.

    Any number of threads may read, and so may forked processes, because there is no lock.
    """

    def __init__(
        self, columns: Mapping[str, Column], chunks: Sequence[Any], normalise: Callable[[Any], Any] | None = None
    ) -> None:
        self.columns = columns
        self._normalise = normalise
        self._chunks = [chunk for chunk in chunks if len(chunk)]
        self._pieces = Pieces(map(len, self._chunks))
        self._table = np.zeros((num_slots(columns), len(self._chunks)), np.int64)
        self._is_described = np.zeros(len(self._chunks), np.bool_)
        self._memory = Memory()

    @classmethod
    def of(cls, table: Any, names: Sequence[str]) -> "ArrowTable":
        types = plain_types(table.schema, names)
        chunks = table.select(list(names)).to_batches()
        return cls(columns_of(table.schema, names), chunks, lambda chunk: normalised(chunk, names, types))

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        """Returns the rows of the given keys, which are numbers from 0."""
        chunk, within = self._pieces.locate(keys)
        if not self._is_described[chunk].all():
            for number in sorted(set(chunk[~self._is_described[chunk]].tolist())):
                self._describe(number)
        return Rows(self._memory, self._chunks, self._table, chunk, within)

    def _describe(self, number: int) -> None:
        chunk = self._chunks[number]
        if self._normalise is not None:
            # Two threads may do this for the same chunk. The memory keeps the buffers of both.
            chunk = self._chunks[number] = self._normalise(chunk)
        slots = np.zeros(num_slots(self.columns), np.int64)
        for column, array in zip(self.columns.values(), chunk.columns, strict=True):
            column.describe(array, slots, self._memory)
        self._table[:, number] = slots
        self._is_described[number] = True


@functools.cache
def arrow() -> ModuleType:
    try:
        import pyarrow as pa  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Cannot read Arrow tables without pyarrow: pip install 'millstream[parquet]'") from error
    library: ModuleType = pa
    return library


def filesystems() -> ModuleType:
    arrow()
    import pyarrow.fs  # noqa: PLC0415

    library: ModuleType = pyarrow.fs
    return library


def columns_of(schema: Any, names: Iterable[str]) -> dict[str, Column]:
    """Returns columns for the given names of a schema, which read `normalised` record batches."""
    columns: dict[str, Column] = {}
    end = 0
    for number, name in enumerate(names):
        kind = schema.field(name).type
        make = _column_maker(kind)
        columns[name] = Objects(end, number, str(_plain_type(kind))) if make is None else make(end)
        end = columns[name].end_slot
    return columns


def num_slots(columns: Mapping[str, Column]) -> int:
    return max((column.end_slot for column in columns.values()), default=0)


def plain_types(schema: Any, names: Iterable[str]) -> list[Any]:
    return [_plain_type(schema.field(name).type) for name in names]


def normalised(chunk: Any, names: Sequence[str], types: Sequence[Any]) -> Any:
    """Returns columns of a record batch, or of a dict of arrays, with plain types and aligned numbers."""
    columns = [_normalise(chunk[name], kind) for name, kind in zip(names, types, strict=True)]
    return arrow().RecordBatch.from_arrays(columns, names=list(names))


def _normalise(array: Any, plain: Any) -> Any:
    pa = arrow()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        values = array.dictionary if plain == array.type.value_type else array.dictionary.cast(plain)
        array = pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode()
    if plain != array.type:
        array = array.cast(plain)
    if any(buffer is not None and buffer.address % _ALIGNMENT for buffer in array.buffers()):
        array = array.take(pa.array(np.arange(len(array))))
    return array


def _plain_type(kind: Any) -> Any:
    pa = arrow()
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
        # The decoded texts may exceed 2 GiB, which needs 64-bit offsets.
        kind = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)
    if kind.id == pa.lib.Type_STRING_VIEW:
        return pa.large_string()
    if kind.id == pa.lib.Type_BINARY_VIEW:
        return pa.large_binary()
    return _plain_nested(kind)


def _plain_nested(kind: Any) -> Any:
    """Returns the type of a list or struct with normalised views in it, and other types unchanged."""
    pa = arrow()
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([field.with_type(_plain_view(field.type)) for field in fields])
    for is_kind, make in (
        (pa.types.is_list, pa.list_),
        (pa.types.is_large_list, pa.large_list),
        (pa.types.is_fixed_size_list, lambda field: pa.list_(field, kind.list_size)),
    ):
        if is_kind(kind):
            return make(kind.value_field.with_type(_plain_view(kind.value_type)))
    return kind


def _plain_view(kind: Any) -> Any:
    """Returns the plain type of a nested type, in which dictionaries stay unchanged."""
    pa = arrow()
    return kind if pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType) else _plain_type(kind)


def _column_maker(kind: Any) -> Callable[[int], Column] | None:
    """Returns the constructor of the column for a type, or None if NumPy has no dtype for it."""
    shape = getattr(kind, "shape", None)
    make = _maker(_plain_type(kind))
    if make is None or shape is None or not all(isinstance(size, int) for size in shape):
        return make
    # A tensor with permuted axes stays a list.
    axes = getattr(kind, "permutation", None)
    in_order = axes is None or list(axes) == sorted(axes)
    return functools.partial(Tensors, shape=tuple(shape), make_lists=make) if in_order else make


def _maker(kind: Any) -> Callable[[int], Column] | None:
    """Returns the constructor of the column for a plain or nested type, or None if it needs Python objects."""
    pa = arrow()
    types = pa.types
    if types.is_boolean(kind):
        return Flags
    if types.is_integer(kind) or types.is_floating(kind):
        return functools.partial(Numbers, dtype=kind.to_pandas_dtype())
    if types.is_temporal(kind):
        return _temporal_maker(kind)
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return functools.partial(FixedBytes, width=kind.byte_width)
    for is_kind, offset, is_text in (
        (types.is_string, np.int32, True),
        (types.is_large_string, np.int64, True),
        (types.is_binary, np.int32, False),
        (types.is_large_binary, np.int64, False),
    ):
        if is_kind(kind):
            return functools.partial(Strings, offset_dtype=offset, is_text=is_text)
    return _nested_maker(kind)


def _temporal_maker(kind: Any) -> Callable[[int], Column] | None:
    types = arrow().types
    if types.is_timestamp(kind):
        return functools.partial(Numbers, dtype=f"datetime64[{kind.unit}]")
    if types.is_duration(kind):
        return functools.partial(Numbers, dtype=f"timedelta64[{kind.unit}]")
    if types.is_time(kind):
        stored = np.int32 if kind.bit_width == 32 else None
        return functools.partial(Numbers, dtype=f"timedelta64[{kind.unit}]", stored=stored)
    if types.is_date32(kind):
        return functools.partial(Numbers, dtype="datetime64[D]", stored=np.int32)
    return functools.partial(Numbers, dtype="datetime64[ms]") if types.is_date64(kind) else None


def _nested_maker(kind: Any) -> Callable[[int], Column] | None:
    types = arrow().types
    if types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        makers = {field.name: maker for field in fields if (maker := _maker(field.type)) is not None}
        return functools.partial(Structs, make_members=makers) if len(makers) == len(fields) else None
    is_fixed, is_large = types.is_fixed_size_list(kind), types.is_large_list(kind)
    if not is_fixed and not is_large and not types.is_list(kind):
        return None
    make_child = _maker(kind.value_type)
    if make_child is None:
        return None
    if is_fixed:
        return functools.partial(FixedLists, size=kind.list_size, make_child=make_child)
    return functools.partial(Lists, offset_dtype=np.int64 if is_large else np.int32, make_child=make_child)


def has_valid_text(chunks: Iterable[Any]) -> bool:
    """Returns True if all texts are UTF-8 and all other values are valid."""
    try:
        for chunk in chunks:
            chunk.validate(full=True)
    except arrow().ArrowInvalid:
        return False
    return True
