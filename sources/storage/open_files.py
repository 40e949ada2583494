"""A limited number of open files, shared by the threads that read them.

Guarantees:
    - A file is opened by the first thread that needs it, in the process that reads it. Threads that need other files do
      not wait.
    - A file in use is never closed. Idle files may be closed, least recently used first.
    - At most `max_open` files are open, unless more are in use at the same time. All sources of a process together use
      at most half of its file descriptors, shared equally among the sources with open files.
    - If the process runs out of file descriptors, idle files of this source and then of others are closed, one after
      another, before the error is raised.
    - After `close()`, no file can be acquired, and the last `release` of a file in use closes it.
    - A signal handler may close a source while its thread is in a method here. The locks are reentrant, and each method
      tolerates the changes of a handler.
    - A forked process opens its own files. It neither uses nor closes those of its parent, because threads that it
      lacks may have been using them.
"""

import errno
import functools
import os
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, final

from millstream.core.signals import SignalSafeLock

RecordT = TypeVar("RecordT")
_T = TypeVar("_T")


class Closable(Protocol):
    """An open file."""

    def close(self) -> None:
        """Closes the file. It is not being read."""


class OpenFile(Closable, Protocol):
    """An open file of records that any number of threads may read.

    It may have `pause`, which is called when its last user has released it, and `resume`, which is called when it has a
    user again. If `resume` returns False, the file is closed and opened again.
    """

    @property
    def num_records(self) -> int: ...


class RecordFile(OpenFile, Protocol[RecordT]):
    """An open file whose records are found one by one.

    It may have `begin`, which takes the arguments of `read`, requests the records, and returns a function that waits
    for them, so that several remote files are read concurrently.
    """

    def read(self, positions: Sequence[int], keys: Sequence[int], /) -> list[RecordT]:
        """Returns the records at the positions, numbers from 0 in any order; the keys are for errors.

        A record that is damaged or lost is a DataSourceError with its position, file and key.
        """
        ...


FileT = TypeVar("FileT", bound=Closable)

_OPENS_BETWEEN_CHECKS = 16
"""The number of files that are opened between two queries of the descriptor limit."""

OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


