"""Best fit: each document goes into the row in which it leaves the least space."""

import bisect
from collections.abc import Iterable, Sequence
from typing import final

from millstream.transforms.bins import BinPack, Bins


@final
class BestFitBins(Bins):
    """Chooses the fullest row with room; of equals, the first.

    The rows that take more are kept sorted by their space over all features, as one number each: space * rows + row.
    """

    def __init__(self, count: int, lengths: Sequence[int], most: int | None) -> None:
        super().__init__(count, lengths, most)
        self._sorted = [sum(lengths) * count + row for row in range(count)]

    def _put(self, sizes: Iterable[int]) -> None:
        (free,) = self._free
        for size in sizes:
            place = bisect.bisect_left(self._sorted, size * len(self._lengths) * self._count)
            if place == len(self._sorted):
                return
            free[self._choose(place, size * len(self._lengths))] -= size

    def _put_unlike(self, sizes: Iterable[tuple[int, ...]]) -> None:
        for needs in sizes:
            place = bisect.bisect_left(self._sorted, sum(needs) * self._count)
            # Enough space over all features is not yet enough in each.
            while place < len(self._sorted) and not self._fits(self._sorted[place] % self._count, needs):
                place += 1
            if place == len(self._sorted):
                return
            row = self._choose(place, sum(needs))
            for free, need in zip(self._free, needs, strict=True):
                free[row] -= need

    def _fits(self, row: int, needs: tuple[int, ...]) -> bool:
        return all(free[row] >= need for free, need in zip(self._free, needs, strict=True))

    def _choose(self, place: int, need: int) -> int:
        """Takes space of the row at a place of the sorted ones, and returns the row."""
        space, row = divmod(self._sorted.pop(place), self._count)
        self._chosen.append(row)
        self._seats[row] -= 1
        if self._seats[row]:
            bisect.insort(self._sorted, (space - need) * self._count + row)
        return row


@final
class BestFitPack(BinPack):
    """Packs documents into rows as they come, each into the row in which it leaves the least space.

    All else is as in `FirstFitPack`, which says more of each argument. Rows are fuller by some tenths of a percent.

    Args:
        length_struct: how many tokens a row takes, for each feature; other features are left out.
        num_packing_bins: how many rows are open at a time, at least 1.
        seed: selects the order of the rows, 0 … 2**64 - 1. None for one that is derived from the seed of the pipeline,
            or 0 if the pipeline has no seed.
        shuffle_bins: whether rows that are given out together come in a random order.
        meta_features: features that need no segment ids and positions of their own.
        padding_struct: what fills up each feature; 0 for those that are not named.
        max_sequences_per_bin: how many documents a row takes at most; None for any number.
        overflow: what becomes of a document that is longer than a row: "error", "truncate", "split" or "drop".
        pack_alignment_struct: documents begin at multiples of this many tokens, for each feature; of features that are
            not named, they lie end to end.
        shuffle_bins_group_by_feature: a feature by which rows that are given out together are sorted first; None for
            no such order.

    Raises:
        TypeError, ValueError: as `FirstFitPack`.

    Examples:
        >>> documents = [{"tokens": np.full(length, length)} for length in (3, 5, 2, 6, 4)]
        >>> operations = [millstream.BestFitPack({"tokens": 10}, num_packing_bins=2), millstream.Batch(2)]
        >>> next(iter(millstream.load(documents, num_epochs=1, transformations=operations)))["tokens"]
        array([[3, 3, 3, 5, 5, 5, 5, 5, 2, 2],
               [6, 6, 6, 6, 6, 6, 4, 4, 4, 4]])
    """

    bins = BestFitBins
