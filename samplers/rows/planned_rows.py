"""The rows of some documents: which segments are in each row, and the rows of each document, in any epoch."""

from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.randomness import mix_words
from millstream.core.segments import Segments
from millstream.samplers.order import equal_to
from millstream.samplers.permutation import permute
from millstream.samplers.rows.packing_plan import AmongEquals, BestFit, Stream

BEST_FIT, CONCAT_THEN_SPLIT = "best_fit", "concat_then_split"
_LENGTH_STEP = np.uint64(0x9E3779B97F4A7C15)
"""An odd number without a pattern, which sets lengths apart."""

Numbers = NDArray[np.int64]
Key: TypeAlias = NDArray[np.uint64] | None
"""A random word of shape (1,) that selects a shuffle; None for no shuffle."""


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
            hashes = mix_words(rows.astype(np.uint64) * _LENGTH_STEP + ~key)
            widths = np.diff(starts)
            owners = np.repeat(np.arange(len(rows)), widths)
            slots = (np.arange(len(segments)) - starts[owners]).astype(np.uint64)
            order = np.lexsort((mix_words(hashes[owners] + slots * _LENGTH_STEP), owners))
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
        seeds = mix_words(lengths.astype(np.uint64) * _LENGTH_STEP + key)
        return permute(ranks, sizes, seeds, 0, inverse=inverse)

    return permuted
