"""Records of a list, one by one in memory that all workers share: a worker makes a record when it is read.

A list of records that crosses as a list becomes as many objects again in each worker, in memory of its own. Here each
record is a pickle of its own, in one long buffer, and costs a worker nothing until it asks for it. Bytes, texts and
one-dimensional arrays of one dtype, such as tokenised documents, lie there as they are, and so do large arrays of a
record, which a worker sees without a copy.

Guarantees:
    * A record, its errors and the number of records are those of the list. Two records that share an object in the
      list do not share it here: records do not know of each other.
    * A list stays a list where this does not pay: it is small, of small records, or has much in common.
"""

import io
import itertools
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.loader.transport.array_pickles import Reduced
from millstream.loader.transport.class_table import ClassTable, class_of_number
from millstream.loader.transport.mapped_arrays import MappedFiles
from millstream.loader.transport.value_pickler import ValuePickler
from millstream.sources.base import own

SMALLEST_BYTES = 1 << 24
"""Lists of fewer bytes stay lists: that much memory for each worker does not matter."""

SMALLEST_RECORD_BYTES = 64
"""Nor do records below this size, on average, become pickles of their own: to read one would cost too much."""

LARGE_ARRAY_BYTES = 1 << 16
"""Arrays of a record from this size on lie beside the pickles, and are not copied when the record is read."""

_SAMPLE = 64
"""How many records, evenly spread, tell how large they are."""

_SLICE = 1 << 14
"""How many texts are encoded at a time."""

_MOST_CHARACTER_BYTES = 4
"""The bytes of the longest character in UTF-8."""

_NUMBERS = frozenset(map(id, (bool, int, float, complex, type(None))))
"""Records of these types are small. By identity: a metaclass may define equality as it likes."""

_COMMON_BYTES = 256
"""What a record may have in common with others, names above all, and be pickled on its own."""


class Recipe(NamedTuple):
    """What `SharedRecords` are made of.

    Attributes:
        kind: what the records were in, list or tuple.
        record_kind: bytes or str, where all records are, or the dtype of arrays; else object, for pickles.
        memory: the records, end to end.
        ends: where each record begins, and the last one ends.
        large: the memory of the large arrays of all records.
        large_ends: which of these is each record's first, and how many there are.
        classes: those that the records' pickles have as numbers.
    """

    kind: type
    record_kind: type | np.dtype[Any]
    memory: NDArray[np.uint8]
    ends: NDArray[np.int64]
    large: Sequence[Any] = ()
    large_ends: NDArray[np.int64] = np.zeros(0, np.int64)
    classes: tuple[type, ...] = ()


