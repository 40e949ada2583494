"""Sources whose records are computed or in memory, and batches that are columns, without a record in between."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.columnar import Allocate, ColumnarRecords, copy_images, find_loss
from millstream.core.direct_copies import DirectCopies
from millstream.errors import DataSourceError
from millstream.sources.base import (
    HeldRecords,
    RecordKeys,
    RenderedSource,
    checked_record_key,
    checked_record_keys,
    is_held,
    is_mapped,
    items_at,
)
from millstream.sources.digests import FINGERPRINT_RECORDS, spread_keys, updated_crc
from millstream.sources.pieces import Cut, cut
from millstream.sources.source_checks import advice_for, batched_read_of, check_range, is_numbered

if TYPE_CHECKING:
    from multiprocessing.shared_memory import SharedMemory


_STACKABLE_SCALARS = "biufcmM"
"""The kinds of dtype whose scalars stack to an array of that dtype. Text and bytes have no fixed width."""


@final
class RangeDataSource(RenderedSource):
    """The integers of `range(start, stop, step)`, as Python ints.

    Args:
        start: the first integer.
        stop: the end, which is excluded.
        step: the difference between neighbours; negative counts down, 0 is an error.

    Raises:
        ValueError: the step is 0, or there are 2**63 integers or more.

    Examples:
        >>> source = millstream.RangeDataSource(10, 20, 5)
        >>> len(source), source[1]
        (2, 15)
    """

    is_in_memory = True

    def __init__(self, start: int, stop: int, step: int = 1) -> None:
        if step == 0:
            raise ValueError("step must not be 0.")
        self._range = range(start, stop, step)
        check_range(self._range)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, record_key: SupportsIndex) -> int:
        return self._range[checked_record_key(record_key, len(self._range))]

    def __getitems__(self, record_keys: RecordKeys) -> list[int]:
        keys = checked_record_keys(record_keys, len(self._range))
        return list(map(self._range.__getitem__, keys.tolist()))

    def __repr__(self) -> str:
        return f"RangeDataSource({self._range.start}, {self._range.stop}, {self._range.step})"

    def fingerprint(self) -> str:
        """Returns the start, the stop and the step of the range."""
        return f"Range start={self._range.start} stop={self._range.stop} step={self._range.step}"


@final
class InMemoryDataSource(RenderedSource):
    """Records in memory, one by one or as columns.

    Columns are equally long NumPy arrays: one array, a tuple (or named tuple) of nothing but arrays, a dict or a
    dataclass whose values are arrays or dicts, lists, tuples and dataclasses of them. Record k is the same structure
    with a copy of row k of every array, so changing a record in place does not change the source. A batched read takes
    one fancy index per array.

    Any other object with `len()` and `[]` is a sequence of records: a list, a tuple, a memory-mapped or lazily decoding
    container. Its own `__getitems__` is used if it has one. Of the records of a list or tuple, dicts, lists, sets and
    arrays are copied for each reader, so `record["image"] -= 1` does not change the source. Arrays of more than 1 MiB
    are views that cannot be written to. Other objects are shared: do not change them in place.

    Args:
        records: the columns or the sequence. It is not copied. Or the path of a file of NumPy: the arrays in an `.npz`
            are columns, and that in an `.npy` is mapped into memory.
        elements: another name of `records`, which Grain uses.
        name: a name of shared memory on this machine, into which the records are copied, or without records, from
            which they are. It exists until `unlink()`, or the end of a process that has it and is not a child of its
            creator. Records are then numbers, text, bytes and None.

    Raises:
        FileExistsError, FileNotFoundError: there is shared memory of this name already, or none to read.
        TypeError: columns that are not NumPy arrays, text, or something without `len()` and `[]`.
        ValueError: an array is 0-dimensional, or arrays differ in length.

    Examples:
        >>> source = millstream.InMemoryDataSource({"x": np.arange(6).reshape(3, 2), "y": np.array([0, 1, 0])})
        >>> len(source), source[1]
        (3, {'x': array([2, 3]), 'y': np.int64(1)})
    """

    def __init__(self, records: Any = None, *, elements: Any = None, name: str | None = None) -> None:
        records = elements if records is None else records
        self._memory: SharedMemory | None = None
        if isinstance(records, str | os.PathLike) and name is None:
            records = _loaded(os.path.expanduser(os.fsdecode(records)))  # noqa: PTH111  (paths are strings throughout)
        if name is not None:
            if records is not None and _is_columns(records):
                raise TypeError(f"InMemoryDataSource(records, name={name!r}) takes a list of records, got columns.")
            if records is not None:
                _sequence_length(records)  # Raises for text, whose characters would be records.
            records, self._memory = _shared_list(records, name)
        elif records is None:
            raise ValueError("InMemoryDataSource must have records, or a name of shared memory that has them.")
        self._is_columns = _is_columns(records)
        if self._is_columns:
            self._num_records = _common_length(_named_columns(records))
            self._records = tree.map_leaves(np.asarray, records)
        else:
            self._num_records = _sequence_length(records)
            self._records = HeldRecords(records) if is_held(records) else records
        self._kind = "columns" if self._is_columns else f"a {type(records).__name__}"
        self._stacks = self._is_columns and all(stacks(column) for _, column in _named_columns(self._records))
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, record_key: SupportsIndex) -> Any:
        key = checked_record_key(record_key, self._num_records)
        if self._is_columns:
            return _take(self._records, key)
        return self._records[key]

    @property
    def is_in_memory(self) -> bool:
        """True if the records are plain data in memory: no mapped file, and no container of the user."""
        if not self._is_columns:
            return isinstance(self._records, HeldRecords)
        return not any(is_mapped(column) for _, column in _named_columns(self._records))

    def close(self) -> None:
        """Does nothing, for compatibility with Grain: the memory is released with the source."""

    def unlink(self) -> None:
        """Removes the shared memory of `name`, if any. Sources that have read it keep their records."""
        if self._memory is not None:
            self._memory.unlink()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_memory": None}

    @property
    def stackable_columns(self) -> Any:
        """The columns if a batch of records has their dtypes; None if it has others, or records are not columns."""
        return self._records if self._stacks else None

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[Any]:
        keys = checked_record_keys(record_keys, self._num_records)
        if self._is_columns:
            records = _ColumnRecords(self._records, keys)
            return records if self._stacks else list(records)
        if (batched_read := batched_read_of(self._records)) is not None:
            return batched_read(keys.tolist())
        return items_at(self._records, keys.tolist())

    @property
    def copies_large_arrays(self) -> bool:
        """True if `copied_directly` saves work."""
        return isinstance(self._records, HeldRecords) and self._records.copies_large_arrays

    def copied_directly(self, record_keys: RecordKeys, copies: DirectCopies) -> Sequence[Any]:
        """Returns the same records as `__getitems__`, with large arrays where the batch of all records will be."""
        keys = checked_record_keys(record_keys, self._num_records)
        return self._records.copied_directly(keys.tolist(), copies)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"InMemoryDataSource({self._num_records} records in {self._kind})"

    def fingerprint(self) -> str:
        """Returns the number of records, the columns' dtypes and shapes, and a CRC over up to 16 records.

        The records are spread evenly over the source. For values other than numbers, text, bytes, arrays, and lists,
        tuples and dicts of these, only the type counts.
        """
        if self._fingerprint is None:
            terms = [f"InMemory records={self._num_records}"]
            if self._is_columns:
                terms += [f"{name or 'rows'}={c.dtype}{list(c.shape[1:])}" for name, c in _named_columns(self._records)]
            crc = 0
            for key in spread_keys(self._num_records, FINGERPRINT_RECORDS):
                crc = updated_crc(crc, self[key])
            self._fingerprint = " ".join([*terms, f"crc32={crc:08x}"])
        return self._fingerprint


def _shared_list(records: Sequence[Any] | None, name: str) -> "tuple[list[Any], SharedMemory]":
    """Copies records into shared memory of a name, or reads those that another process has copied there."""
    from multiprocessing.shared_memory import ShareableList  # noqa: PLC0415  (lazy: slow to import, rarely used)

    for key, record in enumerate(() if records is None else records):
        if not _is_storable(record):
            raise TypeError(
                f"Records of InMemoryDataSource(records, name={name!r}) must be 64-bit integers, floats, bools, None, "
                f"or text and bytes that end with no zero byte, got {type(record).__name__} as record {key}."
            )
    try:
        shared: ShareableList[Any] = ShareableList(records, name=name)
    except FileNotFoundError as error:
        error.add_note(f"Create InMemoryDataSource(records, name={name!r}) first, in a process of this machine.")
        raise
    copied = [shared[key] for key in range(len(shared))]
    shared.shm.close()
    return copied, shared.shm


def _is_storable(record: Any) -> bool:
    kind = type(record)
    if kind in (str, bytes):
        return bool(record[-1:] not in ("\0", b"\0"))
    return record is None or kind in (float, bool) or (kind is int and -(2**63) <= record < 2**63)


def stacks(column: NDArray[Any]) -> bool:
    """Returns True if rows stack to the column's dtype: one-dimensional text, bytes and objects have other ones."""
    return not column.dtype.hasobject and (column.ndim > 1 or column.dtype.kind in _STACKABLE_SCALARS)


