"""The bytes of a file, wherever it is: on a disk, read by `pread`, or in a store far away, read by ranges.

Guarantees:
    - A local file is read by `pread`, never mapped: a mapped file that is cut short kills the process, and a page that
      is not in memory is waited for under the interpreter's lock. Where storage is slow, the rest of a batch is asked
      for at once.
    - Of an object, all spans of a batch are asked for at once; those that are near each other by one request.
    - What is read of an object is of the version that was identified, or there is an error. Where a server gives none
      (HTTP without a strong ETag), it is taken on trust that the object stays the same.
"""

import dataclasses
import errno
import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, final

import numpy as np

from millstream.errors import DataSourceError
from millstream.sources.storage import object_stores
from millstream.sources.storage.object_stores import BeyondEndError, RangeRequests
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.urls import is_url

_READS_BETWEEN_LOOKS = 32
"""How many records are read between two looks at the clock."""

_SLOW_READ_SECONDS = 25e-6
"""A read from the page cache takes 1 µs, and 10 µs for 100 KB; one from an SSD takes 50 to 100 µs."""

_NEAR_BYTES = 32 << 10
"""Spans that are not farther apart come by one request: to read so much more takes less time than another request."""

_REQUEST_BYTES = 4 << 20
"""How much one request asks for, unless one record is larger."""

_BLOCK_BYTES = 4 << 20
"""How much of an object is asked for at once, where it is read from front to back."""

_BLOCKS_AHEAD = 4

_SAMPLE_BYTES = 4096
"""How much of its beginning and its end identifies an object whose store gives no version."""

_SAMPLED = b"sample:"


class SpanReadError(OSError):
    """One of several spans could not be read.

    Attributes:
        place: its number among those that were asked for.
    """

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place


class StoredFile(Protocol):
    """An open file, which any number of threads may read."""

    def read(self, start: int, length: int, /) -> bytes:
        """Returns the bytes from `start` on, fewer than `length` perhaps; none beyond the end."""
        ...

    def begin(self, starts: Sequence[int], lengths: Sequence[int], /) -> Callable[[], list[bytes]]:
        """Asks for the bytes of each span, and returns what waits for them; one too short is beyond the end."""
        ...

    def close(self) -> None:
        """Closes it. Nobody reads it any more."""
        ...


def identify(path: str, kind: str) -> FileIdentity:
    """Returns which file is at a path or URL; `kind` says which format was expected.

    Args:
        path: the file.
        kind: the name of the format, for errors.

    Raises:
        FileNotFoundError, PermissionError, …: it cannot be found, or may not be read.
        IsADirectoryError: it is a directory.
        DataSourceError: it is a pipe, a socket or a device; or its store fails.
    """
    if not is_url(path):
        return FileIdentity.of_regular_file(path, kind)
    try:
        size, version = object_stores.state_of(path)
        return FileIdentity.of_object(size, version or _sample(path, size))
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, f"No such {kind} file", path) from error


def exists(path: str) -> bool:
    """Returns whether there is a file at a path or URL that may be read."""
    if not is_url(path):
        return os.path.exists(path)  # noqa: PTH110
    try:
        object_stores.state_of(path)
    except (FileNotFoundError, PermissionError):
        return False  # S3 refuses what is not there, unless the names may be listed.
    return True


