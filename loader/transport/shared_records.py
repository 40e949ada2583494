"""Records of a list in memory that all workers share. A worker builds a record when it reads it.

A list of records that is pickled as a whole becomes a copy of all objects in each worker. Here each record has its own
pickle in one long buffer, and costs a worker nothing until it is read. Bytes, texts and one-dimensional arrays of one
dtype, such as tokenised documents, are stored as they are. So are large arrays within records, which a worker reads
without a copy.

Guarantees:
    * Records, their errors and their number equal those of the list. Two records that share an object in the list do
      not share it here, because records are independent.
    * A list stays a list if sharing does not pay: if it is small, or has small records or records with much in common.
"""

import functools
import io
import itertools
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.direct_copies import DirectCopies
from millstream.loader.transport.array_pickles import MappedFiles
from millstream.loader.transport.pickling import ClassTable, ValuePickler, class_of_number
from millstream.sources.base import own
from millstream.sources.record_copies import compiled_copies, has_large_arrays

SMALLEST_BYTES = 1 << 24
"""Smaller lists stay lists, because this amount of memory per worker does not matter."""

SMALLEST_RECORD_BYTES = 64
"""Lists whose records are smaller on average stay lists, because reading a pickle would cost too much."""

LARGE_ARRAY_BYTES = 1 << 16
"""Arrays of at least this size within records are stored outside the pickles, and not copied when read."""

_SAMPLE = 64
_SLICE = 1 << 14
_MAX_CHARACTER_BYTES = 4
_NUMBERS = frozenset(map(id, (bool, int, float, complex, type(None))))
"""Records of these types are small. By identity: a metaclass may define equality as it likes."""

_COMMON_BYTES = 256
"""Records may share this many bytes on average, mostly names, and are still pickled separately."""


class Recipe(NamedTuple):
    """The content of `SharedRecords`."""

    kind: type  # Of the collection, list or tuple.
    record_kind: type | np.dtype[Any]  # bytes, str, the dtype of all records, or object, for pickles.
    memory: NDArray[np.uint8]  # The concatenated records.
    ends: NDArray[np.int64]  # The start of each record, and the end of the last one.
    large: Sequence[Any] = ()  # The memory of the large arrays of all records.
    large_ends: NDArray[np.int64] = np.zeros(0, np.int64)  # The index of each record's first one, and their number.
    classes: tuple[type, ...] = ()  # The classes that the pickles contain as numbers.


