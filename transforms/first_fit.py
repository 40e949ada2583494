"""First fit: each document goes into the first row that has room for it."""

from collections.abc import Iterable, Sequence
from typing import final

from millstream.transforms.bins import BinPack, Bins

_KINDS_OF_SIZES = 32
"""Documents of about this many kinds of sizes remember where they last found room."""


@final
class FirstFitBins(Bins):
    """Chooses the first row with room.

    Room only shrinks, so no row before the one where a size has last found room has any for it. One number for all
    sizes that share their leading bits tells where to begin: looking for room then costs a few steps, however many rows
    there are.
    """

    def __init__(self, count: int, lengths: Sequence[int], most: int | None) -> None:
        super().__init__(count, lengths, most)
        self._shift = max(0, lengths[0].bit_length() - _KINDS_OF_SIZES.bit_length() + 1)
        self._first = [0] * ((lengths[0] >> self._shift) + 1)
        # One row more, into which all fit: no search runs beyond the end.
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
    """Packs documents into rows as they come, each into the first row that has room for it.

    `num_packing_bins` rows are open at a time. When a document fits into none of them, they are given out, and new ones
    are begun with that document. So nothing has to be known ahead: it may follow a Filter or a FlatMap. The same rows
    come for any number of workers, and a state is as small as any other. Where the lengths of all documents are known,
    a `PackingSampler` fills rows better, and keeps the pipeline 1:1.

    A document is a dict with the features named here (others are left out), or, where there is one only, that feature's
    array itself; documents without any token are left out. A row is a dict, as `Pack` makes it, with segment ids and
    positions. The rows that are given out at the end may be fewer.

    Args:
        length_struct: how many tokens a row takes, for each feature.
        num_packing_bins: how many rows are open at a time, at least 1. More are fuller, and take more memory: 64 of
            2,048 tokens are 98 to 99 % full of usual texts.
        seed: selects the order of the rows, 0 … 2**64 - 1. None for one that is derived from the seed of the pipeline,
            or 0 if the pipeline has no seed.
        shuffle_bins: whether rows that are given out together come in a random order; else, the first ones have the
            earliest documents.
        meta_features: features that need no segment ids and positions of their own. One that is not in length_struct
            is not a sequence: a row has a list of it, with the value of each of its documents.
        padding_struct: what fills up each feature; 0 for those that are not named.
        max_sequences_per_bin: how many documents a row takes at most; None for any number.
        overflow: what becomes of a document that is longer than a row: "error" raises at its turn; "truncate" takes its
            beginning; "split" cuts it into pieces of a row and a last, shorter one; "drop" leaves it out.
        pack_alignment_struct: documents begin at multiples of this many tokens, for each feature; of features that are
            not named, they lie end to end. The lengths of rows are multiples of it.
        shuffle_bins_group_by_feature: the name of a feature of which each document has one whole number, its group.
            Rows that are given out together then come by the mean of the groups in each (0 is no group), and in a
            random order where that is the same. None for no such order.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range. While reading, a ValueError where a
            document is too long, lacks a feature, or has another dtype or shape than the others of its row.

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
