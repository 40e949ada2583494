"""A cache of decoded units of records, such as row groups, limited in size.

Guarantees:
    - A unit is decoded once. Threads that need it meanwhile wait; threads that need other units do not.
    - Several missing units are decoded by several threads, which end with the call.
    - The units take at most `max_bytes`, or there is one. Units in use live until no thread uses them.
    - A forked process starts with an empty cache, because threads that it lacks may have held locks.
"""

import functools
import operator
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, final

from millstream.core.signals import SignalSafeLock


class Unit(Protocol):
    """A decoded unit."""

    @property
    def num_records(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


UnitT = TypeVar("UnitT", bound=Unit)
KeyT = TypeVar("KeyT", bound=Hashable)


class Dropped(NamedTuple):
    """The number of units that were dropped, and over all of them: records that were read, records, and bytes."""

    num_units: int
    served: int
    num_records: int
    num_bytes: int


class _Entry(Generic[UnitT]):
    """A unit, which is None until the first thread has decoded it, while holding `loading`."""

    __slots__ = ("loading", "served", "unit")

    def __init__(self) -> None:
        self.unit: UnitT | None = None
        self.loading = SignalSafeLock(threading.RLock())
        self.served = 0


@functools.cache
def _all_caches() -> "weakref.WeakSet[UnitCache[Any]]":
    """Returns the caches of this process, which are emptied in forked processes from now on."""
    caches: weakref.WeakSet[UnitCache[Any]] = weakref.WeakSet()

    def reset() -> None:
        for cache in list(caches):
            cache.reset_after_fork()

    os.register_at_fork(after_in_child=reset)
    return caches


@final
class UnitCache(Generic[UnitT]):
    """A cache of units by key, which drops the least recently used ones."""

    def __init__(self, max_bytes: int) -> None:
        self.dropped = Dropped(0, 0, 0, 0)
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = SignalSafeLock(threading.RLock())
        self._entries: OrderedDict[Hashable, _Entry[UnitT]] = OrderedDict()  # Least recently used first.
        self._inherited: list[object] = []
        _all_caches().add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitCache, (self._max_bytes,)  # Another process decodes its own units.

    def get(self, key: KeyT, load: Callable[[KeyT], UnitT]) -> UnitT:
        """Returns a unit, decoded by `load` if it is not in the cache."""
        (unit,) = self.get_all({key: 0}, load, 1)
        return unit

    def get_all(self, wanted: Mapping[KeyT, int], load: Callable[[KeyT], UnitT], max_threads: int) -> list[UnitT]:
        """Returns units, decoded by `load` in up to `max_threads` threads if they are not in the cache.

        `wanted` has the number of records that will be read of each unit, by key.
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
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (lazy: it takes long to import)

            with ThreadPoolExecutor(min(max_threads, len(missing)), "millstream-decode") as threads:
                for _ in threads.map(lambda key: self._load(key, entries[key], load), missing):
                    pass
        # A unit is set once, so it is safe to read it without the lock.
        return [entry.unit or self._load(key, entry, load) for key, entry in entries.items()]

    def touch(self, counts: Iterable[tuple[Hashable, int]]) -> None:
        """Records that more records of units are read, given pairs of key and number. Missing units are ignored."""
        with self._lock:
            for key, count in counts:
                if count and (entry := self._entries.get(key)) is not None:
                    entry.served += count
                    self._entries.move_to_end(key)

    def is_used_up(self, key: Hashable) -> bool:
        """Returns True if all records of a unit have been read, or it is missing."""
        entry = self._entries.get(key)
        return entry is None or entry.unit is None or entry.served >= entry.unit.num_records

    def has(self, units: Iterable[tuple[Hashable, UnitT]]) -> bool:
        """Returns True if all units, given pairs of key and unit, are in the cache."""
        with self._lock:
            return all((entry := self._entries.get(key)) is not None and entry.unit is unit for key, unit in units)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def reset_after_fork(self) -> None:
        """Empties the cache in a forked process. Threads of the parent may have held the lock."""
        self._lock = SignalSafeLock(threading.RLock())
        # Never freed: a destructor of a library may not be safe after a fork.
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
        """Drops the least recently used units, but never the last one. The caller holds the lock."""
        for key, entry in list(self._entries.items())[:-1]:
            if self._num_bytes <= self._max_bytes:
                return
            if entry.unit is not None:
                del self._entries[key]
                self._num_bytes -= entry.unit.num_bytes
                own = (1, entry.served, entry.unit.num_records, entry.unit.num_bytes)
                self.dropped = Dropped._make(map(operator.add, self.dropped, own))