class _ColumnRecords(ColumnarRecords):
    """The records of keys, copied from columns when they are needed: as records, or as one batch."""

    def __init__(self, columns: Any, keys: NDArray[np.int64]) -> None:
        self._columns = columns
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _ColumnRecords(self._columns, self._keys[index])
        return _take(self._columns, self._keys[index])

    def __iter__(self) -> Iterator[Any]:
        return iter(rows_of(_take(self._columns, self._keys), len(self)))

    def stack(self, allocate: Allocate) -> Any:
        """Returns the batch: the columns' structure, arrays of shape (n, …), by one fancy index each."""
        return tree.map_leaves(functools.partial(_taken_into, allocate, self._keys), self._columns)


# Not inside `stack`, where the annotations would be evaluated for each batch.
def _taken_into(allocate: Allocate, keys: NDArray[np.int64], column: NDArray[Any]) -> NDArray[Any]:
    batch = allocate((len(keys), *column.shape[1:]), column.dtype)
    if not can_be_taken_from(column):
        copy_images(column[keys], batch)
        return batch
    # The keys are checked: with any other mode than "raise", NumPy writes to `out` without a second copy.
    return np.take(column, keys, axis=0, out=batch, mode="clip")


def _take(columns: Any, keys: Any) -> Any:
    return tree.map_leaves(functools.partial(_taken, keys), columns)


