"""The protocol of sources of records, and the rules for record keys."""

import abc
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, SupportsIndex, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from millstream.core.closing import Closing
from millstream.core.descriptions import Rendered
from millstream.core.direct_copies import DirectCopies
from millstream.sources.record_copies import (
    IMMUTABLE,
    MAX_CHECKED_VALUES,
    MAX_COPIED_BYTES,
    SAMPLED_VALUES,
    compiled_copies,
    has_large_arrays,
)

T_co = TypeVar("T_co", covariant=True)

RecordKeys = Sequence[int] | NDArray[np.integer]
"""Record keys for one batched read: a sequence of integers, or an integer array of shape (n,)."""


class _Items(Protocol[T_co]):
    def __getitem__(self, key: int, /) -> T_co: ...


@runtime_checkable
class DataSource(Protocol[T_co]):
    """Records found by number: `len(source)` and `source[record_key]` are all that is needed, so a list is a source.

    The same key gives an equal record each time, in every process and thread. A source is pickled for worker processes,
    and several threads read it concurrently. If `source[key]` raises StopIteration, the stream ends there, whatever
    `len(source)` is.

    Five more members are optional, and used if they exist:

    `__getitems__(record_keys: Sequence[int]) -> Sequence[T]`
        The batched read: the records of all keys, in the order of the keys, which may repeat. It is used instead of
        `__getitem__`, and most reading speed comes from it. If a subclass overrides `__getitem__` alone, that one is
        used. If the batched read fails, records are read one by one.
    `takes_key_arrays: bool`
        True if `__getitems__` takes an int64 array as well as a list, because a long list takes time to build. The
        source may sort the array in place.
    `close()`, and the context manager that calls it
        Releases files and connections. The code that constructed the source calls it; a loader does not. A worker
        process closes its own copy.
    `fingerprint() -> str`
        One line that identifies the content: equal for equal records, in every process and after the files were moved.
        It must be cheap, so it may depend on a sample. Checkpoints contain it, and refuse to resume with another
        source. Terms of the form `name=value` are compared one by one, so that the error shows the difference. Without
        it, the class and the length are compared, and attributes that differ are a warning.
    `content_marks() -> Mapping[str, str]`
        Digests by name of code or file content that may change the records, for a source with `fingerprint`. A state
        with other digests is accepted with a warning that names them.

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
        """Returns the number of records."""
        ...

    def __getitem__(self, record_key: int, /) -> T_co:
        """Returns the record of one key, 0 … len(self) - 1."""
        ...


class LoaderView(NamedTuple):
    """A source as a loader reads it.

    Attributes:
        source: the object to read from.
        differs_by_epoch: True if the records of each epoch differ: that of a key is at `epoch * len(source) + key`.
        skips_none: True if None stands for a missing element, which a loader cannot skip.
        reordering: the first step of a chain that reorders records in each epoch; "" without one.
        origins: the records of such a chain; None if an element is made of several records, or they are not known.
    """

    source: Any
    differs_by_epoch: bool = False
    skips_none: bool = False
    reordering: str = ""
    origins: "ChainOrigins | None" = None


class ChainOrigins(Protocol):
    """The records from which the elements of a chain are made, at each position, continued across epochs."""

    source: Any
    """The source of the records; several ones are concatenated."""

    def record_keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the record key in `source` of each position."""

    def occurrences(self, keys: NDArray[np.int64], stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the positions before `stop` of record keys, and for each the number of its key."""


def loader_view(source: Any) -> LoaderView:
    """Returns a source as a loader reads it.

    Raises:
        ValueError: it is a MapDataset some of whose elements are missing.
    """
    view: Callable[[], LoaderView] | None = getattr(source, "_loader_view", None)
    return LoaderView(source) if view is None else view()


def fixed_source(source: Any) -> tuple[Any, Callable[[], None]]:
    """Returns a source that later changes of the program's objects do not reach, and a check that there were none.

    Most sources are shared. A `MapDataset` runs on copies of its operations.
    """
    fix: Callable[[Any], tuple[Any, Callable[[], None]]] | None = getattr(type(source), "_fixed_source", None)
    return (source, _check_nothing) if fix is None else fix(source)


def _check_nothing() -> None:
    pass


class RenderedSource(Rendered):
    """A source that notebooks render, and that takes arrays of record keys."""

    _card_kind = "source"

    takes_key_arrays: ClassVar[bool] = True


class ReadsBatches(RenderedSource, abc.ABC):
    """A source that reads batches: its `__getitem__` reads a batch of one record."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of records."""

    @abc.abstractmethod
    def __getitems__(self, record_keys: RecordKeys) -> Sequence[Any]:
        """Returns the records of the keys, in their order; keys may repeat."""

    def __getitem__(self, record_key: SupportsIndex) -> Any:
        return self.__getitems__([checked_record_key(record_key, len(self))])[0]


class ReadsSource(ReadsBatches, Closing):
    """A source whose records are made of those of another one, `source`."""

    source: Any

    def content_marks(self) -> Mapping[str, str]:
        """Returns the marks of the source; an empty dict if it has none."""
        marks: Mapping[str, str] = self.source.content_marks() if hasattr(self.source, "content_marks") else {}
        return marks

    def close(self) -> None:
        """Closes the source."""
        close_if_possible(self.source)


def fingerprint_of(source: Any) -> str:
    """Returns the fingerprint of any source; if it has none, its class and its number of records."""
    own = getattr(source, "fingerprint", None)
    return str(own()) if callable(own) else f"{type(source).__name__} records={len(source)}"


def close_if_possible(source: Any) -> None:
    if callable(close := getattr(source, "close", None)):
        close()


def items_at(items: _Items[T_co], keys: Sequence[int]) -> Sequence[T_co]:
    """Returns `[items[key] for key in keys]`, by one call of C.

    Objects that are far apart in memory are read two to three times as fast as by a loop, because the processor waits
    for several of them together.
    """
    return operator.itemgetter(*keys)(items) if len(keys) > 1 else [items[key] for key in keys]


_SAMPLED_RECORDS = 256
"""The approximate number of records that decide if the records of a sequence are copied."""

_MAX_DEPTH = 8
"""The number of levels of tuples that are looked into."""


class HeldRecords(Generic[T_co]):
    """The records of a list, tuple or array in memory; each reader gets its own copy of a record that can be changed.

    An operation may therefore write `record["image"] -= mean`, and the next epoch, and each other reader, reads the
    original. Dicts, lists, sets and arrays are copied, at any level; arrays of more than 1 MiB are views that cannot be
    written to. Other objects are shared. A sample of the records, spread evenly, decides at construction if records are
    copied, so that others do not pay for it.

    Attributes:
        records: the list, tuple or array itself.
        copies: True if records are copied.
        is_deep: True if the values in a dict or list are copied as well.

    Args:
        records: the sequence.
        is_stacked: True if nothing but a stack of records is made, so that they need no copy.
    """

    is_in_memory = True

    def __init__(self, records: "Sequence[T_co]", *, is_stacked: bool = False) -> None:
        held: Any = records
        # As in a worker process, which gets a mapped file as an array.
        held = np.asarray(held) if isinstance(held, np.memmap) else held
        self.records: Sequence[T_co] = held
        # The rows of an array are alike, and those of a file take time to read.
        count = 1 if isinstance(held, np.ndarray) and not held.dtype.hasobject else _SAMPLED_RECORDS
        sample = [held[key] for key in range(0, len(held), len(held) // count or 1)]
        containers: list[Any] = [record for record in sample if type(record) in _FLAT]
        self._example = next(filter(_can_change, containers or sample), None)
        self.copies = self._example is not None and not is_stacked
        # Nearly always records are of one kind without levels, which a loop in C copies.
        members = (record.values() if type(record) is dict else record for record in containers)
        self.is_deep = any(map(_holds_levels, members))

    @classmethod
    def concatenated(cls, sequences: "Sequence[Sequence[T_co]]") -> Self:
        """Returns the records of several sequences. All are copied if one sequence has records that are."""
        whole = cls(list(itertools.chain.from_iterable(sequences)))
        for one in map(cls, sequences):
            whole.copies, whole.is_deep = whole.copies or one.copies, whole.is_deep or one.is_deep
        return whole

    @property
    def quickest(self) -> "Sequence[T_co] | HeldRecords[T_co]":
        """The object to read single records from: the sequence itself if no record is copied."""
        return self if self.copies else self.records

    def __getitem__(self, key: int) -> T_co:
        record = self.records[key]
        return own(record) if self.copies else record

    def __getitems__(self, keys: Sequence[int]) -> Sequence[T_co]:
        records = items_at(self.records, keys)
        if not self.copies:
            return records
        kinds: set[Any] = set() if self.is_deep else set(map(type, records))
        if len(kinds) == 1 and (kind := kinds.pop()) in _FLAT:
            return list(map(kind.copy, records))
        return self._copies_of(records)

    @property
    def copies_large_arrays(self) -> bool:
        """True if `copied_directly` saves work."""
        return self.copies and has_large_arrays(self._example)

    def copied_directly(self, keys: Sequence[int], copies: DirectCopies) -> Sequence[T_co]:
        """Returns the same copies as `__getitems__`, with large arrays where the batch of all records will be."""
        return self._copies_of(items_at(self.records, keys), copies.copy)

    @functools.cached_property
    def _copies_of(self) -> Callable[..., list[Any]]:
        return compiled_copies(self._example, own)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_copies_of"}


def is_held(source: object) -> bool:
    """Returns True for a list, tuple or array, also a mapped one, unless it is of a user's class that reads by itself.

    Its records are then objects or rows that the source keeps, and `HeldRecords` reads them.
    """
    if type(source) in _SEQUENCES:
        return True
    if not isinstance(source, (*_SEQUENCES, np.ndarray)) or hasattr(source, "__getitems__"):
        return False
    reading = next(kind for kind in type(source).__mro__ if "__getitem__" in vars(kind))
    return reading.__module__.partition(".")[0] in {"builtins", "numpy"}


def is_mapped(array: Any) -> bool:
    """Returns True if the memory of an array is that of a file."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False


_FLAT: tuple[Any, ...] = (dict, list, set, bytearray)


def own(record: Any, made: "dict[int, Any] | None" = None) -> Any:
    """Returns a copy of all in a record that can be changed in place, or the record itself if nothing can.

    Args:
        record: the record, or a value in it.
        made: the copies of values of the same record, by the `id` of the value, so that one that occurs twice, or in
            itself, is copied once.
    """
    # This runs for each record in memory, so the usual kinds come first.
    kind = type(record)
    if kind in IMMUTABLE:
        return record
    made = {} if made is None else made
    if (key := id(record)) in made:
        return made[key]
    if kind is dict:
        copied = made[key] = record.copy()
        for name, value in record.items():
            if type(value) not in IMMUTABLE:
                copied[name] = own(value, made)
    elif kind is list and _holds_levels(record):
        copied = made[key] = []
        copied.extend(own(value, made) for value in record)
    elif kind in _FLAT:
        made[key] = record.copy()
    elif isinstance(record, np.ndarray):
        made[key] = _own_array(record, made)
    elif _can_change(record):
        members = [own(value, made) for value in record]
        made[key] = kind(*members) if kind is not tuple and hasattr(kind, "_fields") else kind(members)
    else:
        return record
    return made[key]


def _own_array(array: NDArray[Any], made: "dict[int, Any] | None" = None) -> NDArray[Any]:
    if not array.flags.writeable:
        return array
    if array.nbytes <= MAX_COPIED_BYTES:
        copied = array.copy()
        if array.dtype.kind == "O":
            np.frompyfunc(functools.partial(own, made={} if made is None else made), 1, 1)(array, out=copied)
        return copied
    view = array.view()
    view.flags.writeable = False
    return view


_SEQUENCES = (list, tuple)


def _can_change(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Returns True if `own` copies a value."""
    if type(value) in _FLAT or isinstance(value, np.ndarray):
        return True
    return isinstance(value, tuple) and depth > 0 and _holds_levels(value, depth - 1)


def _holds_levels(values: Collection[Any], depth: int = _MAX_DEPTH) -> bool:
    """Returns True if a value can be changed in place. Of a long list or tuple, a sample is tested."""
    if len(values) > MAX_CHECKED_VALUES and isinstance(values, _SEQUENCES):
        values = values[:: len(values) // SAMPLED_VALUES]
    return not IMMUTABLE.issuperset(map(type, values)) and any(_can_change(value, depth) for value in values)


def checked_record_key(record_key: SupportsIndex, num_records: int) -> int:
    """Returns the key as an int; raises TypeError or IndexError otherwise. Keys do not count from the end."""
    try:
        key = operator.index(record_key)
    except TypeError:
        wrong: object = record_key
        remedy = ""
        if isinstance(wrong, slice):
            remedy = " For a range of the records, write millstream.MapDataset.source(source)[start:stop]."
        elif isinstance(wrong, list | tuple | np.ndarray):
            remedy = " Pass one key; source.__getitems__(keys) reads several."
        raise TypeError(f"record_key must be an integer, got {wrong!r:.80}.{remedy}") from None
    if not 0 <= key < num_records:
        raise IndexError(f"record_key must be between 0 and len(source) - 1 = {num_records - 1}, got {key}.")
    return key


def checked_record_keys(record_keys: RecordKeys, num_records: int) -> NDArray[np.int64]:
    """Returns the keys as an int64 array of shape (n,); raises as `checked_record_key`, or ValueError for a shape."""
    keys = np.asarray(record_keys)
    # The keys of a loader. Read as unsigned, negative ones are too large: one pass finds both errors.
    if keys.dtype == np.int64 and keys.ndim == 1 and keys.size and keys.view(np.uint64).max() < num_records:
        return keys
    if keys.ndim != 1:
        raise ValueError(f"record_keys must be one-dimensional, got the shape {keys.shape}.")
    if keys.dtype.kind not in "iu" or (keys.size and not 0 <= keys.min() <= keys.max() < num_records):
        # At least one key is wrong, or the list is empty: the check of single keys raises the error.
        return np.fromiter((checked_record_key(key, num_records) for key in record_keys), dtype=np.int64)
    return keys.astype(np.int64, copy=False)
