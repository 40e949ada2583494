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
    - Worker processes of a machine share the units (`shared_units.py`), which take at most `max_bytes` in all of them
      together, but for those in use: a process drops a unit whose file another one has removed, when it needs others.
"""

import functools
import operator
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, final

from millstream.core.signals import SignalSafeLock
from millstream.sources.reads import map_in_threads
from millstream.sources.shared_units import Found, SharedUnits, UnitFiles, shared_folder

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

    `uses` is a number that the pool counts: the users of a file, the records that were read from a unit. `shared_file`
    is the name of the file that a unit is mapped from, or "". `is_decoded` is True if this process has decoded it.
    """

    __slots__ = ("is_decoded", "making", "shared_file", "uses", "value")

    def __init__(self) -> None:
        self.value: T | None = None
        self.making = new_lock()
        self.uses = 0
        self.shared_file = ""
        self.is_decoded = False


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

    def _complete(self) -> Iterator[tuple[KeyT, Entry[T]]]:
        """Yields the objects that are made, least recently used first. The caller holds the lock."""
        for key, entry in list(self._entries.items()):
            if entry.value is not None:
                yield key, entry

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
    """The units that were dropped: the number of those decoded here, their records and bytes, and what all served."""

    num_units: int
    served: int
    num_records: int
    num_bytes: int


@final
class UnitCache(KeyedPool[KeyT, UnitT]):
    """A cache of decoded units, limited in bytes, which drops the least recently used ones.

    Args:
        max_bytes: the limit.
        files: the files by which workers share units; None to decode them in each worker.
        name: the name of the cache in other processes, whose copies of it have the same one.
    """

    def __init__(self, max_bytes: int, files: UnitFiles[KeyT, UnitT] | None = None, name: str = "") -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.dropped = Dropped(0, 0, 0, 0)
        self._num_bytes = 0
        self._files = files
        self._name = name or os.urandom(8).hex()
        self._opened: SharedUnits[KeyT, UnitT] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitCache, (self.max_bytes, self._files, self._name)

    def get_all(self, wanted: Mapping[KeyT, int], load: Callable[[KeyT], UnitT], max_threads: int) -> list[UnitT]:
        """Returns units, given the number of records that are read from each; missing ones are decoded by `load`."""
        with self._lock:
            found = {key: self._used(key, count) for key, count in wanted.items()}
        missing = [key for key, (_, is_new) in found.items() if is_new]
        if missing:
            self._drop_removed(wanted)
        # Those that another process is decoding come last.
        map_in_threads(
            lambda key: self._load(key, found[key][0], load, waits=False), missing, max_threads, "millstream-decode"
        )
        # A unit is set once, so it is safe to read it without the lock.
        return [entry.value or self._loaded(key, entry, load) for key, (entry, _) in found.items()]

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

    def _loaded(self, key: KeyT, entry: Entry[UnitT], load: Callable[[KeyT], UnitT]) -> UnitT:
        unit = self._load(key, entry, load, waits=True)
        if unit is None:
            raise AssertionError("A unit is missing after the wait for it.")
        return unit

    def _load(self, key: KeyT, entry: Entry[UnitT], load: Callable[[KeyT], UnitT], *, waits: bool) -> UnitT | None:
        """Returns the unit of an entry; None if another process is decoding it, unless this waits."""
        try:
            with entry.making:
                if entry.value is None:
                    shared = self._shared()
                    own = Found(load(key), is_decoded=True) if shared is None else shared.get(key, load, waits=waits)
                    with self._lock:
                        entry.value, entry.shared_file, entry.is_decoded = own
                        self._keep_within_limit(key, entry)
                return entry.value
        except BaseException:
            with self._lock:
                if entry.value is None and self._entries.get(key) is entry:
                    del self._entries[key]
            raise

    def _shared(self) -> SharedUnits[KeyT, UnitT] | None:
        """Returns the units that this process shares with others; None if it is not a worker."""
        if self._opened is None and self._files is not None and (folder := shared_folder()):
            self._opened = SharedUnits(folder, self._name, self._files, self.max_bytes)
        return self._opened

    def _drop_removed(self, wanted: Collection[KeyT]) -> None:
        """Drops units whose files were removed, because the files of all processes are the limit of the memory."""
        shared = self._shared()
        if shared is not None and (names := shared.names()) is not None:
            with self._lock:
                for key, entry in list(self._entries.items()):
                    if entry.shared_file and entry.shared_file not in names and key not in wanted:
                        self._drop(key, entry)

    def _keep_within_limit(self, key: KeyT, entry: Entry[UnitT]) -> None:
        """Counts a new unit, and drops the least recently used ones if there is too little room, but never the last."""
        if entry.value is None or self._entries.get(key) is not entry:
            return
        self._num_bytes += entry.value.num_bytes
        newest = next(reversed(self._entries))
        for old, other in self._complete():
            if self._num_bytes <= self.max_bytes or old == newest:
                return
            self._drop(old, other)

    def _drop(self, key: KeyT, entry: Entry[UnitT]) -> None:
        del self._entries[key]
        if (unit := entry.value) is not None:
            self._num_bytes -= unit.num_bytes
            # The records of a unit are read by all workers that share it, and one of them has decoded it.
            decoded = (1, entry.uses, unit.num_records, unit.num_bytes) if entry.is_decoded else (0, entry.uses, 0, 0)
            self.dropped = Dropped._make(map(operator.add, self.dropped, decoded))
