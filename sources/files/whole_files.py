"""Files that are a record each: images, audio, documents, on a disk or in a bucket."""

import contextlib
import itertools
import os
import stat
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.base import ReadsBatches, RecordKeys, checked_record_key, checked_record_keys
from millstream.sources.digests import digest
from millstream.sources.files.multi_file import INSPECTION_THREADS, marks_of_paths, reading_error, sampled_rows
from millstream.sources.remote.object_stores import WholeObjects
from millstream.sources.remote.urls import canonical, is_url, without_query
from millstream.sources.storage.byte_files import identify, refuse_placeholder
from millstream.sources.storage.open_files import in_threads
from millstream.sources.storage.paths import FileIdentity, common_folder, resolve_paths

_FILES_PER_REQUEST = 32
"""The number of files that are requested together if storage is slow, and read between two looks at the clock."""

_SLOW_READ_SECONDS = 100e-6
"""A file in the page cache is opened and read in 10 µs; from a disk or over a network it takes 100 µs and more."""

_LISTED_PER_FILE = 4
"""The number of entries of a folder that are read per file of the source, to learn the types of the files."""


class FileDataSource(ReadsBatches):
    """Files that are a record each: `{"path": str, "bytes": bytes}`.

    The names take some 50 bytes of memory per file. A file is opened when it is read, by one read, and closed: none
    stays open. If storage is slow, or is a store, the files of a batch are requested together.

    Args:
        paths: one path or a sequence of paths, made absolute immediately. A path is a file (`~` is expanded) or a
            pattern such as `audio/**/*.flac` (its matches sorted by name). The order of the paths is that of the
            records. A `str` may be a URL of `gs://`, `s3://`, `http://` or `https://`.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found, or a pattern has no match. Objects in stores are
            looked up when they are read.
        IsADirectoryError: a path is a directory.
        TypeError: paths that are not paths, or a set of paths, which has no order.
        ValueError: no paths, or a range of records after a path.

    Each reading member raises DataSourceError, with the file and the record, for a file that was removed, cannot be
    read, or is not a regular file.

    Examples:
        >>> source = millstream.FileDataSource("images/*/*.png")
        >>> len(source), source[2]["path"][-9:], source[2]["bytes"][1:4]
        (3, 'dog/1.png', b'PNG')
    """

    allows_empty_files: ClassVar[bool] = True

    def __init__(self, paths: Any) -> None:
        files = resolve_paths(paths, "data")
        if (ranged := next((file for file in files if file.stop is not None), None)) is not None:
            raise ValueError(
                f"paths must be files, each of which is one record, got the range [{ranged.start}:{ranged.stop}] of "
                f"{ranged.path!r}. Pass the file alone."
            )
        names = [file.path for file in files]
        _check_regular([name for name in names if not is_url(name)])
        self._keep_names(common_folder(names), names)

    def _keep_names(self, root: str, paths: Sequence[str]) -> None:
        """Sets the files: paths or URLs that begin with `root`, which is not stored with each of them."""
        encoded = [os.fsencode(path[len(root) :]) for path in paths]
        self._root = root
        self._digest = ""
        self._marks: dict[str, str] | None = None
        # Two arrays: workers share them, whatever the number of files.
        self._ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        self._names = np.frombuffer(b"".join(encoded), np.uint8)
        if os.path.isfile(self._path(0)):  # noqa: PTH113
            identify(self._path(0), "data")  # If one file is a placeholder, all are, or are found when they are read.

    def __len__(self) -> int:
        return len(self._ends)

    def __getitems__(self, record_keys: RecordKeys) -> list[dict[str, Any]]:
        """Returns the records of the keys, in their order; keys may repeat."""
        paths, contents = self._read(checked_record_keys(record_keys, len(self)))
        return [{"path": path, "bytes": content} for path, content in zip(paths, contents, strict=True)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} file{'s'[: len(self) > 1]}, first {self._path(0)!r})"

    def fingerprint(self) -> str:
        """Returns the number of files and a digest of their names within the folder that holds all of them."""
        return f"Files records={len(self)} digest={self._digest_of_names()}"

    def content_marks(self) -> dict[str, str]:
        """Returns digests of the sizes, of the ends and of the versions of up to 64 files, evenly spread ones.

        A checkpoint warns if they differ. Files that cannot be read are left out.
        """
        if self._marks is None:
            self._marks = marks_of_paths([self._path(row) for row in sampled_rows(len(self))])
        return self._marks

    def _digest_of_names(self, *others: bytes) -> str:
        if not self._digest:
            names, ends = self._names, self._ends
            if self._root.startswith("http") and is_url(self._root):  # Passwords and signatures change.
                plain = [without_query(self._path(key)) for key in range(len(self))]
                folder = common_folder(plain)
                encoded = [os.fsencode(name.removeprefix(folder)) for name in plain]
                names, ends = np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([*map(len, encoded)])
            self._digest = digest(8, names.data, ends.astype("<i8").data, *others).hex()
        return self._digest

    def locate(self, record_key: SupportsIndex) -> tuple[str, int]:
        """Returns the file of a record, and 0, because a file is one record.

        Args:
            record_key: the record key, 0 … len(source) - 1.

        Raises:
            IndexError: the record key is out of range.
        """
        return self._path(checked_record_key(record_key, len(self))), 0

    def _path(self, key: int) -> str:
        start = self._ends[key - 1] if key else 0
        name = self._root + os.fsdecode(self._names[start : self._ends[key]].tobytes())
        return canonical(name) if is_url(name) else name

    def _read(self, keys: NDArray[np.int64]) -> tuple[list[str], list[bytes]]:
        paths = [self._path(key) for key in keys.tolist()]
        far = [row for row, path in enumerate(paths) if is_url(path)]
        near = [row for row, path in enumerate(paths) if not is_url(path)]
        contents = dict(zip(near, self._read_local([paths[row] for row in near], keys[near].tolist()), strict=True))
        if far:
            contents |= zip(far, self._read_objects([paths[row] for row in far], keys[far].tolist()), strict=True)
        return paths, [contents[row] for row in range(len(paths))]

    def _read_local(self, paths: Sequence[str], keys: Sequence[int]) -> list[bytes]:
        """Returns the contents of local files. If the first reads are slow, the others are requested in advance."""
        contents: list[bytes] = []
        is_slow = False
        while len(contents) < len(paths):
            rows = slice(len(contents), len(contents) + _FILES_PER_REQUEST)
            if is_slow:
                _request(paths[rows])
            before = time.perf_counter()
            contents += map(self._content, paths[rows], keys[rows])
            is_slow = is_slow or time.perf_counter() - before > _SLOW_READ_SECONDS * len(paths[rows])
        return contents

    def _content(self, path: str, key: int) -> bytes:
        try:
            # O_NONBLOCK: opening a pipe does not wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise _error(key, path, "it is not a regular file")
                chunks = [os.read(descriptor, status.st_size + 1)]
                while chunks[-1] and sum(map(len, chunks)) < status.st_size:  # One read is at most 2 GiB.
                    chunks.append(os.read(descriptor, status.st_size + 1))
            finally:
                os.close(descriptor)
        except DataSourceError:
            raise
        except OSError as error:
            raise reading_error(error, path, 0, key) from error
        content = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if len(content) != status.st_size:
            raise _error(key, path, "it was changed while it was being read")
        return self._checked(content, path, key)

    def _read_objects(self, urls: Sequence[str], keys: Sequence[int]) -> list[bytes]:
        """Returns the contents of objects, all requested together."""
        objects = WholeObjects(urls)
        contents: list[bytes] = []
        try:
            for number, (url, key) in enumerate(zip(urls, keys, strict=True)):
                contents.append(self._checked(objects.result(number), url, key))
        except OSError as error:
            raise reading_error(error, urls[len(contents)], 0, keys[len(contents)]) from error
        finally:
            objects.cancel()
        return contents

    def _checked(self, content: bytes, path: str, key: int) -> bytes:
        if not content and not self.allows_empty_files:
            raise _error(key, path, "it is empty")
        try:
            refuse_placeholder(path, content)
        except DataSourceError as error:
            raise reading_error(error, path, 0, key) from None
        return content


