"""Several sources one after another: the source of a mixture."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import named_arguments
from millstream.core.closing import Closing
from millstream.core.columnar import ColumnarRecords
from millstream.sources.base import (
    HeldRecords,
    LoaderView,
    RecordKeys,
    RenderedSource,
    checked_record_key,
    checked_record_keys,
    close_if_possible,
    fingerprint_of,
    fixed_source,
    is_held,
    loader_view,
)
from millstream.sources.memory import ColumnsInMemory, RecordsInMemory, RecordsOfSources
from millstream.sources.pieces import Pieces, cut
from millstream.sources.reads import read_all
from millstream.sources.source_checks import batched_read_of, check_source, is_in_memory, reads_one_by_one

_MAX_DESCRIPTION = 160
"""The maximum number of characters that describe the sources in a fingerprint; a longer text is replaced by its CRC."""

_KEY_LIMIT = 1 << 63


@final
class ConcatenatedDataSource(RenderedSource, Closing):
    """The records of several sources, one source after another.

    A batch takes one read of each source that it touches, by its `__getitems__` if it has one. Slow reads are shared by
    threads of the loader. Lists and tuples are joined to one list when the first batch is read, which takes 8 bytes per
    record; columns of `InMemoryDataSource`s that are alike are read without a copy of all of them. `locate` finds the
    source of a record. With a `MixtureSampler` for the order, this is the source of a mixture.

    Args:
        sources: the sources: a list, or a mapping that names them. Each is anything with `len` and `source[key]`.

    Attributes:
        names: the sources' names; of a list, their numbers from 0 on.
        parts: the sources by name.
        lengths: the number of records of each source, an int64 array of shape (sources,).

    Raises:
        TypeError: a value is not a source.
        ValueError: there is no source, or a source has no records.

    Examples:
        >>> source = millstream.ConcatenatedDataSource({"web": ["a", "b", "c"], "books": ["X", "Y"]})
        >>> len(source), source[3]
        (5, 'X')
        >>> source.locate([0, 3, 4])
        (array([0, 1, 1]), array([0, 0, 1]))
    """

    _periods: NDArray[np.int64] | None = None
    """The distance of the epochs of each source; None if keys are those of one epoch."""

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
            raise ValueError(f"Concatenated sources must have at most 2**63 records, got {sum(lengths)}.")
        self.lengths = np.array(lengths, dtype=np.int64)
        self._num_records = self._key_limit = sum(lengths)
        self._pieces = Pieces(self.lengths)
        self._prepare()

    def __len__(self) -> int:
        return self._num_records

    @property
    def reads_one_by_one(self) -> bool:
        """True if no source has batched reads. Several threads then share the records of a batch."""
        return reads_one_by_one(self.parts.values())

    @property
    def is_in_memory(self) -> bool:
        """True if the records of all sources are plain data in memory."""
        return all(map(is_in_memory, self.parts.values()))

    def __getitem__(self, record_key: SupportsIndex) -> Any:
        key = checked_record_key(record_key, self._key_limit)
        (number,), own_keys = self._locate(np.array([key]))
        (record,) = self._read(int(number), own_keys)
        return record

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[Any]:
        keys = checked_record_keys(record_keys, self._key_limit)
        if self._holds_all:
            self._held = self._all_held()
            records: Sequence[Any] = self._held.__getitems__(keys.tolist())
            return records
        numbers, own_keys = self._locate(keys)
        if self._columns is not None:
            return RecordsInMemory(self._columns, numbers, own_keys)
        by_source = cut(numbers, len(self.names))
        own_keys = own_keys[by_source.order]
        read = read_all(
            [functools.partial(self._read, number, own_keys[start:stop]) for number, start, stop in by_source.runs]
        )
        columnar = [records for records in read if isinstance(records, ColumnarRecords)]
        if columnar and len(columnar) == len(read):
            return RecordsOfSources(columnar, by_source)
        return by_source.put_back([record for records in read for record in records])

    def __repr__(self) -> str:
        kinds = dict.fromkeys(type(source).__name__ for source in self.parts.values())
        named = ", ".join(list(kinds)[:4]) + (", …" if len(kinds) > 4 else "")
        return f"ConcatenatedDataSource({self._num_records:,} records in {len(self.parts)} sources: {named})"

    def _card_bars(self) -> Sequence[tuple[str, Sequence[tuple[str, float]]]]:
        return [("", [(str(name), len(source)) for name, source in self.parts.items()])]

    def __getstate__(self) -> dict[str, Any]:
        derived = {"_columns", "_held", "_holds_all", "_readers"}
        state = {name: value for name, value in vars(self).items() if name not in derived}
        # Workers share the records of a list in memory. If all sources are lists, they share one, as each may be small.
        if self._holds_all:
            kinds = {name: type(source) for name, source in self.parts.items()}
            return state | {"parts": kinds, "_held": self._all_held()}
        held = {name: HeldRecords(source) for name, source in self.parts.items() if type(source) in {list, tuple}}
        return state | {"parts": self.parts | held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        held = state.get("_held")
        if held is None:
            records = {name: source.records for name, source in self.parts.items() if type(source) is HeldRecords}
            self.parts |= records
        else:
            slices = map(slice, self._pieces.starts.tolist(), self._pieces.ends.tolist())
            self.parts = {
                name: kind(held.records[rows]) if type(held) is HeldRecords else _Slice(held, rows)
                for (name, kind), rows in zip(self.parts.items(), slices, strict=True)
            }
        self._prepare(held)

    def locate(self, record_keys: RecordKeys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the number of each record's source and its key in that source, both of shape (n,).

        The name is `source.names[number]`, so `locate(loader.record_keys(step))` is the composition of a batch.

        Args:
            record_keys: the records, shape (n,), in any order; they may repeat.

        Raises:
            IndexError: a key is negative, or beyond the last record.
        """
        return self._locate(checked_record_keys(record_keys, self._num_records))

    def close(self) -> None:
        """Closes the sources that have `close`. May be called again."""
        for source in self.parts.values():
            close_if_possible(source)

    def fingerprint(self) -> str:
        """Returns the number of records and the fingerprint of each source, or its class if it has none."""
        descriptions = []
        for name, source in self.parts.items():
            descriptions.append(f"{name}: {fingerprint_of(source)}".replace(" ", ","))
        text = ";".join(descriptions)
        if len(text) > _MAX_DESCRIPTION:
            text = f"#{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"
        return f"Concatenated sources={len(descriptions)} records={self._num_records} of={text}"

    def _loader_view(self) -> LoaderView:
        views = {}
        for name, source in self.parts.items():
            try:
                views[name] = loader_view(source)
            except ValueError as error:
                error.add_note(f"millstream: in source {name!r}.")
                raise
        _, differ, skip, reorder, _ = zip(*views.values(), strict=True)
        view = LoaderView(self, any(differ), any(skip), next(filter(None, reorder), ""))
        return view._replace(source=self._over_epochs(views)) if view.differs_by_epoch else view

    def _fixed_source(self) -> tuple[Self, Callable[[], None]]:
        fixed = {name: fixed_source(source) for name, source in self.parts.items()}
        parts = {name: source for name, (source, _) in fixed.items()}
        is_same = all(parts[name] is source for name, source in self.parts.items())
        made = self if is_same else type(self)(parts)
        return made, functools.partial(_check_each, [check for _, check in fixed.values()])

    def _over_epochs(self, views: Mapping[Any, LoaderView]) -> Self:
        """Returns the source whose keys continue over epochs; those of a part only if its epochs differ."""
        continued = object.__new__(type(self))
        vars(continued).update(vars(self) | {"parts": {name: view.source for name, view in views.items()}})
        differ = np.array([view.differs_by_epoch for view in views.values()])
        continued._key_limit, continued._periods = _KEY_LIMIT, np.where(differ, self.lengths, 0)
        continued._prepare()
        return continued

    def _all_held(self) -> Any:
        return HeldRecords.concatenated(list(self.parts.values())) if self._held is None else self._held

    def _prepare(self, held: Any = None) -> None:
        sources = [HeldRecords(source) if is_held(source) else source for source in self.parts.values()]
        self._readers = [_reader(source) for source in sources]
        # Lists in memory are read as one: one call reads records from all over memory at twice the speed, because the
        # processor then waits for several together. It is built by the first read, so only processes that read have it.
        self._holds_all = held is not None or all(type(source) in {list, tuple} for source in self.parts.values())
        self._held = held
        self._columns = ColumnsInMemory.of(list(self.parts.values()))

    def _locate(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self._periods is None:
            return self._pieces.locate(keys)
        epochs, keys = np.divmod(keys, self._num_records)
        numbers, own_keys = self._pieces.locate(keys)
        shifts: Any = epochs * self._periods[numbers]
        return numbers, own_keys + shifts

    def _read(self, number: int, keys: NDArray[np.int64]) -> Sequence[Any]:
        """Returns records of one source. A note names the source in errors."""
        try:
            records = self._readers[number](keys)
        except Exception as error:
            name = self.names[number]
            shown = ", ".join(map(str, keys[:4].tolist())) + (", …" if len(keys) > 4 else "")
            # The number of a source in a chain says little, because chains count each once.
            text = repr(name) if isinstance(name, str) else f"{name!r} ({type(self.parts[name]).__name__})"
            error.add_note(f"millstream: in source {text}, its record{'s'[: len(keys) > 1]} {shown}.")
            raise
        if len(records) != len(keys):
            raise ValueError(
                f"__getitems__ of source {self.names[number]!r}, a {type(self.parts[self.names[number]]).__name__}, "
                f"must return one record per key, got {len(records)} for {len(keys)} keys."
            )
        return records


@final
class _Slice:
    """A slice of a sequence that workers share."""

    def __init__(self, records: Any, rows: slice) -> None:
        self._records = records
        self._numbers = range(rows.start, rows.stop)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: int) -> Any:
        return self._records[self._numbers[key]]


def _check_each(checks: Sequence[Callable[[], None]]) -> None:
    for check in checks:
        check()


def _reader(source: Any) -> Callable[[NDArray[np.int64]], Sequence[Any]]:
    read = batched_read_of(source)
    if read is None:
        return lambda keys: [source[key] for key in keys.tolist()]
    if getattr(source, "takes_key_arrays", False) is True:
        return read
    return lambda keys: read(keys.tolist())