@final
class SharedRecords:
    """The records of a list or tuple, as workers see them."""

    def __init__(self, recipe: "Recipe") -> None:
        self._recipe = recipe
        # If records are arrays, the memory is one array of their dtype.
        dtype = recipe.record_kind if isinstance(recipe.record_kind, np.dtype) else None
        self._memory: Any = memoryview(recipe.memory.data) if dtype is None else recipe.memory.view(dtype)
        self._item_bytes = 1 if dtype is None else dtype.itemsize
        self._classes = ClassTable(recipe.classes) if recipe.classes else None
        # Unpickled records with large arrays. They are small without these, but building one takes as long as copying
        # 30 KB. Each read copies a record, as reads without workers do.
        self._made: dict[int, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedRecords, (self._recipe,)

    @property
    def original_type(self) -> type:
        return self._recipe.kind

    def __len__(self) -> int:
        return len(self._recipe.ends) - 1

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            return self.original_type(map(self.__getitem__, range(*index.indices(len(self)))))
        number = operator.index(index)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"{self.original_type.__name__} index out of range")
        start, end = self._recipe.ends.item(number), self._recipe.ends.item(number + 1)
        return self._make(number, start // self._item_bytes, end // self._item_bytes)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Returns `[records[number] for number in numbers]`, with one lookup for all positions."""
        indices = np.array(numbers, dtype=np.int64)
        if not len(indices) or indices.min() < 0 or indices.max() >= len(self):
            return [self[number] for number in numbers]
        starts, ends = (self._recipe.ends[bounds] // self._item_bytes for bounds in (indices, indices + 1))
        return list(map(self._make, numbers, starts.tolist(), ends.tolist()))

    @property
    def _make(self) -> Callable[[int, int, int], Any]:
        kind = self._recipe.record_kind
        if isinstance(kind, np.dtype):
            return self._array
        return self._bytes if kind is bytes else self._text if kind is str else self._unpickled

    def _array(self, _: int, start: int, end: int) -> NDArray[Any]:
        return own(self._memory[start:end])  # type: ignore[no-any-return]  # an array, as its argument

    def _bytes(self, _: int, start: int, end: int) -> bytes:
        return bytes(self._memory[start:end])

    def _text(self, _: int, start: int, end: int) -> str:
        return str(self._memory[start:end], "utf-8", "surrogatepass")

    @property
    def copies_large_arrays(self) -> bool:
        """True if `copied_directly` saves work."""
        return bool(self._recipe.large) and has_large_arrays(self._uncopied(0))

    def copied_directly(self, numbers: Sequence[int], copies: DirectCopies) -> list[Any]:
        """Returns the same copies as `__getitems__`, with large arrays where the batch of all records will be."""
        if not 0 <= min(numbers) <= max(numbers) < len(self):
            raise IndexError(f"{self.original_type.__name__} index out of range")
        return self._copies_of(list(map(self._uncopied, numbers)), copies.copy)

    @functools.cached_property
    def _copies_of(self) -> Callable[..., list[Any]]:
        return compiled_copies(self._uncopied(0), own)

    def _uncopied(self, number: int) -> Any:
        """Returns a pickled record: a new object, or the one that all reads copy because it has large arrays."""
        recipe = self._recipe
        start, end = recipe.ends.item(number), recipe.ends.item(number + 1)
        large = recipe.large[recipe.large_ends[number] : recipe.large_ends[number + 1]] if recipe.large else ()
        if not large:
            return self._loads(self._memory[start:end], ())
        if number not in self._made:
            self._made[number] = self._loads(self._memory[start:end], large)
        return self._made[number]

    def _unpickled(self, number: int, _start: int, _end: int) -> Any:
        record = self._uncopied(number)
        return own(record) if number in self._made else record

    def _loads(self, record: Any, large: Sequence[Any]) -> Any:
        if self._classes is not None:
            return self._classes.loads(record, large)
        return pickle.loads(record, buffers=large)  # noqa: S301  (written by `share`)


def share(records: Any) -> Any:
    """Returns records as `SharedRecords` if that pays, otherwise unchanged. Raises if a record cannot be pickled."""
    if type(records) not in {list, tuple} or not records:
        return records
    # A sample: inspecting ten million records takes two seconds.
    if _NUMBERS.issuperset(map(id, map(type, _sample_of(records)))):
        return records
    # An array takes a tenth of the memory of a set.
    if len(np.unique(np.fromiter(map(id, records), np.uintp, len(records)))) * 2 < len(records):
        return records
    # By identity, as above.
    kinds = set(map(id, map(type, records)))
    for kind in (bytes, str):
        if kinds == {id(kind)}:
            return _share_text(records, kind) if sum(map(len, records)) >= SMALLEST_BYTES else records
    if kinds == {id(np.ndarray)} and _can_be_joined(records):
        return _share_arrays(records) if sum(record.nbytes for record in records) >= SMALLEST_BYTES else records
    return _share_pickles(records) if _is_worth_it(records) else records


def _sample_of(records: Sequence[Any]) -> Sequence[Any]:
    return records[:: max(1, len(records) // _SAMPLE)]


def _is_worth_it(records: Sequence[Any]) -> bool:
    """Returns True if records are numerous, large and independent enough to be pickled one by one."""
    sample = _sample_of(records)
    pickler = _RecordPickler()
    one_by_one = sum(map(pickler.num_bytes, sample)) / len(sample)
    together = pickler.num_bytes(sample) / len(sample)
    if one_by_one < SMALLEST_RECORD_BYTES or one_by_one * len(records) < SMALLEST_BYTES:
        return False
    return one_by_one <= 2 * together + _COMMON_BYTES


def _share_text(records: Sequence[Any], kind: type) -> SharedRecords:
    if kind is bytes:
        return SharedRecords(Recipe(type(records), kind, _joined(records), _ends(map(len, records))))
    # In slices: all encoded texts together would be a second copy. Memory that is never written takes no room.
    character_bytes = 1 if all(map(str.isascii, records)) else _MAX_CHARACTER_BYTES
    memory = np.empty(character_bytes * sum(map(len, records)), np.uint8)
    ends = np.zeros(len(records) + 1, np.int64)
    for first in range(0, len(records), _SLICE):
        encoded = [record.encode("utf-8", "surrogatepass") for record in records[first : first + _SLICE]]
        start, last = int(ends[first]), first + len(encoded)
        ends[first + 1 : last + 1] = start + np.cumsum(list(map(len, encoded)))
        memory[start : int(ends[last])] = np.frombuffer(b"".join(encoded), np.uint8)
    return SharedRecords(Recipe(type(records), kind, memory[: int(ends[-1])], ends))


def _can_be_joined(arrays: Sequence[NDArray[Any]]) -> bool:
    # By identity: equal dtypes may differ in their metadata. Elements without bytes have no memory to view.
    dtype = arrays[0].dtype
    if dtype.hasobject or dtype.itemsize == 0:
        return False
    if not all(array.dtype is dtype and array.ndim == 1 and array.flags.writeable for array in arrays):
        return False
    files = MappedFiles()
    return not any(array.nbytes >= LARGE_ARRAY_BYTES and files.reduce(array) for array in arrays)


def _share_arrays(arrays: Sequence[NDArray[Any]]) -> SharedRecords:
    memory = np.concatenate(arrays).view(np.uint8)
    ends = _ends(array.nbytes for array in arrays)
    return SharedRecords(Recipe(type(arrays), arrays[0].dtype, memory, ends))


def _share_pickles(records: Sequence[Any]) -> SharedRecords:
    pickler = _RecordPickler()
    pickled = list(map(pickler.dumps, records))
    return SharedRecords(
        Recipe(
            kind=type(records),
            record_kind=object,
            memory=_joined(pickled),
            ends=_ends(map(len, pickled)),
            large=pickler.large,
            large_ends=_ends(pickler.num_large),
            classes=tuple(pickler.classes),
        )
    )


def _joined(chunks: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(chunks), np.uint8)


def _ends(lengths: Any) -> NDArray[np.int64]:
    return np.fromiter(itertools.accumulate(lengths, initial=0), np.int64)


@final
class _RecordPickler(ValuePickler):
    """Pickles records independently."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._class_numbers: dict[int, int] = {}
        super().__init__(self._file, self._take_out, files=MappedFiles(), numbers=self._class_numbers)
        # The memory of the large arrays of all records, and the number of them in each record.
        self.large: list[Any] = []
        self.num_large: list[int] = []

    def dumps(self, record: Any) -> bytes:
        before = len(self.large)
        self.clear_memo()
        self._file.seek(0)
        self._file.truncate()
        self.dump(record)
        self.num_large.append(len(self.large) - before)
        return self._file.getvalue()

    def num_bytes(self, record: Any) -> int:
        before = len(self.large)
        return len(self.dumps(record)) + int(sum(memory.nbytes for memory in self.large[before:]))

    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        if len(self.classes) == len(self._class_numbers):
            return reduced
        number = self._class_numbers[id(value)] = len(self._class_numbers)
        return class_of_number, (number,)

    def _take_out(self, buffer: pickle.PickleBuffer) -> bool:
        memory = np.frombuffer(buffer.raw(), np.uint8)
        if memory.nbytes >= LARGE_ARRAY_BYTES:
            self.large.append(memory)
        return memory.nbytes < LARGE_ARRAY_BYTES
