"""The assignment of segments of documents to rows, computed for all of them before the first is read.

`BestFit` is best-fit decreasing, not over the segments but over the count of each length. From the longest length
down, segments go into the rows with the least space that suffices, in one step as many as there are such rows and
as fit; if there are no such rows, new rows begin. So rows come in *kinds*, those with the same lengths, of which
there are a few thousand for any number of segments; a row is number t of its kind, and takes the next segments of each
of its lengths. Best-fit decreasing needs at most 11/9 of the fewest rows that there could be (Johnson, "Near-Optimal
Bin Packing Algorithms", 1973); of realistic lengths, nearly all rows are full.

`Stream` concatenates all documents and cuts them into rows: full rows, and a cut at nearly each row's end.

`PlannedRows` is one of both, shuffled in each epoch: the segments in each row, and the rows of each document.

`ByLength` sorts segments by length, in buckets that fit a processor's cache. Each bucket is sorted by itself, in a
fifth of the time that it takes to sort all, and a segment is then two bytes: its offset in its bucket. A table of the
number of segments of each length in each bucket locates the segment of any rank.
"""

import bisect
import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.randomness import Purpose, derive_seeds, mix_words
from millstream.core.segments import Segments
from millstream.samplers.order import equal_to, spread
from millstream.samplers.permutation import permute

Numbers = NDArray[np.int64]

BEST_FIT, CONCAT_THEN_SPLIT = "best_fit", "concat_then_split"
_SLOT_STEP = np.uint64(0x9E3779B97F4A7C15)
"""An odd number without a pattern, which sets the slots of a row apart."""

Key: TypeAlias = NDArray[np.uint64] | None
"""A random word of shape (1,) that selects a shuffle; None for no shuffle."""

_BUCKET_SIZE = 1 << 15
"""The minimum size of a bucket: sorting it stays in the cache, and needs no new pages from the system."""

