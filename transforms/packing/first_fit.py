"""First fit: each document goes into the first row that has room for it."""

from collections.abc import Iterable, Sequence
from typing import final

from millstream.transforms.packing.bins import BinPack, Bins

_SIZE_CLASSES = 32
"""Approximate number of size classes. Each remembers the row where its last search ended."""


@final
class FirstFitBins(Bins):
    """Chooses the first row with room.

    Free space only shrinks, so no row before the one that a size last fitted into has room for that size. Sizes with
    the same leading bits share the start of their search, so a search takes few steps, however many rows there are.
    """

    def __init__(self, count: int, lengths: Sequence[int], limit: int | None) -> None:
        super().__init__(count, lengths, limit)
        self._shift = max(0, lengths[0].bit_length() - _SIZE_CLASSES.bit_length() + 1)
        self._first = [0] * ((lengths[0] >> self._shift) + 1)
        # An additional row that every document fits into ends each search.
        for free, length in zip(self._free, lengths, strict=False):
            free.append(length)

    def _put(self, sizes: Iterable[int]) -> None:
        (free,) = self._free
        seats, chosen, count, first, shift = self._seats, self._chosen, self._count, self._first, self._shift
        for size in sizes:
            kind = size >> shift
            row, least = first[kind], kind << shift
            while free[row] < least:
                row += 1
            first[kind] = row
            while free[row] < size:
                row += 1
            if row == count:
                return
            chosen.append(row)
            seats[row] -= 1
            free[row] = free[row] - size if seats[row] else -1

    def _put_unlike(self, sizes: Iterable[tuple[int, ...]]) -> None:
        leading = self._free[0]
        for needs in sizes:
            kind = needs[0] >> self._shift
            row, least = self._first[kind], kind << self._shift
            while leading[row] < least:
                row += 1
            self._first[kind] = row
            while any(free[row] < need for free, need in zip(self._free, needs, strict=True)):
                row += 1
            if row == self._count:
                return
            self._chosen.append(row)
            self._seats[row] -= 1
            for free, need in zip(self._free, needs, strict=True):
                free[row] = free[row] - need if self._seats[row] else -1


@final
class FirstFitPack(BinPack):
    """Packs documents into rows as they arrive, each into the first row with enough space.

    `num_packing_bins` rows are open at a time. When a document fits into none of them, all are returned, and new rows
    are opened with that document. No length must be known in advance, so it may follow a Filter or a FlatMap. The rows
    are the same for any number of workers, and states stay small. If the lengths of all documents are known, a
    `PackingSampler` fills rows better, and keeps the pipeline 1:1.

    A document is a dict with the features named here (others are dropped) or, if there is only one, that feature's
    array itself. Documents without tokens are dropped. A row is a dict as `Pack` returns it, with segment ids and
    positions. The last rows of a stream may be fewer than `num_packing_bins`.

    Args:
        length_struct: the number of tokens per row, for each feature.
        num_packing_bins: the number of rows that are open at a time, at least 1. More rows are filled better, and take
            more memory: 64 rows of 2,048 tokens are 98 to 99 % full for usual texts.
        seed: selects the order of the rows, 0 … 2**64 - 1. None derives it from the seed of the pipeline; it is 0 if
            the pipeline has none.
        shuffle_bins: True to return the rows of a group in a random order; False to begin with those of the earliest
            documents.
        meta_features: features without segment ids and positions of their own. If a name is not in length_struct, the
            feature is not a sequence: a row has a list with the value of each of its documents.
        padding_struct: the padding value, per feature; 0 for the other features.
        max_sequences_per_bin: the maximum number of documents per row; None for no limit.
        overflow: the treatment of a document longer than a row: "error" raises an error when it is reached; "truncate"
            keeps its beginning; "split" cuts it into segments of a row's length and a shorter remainder; "drop" drops
            it.
        pack_alignment_struct: the multiples of tokens at which documents begin, per feature; 1 for the other features.
            The lengths of rows must be multiples of it.
        shuffle_bins_group_by_feature: the name of a feature with one integer per document, its group. The rows of a
            group of rows are then sorted by the mean of their distinct groups (0 is not a group), and randomly among
            equals. None for a random order only.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range. While reading, a ValueError if a
            document is too long, lacks a feature, or differs in dtype or shape from the others of its row.

    Examples:
        >>> documents = [{"tokens": np.full(length, length)} for length in (3, 5, 2, 6, 4)]
        >>> operations = [millstream.FirstFitPack({"tokens": 10}, num_packing_bins=2), millstream.Batch(2)]
        >>> batch = next(iter(millstream.load(documents, num_epochs=1, transformations=operations)))
        >>> batch["tokens"]
        array([[3, 3, 3, 5, 5, 5, 5, 5, 2, 2],
               [6, 6, 6, 6, 6, 6, 4, 4, 4, 4]])
        >>> batch["tokens_segment_ids"]
        array([[1, 1, 1, 2, 2, 2, 2, 2, 3, 3],
               [1, 1, 1, 1, 1, 1, 2, 2, 2, 2]], dtype=int32)
    """

    bins = FirstFitBins
