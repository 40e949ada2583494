"""What a source of records is, and the rule for the keys that it takes."""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, Self, SupportsIndex, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

T_co = TypeVar("T_co", covariant=True)

RecordKeys = Sequence[int] | NDArray[np.integer]
"""Record keys for one batched read: a sequence of integers, or an integer array of shape (n,)."""


class _Items(Protocol[T_co]):
    def __getitem__(self, key: int, /) -> T_co: ...


@runtime_checkable
class DataSource(Protocol[T_co]):
    """Records found by number: `len(source)` and `source[record_key]` are all that is needed, so a list is a source.

    Reading the same key gives an equal record each time, in every process and thread. A source is sent to worker
    processes by pickle, and is read by several threads at once. Where `source[key]` raises StopIteration, there is no
    record from there on: the stream ends, however many there are by its length.

    Four more members are optional, and used if they are there:

    `__getitems__(record_keys: Sequence[int]) -> Sequence[T]`
        The batched read: the records of all keys, in the order of the keys, which may repeat. It is used instead of
        `__getitem__`, and is where most reading speed comes from, unless a subclass overrides `__getitem__` alone: the
        more derived one is used. If it fails, records are read one by one.
    `takes_key_arrays: bool`
        Whether `__getitems__` takes an int64 array as well as a list; a list of many keys takes time to make. The
        array is the source's own: it may be sorted in place.
    `close()`, and the context manager that calls it
        Releases files and connections. The owner calls it, the code that constructed the source; a loader does not.
        A worker process has its own copy and closes that one.
    `fingerprint() -> str`
        A line of words that identifies the content, wherever it lies: equal for equal records, in every process and
        after moving the files; cheap, so a sample will do. It goes into checkpoints, so that a state is refused with
        another source, and the error shows what differs: words of the form `name=value` are compared one by one.
        Without it, its class and length count, and attributes that differ are a warning.
    `content_marks() -> Mapping[str, str]`
        Marks by name of what may change the records, for a source with `fingerprint`: of code, or of some bytes of
        its files. A state with other marks is accepted with a warning that names them.

    Examples:
        >>> class Squares:
        ...     def __len__(self):
        ...         return 100
        ...
        ...     def __getitem__(self, record_key):
        ...         return record_key**2
        ...
        ...     def __getitems__(self, record_keys):  # optional: the batched read
        ...         return [key**2 for key in record_keys]
        >>> next(iter(millstream.load(Squares(), batch_size=5)))
        array([ 0,  1,  4,  9, 16])
    """

    def __len__(self) -> int:
        """Returns how many records there are."""
        ...

    def __getitem__(self, record_key: int, /) -> T_co:
        """Returns the record of one key, 0 … len(self) - 1."""
        ...


def items_at(items: _Items[T_co], keys: Sequence[int]) -> Sequence[T_co]:
    """Returns `[items[key] for key in keys]`, in a single call of C.

    Objects that are far apart in memory come two to three times as fast as from a loop: the processor waits for several
    of them at once.
    """
    return operator.itemgetter(*keys)(items) if len(keys) > 1 else [items[key] for key in keys]


def put_back(records: Sequence[T_co], order: NDArray[np.intp]) -> list[T_co]:
    """Returns records in the order in which they were asked for, having been read in another one: that of `order`."""
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return list(items_at(records, places.tolist()))


_LOOKED_AT = 256
"""How many records, or a few more, decide whether a sequence holds any that are copied."""


class HeldRecords(Generic[T_co]):
    """The records of a list or tuple in memory, of which each reader gets its own dict or list.

    So an operation may write `record["image"] = ...`: the next epoch reads what was there before. The copy is shallow
    and costs a tenth of a microsecond; what is inside it, and all other records, are handed out as they are. Some
    records, spread evenly, decide at construction whether to copy: sources that do not need it do not pay for it.

    Attributes:
        records: the list or tuple itself.
        copies: whether there are any to copy.
    """

    def __init__(self, records: "Sequence[T_co]", *, copies: bool = False) -> None:
        self.records = records
        some = [records[key] for key in range(0, len(records), len(records) // _LOOKED_AT or 1)]
        self.copies = copies or any(type(record) is dict or type(record) is list for record in some)

    @classmethod
    def end_to_end(cls, parts: "Sequence[Sequence[T_co]]") -> Self:
        """Returns the records of several lists or tuples; they are copied where those of one of them are."""
        copies = any(cls(part).copies for part in parts)
        return cls(list(itertools.chain.from_iterable(parts)), copies=copies)

    @property
    def quickest(self) -> "Sequence[T_co] | HeldRecords[T_co]":
        """What to take single records from: the list or tuple itself, where none is copied."""
        return self if self.copies else self.records

    def __getitem__(self, key: int) -> T_co:
        record = self.records[key]
        return own(record) if self.copies else record

    def __getitems__(self, keys: Sequence[int]) -> Sequence[T_co]:
        """Returns the records of the keys, in their order."""
        records = items_at(self.records, keys)
        if not self.copies:
            return records
        kinds = set(map(type, records))
        # Of one kind, as nearly always, they are copied by a loop in C.
        return list(map(_COPY if kinds in ({dict}, {list}) else own, records))


_COPY: Callable[[Any], Any] = operator.methodcaller("copy")


def own(record: Any) -> Any:
    """Returns a copy of a dict or list, which the reader may change; anything else as it is."""
    return record.copy() if type(record) is dict or type(record) is list else record


def checked_record_key(record_key: SupportsIndex, num_records: int) -> int:
    """Returns the key as an int.

    Raises:
        TypeError: it is not an integer.
        IndexError: it is negative, or beyond the last record: keys do not count from the end.
    """
    key = operator.index(record_key)
    if not 0 <= key < num_records:
        raise IndexError(f"record_key must be between 0 and len(source) - 1 = {num_records - 1}, got {key}.")
    return key


def checked_record_keys(record_keys: RecordKeys, num_records: int) -> NDArray[np.int64]:
    """Returns the keys as an int64 array of shape (n,).

    Raises:
        TypeError: they are not integers.
        ValueError: they are not one-dimensional.
        IndexError: one of them is negative, or beyond the last record.
    """
    keys = np.asarray(record_keys)
    # As a loader gives them. Read without a sign, what is negative is too large: one pass finds both.
    if keys.dtype == np.int64 and keys.ndim == 1 and keys.size and keys.view(np.uint64).max() < num_records:
        return keys
    if keys.ndim != 1:
        raise ValueError(f"record_keys must be one-dimensional, got the shape {keys.shape}.")
    if keys.dtype.kind not in "iu" or (keys.size and not 0 <= keys.min() <= keys.max() < num_records):
        # Something is wrong with at least one key, or the list is empty: the rule for one key says what.
        return np.fromiter((checked_record_key(key, num_records) for key in record_keys), dtype=np.int64)
    return keys.astype(np.int64, copy=False)