def _taken(keys: Any, column: NDArray[Any]) -> Any:
    if np.ndim(keys):
        return _taken_into(np.empty, keys, column)
    row = column[keys]
    # An array or a structured scalar is a view of the column.
    return row.copy() if column.ndim > 1 or isinstance(row, np.void) else row


def can_be_taken_from(column: NDArray[Any]) -> bool:
    """Returns True if `numpy.take` reads the rows in place. It first copies all of any other array."""
    return column.flags.c_contiguous and column.flags.aligned


def _is_columns(records: Any) -> bool:
    if isinstance(records, tuple):
        return len(records) > 0 and all(isinstance(member, np.ndarray) for member in records)
    if isinstance(records, Mapping) and not isinstance(records, dict):
        return not is_numbered(records)
    is_dataclass = dataclasses.is_dataclass(type(records)) and not hasattr(records, "__getitem__")
    return is_dataclass or isinstance(records, dict | np.ndarray)


def _loaded(path: str) -> Any:
    """Returns the arrays of an `.npz` file, or that of an `.npy` file, mapped into memory."""
    is_archive, is_array = path.lower().endswith(".npz"), path.lower().endswith(".npy")
    try:
        if is_archive:
            with np.load(path) as arrays:
                return dict(arrays)
        return np.load(path, mmap_mode="r") if is_array else path
    except _errors_of_damage() as error:
        # NumPy takes what it cannot read for pickled objects, and advises to load them.
        raise DataSourceError(
            f"Cannot read the arrays of {path!r}: it is damaged, no file of NumPy, or has arrays of Python objects. "
            "Restore it, or write arrays of numbers or fixed-size strings."
        ) from error


