"""A bounded number of open files, shared by the threads that read them.

Guarantees:
    - A file is opened by the first thread that asks for it, in the process that asks; threads that ask for other
      files do not wait for it.
    - A file in use is never closed. One that is idle may be, the one unused for the longest time first.
    - At most `max_open` files are open, or as many as are in use at once, if that is more. All sources of a process
      together leave half of its file descriptors to others: as many as that leaves are shared out equally among the
      sources that have files open.
    - When the process runs out of file descriptors, idle files are closed, one after the other, before giving up.
    - After `close()`, nothing can be acquired; files in use are closed by their last `release`.
    - A signal handler may close a source while its thread is in a method here: the locks are reentrant, and each
      method copes with what the handler has changed.
    - A forked process opens its own files. Those of its parent may have been in use by threads that the child does
      not have: it neither uses nor closes them.
"""

import errno
import functools
import os
import resource
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, final

from millstream.signal_safe_lock import SignalSafeLock


class Closable(Protocol):
    """An open file."""

    def close(self) -> None:
        """Closes it."""


FileT = TypeVar("FileT", bound=Closable)

_OPENS_BETWEEN_LOOKS = 16
"""How many files are opened between two looks at the limit of descriptors."""

_OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


def descriptor_share() -> int:
    """Returns how many files all sources together may keep open: half of what this process may, at least one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(1, limit // 2)


class _Registry:
    """The open files of all sources in this process.

    Its lock is held while locks of OpenFiles are taken, never the other way round.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[OpenFiles[Any]] = weakref.WeakSet()
        self._lock = SignalSafeLock(threading.RLock())
        # No more descriptors than this are in use: counted when all sources were last looked at, and for each file that
        # was opened since. A mixture may have a thousand sources.
        self._most_in_use = 0
        self._share, self._opens_before_look = 0, 0

    def add(self, files: "OpenFiles[Any]") -> None:
        """Adds the files of a source, for as long as it lives."""
        with self._lock:
            self._all.add(files)

    def make_room(self, descriptors: int) -> None:
        """Closes idle files of the sources that have more open than is their share. Needs no lock of OpenFiles.

        Args:
            descriptors: how many are about to be taken.
        """
        with self._lock:
            self._most_in_use += descriptors
            self._opens_before_look -= 1
            if self._opens_before_look <= 0:
                # A process may change its limit, but to ask the system at each opening takes as long as that.
                self._share, self._opens_before_look = descriptor_share(), _OPENS_BETWEEN_LOOKS
            if self._most_in_use <= self._share:
                return
            using = [files for files in self._all if len(files)]
            share = max(1, self._share // max(1, len(using)))
            for files in using:
                if files.descriptors > share:
                    files.close_idle_beyond(share)
            self._most_in_use = sum(files.descriptors for files in using)

    def start_anew(self) -> None:
        """Begins without open files in a forked process; threads that are not here may have held the locks."""
        self._lock = SignalSafeLock(threading.RLock())
        self._most_in_use = 0
        for files in list(self._all):
            files.start_anew()


@functools.cache
def _registry() -> _Registry:
    """Returns the one registry, which processes forked from now on start anew."""
    registry = _Registry()
    os.register_at_fork(after_in_child=registry.start_anew)
    return registry


class _Entry(Generic[FileT]):
    """A file with the number of its users; absent until the first of them, holding `opening`, has opened it."""

    __slots__ = ("file", "opening", "users")

    def __init__(self) -> None:
        self.file: FileT | None = None
        self.opening = SignalSafeLock(threading.RLock())
        self.users = 0


@final
class OpenFiles(Generic[FileT]):
    """Files by path, opened on demand. Each `acquire` that returns is followed by one `release`.

    Args:
        max_open: how many files stay open, at least 1.
        descriptors_per_file: how many descriptors each of them takes.
    """

    def __init__(self, max_open: int, descriptors_per_file: int = 1) -> None:
        self._max_open = max_open
        self._descriptors_per_file = descriptors_per_file
        self._lock = SignalSafeLock(threading.RLock())
        self._entries: dict[str, _Entry[FileT]] = {}
        self._idle: dict[str, None] = {}  # Of these, the open files without users: the least recently used first.
        self._inherited: list[object] = []
        self._closed = False
        _registry().add(self)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __len__(self) -> int:
        """Returns how many files are open or being opened."""
        return len(self._entries)

    @property
    def descriptors(self) -> int:
        """How many descriptors these take."""
        return len(self._entries) * self._descriptors_per_file

    def acquire(self, path: str, open_file: Callable[[str], FileT]) -> FileT:
        """Returns the open file of a path, which stays open until `release(path)`.

        Args:
            path: which file.
            open_file: opens the file of a path; an OSError with EMFILE or ENFILE says that no descriptor is free. It
                is not kept: as a bound method, it would keep its owner, and the open files with it, alive.

        Raises:
            ValueError: `close` was called.
            Exception: whatever opening raises; there is nothing to release then.
        """
        with self._lock:
            self.check_open()
            entry = self._entries.get(path)
            is_new = entry is None
            if entry is None:
                entry = self._entries[path] = _Entry()
            entry.users += 1
            self._idle.pop(path, None)
        if is_new:
            _registry().make_room(self._descriptors_per_file)
            self.close_idle_beyond(sys.maxsize)
        # Set once, and only closed when there are no users: reading it without the lock is safe.
        return entry.file if entry.file is not None else self._open(path, entry, open_file)

    def check_open(self) -> None:
        """Raises ValueError if `close` was called."""
        if self._closed:
            raise ValueError("This source is closed: construct another one to read again.")

    def release(self, path: str) -> None:
        """Ends one use of the file."""
        with self._lock:
            entry = self._entries[path]
            entry.users -= 1
            if entry.users == 0 and (self._closed or entry.file is None):
                del self._entries[path]
                if entry.file is not None:
                    entry.file.close()
            elif entry.users == 0:
                self._idle[path] = None

    def close_idle_beyond(self, descriptors: int) -> None:
        """Closes idle files, as long as those open take more descriptors, or are more than `max_open`."""
        most = min(max(1, descriptors // self._descriptors_per_file), self._max_open)
        with self._lock:
            while len(self._entries) > most and self._close_one_idle():
                pass

    def start_anew(self) -> None:
        """Begins without open files in a forked process, whose parent's threads may have held the lock."""
        self._lock = SignalSafeLock(threading.RLock())
        # Kept from being destroyed: a library may do more then than is safe after a fork.
        self._inherited.append(self._entries)
        self._entries = {}
        self._idle = {}

    def close(self) -> None:
        """Closes the idle files now, and each other one when its last user is done. May be called again."""
        with self._lock:
            self._closed = True
            # A signal may have come between the last use of a file and the note of it.
            self._idle |= dict.fromkeys(path for path, entry in self._entries.items() if not entry.users)
            while self._close_one_idle():
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
                with self._lock:
                    if error.errno not in _OUT_OF_DESCRIPTORS or not self._close_one_idle():
                        raise

    def _close_one_idle(self) -> bool:
        """Closes the idle file unused for the longest time; returns whether there was one. Needs the lock."""
        while self._idle:
            path = next(iter(self._idle))
            entry = self._entries.pop(path, None)
            self._idle.pop(path, None)
            if entry is not None and entry.file is not None:
                entry.file.close()
                return True
        return False
