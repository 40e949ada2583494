"""What is asked of pyarrow: the types of columns, and the row groups of Parquet files.

This is the one module that imports it, when it is needed.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from millstream.errors import DataSourceError
from millstream.sources.arrow_columns import FixedBytes, FixedLists, Flags, Lists, Numbers, Strings
from millstream.sources.arrow_memory import Column, Places
from millstream.sources.arrow_structures import Objects, Structs, Tensors

_ALIGNED = 8
"""Where numbers begin in memory: at a multiple of this. Arrow recommends 64 bytes, and IPC demands 8."""


@functools.cache
def _arrow() -> ModuleType:
    """Returns pyarrow."""
    try:
        import pyarrow as pa  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Arrow's tables need pyarrow: pip install 'millstream[parquet]'") from error
    library: ModuleType = pa
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


def described(columns: Mapping[str, Column], chunk: Any) -> Places:
    """Returns where the buffers of a chunk are: a row of the table, of shape (slots,)."""
    slots = np.zeros(num_slots(columns), np.int64)
    for column, array in zip(columns.values(), chunk.columns, strict=True):
        column.describe(array, slots)
    return slots


def plain_types(schema: Any, names: Iterable[str]) -> list[Any]:
    """Returns the types that some columns of a schema have once they are normalised."""
    return [_plain_type(schema.field(name).type) for name in names]


def normalised(chunk: Any, names: Sequence[str], types: Sequence[Any]) -> Any:
    """Returns some columns of a record batch with plain types, and numbers at multiples of 8 in memory."""
    columns = [_normalised(chunk.column(name), kind) for name, kind in zip(names, types, strict=True)]
    return _arrow().RecordBatch.from_arrays(columns, names=list(names))


def _normalised(array: Any, plain: Any) -> Any:
    pa = _arrow()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if plain != array.type:
        array = array.cast(plain)
    if any(buffer is not None and buffer.address % _ALIGNED for buffer in array.buffers()):
        array = array.take(pa.array(np.arange(len(array))))
    return array


def _plain_type(kind: Any) -> Any:
    """Returns the type that a column has once it is normalised."""
    pa = _arrow()
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind.id == pa.lib.Type_STRING_VIEW:
        return pa.large_string()
    return pa.large_binary() if kind.id == pa.lib.Type_BINARY_VIEW else kind


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
    pa = _arrow()
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
    types = _arrow().types
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
    types = _arrow().types
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


class ParquetFile:
    """An open Parquet file, which any number of threads may read.

    Args:
        path: where it is.

    Raises:
        OSError: it cannot be opened, with the operating system's error number, or is damaged (DataSourceError).
    """

    def __init__(self, path: str) -> None:
        import pyarrow.parquet as pq  # noqa: PLC0415

        self.path = path
        self._file = _arrow().OSFile(path)
        try:
            reader = pq.ParquetFile(self._file, page_checksum_verification=True)
            self._metadata = reader.metadata
            self.schema = reader.schema_arrow
            self.group_sizes = [self._metadata.row_group(n).num_rows for n in range(self._metadata.num_row_groups)]
            if min(self.group_sizes, default=0) < 0 or sum(self.group_sizes) != self._metadata.num_rows:
                raise ValueError("its row groups have other numbers of rows than the file")  # noqa: TRY301
        except Exception as error:
            self._file.close()
            raise DataSourceError(
                f"{path!r} is not a Parquet file, or is damaged, or was cut short: {_words(error)}. Restore the file."
            ) from error

    @property
    def num_records(self) -> int:
        """How many rows it has."""
        return int(sum(self.group_sizes))

    def close(self) -> None:
        """Closes it. It is not being read."""
        self._file.close()

    def read_group(self, group: int, names: Sequence[str], types: Sequence[Any]) -> list[Any]:
        """Returns the rows of a row group: record batches of some columns, normalised to these types.

        Raises:
            ValueError: the row group cannot be read; the message has the library's words.
        """
        import pyarrow.parquet as pq  # noqa: PLC0415

        try:
            # A reader of its own for each call: one is not made for several threads.
            reader = pq.ParquetFile(self._file, metadata=self._metadata, page_checksum_verification=True)
            # Threads of the library would not come along to a forked process, and are no faster here.
            table = reader.read_row_group(group, columns=list(names), use_threads=False)
            table.validate()
            chunks = [normalised(chunk, names, types) for chunk in table.to_batches() if len(chunk)]
        except Exception as error:
            raise ValueError(_words(error)) from error
        if (count := sum(map(len, chunks))) != self.group_sizes[group]:
            raise ValueError(f"it has {count} rows, and should have {self.group_sizes[group]}")
        return chunks


def has_valid_text(chunks: Iterable[Any]) -> bool:
    """Returns whether all texts are UTF-8, and all else is as it should be."""
    try:
        for chunk in chunks:
            chunk.validate(full=True)
    except _arrow().ArrowInvalid:
        return False
    return True


def _words(error: BaseException) -> str:
    """Returns the library's words in one line."""
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
