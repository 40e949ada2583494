"""Decoded units of records, such as row groups, kept as long as there is room for them.

Guarantees:
    - A unit is decoded once; threads that ask for it meanwhile wait for that. Threads that ask for other units do not.
    - Several that are missing are decoded by several threads, which are gone when they are.
    - The units that are kept have at most `max_bytes`, or are one. Those in use live on until nobody uses them.
    - A forked process begins without units: threads that it does not have may have been at them.
"""

import functools
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, final

from millstream.signal_safe_lock import SignalSafeLock


class Unit(Protocol):
    """A decoded unit."""

    @property
    def num_records(self) -> int:
        """How many records it has."""
        ...

    @property
    def num_bytes(self) -> int:
        """How much memory it takes."""
        ...


UnitT = TypeVar("UnitT", bound=Unit)
KeyT = TypeVar("KeyT", bound=Hashable)


class Use(NamedTuple):
    """What use was made of a unit that was dropped.

    Attributes:
        served: how many records of it were asked for.
        num_records: how many it had.
        num_bytes: how much memory it took.
    """

    served: int
    num_records: int
    num_bytes: int


class _Entry(Generic[UnitT]):
    """A unit, absent until the first thread, holding `loading`, has decoded it."""

    __slots__ = ("loading", "served", "unit")

    def __init__(self) -> None:
        self.unit: UnitT | None = None
        self.loading = SignalSafeLock(threading.RLock())
        self.served = 0


@functools.cache
def _all_caches() -> "weakref.WeakSet[UnitCache[Any]]":
    """Returns the caches of this process; processes forked from now on start anew."""
    caches: weakref.WeakSet[UnitCache[Any]] = weakref.WeakSet()

    def start_anew() -> None:
        for cache in list(caches):
            cache.start_anew()

    os.register_at_fork(after_in_child=start_anew)
    return caches


@final
class UnitCache(Generic[UnitT]):
    """Units by their keys, such as numbers, the least recently used of which are dropped.

    Args:
        max_bytes: how much memory they may take.

    Attributes:
        dropped: what use was made of the units that were dropped last.
    """

    def __init__(self, max_bytes: int, remembered: int) -> None:
        self.dropped: deque[Use] = deque(maxlen=remembered)
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = SignalSafeLock(threading.RLock())
        self._entries: OrderedDict[Hashable, _Entry[UnitT]] = OrderedDict()  # The least recently used comes first.
        self._inherited: list[object] = []
        _all_caches().add(self)

    def get(self, key: KeyT, load: Callable[[KeyT], UnitT]) -> UnitT:
        """Returns a unit, which `load` decodes if it is not there."""
        (unit,) = self.get_all({key: 0}, load, 1)
        return unit

    def get_all(self, wanted: Mapping[KeyT, int], load: Callable[[KeyT], UnitT], max_threads: int) -> list[UnitT]:
        """Returns some units; `load` decodes those that are not there.

        Args:
            wanted: how many records of each unit are wanted, by the keys of the units.
            load: decodes one of them.
            max_threads: how many may be decoded at the same time.
        """
        entries: dict[KeyT, _Entry[UnitT]] = {}
        missing: list[KeyT] = []
        with self._lock:
            for key, count in wanted.items():
                entry = self._entries.get(key)
                if entry is None:
                    entry = self._entries[key] = _Entry()
                    missing.append(key)
                else:
                    self._entries.move_to_end(key)
                entry.served += count
                entries[key] = entry
        if len(missing) > 1 < max_threads:
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (takes long to import)

            with ThreadPoolExecutor(min(max_threads, len(missing)), "millstream-decode") as threads:
                for _ in threads.map(lambda key: self._load(key, entries[key], load), missing):
                    pass
        # Set once: reading it without the lock is safe.
        return [entry.unit or self._load(key, entry, load) for key, entry in entries.items()]

    def touch(self, counts: Iterable[tuple[Hashable, int]]) -> None:
        """Notes that more records of some units were asked for, by the keys of those that are there."""
        with self._lock:
            for key, count in counts:
                if count and (entry := self._entries.get(key)) is not None:
                    entry.served += count
                    self._entries.move_to_end(key)

    def is_used_up(self, key: Hashable) -> bool:
        """Returns whether all records of a unit have been asked for, or it is not there."""
        entry = self._entries.get(key)
        return entry is None or entry.unit is None or entry.served >= entry.unit.num_records

    def replace(self, key: Hashable, unit: UnitT) -> None:
        """Puts an equal unit into the place of one, if it is there."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.unit is not None:
                entry.unit = unit

    def clear(self) -> None:
        """Drops all units."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def start_anew(self) -> None:
        """Begins without units in a forked process, whose parent's threads may have held the lock."""
        self._lock = SignalSafeLock(threading.RLock())
        # Kept from being freed: a library may do more then than is safe after a fork.
        self._inherited.append(self._entries)
        self._entries = OrderedDict()
        self._num_bytes = 0

    def _load(self, key: KeyT, entry: _Entry[UnitT], load: Callable[[KeyT], UnitT]) -> UnitT:
        try:
            with entry.loading:
                if entry.unit is not None:
                    return entry.unit
                unit = load(key)
                with self._lock:
                    entry.unit = unit
                    if self._entries.get(key) is entry:
                        self._num_bytes += unit.num_bytes
                        self._make_room()
                return unit
        except BaseException:
            with self._lock:
                if entry.unit is None and self._entries.get(key) is entry:
                    del self._entries[key]
            raise

    def _make_room(self) -> None:
        """Drops the units that were not used for the longest time, but for the last one. Needs the lock."""
        for key, entry in list(self._entries.items())[:-1]:
            if self._num_bytes <= self._max_bytes:
                return
            if entry.unit is not None:
                del self._entries[key]
                self._num_bytes -= entry.unit.num_bytes
                self.dropped.append(Use(entry.served, entry.unit.num_records, entry.unit.num_bytes))
