"""Several sources laid end to end: where the records of a mixture come from."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import named_arguments
from millstream.closing import Closing
from millstream.columnar import ColumnarRecords
from millstream.notebook_repr import Pictured
from millstream.sources.base import HeldRecords, RecordKeys, checked_record_key, checked_record_keys, put_back
from millstream.sources.columnar_parts import ColumnarParts
from millstream.sources.mixed_columns import EndToEndColumns, MixedColumns
from millstream.sources.source_checks import batched_read_of, check_source

_SHOWN_WORDS = 160
"""The most characters with which a fingerprint says what the parts are; more of it is a checksum."""

_KEY_LIMIT = 1 << 63


@final
class ConcatenatedDataSource(Pictured, Closing):
    """The records of several sources, laid end to end: first all of the first one, then those of the second, and so on.

    A batch costs one read of each source that it touches: its `__getitems__` is used where it has one. Lists and tuples
    are read as one list, which is made of them when the first batch is read, and takes 8 bytes a record; alike columns
    of `InMemoryDataSource`s are read where they are. `locate` says which source a record is from. With a
    `MixtureSampler` for the order, it is the source of a mixture.

    Args:
        sources: the sources: a list, or a mapping that names them. Each is anything with `len` and `source[key]`.

    Attributes:
        names: the sources' names; of a list, their numbers from 0 on.
        parts: the sources by name, as they were given.
        lengths: how many records each source has, an int64 array of shape (sources,).

    Raises:
        TypeError: something is not a source.
        ValueError: there is no source, or one without records.

    Examples:
        >>> source = millstream.ConcatenatedDataSource({"web": ["a", "b", "c"], "books": ["X", "Y"]})
        >>> len(source), source[3]
        (5, 'X')
        >>> source.locate([0, 3, 4])
        (array([0, 1, 1]), array([0, 0, 1]))
    """

    _picture_kind = "source"

    takes_key_arrays: ClassVar[bool] = True

    @named_arguments()
    def __init__(self, sources: Sequence[Any] | Mapping[str, Any]) -> None:
        if isinstance(sources, (str, bytes)) or not isinstance(sources, (Sequence, Mapping)):
            raise TypeError(f"sources must be a list, or a mapping by name, got {type(sources).__name__}.")
        self.parts: dict[Any, Any] = dict(sources if isinstance(sources, Mapping) else enumerate(sources))
        self.names: tuple[Any, ...] = tuple(self.parts)
        if not self.parts:
            raise ValueError("sources must have at least one source, got none.")
        for name, source in self.parts.items():
            check_source(source, f"Source {name!r}")
        lengths = [len(source) for source in self.parts.values()]
        if sum(lengths) > _KEY_LIMIT:
            raise ValueError(f"Sources laid end to end can have 2**63 records at most, got {sum(lengths)}.")
        self.lengths = np.array(lengths, dtype=np.int64)
        self._num_records = sum(lengths)
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._prepare()

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, record_key: SupportsIndex) -> Any:
        key = checked_record_key(record_key, self._num_records)
        part = int(np.searchsorted(self._starts, key, side="right")) - 1
        (record,) = self._read(part, np.array([key - self._starts[part]]))
        return record

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[Any]:
        """Returns the records of the keys, in their order; keys may repeat. Each source is asked once."""
        keys = checked_record_keys(record_keys, self._num_records)
        if self._holds_all:
            self._held = self._all_held()
            records: Sequence[Any] = self._held.__getitems__(keys.tolist())
            return records
        parts, own_keys = self._locate(keys)
        if self._columns is not None:
            return MixedColumns(self._columns, parts, own_keys)
        # Sorted as small integers, which takes a tenth of the time.
        order = np.argsort(parts.astype(np.min_scalar_type(len(self.names))), kind="stable")
        own_keys = own_keys[order]
        read: list[Sequence[Any]] = []
        stop = 0
        for part, count in enumerate(np.bincount(parts, minlength=len(self.names)).tolist()):
            if count:
                start, stop = stop, stop + count
                read.append(self._read(part, own_keys[start:stop]))
        columnar = [records for records in read if isinstance(records, ColumnarRecords)]
        if columnar and len(columnar) == len(read):
            return ColumnarParts(columnar, order)
        return put_back([record for records in read for record in records], order)

    def __repr__(self) -> str:
        kinds = dict.fromkeys(type(source).__name__ for source in self.parts.values())
        named = ", ".join(list(kinds)[:4]) + (", …" if len(kinds) > 4 else "")
        return f"ConcatenatedDataSource({self._num_records:,} records in {len(self.parts)} sources: {named})"

    def _picture_parts(self) -> Sequence[tuple[str, float]]:
        return [(str(name), len(part)) for name, part in self.parts.items()]

    def __getstate__(self) -> dict[str, Any]:
        made = {"_columns", "_held", "_holds_all", "_readers"}
        state = {name: value for name, value in vars(self).items() if name not in made}
        # Workers share the records of a list in memory. Where all are lists, they share one: each alone may be small.
        if self._holds_all:
            return state | {"parts": {name: type(part) for name, part in self.parts.items()}, "_held": self._all_held()}
        held = {name: HeldRecords(part) for name, part in self.parts.items() if type(part) in {list, tuple}}
        return state | {"parts": self.parts | held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        held = state.get("_held")
        if held is None:
            records = {name: part.records for name, part in self.parts.items() if type(part) is HeldRecords}
            self.parts |= records
        else:
            stretches = map(slice, self._starts.tolist(), (self._starts + self.lengths).tolist())
            self.parts = {
                name: kind(held.records[stretch]) if type(held) is HeldRecords else _Stretch(held, stretch)
                for (name, kind), stretch in zip(self.parts.items(), stretches, strict=True)
            }
        self._prepare(held)

    def locate(self, record_keys: RecordKeys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns which source each record is from, as its number, and its key in that source; both of shape (n,).

        `source.names[number]` is the name. So `locate(loader.record_keys(step))` tells what a batch is made of.

        Args:
            record_keys: the records, shape (n,), in any order; they may repeat.

        Raises:
            IndexError: a key is negative, or beyond the last record.
        """
        return self._locate(checked_record_keys(record_keys, self._num_records))

    def close(self) -> None:
        """Closes those sources that can be closed. May be called again."""
        for source in self.parts.values():
            if callable(close := getattr(source, "close", None)):
                close()

    def fingerprint(self) -> str:
        """Returns the number of records and what each source says of itself; of one that does not, its class."""
        words = []
        for name, source in self.parts.items():
            own = getattr(source, "fingerprint", None)
            text = str(own()) if callable(own) else f"{type(source).__name__} records={len(source)}"
            words.append(f"{name}: {text}".replace(" ", ","))
        texts = ";".join(words)
        if len(texts) > _SHOWN_WORDS:
            texts = f"#{zlib.crc32(texts.encode('utf-8', 'surrogatepass')):08x}"
        return f"Concatenated sources={len(words)} records={self._num_records} of={texts}"

    def content_marks(self) -> dict[str, str]:
        """Returns the marks of those sources that have any, by the sources' names."""
        found = {name: getattr(source, "content_marks", None) for name, source in self.parts.items()}
        return {
            f"sources[{name!r}].{path}": mark
            for name, marks in found.items()
            if callable(marks)
            for path, mark in marks().items()
        }

    def _all_held(self) -> Any:
        """Returns the records of all sources, which are lists or tuples, as one."""
        return HeldRecords.end_to_end(list(self.parts.values())) if self._held is None else self._held

    def _prepare(self, held: Any = None) -> None:
        sources = [HeldRecords(source) if _is_held(source) else source for source in self.parts.values()]
        self._readers = [_reader(source) for source in sources]
        # Lists in memory are read as one: records from all over memory come twice as fast from one call, as that waits
        # for several at once. It is made when a batch is read, so that only processes which read have it.
        self._holds_all = held is not None or all(type(source) in {list, tuple} for source in self.parts.values())
        self._held = held
        self._columns = EndToEndColumns.of(list(self.parts.values()))

    def _locate(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        parts = np.searchsorted(self._starts, keys, side="right") - 1
        return parts, keys - self._starts[parts]

    def _read(self, part: int, keys: NDArray[np.int64]) -> Sequence[Any]:
        """Returns records of one source; an error gets a note that says which."""
        try:
            records = self._readers[part](keys)
        except Exception as error:
            name = self.names[part]
            shown = ", ".join(map(str, keys[:4].tolist())) + (", …" if len(keys) > 4 else "")
            error.add_note(f"millstream: in source {name!r}, its record{'s'[: len(keys) > 1]} {shown}.")
            raise
        if len(records) != len(keys):
            raise ValueError(
                f"__getitems__ of source {self.names[part]!r}, a {type(self.parts[self.names[part]]).__name__}, was "
                f"asked for {len(keys)} records and gave {len(records)}."
            )
        return records


@final
class _Stretch:
    """Records that follow one another in a longer sequence: what a worker has of a list."""

    def __init__(self, records: Any, stretch: slice) -> None:
        self._records = records
        self._numbers = range(stretch.start, stretch.stop)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: int) -> Any:
        return self._records[self._numbers[key]]


def _is_held(source: Any) -> bool:
    return isinstance(source, (list, tuple)) and not hasattr(source, "__getitems__")


def _reader(source: Any) -> Callable[[NDArray[np.int64]], Sequence[Any]]:
    """Returns the function that reads records of a source: in one call where it can."""
    read_many = batched_read_of(source)
    if read_many is None:
        return lambda keys: [source[key] for key in keys.tolist()]
    if getattr(source, "takes_key_arrays", False) is True:
        return read_many
    return lambda keys: read_many(keys.tolist())
