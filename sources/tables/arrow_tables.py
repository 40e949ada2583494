"""Tables of pyarrow: the columns for their types, and random access to the rows of many chunks.

pyarrow is imported when it is first needed.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.pieces import Pieces
from millstream.sources.tables.arrow_columns import FixedBytes, FixedLists, Flags, Lists, Numbers, Strings
from millstream.sources.tables.arrow_memory import Column, Memory, Rows
from millstream.sources.tables.arrow_structures import Objects, Structs, Tensors

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
            for number in np.unique(chunk[~self._is_described[chunk]]).tolist():
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
    """Returns columns of a record batch with plain types and aligned numbers."""
    columns = [_normalise(chunk.column(name), kind) for name, kind in zip(names, types, strict=True)]
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