def _errors_of_damage() -> tuple[type[Exception], ...]:
    import zipfile  # noqa: PLC0415  (lazy: slow to import, in each worker)

    return ValueError, EOFError, zipfile.BadZipFile


def _sequence_length(records: Any) -> int:
    advice = advice_for(records)
    if (
        advice
        or isinstance(records, bytes | bytearray)
        or not (hasattr(records, "__len__") and hasattr(records, "__getitem__"))
    ):
        raise TypeError(
            "records must be a sequence of records, or a dict, tuple or dataclass of equally long NumPy arrays, "
            f"got {type(records).__name__}" + (f": {advice}" if advice else ".")
        )
    return len(records)


def _named_columns(columns: Any) -> list[tuple[str, NDArray[Any]]]:
    """Returns every array with its path, such as `['image']`; raises TypeError for leaves that are not arrays."""
    return [(name, _checked_column(column, name)) for name, column in tree.leaves(columns)]


def _checked_column(column: Any, name: str) -> NDArray[Any]:
    if not isinstance(column, np.ndarray) or find_loss([column]):
        raise TypeError(
            f"Column {name} must be a NumPy array without a mask or a unit, got {type(column).__name__}: "
            "pass np.asarray(column), also of a list of numbers or texts, or pass a list of records."
        )
    if column.ndim == 0:
        raise ValueError(f"Column {name or 'of the records'} must have one row per record, got a 0-dimensional array.")
    return column


def _common_length(columns: list[tuple[str, NDArray[Any]]]) -> int:
    lengths = {name: len(column) for name, column in columns}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"Columns must be equally long, one row per record, but {listed}.")
    return next(iter(lengths.values()), 0)


def rows_of(columns: Any, count: int) -> list[Any]:
    members = tree.children(columns)
    if members is None:
        return list(columns)
    # An empty structure among the columns is empty in each record.
    rows = zip(*(rows_of(member, count) for member in members), strict=True) if members else itertools.repeat((), count)
    return tree.all_rebuilt(columns, rows)


def records_of_arrays(columns: Mapping[str, Any], count: int) -> Sequence[dict[str, Any]]:
    """Returns the records that arrays of shape (count, …) hold, one array per column.

    The arrays are new ones, which belong to the records. Columns may be nested in dicts. Objects are bytes.
    """
    native = tree.map_leaves(lambda column: column.astype(column.dtype.newbyteorder("="), copy=False), columns)
    can_stack = all(column.dtype.hasobject or stacks(column) for _, column in tree.leaves(native))
    return _ArrayRecords(native, count) if can_stack else rows_of(native, count)


@final
class _ArrayRecords(ColumnarRecords):
    """The rows of arrays, as records or as one batch."""

    def __init__(self, columns: Mapping[str, Any], count: int) -> None:
        self._columns = columns
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        rows = tree.map_leaves(lambda column: column[index], self._columns)
        if isinstance(index, slice):
            return _ArrayRecords(rows, len(range(*index.indices(self._count))))
        return rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(rows_of(self._columns, self._count))

    def stack(self, allocate: Allocate) -> Any:  # noqa: ARG002
        """Returns the arrays themselves, which are as new as those of `allocate`: a copy would double the time."""
        return tree.map_leaves(lambda column: column, self._columns)


Keys = NDArray[np.int64]


@final
class ColumnsInMemory:
    """The columns of several sources in memory that differ in nothing but their lengths."""

    def __init__(self, columns: Sequence[Any]) -> None:
        self.structure = columns[0]
        # For each column, the array of each source.
        self.arrays = list(zip(*([leaf for _, leaf in tree.leaves(each)] for each in columns), strict=True))
        # Some are views, of which `numpy.take` would copy everything.
        self.are_views = [not all(map(can_be_taken_from, of_column)) for of_column in self.arrays]
        self.num_sources = len(columns)

    @classmethod
    def of(cls, sources: Sequence[Any]) -> Self | None:
        """Returns the columns of the sources, or None if a source has none in memory or has other ones."""
        columns = [source.stackable_columns for source in sources if type(source) is InMemoryDataSource]
        if len(columns) < len(sources) or not all(
            each is not None and _are_alike(columns[0], each) for each in columns
        ):
            return None
        return cls(columns)


