"""What is asked of pyarrow of any table: the types of columns, and where the buffers of chunks are.

It is imported when it is needed.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from millstream.sources.tables.arrow_columns import FixedBytes, FixedLists, Flags, Lists, Numbers, Strings
from millstream.sources.tables.arrow_memory import Column, Memory, Places
from millstream.sources.tables.arrow_structures import Objects, Structs, Tensors

_ALIGNED = 8
"""Where numbers begin in memory: at a multiple of this. Arrow recommends 64 bytes, and IPC demands 8."""


@functools.cache
def arrow() -> ModuleType:
    """Returns pyarrow."""
    try:
        import pyarrow as pa  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Arrow's tables need pyarrow: pip install 'millstream[parquet]'") from error
    library: ModuleType = pa
    return library


def filesystems() -> ModuleType:
    """Returns pyarrow's file systems."""
    arrow()
    import pyarrow.fs  # noqa: PLC0415

    library: ModuleType = pyarrow.fs
    return library


def columns_of(schema: Any, names: Iterable[str]) -> dict[str, Column]:
    """Returns how the values of some columns of a schema are read, once they are `normalised`."""
    columns: dict[str, Column] = {}
    end = 0
    for number, name in enumerate(names):
        kind = schema.field(name).type
        make = _column_maker(kind)
        columns[name] = Objects(end, number, str(_plain_type(kind))) if make is None else make(end)
        end = columns[name].end_slot
    return columns


def num_slots(columns: Mapping[str, Column]) -> int:
    """Returns how many slots a chunk has in the table of some columns."""
    return max((column.end_slot for column in columns.values()), default=0)


def described(columns: Mapping[str, Column], chunk: Any, memory: Memory) -> Places:
    """Returns where in a memory the buffers of a chunk are: a row of the table, of shape (slots,)."""
    slots = np.zeros(num_slots(columns), np.int64)
    for column, array in zip(columns.values(), chunk.columns, strict=True):
        column.describe(array, slots, memory)
    return slots


def plain_types(schema: Any, names: Iterable[str]) -> list[Any]:
    """Returns the types that some columns of a schema have once they are normalised."""
    return [_plain_type(schema.field(name).type) for name in names]


def normalised(chunk: Any, names: Sequence[str], types: Sequence[Any]) -> Any:
    """Returns some columns of a record batch with plain types, and numbers at multiples of 8 in memory."""
    columns = [_normalised(chunk.column(name), kind) for name, kind in zip(names, types, strict=True)]
    return arrow().RecordBatch.from_arrays(columns, names=list(names))


def _normalised(array: Any, plain: Any) -> Any:
    pa = arrow()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        values = array.dictionary if plain == array.type.value_type else array.dictionary.cast(plain)
        array = pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode()
    if plain != array.type:
        array = array.cast(plain)
    if any(buffer is not None and buffer.address % _ALIGNED for buffer in array.buffers()):
        array = array.take(pa.array(np.arange(len(array))))
    return array


def _plain_type(kind: Any) -> Any:
    """Returns the type that a column has once it is normalised."""
    pa = arrow()
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
        # Decoded, its texts may have 2 GiB and more, which takes offsets of 64 bits.
        kind = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)
    if kind.id == pa.lib.Type_STRING_VIEW:
        return pa.large_string()
    if kind.id == pa.lib.Type_BINARY_VIEW:
        return pa.large_binary()
    return _plain_nested(kind)


def _plain_nested(kind: Any) -> Any:
    """Returns the type that a list or struct has once views within it are normalised; any other type as it is."""
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
    """Returns the same for a type within another one, in which dictionaries stay as they are."""
    pa = arrow()
    return kind if pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType) else _plain_type(kind)


def _column_maker(kind: Any) -> Callable[[int], Column] | None:
    """Returns what makes the column of a type, given its first slot; None for what NumPy has no dtype for."""
    shape = getattr(kind, "shape", None)
    make = _maker(_plain_type(kind))
    if make is None or shape is None or not all(isinstance(size, int) for size in shape):
        return make
    # With its axes in another order, it stays the list that it is stored as.
    axes = getattr(kind, "permutation", None)
    in_order = axes is None or list(axes) == sorted(axes)
    return functools.partial(_tensors, tuple(shape), make) if in_order else make


def _tensors(shape: tuple[int, ...], make_lists: Callable[[int], Column], slot: int) -> Column:
    return Tensors(slot, shape, make_lists)


def _maker(kind: Any) -> Callable[[int], Column] | None:
    """Returns what makes the column of a type that is within others or plain; None where Python objects are needed."""
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


def laid_end_to_end(chunks: Sequence[Any]) -> list[Any]:
    """Returns the rows of some record batches in one, copied; in several where a column has more than 2 GB."""
    table = arrow().Table.from_batches(chunks).combine_chunks()
    return [chunk for chunk in table.to_batches() if len(chunk)]


def has_valid_text(chunks: Iterable[Any]) -> bool:
    """Returns whether all texts are UTF-8, and all else is as it should be."""
    try:
        for chunk in chunks:
            chunk.validate(full=True)
    except arrow().ArrowInvalid:
        return False
    return True
