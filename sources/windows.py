"""Windows of consecutive records, or within records, as a source."""

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.checks import LARGEST_COUNT, as_integer, named_arguments
from millstream.core.columnar import ColumnarRecords, stack_objects, stack_texts
from millstream.sources.base import (
    ReadsSource,
    RecordKeys,
    checked_record_key,
    checked_record_keys,
    fingerprint_of,
    loader_view,
    own,
)
from millstream.sources.source_checks import batched_read_of, check_source, is_in_memory, reads_one_by_one


@final
class WindowDataSource(ReadsSource):
    """Windows of `size` consecutive records of another source, stacked; or of `size` rows within each of its records.

    Frames of video, steps of episodes, hours of weather: record i of this source is a window of them. With `groups`,
    windows stay within episodes, whose numbers of records these are. With `lengths`, each record of the source is
    itself a series, such as a song, and windows are cut along the first axis of its arrays.

    Nothing is copied or indexed: windows are computed from the numbers of records. A batch reads each record that its
    windows share once. The units of the source, such as the chunks of a `ZarrDataSource`, are passed on, so that
    `load(windows, shuffle=True)` shuffles in windows of few units. With a `WeightedSampler`, it is prioritised replay.

    Args:
        source: anything with `len` and `source[key]`.
        size: the number of records, or of rows, per window, at least 1.
        stride: the distance of the beginnings of windows, at least 1.
        groups: the number of records of each group, in order, shape (groups,); None for one group. A group shorter than
            size has no window.
        lengths: the number of rows of each record, shape (len(source),), for windows within records; None for windows
            of records. Arrays, and flat lists, of this length are cut; what else a record has stays whole.

    Attributes:
        source, size, stride: as given.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, groups or lengths do not fit the
            source, or no window fits. While reading, a ValueError if records do not stack, or have other lengths.

    Examples:
        >>> frames = [{"t": t, "image": np.full(2, t)} for t in range(6)]
        >>> windows = millstream.WindowDataSource(frames, 2, groups=[4, 2])
        >>> len(windows), [window["t"].tolist() for window in windows.__getitems__(range(4))]
        (4, [[0, 1], [1, 2], [2, 3], [4, 5]])
        >>> songs = [np.arange(5), np.arange(10, 14)]
        >>> windows = millstream.WindowDataSource(songs, 3, stride=2, lengths=[5, 4])
        >>> [window.tolist() for window in windows.__getitems__(range(3))]
        [[0, 1, 2], [2, 3, 4], [10, 11, 12]]
    """

    @named_arguments()
    def __init__(self, source: Any, size: int, *, stride: int = 1, groups: Any = None, lengths: Any = None) -> None:
        check_source(source, "source")
        if loader_view(source).differs_by_epoch:
            raise ValueError(
                "source must have the same records in each epoch, got a chain with random or shuffled elements. Put "
                "the windows below it: MapDataset.source(WindowDataSource(...)).random_map(...)."
            )
        self.source = source
        self.size = as_integer(size, "size", minimum=1, maximum=LARGEST_COUNT - 1)
        self.stride = as_integer(stride, "stride", minimum=1, maximum=LARGEST_COUNT - 1)
        if groups is not None and lengths is not None:
            raise ValueError("groups and lengths exclude each other: windows are of records, or within them. Pass one.")
        self._is_within = lengths is not None
        name, given = ("lengths", lengths) if self._is_within else ("groups", groups)
        self._lengths = np.array([len(source)]) if given is None else _counts(given, name)
        if self._is_within and len(self._lengths) != len(source):
            raise ValueError(
                f"lengths must have one number for each of the {len(source)} records, got {len(self._lengths)}."
            )
        if not self._is_within and self._lengths.sum() != len(source):
            raise ValueError(
                f"groups must have the sum {len(source)}, the number of records, got {self._lengths.sum()}."
            )
        # As many windows as begin at a multiple of the stride, and end in the group.
        counts = np.maximum(0, (self._lengths - self.size) // self.stride + 1)
        self._ends = np.cumsum(counts)
        # A window of records begins after the groups before its own, and one within a record at a row of that.
        self._starts = np.zeros(1, np.int64) if self._is_within else np.cumsum(self._lengths) - self._lengths
        if not counts.any():
            longest = int(self._lengths.max(initial=0))
            what = "lengths" if self._is_within else "the records" if groups is None else "groups"
            raise ValueError(f"size must be at most {longest}, the largest of {what}, got {self.size}.")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        stride = "" if self.stride == 1 else f", stride={self.stride}"
        return f"WindowDataSource({len(self)} windows of {self.size}{stride} of {type(self.source).__name__})"

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[Any]:
        keys = checked_record_keys(record_keys, len(self))
        if not len(keys):
            return []
        series, starts = self._begin_of(keys)
        if self._is_within:
            wanted, rows = np.unique(series, return_inverse=True)
            records = self._read(wanted)
            return [
                self._cut(records[row], int(number), start)
                for row, number, start in zip(rows.tolist(), series.tolist(), starts.tolist(), strict=True)
            ]
        wanted = np.unique(starts[:, np.newaxis] + np.arange(self.size))
        rows = np.searchsorted(wanted, starts)
        records = self._read(wanted)
        columns = records.stack(np.empty) if isinstance(records, ColumnarRecords) else None
        if columns is not None:
            return [tree.map_leaves(functools.partial(_rows, row, self.size), columns) for row in rows.tolist()]
        records = list(records)
        return [
            self._stacked(records[row : row + self.size], start)
            for row, start in zip(rows.tolist(), starts.tolist(), strict=True)
        ]

    @property
    def window_units(self) -> int | None:
        """The number of units of the source that a shuffle should keep together; None if any order is as fast."""
        found: int | None = getattr(self.source, "window_units", None)
        return found

    @property
    def unit_sizes(self) -> NDArray[np.int64] | None:
        """The number of windows that begin in each unit of the source, int64, shape (units,); None without units."""
        sizes = getattr(self.source, "unit_sizes", None)
        if sizes is None:
            return None
        counts: NDArray[np.int64] = np.diff(self._windows_before(np.cumsum(sizes)), prepend=0)
        return counts

    @property
    def unit_numbers(self) -> NDArray[np.int64] | None:
        """The number of the unit that each of `unit_sizes` belongs to, as the source has it; None if it has none."""
        found: NDArray[np.int64] | None = getattr(self.source, "unit_numbers", None)
        return found

    @property
    def reads_one_by_one(self) -> bool:
        """True if the source has no batched reads. Several threads then share the windows of a batch."""
        return reads_one_by_one([self.source])

    @property
    def is_in_memory(self) -> bool:
        """True if the source is plain data in memory."""
        return is_in_memory(self.source)

    def __getattr__(self, name: str) -> Any:
        # Only a source that knows its files has `locate`.
        if name == "locate" and "source" in vars(self) and callable(getattr(self.source, "locate", None)):
            return self._locate
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def fingerprint(self) -> str:
        """Returns the windows, in words, and the fingerprint of the source, or its class if it has none."""
        crc = zlib.crc32(self._lengths.astype("<i8", copy=False).data)
        kind = "lengths" if self._is_within else "groups"
        fields = f"size={self.size} stride={self.stride} {kind}={len(self._lengths)}#{crc:08x}"
        return f"WindowDataSource {fields} of={fingerprint_of(self.source).replace(' ', ',')}"

    def _begin_of(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Returns the group and the first record of windows; or the record, and the first row in it."""
        series = np.searchsorted(self._ends, keys, side="right")
        before = np.where(series > 0, self._ends[series - 1], 0)
        starts = (keys - before) * self.stride
        return series, starts if self._is_within else starts + self._starts[series]

    def _windows_before(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of windows that begin before each record of the source."""
        ends = np.append(0, self._ends)
        group_ends = np.append(0, np.cumsum(self._lengths))
        groups = np.minimum(np.searchsorted(group_ends, records, side="right") - 1, len(self._lengths) - 1)
        begun = -(-(records - group_ends[groups]) // self.stride)
        before: NDArray[np.int64]
        before = ends[records] if self._is_within else np.minimum(ends[groups] + begun, ends[groups + 1])
        return before

    def _read(self, keys: NDArray[np.int64]) -> Sequence[Any]:
        read = batched_read_of(self.source)
        if read is None:
            return [self.source[key] for key in keys.tolist()]
        takes_arrays = getattr(self.source, "takes_key_arrays", False) is True
        return read(keys.copy() if takes_arrays else keys.tolist())

    def _stacked(self, records: Sequence[Any], start: int) -> Any:
        try:
            return _stack(records)
        except ValueError as error:
            raise ValueError(
                f"Cannot stack the records {start} to {start + self.size - 1} of a window: {error} Give the "
                "WindowDataSource a MapDataset that makes them alike."
            ) from error

    def _cut(self, record: Any, number: int, start: int) -> Any:
        length = int(self._lengths[number])
        found = []

        def cut(value: Any) -> Any:
            inner = tree.children(value)
            is_flat = isinstance(value, list | tuple) and not any(tree.children_if_any(each) for each in value)
            if is_flat and len(value) == length and not hasattr(value, "_fields"):
                found.append(True)
                return value[start : start + self.size]
            if inner is not None:
                return tree.rebuilt(value, map(cut, inner))
            shape = getattr(value, "shape", ())
            if not shape or shape[0] != length:
                # Other windows of the batch have the same value.
                return own(value)
            found.append(True)
            rows = value[start : start + self.size]
            return rows.copy() if isinstance(rows, np.ndarray) else rows

        made = cut(record)
        if not found:
            raise ValueError(
                f"Record {number} has no array of {length} rows, which lengths[{number}] says. Pass the lengths of its "
                "first axis, such as those that millstream.lengths_of returns."
            )
        return made

    def _locate(self, record_key: int) -> Any:
        (series,), (start,) = self._begin_of(np.array([checked_record_key(record_key, len(self))]))
        return self.source.locate(int(series if self._is_within else start))


def _counts(values: Any, name: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(
            f"{name} must be a one-dimensional array of integers, got dtype {array.dtype}, shape {array.shape}."
        )
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must be numbers from 0 on, got {array.min()}.")
    return array.astype(np.int64)


def _rows(start: int, size: int, column: Any) -> Any:
    # A copy, because windows overlap, and an operation may write into its element.
    return None if column is None else column[start : start + size].copy()


def _stack(values: Sequence[Any]) -> Any:
    """Returns the structure of elements, each leaf stacked along a new first axis."""
    first = values[0]
    if tree.children(first) is not None:
        steps = list(tree.paths(first))
        for value in values:
            if type(value) is not type(first) or list(tree.paths(value)) != steps:
                _refuse("structure", first, value)
        return tree.rebuilt(first, map(_stack, zip(*(tree.children(value) or () for value in values), strict=True)))
    if first is None and all(value is None for value in values):
        return None
    if all(isinstance(value, str) for value in values):
        return stack_texts(list(values), np.empty)
    if all(isinstance(value, bytes) for value in values):
        return stack_objects(list(values))
    arrays = [np.asarray(value) for value in values]
    for array in arrays:
        if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            _refuse("shape and dtype", *(f"{one.dtype} of shape {one.shape}" for one in (arrays[0], array)))
    return np.stack(arrays)


def _refuse(what: str, first: object, other: object) -> NoReturn:
    shown = [text if len(text) < 80 else f"{text[:77]}..." for text in map(str, (first, other))]
    raise ValueError(f"they must have one {what}, got {shown[0]} and {shown[1]}.")
