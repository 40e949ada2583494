"""Objects by key that threads share: open files (see `files/open_files.py`), and decoded units such as row groups.

Guarantees:
    - An object is made by the first thread that needs it. Threads that need it meanwhile wait; threads that need other
      objects do not.
    - If making it fails, the error is raised in that thread, and the next one that needs the object tries again.
    - Objects are in the order of their use, so that the least recently used ones can be dropped.
    - A signal handler may use a pool while its thread is in a method here: the locks are reentrant.
    - A forked process starts with empty pools. It neither uses nor frees the objects of its parent, because threads
      that it lacks may have been using them.
    - Several missing units are decoded by several threads, which end with the call. The units take at most `max_bytes`,
      or there is one. Units in use live until no thread uses them.
"""

import functools
import operator
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, final

from millstream.core.signals import SignalSafeLock
from millstream.sources.reads import map_in_threads

KeyT = TypeVar("KeyT", bound=Hashable)
T = TypeVar("T")


class _ResetAfterFork(Protocol):
    def reset_after_fork(self) -> None: ...


@functools.cache
def _all_pools() -> "weakref.WeakSet[_ResetAfterFork]":
    pools: weakref.WeakSet[_ResetAfterFork] = weakref.WeakSet()

    def reset() -> None:
        for pool in list(pools):
            pool.reset_after_fork()

    os.register_at_fork(after_in_child=reset)
    return pools


def reset_in_forked_processes(pool: _ResetAfterFork) -> None:
    """Calls `reset_after_fork` of an object in forked processes from now on, as long as the object lives."""
    _all_pools().add(pool)


def new_lock() -> SignalSafeLock:
    return SignalSafeLock(threading.RLock())


class Entry(Generic[T]):
    """An object, which is None until its first user, who holds `making`, has made it.

    `uses` is a number that the pool counts: the users of a file, the records that were read from a unit.
    """

    __slots__ = ("making", "uses", "value")

    def __init__(self) -> None:
        self.value: T | None = None
        self.making = new_lock()
        self.uses = 0


class KeyedPool(Generic[KeyT, T]):
    """Objects by key, least recently used first. A subclass decides how long they stay."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._entries: OrderedDict[KeyT, Entry[T]] = OrderedDict()
        self._inherited: list[object] = []
        reset_in_forked_processes(self)

    def __len__(self) -> int:
        """Returns the number of objects that are made or being made."""
        return len(self._entries)

    def _used(self, key: KeyT, uses: int) -> tuple[Entry[T], bool]:
        """Returns the entry of a key with more uses, and True if it is new. The caller holds the lock."""
        entry = self._entries.get(key)
        is_new = entry is None
        if entry is None:
            entry = self._entries[key] = Entry()
        else:
            self._entries.move_to_end(key)
        entry.uses += uses
        return entry, is_new

    def _made(self, key: KeyT, entry: Entry[T], make: Callable[[KeyT], T]) -> T:
        """Returns the object of an entry, made by `make` if it is missing."""
        with entry.making:
            if entry.value is None:
                value = make(key)
                with self._lock:
                    entry.value = value
                    self._has_made(key, entry)
            return entry.value

    def _has_made(self, key: KeyT, entry: Entry[T]) -> None:
        """Does what follows the making of an object. The caller holds the lock."""

    def _complete(self) -> Iterator[tuple[KeyT, T, int]]:
        """Yields the objects that are made, with their uses, least recently used first. The caller holds the lock."""
        for key, entry in list(self._entries.items()):
            if entry.value is not None:
                yield key, entry.value, entry.uses

    def reset_after_fork(self) -> None:
        """Forgets everything in a forked process. Threads of the parent may have held the lock."""
        self._lock = new_lock()
        # Never freed: a destructor of a library may not be safe after a fork.
        self._inherited.append(self._entries)
        self._entries = OrderedDict()


class Unit(Protocol):
    """A decoded unit."""

    @property
    def num_records(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


UnitT = TypeVar("UnitT", bound=Unit)


class Dropped(NamedTuple):
    """The number of units that were dropped, and over all of them: records that were read, records, and bytes."""

    num_units: int
    served: int
    num_records: int
    num_bytes: int


@final
class UnitCache(KeyedPool[KeyT, UnitT]):
    """A cache of decoded units, limited in bytes, which drops the least recently used ones."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.dropped = Dropped(0, 0, 0, 0)
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitCache, (self._max_bytes,)  # Another process decodes its own units.

    def get_all(self, wanted: Mapping[KeyT, int], load: Callable[[KeyT], UnitT], max_threads: int) -> list[UnitT]:
        """Returns units, given the number of records that are read from each; missing ones are decoded by `load`."""
        with self._lock:
            found = {key: self._used(key, count) for key, count in wanted.items()}
        missing = [key for key, (_, is_new) in found.items() if is_new]
        map_in_threads(lambda key: self._load(key, found[key][0], load), missing, max_threads, "millstream-decode")
        # A unit is set once, so it is safe to read it without the lock.
        return [entry.value or self._load(key, entry, load) for key, (entry, _) in found.items()]

    def touch(self, counts: Iterable[tuple[KeyT, int]]) -> None:
        """Records that more records of units are read, given pairs of key and number. Missing units are ignored."""
        with self._lock:
            for key, count in counts:
                if count and key in self._entries:
                    self._used(key, count)

    def is_used_up(self, key: KeyT) -> bool:
        """Returns True if all records of a unit have been read, or it is missing."""
        entry = self._entries.get(key)
        return entry is None or entry.value is None or entry.uses >= entry.value.num_records

    def has(self, units: Iterable[tuple[KeyT, UnitT]]) -> bool:
        """Returns True if all units, given pairs of key and unit, are in the cache."""
        with self._lock:
            return all((entry := self._entries.get(key)) is not None and entry.value is unit for key, unit in units)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._num_bytes = 0

    def _load(self, key: KeyT, entry: Entry[UnitT], load: Callable[[KeyT], UnitT]) -> UnitT:
        try:
            return self._made(key, entry, load)
        except BaseException:
            with self._lock:
                if entry.value is None and self._entries.get(key) is entry:
                    del self._entries[key]
            raise

    def _has_made(self, key: KeyT, entry: Entry[UnitT]) -> None:
        """Drops the least recently used units if there is too little room, but never the last one."""
        if entry.value is None or self._entries.get(key) is not entry:
            return
        self._num_bytes += entry.value.num_bytes
        newest = next(reversed(self._entries))
        for old, unit, served in self._complete():
            if self._num_bytes <= self._max_bytes or old == newest:
                return
            del self._entries[old]
            self._num_bytes -= unit.num_bytes
            own = (1, served, unit.num_records, unit.num_bytes)
            self.dropped = Dropped._make(map(operator.add, self.dropped, own))
