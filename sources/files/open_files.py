"""A limited number of open files, shared by the threads that read them.

Guarantees, besides those of `keyed_pool`:
    - A file in use is never closed. Idle files may be closed, least recently used first.
    - At most `max_open` files are open, unless more are in use at the same time. All sources of a process together use
      at most half of its file descriptors, shared equally among the sources with open files.
    - If the process runs out of file descriptors, idle files of this source and then of others are closed, one after
      another, before the error is raised.
    - After `close()`, no file can be acquired, and the last `release` of a file in use closes it.
    - A signal handler may close a source while its thread is in a method here.
"""

import errno
import functools
import resource
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, final

from millstream.sources.keyed_pool import Entry, KeyedPool, new_lock, reset_in_forked_processes

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
        self._lock = new_lock()
        # An upper bound of the descriptors in use: counted over all sources, of which a mixture may have a thousand,
        # from time to time, and raised with each file that is opened.
        self._max_in_use = 0
        self._share, self._opens_before_check = 0, 0
        reset_in_forked_processes(self)

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
        self._lock = new_lock()
        self._max_in_use = 0


@functools.cache
def _registry() -> _Registry:
    return _Registry()


def _always() -> bool:
    """Stands for `pause` and `resume` of files that have none."""
    return True


@final
class OpenFiles(KeyedPool[str, FileT]):
    """Files by path, opened on demand. Each successful `acquire` needs one `release`."""

    def __init__(self, max_open: int, descriptors_per_file: int = 1) -> None:
        super().__init__()
        self._max_open = max_open
        self._descriptors_per_file = descriptors_per_file
        self._closed = False
        _registry().add(self)

    @property
    def closed(self) -> bool:
        return self._closed

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
            entry, is_new = self._used(path, 1)
            if entry.uses == 1 and entry.value is not None and not getattr(entry.value, "resume", _always)():
                entry.value.close()
                entry.value = None
        if is_new:
            _registry().make_room(self._descriptors_per_file)
            if len(self._entries) > self._max_open:
                self.close_idle_beyond(sys.maxsize)
        # Set by `_open`, and closed only without other users, so it is safe to read it without the lock.
        return entry.value if entry.value is not None else self._open(path, entry, open_file)

    def check_open(self) -> None:
        if self._closed:
            raise ValueError("This source is closed. Construct another one to read again.")

    def release(self, path: str) -> None:
        with self._lock:
            entry = self._entries[path]
            self._entries.move_to_end(path)
            entry.uses -= 1
            if entry.uses == 0 and (self._closed or entry.value is None):
                del self._entries[path]
                if entry.value is not None:
                    entry.value.close()
            elif entry.uses == 0:
                getattr(entry.value, "pause", _always)()

    def close_idle_beyond(self, descriptors: int) -> None:
        """Closes idle files while the open files exceed a number of descriptors, or `max_open`."""
        limit = min(max(1, descriptors // self._descriptors_per_file), self._max_open)
        with self._lock:
            while len(self._entries) > limit and self.close_one_idle():
                pass

    def close(self) -> None:
        """Closes the idle files, and each other file when its last user releases it. May be called again."""
        with self._lock:
            self._closed = True
            while self.close_one_idle():
                pass

    def close_one_idle(self) -> bool:
        """Closes the least recently used idle file. Returns False if there is none."""
        with self._lock:
            for path, entry in self._complete():
                if not entry.uses and entry.value is not None and self._entries.pop(path, None) is not None:
                    entry.value.close()
                    return True
        return False

    def _open(self, path: str, entry: Entry[FileT], open_file: Callable[[str], FileT]) -> FileT:
        try:
            with entry.making:
                if entry.value is None:
                    file = self._open_making_room(path, open_file)
                    with self._lock:
                        entry.value = file
                return entry.value
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