def state_of(path: str) -> FileIdentity | None:
    """Returns which file is at a path or URL, or None if there is none."""
    try:
        return FileIdentity.of_object(*object_stores.state_of(path)) if is_url(path) else FileIdentity.of(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None  # S3 refuses what is not there, unless the names may be listed.


def open_stored(path: str, identity: FileIdentity) -> StoredFile:
    """Returns a file, open.

    Raises:
        OSError: it cannot be opened.
    """
    return RemoteFile(path, identity) if is_url(path) else LocalFile(path)


def _sample(url: str, size: int) -> bytes:
    """Returns what identifies an object that has no version: nobody says whether its middle stays the same."""
    if not size:
        return _SAMPLED
    import hashlib  # noqa: PLC0415  (OpenSSL takes long to import)

    places = [(0, min(size, _SAMPLE_BYTES)), (max(0, size - _SAMPLE_BYTES), size)]
    requests = RangeRequests(url, places)
    return _SAMPLED + hashlib.blake2b(requests.result(0)[0] + requests.result(1)[0], digest_size=8).digest()


MAX_PREAD_BYTES = 0x7FFFF000
"""The most bytes that one `pread` of Linux returns."""

_PREAD: Callable[[int, int, int], bytes] = os.pread


@final
class LocalFile:
    """A file of the operating system.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        self._finalizer.atexit = False

    def read(self, start: int, length: int) -> bytes:
        """Returns the bytes from `start` on, fewer than `length` perhaps; none beyond the end."""
        return _whole(self._descriptor, _PREAD(self._descriptor, length, start), start, length)

    def begin(self, starts: Sequence[int], lengths: Sequence[int]) -> Callable[[], list[bytes]]:
        """Returns what returns the bytes of each span; one that is too short lies beyond the end of the file."""
        return lambda: read_spans(self._descriptor, starts, lengths)

    def close(self) -> None:
        """Closes it."""
        self._finalizer()


def read_spans(descriptor: int, starts: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """Returns the bytes of each span; one that is too short lies beyond the end of the file.

    Reading begins one by one. If that is slow, the operating system is asked for all other spans at once.
    """
    spans: list[bytes] = []
    while len(spans) < len(starts):
        done = len(spans)
        few = slice(done, done + _READS_BETWEEN_LOOKS)
        before = time.perf_counter()
        spans += map(_PREAD, itertools.repeat(descriptor), lengths[few], starts[few])
        if time.perf_counter() - before > _SLOW_READ_SECONDS * (len(spans) - done):
            break
    done = len(spans)
    if done < len(starts):
        if hasattr(os, "posix_fadvise"):  # Not on macOS.
            for start, length in zip(starts[done:], lengths[done:], strict=True):
                os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)
        spans += map(_PREAD, itertools.repeat(descriptor), lengths[done:], starts[done:])
    if max(lengths, default=0) > MAX_PREAD_BYTES:
        return [_whole(descriptor, *read) for read in zip(spans, starts, lengths, strict=True)]
    return spans


def _whole(descriptor: int, content: bytes, start: int, length: int) -> bytes:
    """Returns the bytes from `start` on, of which the first were read: one `pread` may return fewer than exist."""
    if length <= MAX_PREAD_BYTES:
        return content
    parts = [content]
    done = len(content)
    while done < length and (more := _PREAD(descriptor, length - done, start + done)):
        parts.append(more)
        done += len(more)
    return b"".join(parts)


@final
class RemoteFile:
    """One version of an object. Nothing is asked of its store before the first read.

    Args:
        url: its name.
        identity: which version.
    """

    def __init__(self, url: str, identity: FileIdentity) -> None:
        self._url = url
        self._identity = identity
        self._blocks: dict[int, RangeRequests] = {}

    def read(self, start: int, length: int) -> bytes:
        """Returns the bytes from `start` on, fewer at the end only; for one thread, which goes from front to back."""
        stop = min(start + length, self._identity.size)
        first, last = start // _BLOCK_BYTES, (stop - 1) // _BLOCK_BYTES
        if stop <= start:
            return b""
        # Ahead of a reader that continues where it was, not of one that looks here and there.
        is_going_on = first in self._blocks or first - 1 in self._blocks
        ahead = min(last + _BLOCKS_AHEAD if is_going_on else last, (self._identity.size - 1) // _BLOCK_BYTES)
        self._blocks = {number: block for number, block in self._blocks.items() if number >= first}
        for number in range(first, ahead + 1):
            if number not in self._blocks:
                end = min((number + 1) * _BLOCK_BYTES, self._identity.size)
                self._blocks[number] = RangeRequests(self._url, [(number * _BLOCK_BYTES, end)])
        try:
            parts = [self._checked(self._blocks[number], 0, 0) for number in range(first, last + 1)]
        except SpanReadError as error:
            raise DataSourceError(str(error)) from error
        joined = parts[0] if len(parts) == 1 else b"".join(parts)
        begin = start - first * _BLOCK_BYTES
        return joined[begin : begin + stop - start]

    def begin(self, starts: Sequence[int], lengths: Sequence[int]) -> Callable[[], list[bytes]]:
        """Asks for all spans at once, and returns what waits for them."""
        joined = join_near(starts, lengths)
        requests = RangeRequests(self._url, [(part.start, part.stop) for part in joined])

        def finish() -> list[bytes]:
            spans = [b""] * len(starts)
            for number, part in enumerate(joined):
                content = self._checked(requests, number, part.places[0])
                for place in part.places:
                    begin = starts[place] - part.start
                    spans[place] = content[begin : begin + lengths[place]]
            return spans

        return finish

    def close(self) -> None:
        """Gives up what was asked for ahead."""
        for block in self._blocks.values():
            block.cancel()
        self._blocks = {}

    def _checked(self, requests: RangeRequests, number: int, place: int) -> bytes:
        """Returns the bytes of a range, or the error of the span at a place."""
        try:
            content, version = requests.result(number)
        except BeyondEndError:
            raise SpanReadError(place, self._changed()) from None
        except FileNotFoundError:
            raise SpanReadError(place, f"{self._url!r} was removed while it was being read. Restore it.") from None
        except DataSourceError as error:
            raise SpanReadError(place, str(error)) from error
        except OSError as error:
            raise SpanReadError(place, f"{error.strerror}: {self._url!r}.") from error
        if version != self._identity.version and not self._identity.version.startswith(_SAMPLED):
            raise SpanReadError(place, self._changed())
        return content

    def _changed(self) -> str:
        return (
            f"{self._url!r} is not what it was when the source was constructed: it was replaced. Construct the source "
            "again, or restore the object."
        )


@dataclasses.dataclass(slots=True)
class JoinedSpans:
    """Spans that one request asks for.

    Attributes:
        start: where the first of them begins.
        stop: where the last one ends.
        places: their numbers among all spans.
    """

    start: int
    stop: int
    places: list[int]


def join_near(starts: Sequence[int], lengths: Sequence[int]) -> list[JoinedSpans]:
    """Returns which spans are near enough to each other to be asked for together; none that is empty."""
    begins = np.array(starts, np.int64)
    ends = begins + np.array(lengths, np.int64)
    order = np.argsort(begins, kind="stable")
    joined: list[JoinedSpans] = []
    for place in order[ends[order] > begins[order]].tolist():
        begin, end = int(begins[place]), int(ends[place])
        if joined and begin - joined[-1].stop <= _NEAR_BYTES:
            stop = max(joined[-1].stop, end)
            if stop - joined[-1].start <= _REQUEST_BYTES:
                joined[-1].stop = stop
                joined[-1].places.append(place)
                continue
        joined.append(JoinedSpans(begin, end, [place]))
    return joined
