"""Records that are spans of bytes in files: the base of all sources that need no library to read one.

A format says how to find where the records of a file begin, in one pass from its front to its end, and how to turn
their bytes into records. All else is here: the index of these places is made once and kept (see `offset_index`); a
read of many records is one `pread` for each, in one go, or one request to a store (see `stored_files`).

Guarantees, besides those of all sources of files:
    - A span that lies beyond the end of its file is an error with file and record.
    - Where files are objects in stores, all that a batch needs of any of them is asked for before any of it is awaited.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.files.file_records import FileRecords
from millstream.sources.files.scan import Scan
from millstream.sources.storage.file_cache import FileCache
from millstream.sources.storage.offset_index import Offsets, find_offsets, indexed_size, store_offsets
from millstream.sources.storage.paths import FilePart
from millstream.sources.storage.progress import CancelledScanError, Progress
from millstream.sources.storage.stored_files import SpanReadError, StoredFile, open_stored
from millstream.sources.storage.urls import is_url

if TYPE_CHECKING:
    from concurrent.futures import Executor

RecordT = TypeVar("RecordT")


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
        cache: where whole files of stores are copied to before they are read; None to read them where they are.
    """

    descriptors_per_file: ClassVar[int] = 2  # A mapping of the index keeps one, too.

    def __init__(self, paths: Any, span_format: SpanFormat[RecordT], cache: FileCache | None = None) -> None:
        self._format = span_format
        self._unsaved: dict[str, Offsets] = {}
        self._progress: Progress | None = None
        super().__init__(paths, cache)
        self._reads_stores = cache is None and any(map(is_url, self._paths))

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

    @property
    def unkept_indices(self) -> list[str]:
        """The files whose index no folder takes: each process that reads them makes it anew."""
        return list(self._unsaved)

    def span_sizes(self) -> NDArray[np.int64]:
        """Returns how many bytes each record takes in its file, what frames it included: shape (records,)."""
        return np.concatenate([self._sizes_within(part) for part in self._parts])

    def _sizes_within(self, part: FilePart) -> NDArray[np.int64]:
        """Returns how many bytes each record of a part takes."""
        stop = self._counts[part.path] if part.stop is None else part.stop
        return np.diff(self._offsets(part.path)[part.start : stop + 1])

    def _count(self, path: str) -> int:
        return len(self._offsets(path)) - 1

    def _known_size(self, url: str, version: bytes) -> int | None:
        size = indexed_size(url, self._format.index_kind, version)
        return super()._known_size(url, version) if size is None else size

    def _open(self, path: str, place: str) -> "SpanFile[RecordT]":
        offsets = self._offsets(path)
        return SpanFile(path, open_stored(place, self._identities[path]), offsets, self._format_of(path))

    def _read_files(self, requests: Iterable[tuple[str, list[int], list[int]]]) -> list[RecordT]:
        if not self._reads_stores:
            return super()._read_files(requests)
        begun: list[Callable[[], list[RecordT]]] = []
        acquired: list[str] = []
        try:
            for path, positions, keys in requests:
                file = self._acquire(path, positions[0], keys[0])
                acquired.append(path)
                begun.append(
                    file.begin(positions, keys)
                    if isinstance(file, SpanFile)
                    else functools.partial(file.read, positions, keys)
                )
            return [record for finish in begun for record in finish()]
        finally:
            for path in acquired:
                self._open_files.release(path)

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
        with self._at_hand(path) as place:
            scan = Scan(path, open_stored(place, self._identities[path]), self._identities[path], progress)
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
        path: the name of the file.
        file: the file. It is closed with this.
        offsets: its index.
        span_format: how records are decoded.
    """

    def __init__(self, path: str, file: StoredFile, offsets: Offsets, span_format: SpanFormat[RecordT]) -> None:
        self._path = path
        self._file = file
        self._offsets = offsets
        self._format = span_format

    @property
    def num_records(self) -> int:
        """How many records it holds."""
        return len(self._offsets) - 1

    def read(self, positions: Sequence[int], keys: Sequence[int]) -> list[RecordT]:
        """Returns the records at the positions, numbers from 0 in any order; the keys are for errors.

        Raises:
            DataSourceError: one of the records is damaged or lost.
        """
        return self.begin(positions, keys)()

    def begin(self, positions: Sequence[int], keys: Sequence[int]) -> Callable[[], list[RecordT]]:
        """Asks for the records, and returns what waits for them.

        Raises:
            DataSourceError: the index is damaged.
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
        wanted = lengths.tolist()
        finish = self._file.begin(starts.tolist(), wanted)
        return lambda: self._format.decode(_whole_spans(finish, wanted, places), places)

    def close(self) -> None:
        """Closes it. Nobody reads it any more."""
        self._file.close()


def _whole_spans(finish: Callable[[], list[bytes]], wanted: list[int], places: SpanPlaces) -> list[bytes]:
    """Returns the spans that were asked for, or raises the error of the first that is not whole."""
    try:
        spans = finish()
    except SpanReadError as error:
        raise places.error(error.place, str(error)) from error
    except OSError as error:
        raise places.error(
            0, f"reading failed here or at one of the other {len(places.keys) - 1} records that were asked for: {error}"
        ) from error
    if list(map(len, spans)) != wanted:
        place = next(n for n, (span, length) in enumerate(zip(spans, wanted, strict=True)) if len(span) != length)
        raise places.error(
            place,
            f"the file ends after {len(spans[place]):,} of its {wanted[place]:,} bytes, so it was cut short while "
            "it was open. Restore the file.",
        )
    return spans
