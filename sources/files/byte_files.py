"""The bytes of files, on a local disk or in an object store.

Guarantees:
    - A local file is read by `pread`, never mapped: truncating a mapped file kills the process, and page faults hold
      the interpreter lock. On slow storage, the system prefetches the remainder of a batch.
    - Spans of a local file that was written to since it was identified are an error: most formats have no checksums.
    - All spans of a batch in an object are requested together, and near spans by one request.
    - Bytes of an object belong to the version that was identified, or there is an error. A server without versions
      (HTTP without a strong ETag) is trusted not to change the object.
"""

import contextlib
import errno
import functools
import io
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.digests import digest
from millstream.sources.files.paths import FileIdentity
from millstream.sources.remote import object_stores
from millstream.sources.remote.object_stores import BeyondEndError, RangeRequests, join_near
from millstream.sources.remote.urls import is_url

_MAX_PLACEHOLDER_BYTES = 1024
"""Limit of the size of a placeholder. Git LFS has no larger ones."""

_PLACEHOLDERS = {
    "Git LFS pointer": (rb"version https?://\S+\s+(ext-.*\s+)*oid \w+:[0-9a-f]{32}", "git lfs pull"),
    "git-annex pointer": (rb"[/\\]annex[/\\]objects[/\\][^/\\\n]+\n?\Z", "git annex get"),
}
"""The content of the files that stand in for large ones in a clone, and the command that fetches these."""

_TIMED_READS = 32
"""The number of reads between two measurements of their speed."""

_SLOW_READ_SECONDS = 25e-6
"""A read from the page cache takes 1 µs, and 10 µs for 100 KB; a read from an SSD takes 50 to 100 µs."""

_BLOCK_BYTES = 4 << 20
"""Bytes per request when an object is read sequentially."""

_PREFETCHED_BLOCKS = 4

_SAMPLE_BYTES = 4096
"""Bytes at the start and at the end of an object that identify it if its store has no versions."""

_SAMPLED = b"sample:"

_WRITTEN = "the file was written to since the source was constructed. Construct the source again."


_TargetT = TypeVar("_TargetT")
_ResultT = TypeVar("_ResultT")


class SpanReadError(OSError):
    """One of several spans cannot be read: the one with the index `span` in the request."""

    def __init__(self, span: int, reason: str) -> None:
        super().__init__(reason)
        self.span = span


def identify(path: str, kind: str) -> FileIdentity:
    """Returns the identity of the file at a path or URL, as `FileIdentity.of_regular_file` does.

    A placeholder for the file is a DataSourceError.
    """
    if not is_url(path):
        identity = FileIdentity.of_regular_file(path, kind)
        if 0 < identity.size <= _MAX_PLACEHOLDER_BYTES:
            with contextlib.closing(LocalFile(path)) as file:
                refuse_placeholder(path, file.read(0, identity.size))
        return identity
    try:
        size, version = object_stores.state_of(path)
        if 0 < size <= _MAX_PLACEHOLDER_BYTES:
            refuse_placeholder(path, RangeRequests(path, [(0, size)]).result(0)[0])
        return FileIdentity.of_object(size, version or _sample(path, size))
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, f"No such {kind} file", path) from error


def refuse_placeholder(path: str, content: bytes) -> None:
    """Raises DataSourceError if the content of a file names the data that version control keeps elsewhere."""
    if len(content) > _MAX_PLACEHOLDER_BYTES:
        return
    for name, (pattern, command) in _PLACEHOLDERS.items():
        if re.match(pattern, content):
            raise DataSourceError(
                f"{path!r} is a {name}, which names the data instead of holding it. Run `{command}` in its repository."
            )


def exists(path: str) -> bool:
    return os.path.exists(path) if not is_url(path) else state_of(path) is not None  # noqa: PTH110