_LENGTHS_IN_BUCKET = 8
"""Or this many times as many as there may be lengths: so the table is small beside the segments."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ByLength:
    """All segments by rank: shorter ones first, equally long ones as they come.

    Attributes:
        firsts: the rank of the first segment of each length from 0 on, and the number of all; shape (row_length + 2,).
    """

    firsts: Numbers
    _bucket_size: int
    _offsets: NDArray[np.unsignedinteger]
    _ranks: Numbers
    _shifts: Numbers

    @classmethod
    def of(cls, lengths: Numbers, row_length: int) -> Self:
        size = max(_BUCKET_SIZE, _LENGTHS_IN_BUCKET * (row_length + 1))
        starts = np.arange(0, len(lengths), size)
        counts = np.empty((len(starts), row_length + 1), dtype=np.int64)
        offsets = np.empty(len(lengths), dtype=np.min_scalar_type(size - 1))
        for own, start in zip(counts, starts.tolist(), strict=True):
            bucket = lengths[start : start + size]
            own[:] = np.bincount(bucket, minlength=row_length + 1)
            # As small as can be: these are sorted by counting.
            offsets[start : start + size] = np.argsort(bucket.astype(np.min_scalar_type(row_length)), kind="stable")
        # Length by length, and bucket by bucket: the rank of the first segment, and its distance to the bucket.
        ranks = np.concatenate([[0], np.cumsum(counts.T)])
        begins = np.cumsum(counts, axis=1) - counts + starts[:, np.newaxis]
        return cls(ranks[:: len(starts)].copy(), size, offsets, ranks, begins.T.ravel() - ranks[:-1])

    def at(self, ranks: Numbers) -> Numbers:
        offsets = ranks + self._shifts[np.searchsorted(self._ranks, ranks, side="right") - 1]
        segments: Numbers = offsets - offsets % self._bucket_size + self._offsets[offsets]
        return segments


AmongEquals: TypeAlias = Callable[[Numbers, Numbers, Numbers], Numbers]


class Kind(NamedTuple):
    """Rows that hold segments of the same lengths, longest first."""

    number: int
    lengths: tuple[int, ...]


def best_fit(histogram: list[int], row_length: int) -> list[Kind]:
    """Returns the kinds of rows that take, for each length 1 … row_length, as many segments as the histogram says."""
    open_rows: defaultdict[int, list[Kind]] = defaultdict(list)
    spaces: list[int] = []
    kinds: list[Kind] = []

    def put(space: int, kind: Kind) -> None:
        if not space:
            kinds.append(kind)
            return
        if not open_rows[space]:
            bisect.insort(spaces, space)
        open_rows[space].append(kind)

    for length in range(row_length, 0, -1):
        left = histogram[length]
        while left:
            number = bisect.bisect_left(spaces, length)
            space = spaces[number] if number < len(spaces) else row_length
            found = open_rows[space].pop() if number < len(spaces) else Kind(left, ())
            if number < len(spaces) and not open_rows[space]:
                spaces.pop(number)
            # A row is filled with equals before the next one gets any.
            each = min(space // length, left)
            count = min(found.number, left // each)
            left -= count * each
            if found.lengths and found.number > count:
                put(space, Kind(found.number - count, found.lengths))
            put(space - each * length, Kind(count, (*found.lengths, *(length,) * each)))
    for rows in open_rows.values():
        kinds += rows
    return kinds


@dataclasses.dataclass(frozen=True, eq=False)
class BestFit:
    """Rows by best fit."""

    num_rows: int
    order: ByLength
    _row_ends: Numbers
    _counts: Numbers
    _slots: Numbers
    _lengths: Numbers
    _used: Numbers
    _each: Numbers
    _offsets: Numbers

    @classmethod
    def of(cls, lengths: Numbers, row_length: int) -> "BestFit":
        order = ByLength.of(lengths, row_length)
        kinds = best_fit(np.diff(order.firsts).tolist(), row_length)
        counts = np.array([kind.number for kind in kinds], dtype=np.int64)
        slots = np.cumsum([0, *(len(kind.lengths) for kind in kinds)])
        of_slots = np.fromiter(itertools.chain.from_iterable(kind.lengths for kind in kinds), np.int64, int(slots[-1]))
        # Equal lengths of a kind stand side by side, in a run.
        is_first = np.append(True, of_slots[1:] != of_slots[:-1])
        is_first[slots[:-1]] = True
        runs = np.flatnonzero(is_first)
        each = np.append(runs[1:], len(of_slots)) - runs
        taken = each * np.repeat(counts, slots[1:] - slots[:-1])[runs]
        # Kind after kind takes its segments of a length; in the end, all of them are taken.
        by_length = np.argsort(of_slots[runs], kind="stable")
        used = np.empty_like(taken)
        used[by_length] = np.cumsum(taken[by_length]) - taken[by_length]
        used -= order.firsts[of_slots[runs]]
        return cls(
            int(counts.sum()),
            order,
            np.cumsum(counts),
            counts,
            slots,
            of_slots,
            np.repeat(used, each),
            np.repeat(each, each),
            np.arange(len(of_slots)) - np.repeat(runs, each),
        )

    def segments(self, rows: Numbers, among_equals: AmongEquals) -> tuple[Numbers, Numbers, Numbers]:
        """Returns the first segment of each row, shape (m + 1,), and the segments of all rows with their lengths.

        Args:
            rows: numbers of rows, shape (m,).
            among_equals: given, for some segments, how many there are of the length, the number among these, and the
                length, says which of these replace them: a permutation for each length.
        """
        kinds = np.searchsorted(self._row_ends, rows, side="right")
        number_in_kind = rows - (self._row_ends[kinds] - self._counts[kinds])
        widths = self._slots[kinds + 1] - self._slots[kinds]
        starts = np.concatenate([[0], np.cumsum(widths)])
        slots = np.repeat(self._slots[kinds] - starts[:-1], widths) + np.arange(starts[-1])
        ranks = self._used[slots] + np.repeat(number_in_kind, widths) * self._each[slots] + self._offsets[slots]
        lengths = self._lengths[slots]
        firsts = self.order.firsts[lengths]
        segments = self.order.at(firsts + among_equals(self.order.firsts[lengths + 1] - firsts, ranks, lengths))
        return starts, segments, lengths

    @functools.cached_property
    def _tokens(self) -> Numbers:
        return np.add.reduceat(self._lengths, self._slots[:-1])

    def tokens_of(self, rows: Numbers) -> Numbers:
        return self._tokens[np.searchsorted(self._row_ends, rows, side="right")]

    def rows_of(self, segments: Numbers, back: AmongEquals) -> Numbers:
        """Returns the row of each segment, shape (m,); `back` is the inverse of `among_equals`."""
        firsts = self.order.firsts
        ranks_of_all = np.empty(int(firsts[-1]), dtype=np.int64)
        ranks_of_all[self.order.at(np.arange(len(ranks_of_all)))] = np.arange(len(ranks_of_all))
        ranks = ranks_of_all[segments]
        lengths = np.searchsorted(firsts, ranks, side="right") - 1
        ranks = back(firsts[lengths + 1] - firsts[lengths], ranks - firsts[lengths], lengths)
        # Slots by length, and by what is used up before them: the first of equal ones stands for its run.
        is_run = np.flatnonzero(self._offsets == 0)
        starts = firsts[self._lengths[is_run]] + self._used[is_run]
        by_start = np.argsort(starts, kind="stable")
        runs = is_run[by_start[np.searchsorted(starts[by_start], firsts[lengths] + ranks, side="right") - 1]]
        kinds = np.searchsorted(self._slots, runs, side="right") - 1
        return self._row_ends[kinds] - self._counts[kinds] + (ranks - self._used[runs]) // self._each[runs]


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Rows of the concatenated documents, given the end of each; the last row may be short."""

    num_rows: int
    ends: Numbers
    _row_length: int

    @classmethod
    def of(cls, lengths: Numbers, row_length: int) -> "Stream":
        ends = np.cumsum(lengths)
        return cls(-(-int(ends[-1]) // row_length), ends, row_length)

    def segments(self, rows: Numbers, first: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Returns the first segment of each row, shape (m + 1,); and documents, begins and ends of all segments.

        The first row begins with the document `first`: after the last one of the source comes its first.
        """
        count, total = len(self.ends), int(self.ends[-1])
        shift = int(self.ends[first - 1]) if first else 0
        # Tokens and documents are counted in two passes over the source, so that those of a row are consecutive.
        starts = rows * self._row_length + shift
        stops = np.minimum(starts + self._row_length, total + shift)
        firsts, lasts = self._numbers_at(starts), self._numbers_at(stops - 1)
        row_starts = np.concatenate([[0], np.cumsum(lasts - firsts + 1)])
        owners, numbers = spread(firsts, lasts + 1)
        is_second = numbers >= count
        documents = numbers - count * is_second
        document_starts = np.where(documents > 0, self.ends[documents - 1], 0) + total * is_second
        document_ends = self.ends[documents] + total * is_second
        begins = np.maximum(starts[owners], document_starts) - document_starts
        ends = np.minimum(stops[owners], document_ends) - document_starts
        # Documents without tokens lie between the others.
        kept = ends > begins
        if not kept.all():
            row_starts = np.concatenate([[0], np.cumsum(kept)])[row_starts]
            documents, begins, ends = documents[kept], begins[kept], ends[kept]
        return row_starts, documents, begins, ends

    def _numbers_at(self, tokens: Numbers) -> Numbers:
        """Returns the number of the document of each token, both counted in two passes over the source."""
        is_second = tokens >= int(self.ends[-1])
        found = np.searchsorted(self.ends, tokens - int(self.ends[-1]) * is_second, side="right")
        return found + len(self.ends) * is_second

    def tokens_of(self, rows: Numbers) -> Numbers:
        return np.minimum(int(self.ends[-1]) - rows * self._row_length, self._row_length)

    def rows_of(self, documents: Numbers, first: int) -> tuple[Numbers, Numbers]:
        """Returns the rows that documents with tokens lie in, and the index of the document of each."""
        shift = int(self.ends[first - 1]) if first else 0
        starts = np.where(documents > 0, self.ends[documents - 1], 0)
        lengths = self.ends[documents] - starts
        begins = (starts - shift) % int(self.ends[-1])
        return spread(begins // self._row_length, (begins + lengths - 1) // self._row_length + 1)


@final
class PlannedRows:
    """The rows of documents, by one of the strategies of `PackingSampler`.

    Documents without tokens are in no row, and longer ones are cut. `keys` are their record keys, ascending; None for
    0, 1, 2, ….
    """

    def __init__(self, lengths: Numbers, row_length: int, strategy: str, keys: Numbers | None = None) -> None:
        self._keys = keys
        self._documents: Numbers | None = None
        self._begins: Numbers | None = None
        if strategy == CONCAT_THEN_SPLIT:
            self._plan: BestFit | Stream = Stream.of(lengths, row_length)
        else:
            self._plan = BestFit.of(self._cut(lengths, row_length), row_length)
        self.num_rows = self._plan.num_rows

    def segments(self, rows: Numbers, key: Key) -> Segments:
        if isinstance(self._plan, Stream):
            starts, documents, begins, ends = self._plan.segments(rows, _first(self._plan, key))
            return Segments(starts, self._keys_of(documents), begins, ends)
        starts, segments, lengths = self._plan.segments(rows, _among_equals(key))
        if key is not None:
            # Else the longest document of each row would come first.
            hashes = derive_seeds(key, Purpose.PACKED_SEGMENTS, rows.astype(np.uint64))
            widths = np.diff(starts)
            owners = np.repeat(np.arange(len(rows)), widths)
            slots = (np.arange(len(segments)) - starts[owners]).astype(np.uint64)
            order = np.lexsort((mix_words(hashes[owners] + slots * _SLOT_STEP), owners))
            segments, lengths = segments[order], lengths[order]
        documents = segments if self._documents is None else self._documents[segments]
        begins = np.zeros(len(segments), dtype=np.int64) if self._begins is None else self._begins[segments]
        return Segments(starts, self._keys_of(documents), begins, begins + lengths)

    def tokens_of(self, rows: Numbers) -> Numbers:
        return self._plan.tokens_of(rows)

    def rows_of(self, keys: Numbers, key: Key) -> tuple[Numbers, Numbers]:
        """Returns the rows that documents with tokens are in, and the index of the document of each."""
        documents = keys if self._keys is None else np.searchsorted(self._keys, keys)
        if isinstance(self._plan, Stream):
            return self._plan.rows_of(documents, _first(self._plan, key))
        owners, segments = np.arange(len(documents)), documents
        if self._documents is not None:
            owners, segments = equal_to(self._documents, documents)
        return owners, self._plan.rows_of(segments, _among_equals(key, inverse=True))

    def _keys_of(self, documents: Numbers) -> Numbers:
        return documents if self._keys is None else self._keys[documents]

    def _cut(self, lengths: Numbers, row_length: int) -> Numbers:
        """Returns the lengths of all segments; sets the document and the begin of each, unless all are whole."""
        if lengths.max() > row_length:
            counts = -(-lengths // row_length)
            self._documents = np.repeat(np.arange(len(lengths)), counts)
            firsts = np.cumsum(counts) - counts
            self._begins = (np.arange(len(self._documents)) - firsts[self._documents]) * row_length
            segments: Numbers = np.minimum(lengths[self._documents] - self._begins, row_length)
            return segments
        if lengths.min():
            return lengths
        self._documents = np.flatnonzero(lengths)
        return lengths[self._documents]


def _first(plan: Stream, key: Key) -> int:
    return 0 if key is None else int(key[0] % np.uint64(len(plan.ends)))


def _among_equals(key: Key, *, inverse: bool = False) -> AmongEquals:
    """Returns the permutation among segments of one length, or its inverse."""

    def permuted(sizes: Numbers, ranks: Numbers, lengths: Numbers) -> Numbers:
        if key is None:
            return ranks
        seeds = derive_seeds(key, Purpose.PACKED_LENGTHS, lengths.astype(np.uint64))
        return permute(ranks, sizes, seeds, 0, inverse=inverse)

    return permuted