@final
class SharedRecords:
    """The records of a list or tuple, in a worker."""

    def __init__(self, recipe: "Recipe") -> None:
        self._recipe = recipe
        # Where records are arrays, the memory is one array of their dtype.
        dtype = recipe.record_kind if isinstance(recipe.record_kind, np.dtype) else None
        self._memory: Any = memoryview(recipe.memory.data) if dtype is None else recipe.memory.view(dtype)
        self._item_bytes = 1 if dtype is None else dtype.itemsize
        self._classes = ClassTable(recipe.classes) if recipe.classes else None
        # Objects around large arrays, which are nothing beside these, but take as long to make as copying 30 KB. A dict
        # or list among them is copied when it is read, as where there are no workers.
        self._made: dict[int, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedRecords, (self._recipe,)

    @property
    def stands_in_for(self) -> type:
        """What the records were in, list or tuple."""
        return self._recipe.kind

    def __len__(self) -> int:
        return len(self._recipe.ends) - 1

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        if isinstance(place, slice):
            return self.stands_in_for(map(self.__getitem__, range(*place.indices(len(self)))))
        number = operator.index(place)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"{self.stands_in_for.__name__} index out of range")
        start, end = self._recipe.ends.item(number), self._recipe.ends.item(number + 1)
        return self._make(number, start // self._item_bytes, end // self._item_bytes)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Returns `[records[number] for number in numbers]`: where each record lies is looked up for all at once."""
        places = np.array(numbers, dtype=np.int64)
        if not len(places) or places.min() < 0 or places.max() >= len(self):
            return [self[number] for number in numbers]
        starts, ends = (self._recipe.ends[some] // self._item_bytes for some in (places, places + 1))
        return list(map(self._make, numbers, starts.tolist(), ends.tolist()))

    @property
    def _make(self) -> Callable[[int, int, int], Any]:
        """What makes a record, given its number, and where in the memory it begins and ends."""
        kind = self._recipe.record_kind
        if isinstance(kind, np.dtype):
            return self._array
        return self._bytes if kind is bytes else self._text if kind is str else self._unpickled

    def _array(self, _: int, start: int, end: int) -> NDArray[Any]:
        array: NDArray[Any] = self._memory[start:end]
        return array if array.nbytes >= LARGE_ARRAY_BYTES else array.copy()

    def _bytes(self, _: int, start: int, end: int) -> bytes:
        return bytes(self._memory[start:end])

    def _text(self, _: int, start: int, end: int) -> str:
        return str(self._memory[start:end], "utf-8", "surrogatepass")

    def _unpickled(self, number: int, start: int, end: int) -> Any:
        record, recipe = self._memory[start:end], self._recipe
        large = recipe.large[recipe.large_ends[number] : recipe.large_ends[number + 1]] if recipe.large else ()
        if not large:
            return self._loads(record, ())
        if number not in self._made:
            self._made[number] = self._loads(record, large)
        return own(self._made[number])

    def _loads(self, record: Any, large: Sequence[Any]) -> Any:
        if self._classes is not None:
            return self._classes.loads(record, large)
        return pickle.loads(record, buffers=large)  # noqa: S301  (written by `share`)


def share(records: Any) -> Any:
    """Returns records as `SharedRecords` where that pays, else as they are.

    Raises:
        Exception: a record cannot be pickled.
    """
    if type(records) not in {list, tuple} or not records:
        return records
    # Without a look at each, which takes two seconds for ten million.
    if _NUMBERS.issuperset(map(id, map(type, _sample_of(records)))):
        return records
    # As an array, which takes a tenth of the memory of a set.
    if len(np.unique(np.fromiter(map(id, records), np.uintp, len(records)))) * 2 < len(records):
        return records
    # By identity, too.
    kinds = set(map(id, map(type, records)))
    for kind in (bytes, str):
        if kinds == {id(kind)}:
            return _share_text(records, kind) if sum(map(len, records)) >= SMALLEST_BYTES else records
    if kinds == {id(np.ndarray)} and _are_alike(records):
        return _share_arrays(records) if sum(record.nbytes for record in records) >= SMALLEST_BYTES else records
    return _share_pickles(records) if _is_worth_it(records) else records


def _sample_of(records: Sequence[Any]) -> Sequence[Any]:
    return records[:: max(1, len(records) // _SAMPLE)]


def _is_worth_it(records: Sequence[Any]) -> bool:
    """Returns whether records are many and large enough, and independent enough, to be pickled one by one."""
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
    # Encoded a slice at a time: all texts together would be a second copy. Memory that is not written takes no room.
    most_bytes = 1 if all(map(str.isascii, records)) else _MOST_CHARACTER_BYTES
    memory = np.empty(most_bytes * sum(map(len, records)), np.uint8)
    ends = np.zeros(len(records) + 1, np.int64)
    for first in range(0, len(records), _SLICE):
        encoded = [record.encode("utf-8", "surrogatepass") for record in records[first : first + _SLICE]]
        start, last = int(ends[first]), first + len(encoded)
        ends[first + 1 : last + 1] = start + np.cumsum(list(map(len, encoded)))
        memory[start : int(ends[last])] = np.frombuffer(b"".join(encoded), np.uint8)
    return SharedRecords(Recipe(type(records), kind, memory[: int(ends[-1])], ends))


def _are_alike(arrays: Sequence[NDArray[Any]]) -> bool:
    """Returns whether arrays can lie end to end: of one dimension and dtype, to be written to, and in no file."""
    # By identity: equal dtypes may differ in their metadata. An element without bytes leaves nothing to view.
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


def _joined(pieces: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(pieces), np.uint8)


def _ends(lengths: Any) -> NDArray[np.int64]:
    return np.fromiter(itertools.accumulate(lengths, initial=0), np.int64)


@final
class _RecordPickler(ValuePickler):
    """Pickles one record after the other.

    Attributes:
        classes: those that cross by value; a record has their numbers.
        large: the memory of the large arrays of all records.
        num_large: how many each record has.
    """

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, self._take_out)
        self.classes: list[type] = []
        self.large: list[Any] = []
        self.num_large: list[int] = []
        self._numbers: dict[int, int] = {}
        self._files = MappedFiles()

    def dumps(self, record: Any) -> bytes:
        """Returns the pickle of a record."""
        before = len(self.large)
        self.clear_memo()
        self._file.seek(0)
        self._file.truncate()
        self.dump(record)
        self.num_large.append(len(self.large) - before)
        return self._file.getvalue()

    def num_bytes(self, record: Any) -> int:
        """Returns how much memory a record takes."""
        before = len(self.large)
        return len(self.dumps(record)) + int(sum(memory.nbytes for memory in self.large[before:]))

    def reducer_override(self, value: Any) -> Any:
        number = self._numbers.get(id(value)) if isinstance(value, type) else None
        if number is None:
            reduced = super().reducer_override(value)
            if not isinstance(value, type) or reduced is NotImplemented:
                return reduced
            number = self._numbers[id(value)] = len(self.classes)
            self.classes.append(value)
        return class_of_number, (number,)

    def reduce_array(self, array: NDArray[Any]) -> Reduced:
        return self.in_file(array) or super().reduce_array(array)

    def in_file(self, array: NDArray[Any]) -> Reduced | None:
        """Returns how to pickle an array by its place in a file, None where it is in none."""
        return self._files.reduce(array)

    def _take_out(self, buffer: pickle.PickleBuffer) -> bool:
        memory = np.frombuffer(buffer.raw(), np.uint8)
        if memory.nbytes >= LARGE_ARRAY_BYTES:
            self.large.append(memory)
        return memory.nbytes < LARGE_ARRAY_BYTES