def descriptor_share() -> int:
    """Returns the number of files that all sources together may keep open, half of the process's limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(1, limit // 2)


def in_threads(
    function: Callable[[str], _T], paths: Sequence[str], count: int, cancel: Callable[[], None] | None = None
) -> Iterator[_T]:
    """Yields the result for each path, in order. A task costs 50 µs, so each one takes several paths.

    The threads are fewer than `count` if the process may not open so many files. After an error, `cancel` is called
    before the threads are awaited, to end calls that take long.
    """
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (lazy: takes long to import)

    size = max(1, len(paths) // (8 * count))
    groups = [paths[start : start + size] for start in range(0, len(paths), size)]
    with ThreadPoolExecutor(min(count, descriptor_share()), "millstream-inspect") as threads:
        try:
            for results in threads.map(lambda group: [function(path) for path in group], groups):
                yield from results
        except BaseException:
            if cancel is not None:
                cancel()
            raise


class _Registry:
    """The open files of all sources in this process.

    Lock order: the lock of the registry before those of OpenFiles.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[OpenFiles[Any]] = weakref.WeakSet()
        self._lock = SignalSafeLock(threading.RLock())
        # An upper bound of the descriptors in use: counted over all sources, of which a mixture may have a thousand,
        # from time to time, and raised with each file that is opened.
        self._max_in_use = 0
        self._share, self._opens_before_check = 0, 0

    def add(self, files: "OpenFiles[Any]") -> None:
        with self._lock:
            self._all.add(files)

    def make_room(self, descriptors: int) -> None:
        """Closes idle files of sources that exceed their share. The caller holds no lock of OpenFiles."""
        with self._lock:
            self._max_in_use += descriptors
            self._opens_before_check -= 1
            if self._opens_before_check <= 0:
                # The limit may change, but to query it at each opening would take as long as the opening.
                self._share, self._opens_before_check = descriptor_share(), _OPENS_BETWEEN_CHECKS
            if self._max_in_use <= self._share:
                return
            using = [files for files in self._all if len(files)]
            share = max(1, self._share // max(1, len(using)))
            for files in using:
                if files.descriptors > share:
                    files.close_idle_beyond(share)
            self._max_in_use = sum(files.descriptors for files in using)

    def close_one_idle(self) -> bool:
        """Closes an idle file of any source. The caller holds no lock of OpenFiles."""
        with self._lock:
            return any(files.close_one_idle() for files in list(self._all))

    def reset_after_fork(self) -> None:
        self._lock = SignalSafeLock(threading.RLock())
        self._max_in_use = 0
        for files in list(self._all):
            files.reset_after_fork()


@functools.cache
def _registry() -> _Registry:
    """Returns the registry of this process, which is reset in forked processes from now on."""
    registry = _Registry()
    os.register_at_fork(after_in_child=registry.reset_after_fork)
    return registry


def _always() -> bool:
    """Stands for `pause` and `resume` of files that have none."""
    return True


class _Entry(Generic[FileT]):
    """A file and the number of its users. It is None until its first user, who holds `opening`, has opened it."""

    __slots__ = ("file", "opening", "users")

    def __init__(self) -> None:
        self.file: FileT | None = None
        self.opening = SignalSafeLock(threading.RLock())
        self.users = 0


@final
class OpenFiles(Generic[FileT]):
    """Files by path, opened on demand. Each successful `acquire` needs one `release`."""

    def __init__(self, max_open: int, descriptors_per_file: int = 1) -> None:
        self._max_open = max_open
        self._descriptors_per_file = descriptors_per_file
        self._lock = SignalSafeLock(threading.RLock())
        self._entries: dict[str, _Entry[FileT]] = {}
        self._idle: dict[str, None] = {}  # The open files without users, least recently used first.
        self._inherited: list[object] = []
        self._closed = False
        _registry().add(self)

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        """Returns the number of files that are open or being opened."""
        return len(self._entries)

    @property
    def descriptors(self) -> int:
        return len(self._entries) * self._descriptors_per_file

    def acquire(self, path: str, open_file: Callable[[str], FileT]) -> FileT:
        """Returns the open file of a path, which stays open until `release(path)`.

        An OSError of `open_file` with EMFILE or ENFILE means that no descriptor is free. The function is not stored,
        because a bound method would keep its owner alive, and with it the open files. If it raises, there is nothing to
        release. After `close`, this raises ValueError.
        """
        with self._lock:
            self.check_open()
            entry = self._entries.get(path)
            is_new = entry is None
            if entry is None:
                entry = self._entries[path] = _Entry()
            entry.users += 1
            self._idle.pop(path, None)
            if entry.users == 1 and entry.file is not None and not getattr(entry.file, "resume", _always)():
                entry.file.close()
                entry.file = None
        if is_new:
            _registry().make_room(self._descriptors_per_file)
            if len(self._entries) > self._max_open:
                self.close_idle_beyond(sys.maxsize)
        # Set by `_open`, and closed only without other users, so it is safe to read it without the lock.
        return entry.file if entry.file is not None else self._open(path, entry, open_file)

    def check_open(self) -> None:
        if self._closed:
            raise ValueError("This source is closed. Construct another one to read again.")

    def release(self, path: str) -> None:
        with self._lock:
            entry = self._entries[path]
            entry.users -= 1
            if entry.users == 0 and (self._closed or entry.file is None):
                del self._entries[path]
                if entry.file is not None:
                    entry.file.close()
            elif entry.users == 0:
                self._idle[path] = None
                getattr(entry.file, "pause", _always)()

    def close_idle_beyond(self, descriptors: int) -> None:
        """Closes idle files while the open files exceed a number of descriptors, or `max_open`."""
        limit = min(max(1, descriptors // self._descriptors_per_file), self._max_open)
        with self._lock:
            while len(self._entries) > limit and self.close_one_idle():
                pass

    def reset_after_fork(self) -> None:
        """Forgets all files in a forked process. Threads of the parent may have held the lock."""
        self._lock = SignalSafeLock(threading.RLock())
        # Never freed: a destructor of a library may not be safe after a fork.
        self._inherited.append(self._entries)
        self._entries = {}
        self._idle = {}

    def close(self) -> None:
        """Closes the idle files, and each other file when its last user releases it. May be called again."""
        with self._lock:
            self._closed = True
            # A signal may have arrived between the last use of a file and its entry in `_idle`.
            self._idle |= dict.fromkeys(path for path, entry in self._entries.items() if not entry.users)
            while self.close_one_idle():
                pass

    def _open(self, path: str, entry: _Entry[FileT], open_file: Callable[[str], FileT]) -> FileT:
        try:
            with entry.opening:
                if entry.file is None:
                    entry.file = self._open_making_room(path, open_file)
                return entry.file
        except BaseException:
            self.release(path)
            raise

    def _open_making_room(self, path: str, open_file: Callable[[str], FileT]) -> FileT:
        while True:
            try:
                return open_file(path)
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS:
                    raise
                if not (self.close_one_idle() or _registry().close_one_idle()):
                    raise

    def close_one_idle(self) -> bool:
        """Closes the least recently used idle file. Returns False if there is none."""
        with self._lock:
            while self._idle:
                path = next(iter(self._idle))
                entry = self._entries.pop(path, None)
                self._idle.pop(path, None)
                if entry is not None and entry.file is not None:
                    entry.file.close()
                    return True
        return False
