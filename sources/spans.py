"""Records that are spans of bytes in files: the base of all sources that need no library to read one.

A format says how to find where the records of a file begin, in one pass from its front to its end, and how to turn
their bytes into records. All else is here: the index of these places is made once and kept (see `offset_index`); a
read of many records is one `pread` for each, in one go.

Guarantees, besides those of all sources of files:
    - Files are read by `pread`, never mapped: a mapped file that is cut short kills the process, and a page that is not
      in memory is waited for under the interpreter's lock.
    - A span that lies beyond the end of its file is an error with file and record.
    - Where storage is slow, the rest of a batch is asked for at once.
"""

import abc
import dataclasses
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, final

import numpy as np

from millstream.errors import DataSourceError
from millstream.sources.files import FileRecords
from millstream.sources.offset_index import Offsets, find_offsets, store_offsets
from millstream.sources.progress import CancelledScanError, Progress
from millstream.sources.scan import Scan

if TYPE_CHECKING:
    from concurrent.futures import Executor

RecordT = TypeVar("RecordT")

_READS_BETWEEN_LOOKS = 32
"""How many records are read between two looks at the clock."""

_SLOW_READ_SECONDS = 25e-6
"""A read from the page cache takes 1 µs, and 10 µs for 100 KB; one from an SSD takes 50 to 100 µs."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpanPlaces:
    """Where some records were read, for the errors of those that are wrong.

    Attributes:
        path: the file.
        positions: the number of each record in the file, from 0.
        keys: the key of each record.
    """

    path: str
    positions: Sequence[int]
    keys: Sequence[int]

    def error(self, place: int, reason: str) -> DataSourceError:
        """Returns the error of the record at a place of the batch, from 0."""
        return DataSourceError(
            f"Cannot read record {self.positions[place]} of {self.path!r} (record key {self.keys[place]}): {reason}"
        )


class SpanFormat(abc.ABC, Generic[RecordT]):
    """How the records of one format are found and decoded. It has no state but its options, and can be pickled."""

    index_kind: ClassVar[str]
    """The name of the index: one word, which is part of a file's name. Formats that differ in it never share one."""

    index_version: ClassVar[int] = 1
    """To be raised when records are found in another way: indices that were made before are made anew."""

    @abc.abstractmethod
    def offsets(self, scan: Scan) -> Iterator[Any]:
        """Yields, in integer arrays of any lengths, where the records begin, and at last where the last one ends.

        A file without records has one offset.

        Raises:
            DataSourceError: the file is not of this format, or is damaged.
        """

    @abc.abstractmethod
    def decode(self, spans: list[bytes], places: SpanPlaces) -> list[RecordT]:
        """Returns the records of some spans.

        Raises:
            DataSourceError: one of them is damaged, made by `places.error`.
        """


class SpanRecords(FileRecords[RecordT]):
    """The records of files of one `SpanFormat` laid end to end.

    Args:
        paths: one path or a sequence of paths, as `resolve_paths` takes them.
        span_format: how records are found and decoded.
    """

    descriptors_per_file: ClassVar[int] = 2  # A mapping of the index keeps one, too.

    def __init__(self, paths: Any, span_format: SpanFormat[RecordT]) -> None:
        self._format = span_format
        self._unsaved: dict[str, Offsets] = {}
        self._progress: Progress | None = None
        super().__init__(paths)

    def _count_files(self, paths: Sequence[str], threads: "Executor") -> None:  # noqa: ARG002
        """Makes the index of every file that has none. Those of which only ranges are used need one as well."""
        num_files = f"{len(self._paths)} file{'s'[: len(self._paths) > 1]}"
        progress = Progress(f"Indexing {num_files}", sum(identity.size for identity in self._identities.values()))
        self._progress = progress
        try:
            super()._count_files(self._paths, threads)
        except BaseException:
            progress.cancel()  # Else the pool would wait until the files that threads are at are through.
            raise
        finally:
            self._progress = None
            progress.close()
        self._check_ranges()

    def _count(self, path: str) -> int:
        return len(self._offsets(path)) - 1

    def _open(self, path: str) -> "SpanFile[RecordT]":
        return SpanFile(path, self._offsets(path), self._format_of(path))

    def _format_of(self, path: str) -> SpanFormat[RecordT]:  # noqa: ARG002  (a format may know more of each file)
        """Returns how the records of a file are decoded."""
        return self._format

    def _offsets(self, path: str) -> Offsets:
        """Returns the index of a file; it is made if it is not there, or is of another state of the file."""
        if path in self._unsaved:
            return self._unsaved[path]
        progress = self._progress or Progress(f"Indexing {path!r}", self._identities[path].size)
        key = (path, self._format.index_kind, self._format.index_version, self._identities[path])
        offsets = find_offsets(*key)
        if offsets is not None:
            progress.advance(self._identities[path].size)
            return offsets
        scan = Scan(path, self._identities[path], progress)
        try:
            offsets = store_offsets(*key, self._scanned(scan))
        except CancelledScanError:
            raise DataSourceError(f"The search for the records of {path!r} was given up.") from None
        finally:
            scan.close()
        if offsets.flags.owndata:
            self._unsaved[path] = offsets
        return offsets

    def _scanned(self, scan: Scan) -> Iterator[Any]:
        yield from self._format.offsets(scan)
        scan.check_unchanged()


@final
class SpanFile(Generic[RecordT]):
    """An open file with its index.

    Args:
        path: the file.
        offsets: its index.
        span_format: how records are decoded.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, offsets: Offsets, span_format: SpanFormat[RecordT]) -> None:
        self._path = path
        self._offsets = offsets
        self._format = span_format
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        self._finalizer.atexit = False

    @property
    def num_records(self) -> int:
        """How many records it holds."""
        return len(self._offsets) - 1

    def read(self, positions: Sequence[int], keys: Sequence[int]) -> list[RecordT]:
        """Returns the records at the positions, numbers from 0 in any order; the keys are for errors.

        Raises:
            DataSourceError: one of the records is damaged or lost.
        """
        places = SpanPlaces(self._path, positions, keys)
        rows = np.array(positions, np.int64)
        starts = self._offsets[rows]
        stops = self._offsets[rows + 1]
        lengths = stops - starts
        if len(rows) and (lengths.min() < 0 or starts.min() < 0 or stops.max() > self._offsets[-1]):
            place = int(np.flatnonzero((lengths < 0) | (starts < 0) | (stops > self._offsets[-1]))[0])
            raise places.error(
                place,
                f"the index of the file's records is damaged: it has the record from byte {starts[place]} to "
                f"{stops[place]}. Remove the index, a `.npy` beside the file or in the cache folder.",
            )
        try:
            spans = read_spans(self._descriptor, starts.tolist(), lengths.tolist())
        except OSError as error:
            raise places.error(
                0, f"reading failed here or at one of the other {len(keys) - 1} records that were asked for: {error}"
            ) from error
        if list(map(len, spans)) != (wanted := lengths.tolist()):
            place = next(n for n, (span, length) in enumerate(zip(spans, wanted, strict=True)) if len(span) != length)
            raise places.error(
                place,
                f"the file ends after {len(spans[place]):,} of its {wanted[place]:,} bytes, so it was cut short while "
                "it was open. Restore the file.",
            )
        return self._format.decode(spans, places)

    def close(self) -> None:
        """Closes it. Nobody reads it any more."""
        self._finalizer()


_PREAD: Callable[[int, int, int], bytes] = os.pread


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
    return spans