def state_of(path: str) -> FileIdentity | None:
    """Returns the identity of the file at a path or URL, or None if there is no readable one."""
    try:
        return FileIdentity.of_object(*object_stores.state_of(path)) if is_url(path) else FileIdentity.of(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None  # S3 refuses access to missing objects, unless the names may be listed.


def open_stored(path: str, identity: FileIdentity, location: str | None = None) -> "StoredFile":
    """Opens a file or object with an identity, or a copy of it at another location, which no process writes to."""
    if location is not None and location != path:
        return LocalFile(location)
    return RemoteFile(path, identity) if is_url(path) else LocalFile(path, identity)


def prefetch_file(path: str, spans: Iterable[tuple[int, int]] = ((0, 0),)) -> None:
    """Makes the operating system read spans of a file in advance, by default all of it.

    A span is its start and length, of which 0 is to the end. An error is raised when the file itself is read.
    """
    if not hasattr(os, "posix_fadvise"):  # Not on macOS.
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            for start, length in spans:
                os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def read_whole(path: str, kind: str) -> bytes:
    identity = identify(path, kind)
    with contextlib.closing(open_stored(path, identity)) as file:
        return file.read(0, identity.size)


def _sample(url: str, size: int) -> bytes:
    """Returns a substitute for the version of an object that has none. It does not depend on the object's middle."""
    if not size:
        return _SAMPLED
    ranges = [(0, min(size, _SAMPLE_BYTES)), (max(0, size - _SAMPLE_BYTES), size)]
    requests = RangeRequests(url, ranges)
    return _SAMPLED + digest(8, requests.result(0)[0], requests.result(1)[0])


MAX_PREAD_BYTES = 0x7FFFF000
"""Limit of the bytes that one `pread` of Linux returns."""

_NEAR_GAP_BYTES = 4096
"""Gap per span up to which spans are read together, because copying a page takes less time than a call."""

_NEAR_BYTES = 1 << 19
"""Limit of the bytes that are read together with gaps, because getting more memory takes longer than the calls."""

_PREAD: Callable[[int, int, int], bytes] = os.pread


@final
class LocalFile:
    """A local file. If its identity is given, reads of spans are compared with it."""

    _descriptor = -1

    def __init__(self, path: str, identity: FileIdentity | None = None) -> None:
        # O_NONBLOCK: opening a pipe that has replaced the file does not wait for a writer.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._state = None if identity is None else (identity.size, identity.modified)

    def size(self) -> int:
        """Returns the present size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def read(self, start: int, length: int) -> bytes:
        """Returns the bytes from `start` on, fewer than `length` only at the end."""
        return _complete(self._descriptor, _PREAD(self._descriptor, length, start), start, length)

    def begin(self, starts: Sequence[int], lengths: Sequence[int]) -> Callable[[], list[bytes]]:
        """Returns a function that reads the bytes of each span. A short result is beyond the end of the file."""

        def finish() -> list[bytes]:
            spans = read_spans(self._descriptor, starts, lengths)
            if self._was_written() and list(map(len, spans)) == lengths:  # Else, the error is about the short one.
                raise SpanReadError(0, _WRITTEN)
            return spans

        return finish

    def read_into(self, starts: Sequence[int], rows: NDArray[np.uint8]) -> list[int]:
        """Reads spans of one length, each into its row, and returns the number of bytes of each.

        `rows` is C-contiguous, of shape (spans, bytes), with rows below `MAX_PREAD_BYTES`. A span beyond the end of the
        file fills less of its row.
        """
        memory, length = rows.reshape(-1).data, rows.shape[1]
        expected = [length] * len(starts)
        if len(rows) > 1 and self._read_together(np.array(starts, np.int64), rows):
            found = expected
        else:
            targets = [(memory[row * length : (row + 1) * length],) for row in range(len(rows))]
            read = functools.partial(os.preadv, self._descriptor)
            found = _all_read(self._descriptor, starts, expected, read, targets)
        if self._was_written() and found == expected:
            raise SpanReadError(0, _WRITTEN)
        return found

    def _was_written(self) -> bool:
        """Returns True if the file is another one than its identity says. It is called after a read."""
        if self._state is None:
            return False
        status = os.fstat(self._descriptor)
        return (status.st_size, status.st_mtime_ns) != self._state

    def _read_together(self, starts: NDArray[np.int64], rows: NDArray[np.uint8]) -> bool:
        """Reads spans that are near each other by one call. Returns False if they are not, or the file is shorter."""
        count, length = rows.shape
        first = int(starts.min())
        num_bytes = int(starts.max()) + length - first
        if num_bytes == rows.nbytes < MAX_PREAD_BYTES and (np.diff(starts) == length).all():
            return bool(os.preadv(self._descriptor, (rows.reshape(-1).data,), first) == num_bytes)
        if num_bytes > min(_NEAR_BYTES, rows.nbytes + count * _NEAR_GAP_BYTES):
            return False
        content = np.empty(num_bytes, np.uint8)
        if os.preadv(self._descriptor, (content.data,), first) < num_bytes:
            return False
        rows[:] = np.lib.stride_tricks.as_strided(content, (num_bytes - length + 1, length), (1, 1))[starts - first]
        return True

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        # Not `weakref.finalize`, which takes as long as opening the file.
        self.close()


def read_spans(descriptor: int, starts: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """Returns the bytes of each span. A short result is beyond the end of the file."""
    if len(starts) == 1 and lengths[0] <= MAX_PREAD_BYTES:
        # Nothing to prefetch.
        return [_PREAD(descriptor, lengths[0], starts[0])]
    spans = _all_read(descriptor, starts, lengths, functools.partial(_PREAD, descriptor), lengths)
    if max(lengths, default=0) > MAX_PREAD_BYTES:
        return [_complete(descriptor, *read) for read in zip(spans, starts, lengths, strict=True)]
    return spans


def _all_read(
    descriptor: int,
    starts: Sequence[int],
    lengths: Sequence[int],
    read: Callable[[_TargetT, int], _ResultT],
    targets: Sequence[_TargetT],
) -> list[_ResultT]:
    """Returns `read(target, start)` for each span. If the first reads are slow, the system prefetches all others."""
    results: list[_ResultT] = []
    while len(results) < len(starts):
        done = len(results)
        block = slice(done, done + _TIMED_READS)
        before = time.perf_counter()
        results += map(read, targets[block], starts[block])
        if time.perf_counter() - before > _SLOW_READ_SECONDS * (len(results) - done):
            break
    done = len(results)
    if done < len(starts):
        if hasattr(os, "posix_fadvise"):  # Not on macOS.
            for start, length in zip(starts[done:], lengths[done:], strict=True):
                os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)
        results += map(read, targets[done:], starts[done:])
    return results


def _complete(descriptor: int, content: bytes, start: int, length: int) -> bytes:
    """Reads the remainder of a span, of which one `pread` may return only a part."""
    chunks = [content]
    done = len(content)
    while done < length and (more := _PREAD(descriptor, length - done, start + done)):
        chunks.append(more)
        done += len(more)
    return b"".join(chunks)


@final
class RemoteFile:
    """One version of an object. The first request is that of the first read."""

    def __init__(self, url: str, identity: FileIdentity) -> None:
        self._url = url
        self._identity = identity
        self._blocks: dict[int, RangeRequests] = {}

    def read(self, start: int, length: int) -> bytes:
        """Returns the bytes from `start` on, fewer only at the end. For one thread that reads sequentially."""
        stop = min(start + length, self._identity.size)
        first, last = start // _BLOCK_BYTES, (stop - 1) // _BLOCK_BYTES
        if stop <= start:
            return b""
        # Only a reader that continues at its position is worth reading ahead for.
        ahead = _PREFETCHED_BLOCKS if first in self._blocks or first - 1 in self._blocks else 0
        prefetched = min(last + ahead, (self._identity.size - 1) // _BLOCK_BYTES)
        self._blocks = {number: block for number, block in self._blocks.items() if number >= first}
        blocks = []
        for number in range(first, last + 1):
            # Not all blocks of a long read: the size may be wrong.
            for following in range(number, min(number + _PREFETCHED_BLOCKS, prefetched) + 1):
                if following not in self._blocks:
                    end = min((following + 1) * _BLOCK_BYTES, self._identity.size)
                    self._blocks[following] = RangeRequests(self._url, [(following * _BLOCK_BYTES, end)])
            try:
                blocks.append(self._result(self._blocks[number], 0, 0))
            except SpanReadError as error:
                raise DataSourceError(str(error)) from error
        content = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        begin = start - first * _BLOCK_BYTES
        return content[begin : begin + stop - start]

    def begin(self, starts: Sequence[int], lengths: Sequence[int]) -> Callable[[], list[bytes]]:
        """Requests all spans together, and returns a function that waits for their bytes."""
        joined = join_near(starts, lengths)
        requests = RangeRequests(self._url, [(group.start, group.stop) for group in joined])

        def finish() -> list[bytes]:
            contents = [b""] * len(starts)
            for number, group in enumerate(joined):
                content = self._result(requests, number, group.spans[0])
                for span in group.spans:
                    begin = starts[span] - group.start
                    contents[span] = content[begin : begin + lengths[span]]
            return contents

        return finish

    def read_into(self, starts: Sequence[int], rows: NDArray[np.uint8]) -> list[int]:
        for row, span in zip(rows, self.begin(starts, [rows.shape[1]] * len(starts))(), strict=True):
            row[:] = np.frombuffer(span, np.uint8)
        return [rows.shape[1]] * len(starts)

    def read_here(self, start: int, stop: int) -> bytes:
        """Returns the bytes of a range, requested by this thread."""
        return self._result(RangeRequests(self._url, [(start, stop)], in_threads=False), 0, 0)

    def close(self) -> None:
        for block in self._blocks.values():
            block.cancel()
        self._blocks = {}

    def _result(self, requests: RangeRequests, number: int, span: int) -> bytes:
        try:
            content, version = requests.result(number)
        except BeyondEndError:
            raise SpanReadError(span, self._changed()) from None
        except FileNotFoundError:
            raise SpanReadError(span, f"{self._url!r} was removed. Restore it.") from None
        except DataSourceError as error:
            raise SpanReadError(span, str(error)) from error
        except OSError as error:
            raise SpanReadError(span, f"{error.strerror}: {self._url!r}.") from error
        if version != self._identity.version and not self._identity.version.startswith(_SAMPLED):
            raise SpanReadError(span, self._changed())
        return content

    def _changed(self) -> str:
        return f"{self._url!r} has changed since the source was constructed. Construct the source again."


StoredFile: TypeAlias = LocalFile | RemoteFile
"""An open file, which any number of threads may read."""


@final
class RawFile(io.RawIOBase):
    """A file of a known size, whose bytes a function reads.

    The function returns bytes, given the offset of the first one and their number. It is at least 1, and ends within
    the file.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        super().__init__()
        self._read = read
        self._size = size
        self._position = 0

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._size - self._position)
        count = left if size < 0 else min(size, left)
        content = self._read(self._position, count) if count else b""
        self._position += len(content)
        return content

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        content = self.read(len(target))
        target[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
