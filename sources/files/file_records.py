"""Records in files of any format that are found one by one: each file of a batch is read in one call."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, SupportsIndex, final

from millstream.sources.base import RecordKeys, checked_record_keys
from millstream.sources.files.multi_file import Files
from millstream.sources.pieces import cut
from millstream.sources.remote.urls import is_url
from millstream.sources.storage.file_cache import LocalCopy
from millstream.sources.storage.open_files import RecordFile, RecordT


class FileRecords(Files[RecordFile[RecordT]]):
    """The records of several files, found one by one: each file of a batch is read in one call."""

    def __getitem__(self, record_key: SupportsIndex) -> RecordT:
        path, position = self.locate(record_key)
        return self._read(path, [position], [operator.index(record_key)])[0]

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[RecordT]:
        """Returns the records of the keys, in their order; keys may repeat. Each file is read once."""
        keys = checked_record_keys(record_keys, self._num_records)
        if len(self._ranges) == 1 and len(keys):
            # Nothing to sort: sorting is most of the work if a mixture reads a few records of each of many sources.
            return self._read(self._paths[0], (keys + self._ranges[0].start).tolist(), keys.tolist())
        ranges, rows = self._pieces.locate(keys)
        by_file = cut(self._file_numbers[ranges], len(self._paths))
        positions = (rows + self._first_rows[ranges])[by_file.order].tolist()
        sorted_keys = keys[by_file.order].tolist()
        records = self._read_files(
            (self._paths[file], positions[start:stop], sorted_keys[start:stop]) for file, start, stop in by_file.runs
        )
        return by_file.put_back(records)

    def _read_files(self, requests: Iterable[tuple[str, list[int], list[int]]]) -> list[RecordT]:
        """Returns the records of files in stores by requesting all of them before the first one is awaited."""
        if not self._reads_stores:
            return [record for request in requests for record in self._read(*request)]
        begun: list[Callable[[], list[RecordT]]] = []
        acquired: list[str] = []
        try:
            for path, positions, keys in requests:
                file = self._acquire(path, positions[0], keys[0])
                acquired.append(path)
                begin = getattr(file, "begin", None) or functools.partial(functools.partial, file.read)
                begun.append(begin(positions, keys))
            return [record for finish in begun for record in finish()]
        finally:
            for path in acquired:
                self._open_files.release(path)

    @functools.cached_property
    def _reads_stores(self) -> bool:
        return self._cache is None and any(map(is_url, self._paths))

    def _read(self, path: str, positions: list[int], keys: list[int]) -> list[RecordT]:
        file = self._acquire(path, positions[0], keys[0])
        try:
            return file.read(positions, keys)
        finally:
            self._open_files.release(path)

    def _open_unchanged(self, path: str) -> RecordFile[RecordT]:
        if not self._is_copied(path):
            return super()._open_unchanged(path)
        copy = self._copy_of(path)
        try:
            return _CopiedFile(copy, self._open_checked(path, copy.path))
        except BaseException:
            copy.close()
            raise


@final
class _CopiedFile(Generic[RecordT]):
    """A file that is read from a copy in a cache, which is not evicted while the file has users."""

    def __init__(self, copy: LocalCopy, file: RecordFile[RecordT]) -> None:
        self._copy, self._file = copy, file
        self.num_records, self.read = file.num_records, file.read
        self.pause, self.resume = copy.release, copy.reacquire

    def close(self) -> None:
        self._file.close()
        self._copy.close()
