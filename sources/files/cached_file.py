"""A remote file whose records are read from a copy in a cache.

Guarantees:
    - Any number of threads may read. The copy is not evicted while one does.
    - A copy that was evicted between two reads is made again.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, final

from millstream.errors import DataSourceError
from millstream.signals import SignalSafeLock
from millstream.sources.storage.file_cache import FileCache, LocalCopy
from millstream.sources.storage.open_files import RecordFile, RecordT

if TYPE_CHECKING:
    import weakref


@final
class CopiedFile(Generic[RecordT]):
    """A remote file that is read from a copy, which is made when it is needed.

    Args:
        url: the URL of the file.
        acquire: returns the copy, given the URL.
        open_file: opens the file of records, given its URL and the path of the copy.
    """

    def __init__(
        self,
        url: str,
        acquire: "weakref.WeakMethod[Callable[[str], LocalCopy]]",
        open_file: "weakref.WeakMethod[Callable[[str, str], RecordFile[RecordT]]]",
    ) -> None:
        self._url = url
        self._acquire = acquire
        self._open_file = open_file
        self._lock = SignalSafeLock(threading.Lock())
        self._users = 0
        self._opened: tuple[LocalCopy, RecordFile[RecordT]] | None = None

    @property
    def num_records(self) -> int:
        file = self._begin()
        try:
            return file.num_records
        finally:
            self._end()

    def read(self, positions: Sequence[int], keys: Sequence[int]) -> list[RecordT]:
        try:
            file = self._begin()
        except OSError as error:
            raise DataSourceError(
                f"Cannot read record {positions[0]} of {self._url!r} (record key {keys[0]}): {error}"
            ) from error
        try:
            return file.read(positions, keys)
        finally:
            self._end()

    def close(self) -> None:
        if (opened := self._opened) is not None:
            self._opened = None
            copy, file = opened
            file.close()
            copy.close()

    def _begin(self) -> RecordFile[RecordT]:
        """Returns the open copy, which is not evicted until `_end`."""
        with self._lock:
            if self._users == 0 and self._opened is not None and not self._opened[0].reacquire():
                self.close()
            if self._opened is None:
                self._opened = self._open()
            self._users += 1
            return self._opened[1]

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._opened is not None:
                self._opened[0].release()

    def _open(self) -> tuple[LocalCopy, RecordFile[RecordT]]:
        open_file, acquire = self._open_file(), self._acquire()
        if open_file is None or acquire is None:
            raise ReferenceError("The source that this file belongs to is gone.")
        copy = acquire(self._url)
        try:
            return copy, open_file(self._url, copy.path)
        except BaseException:
            copy.close()
            raise


def check_cache(cache: object) -> None:
    if not isinstance(cache, FileCache):
        raise TypeError(f"cache must be a FileCache, or None to read without one, got {type(cache).__name__}.")