@final
class RecordsInMemory(ColumnarRecords):
    """Records that are copied from columns in memory when they are needed, in one pass over each column.

    A record has the number of its source, and its key there.
    """

    def __init__(self, columns: ColumnsInMemory, numbers: Keys, keys: Keys) -> None:
        self._columns = columns
        self._numbers = numbers
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return RecordsInMemory(self._columns, self._numbers[index], self._keys[index])
        (record,) = RecordsInMemory(self._columns, self._numbers[index, np.newaxis], self._keys[index, np.newaxis])
        return record

    def __iter__(self) -> Iterator[Any]:
        return iter(rows_of(self.stack(np.empty), len(self)))

    def stack(self, allocate: Allocate) -> Any:
        by_source = cut(self._numbers, self._columns.num_sources)
        keys, rows = self._keys[by_source.order], by_source.rows
        batches = iter(
            [
                self._gathered(arrays, by_source.runs, keys, rows, allocate, are_views=are_views)
                for arrays, are_views in zip(self._columns.arrays, self._columns.are_views, strict=True)
            ]
        )
        return tree.map_leaves(lambda _: next(batches), self._columns.structure)

    def _gathered(
        self,
        arrays: Sequence[NDArray[Any]],
        runs: Sequence[tuple[int, int, int]],
        keys: Keys,
        rows: NDArray[np.intp],
        allocate: Allocate,
        *,
        are_views: bool,
    ) -> NDArray[Any]:
        """Returns the rows of one column: first sorted by source, then in their order."""
        sorted_rows = np.empty((len(keys), *arrays[0].shape[1:]), arrays[0].dtype)
        for number, start, stop in runs:
            if are_views:
                copy_images(arrays[number][keys[start:stop]], sorted_rows[start:stop])
                continue
            # The keys are checked: with any other mode than "raise", NumPy writes to `out` without a second copy.
            arrays[number].take(keys[start:stop], 0, sorted_rows[start:stop], "clip")
        return sorted_rows.take(rows, 0, allocate(sorted_rows.shape, sorted_rows.dtype), "clip")


@final
class RecordsOfSources(ColumnarRecords):
    """Records that several sources returned, each in one read.

    Args:
        read: the records of each source, of at least one source.
        by_source: the batch that was cut by source.
    """

    def __init__(self, read: Sequence[ColumnarRecords], by_source: Cut) -> None:
        self._read = read
        self._by_source = by_source

    def __len__(self) -> int:
        return len(self._by_source.order)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)

    def stack(self, allocate: Allocate) -> Any:
        """Returns the batch, or None if the columns of the sources differ: the records themselves are then stacked."""
        batches = [records.stack(np.empty) for records in self._read]
        if not all(_are_alike(batches[0], batch) for batch in batches):
            return None
        rows = [self._by_source.order[start:stop] for _, start, stop in self._by_source.runs]
        columns = zip(*([leaf for _, leaf in tree.leaves(batch)] for batch in batches), strict=True)
        stacked = (self._joined(column, rows, allocate) for column in columns)
        return tree.map_leaves(lambda _: next(stacked), batches[0])

    def _joined(self, column: Sequence[Any], rows: Sequence[NDArray[np.intp]], allocate: Allocate) -> Any:
        batch = allocate((len(self), *column[0].shape[1:]), column[0].dtype)
        for values, of_source in zip(column, rows, strict=True):
            batch[of_source] = values
        return batch

    @functools.cached_property
    def _records(self) -> list[Any]:
        return self._by_source.put_back([record for records in self._read for record in records])


def _are_alike(one: Any, other: Any) -> bool:
    """Returns True if two batches have the same structure of arrays that differ in nothing but their lengths."""
    if type(one) is not type(other):
        return False
    members = tree.children(one)
    if members is None:
        is_array = isinstance(one, np.ndarray) and not one.dtype.hasobject
        return is_array and one.dtype == other.dtype and one.shape[1:] == other.shape[1:]
    same_names = list(tree.paths(one)) == list(tree.paths(other))
    return same_names and all(itertools.starmap(_are_alike, zip(members, tree.children(other) or (), strict=True)))