def _check_regular(paths: Sequence[str]) -> None:
    """Raises the error of a path that is not a regular file.

    A folder's list tells the types of its files, so one request of network storage replaces hundreds.
    """
    names: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        folder, _, name = path.rpartition("/")
        names[folder].append(name)

    def others_of(folder: str) -> list[str]:
        wanted = names[folder]
        regular: set[str] = set()
        # A few files of a large folder, and a folder that may not be listed, are looked up one by one.
        with contextlib.suppress(OSError), os.scandir(folder or "/") as entries:
            listed = itertools.islice(entries, _LISTED_PER_FILE * len(wanted))
            regular.update(entry.name for entry in listed if entry.is_file(follow_symlinks=False))
        return [f"{folder}/{name}" for name in wanted if name not in regular]

    others = [path for found in in_threads(others_of, list(names), INSPECTION_THREADS) for path in found]
    for _ in in_threads(lambda path: FileIdentity.of_regular_file(path, "data"), others, INSPECTION_THREADS):
        pass


def _request(paths: Sequence[str]) -> None:
    """Makes the operating system read the files in advance. An error is raised when the file itself is read."""
    if not hasattr(os, "posix_fadvise"):  # Not on macOS.
        return
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:
            continue
        finally:
            os.close(descriptor)


def _error(key: int, path: str, reason: str) -> DataSourceError:
    return DataSourceError(f"Cannot read record 0 of {path!r} (record key {key}): {reason}. Restore the file.")
