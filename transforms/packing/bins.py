"""Packing of whole documents into rows as they arrive, by first fit or best fit."""

import abc
import bisect
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_flag, as_integer, as_integer_or_none, as_overflow, named_arguments
from millstream.core.columnar import Allocate
from millstream.core.randomness import as_seed
from millstream.core.segments import Segments
from millstream.transforms.grouping import GroupId, GroupingOperation, OpenGroup, Prepared, lengths_of
from millstream.transforms.packing.rows import Document, RowFormat


class Bins(OpenGroup):
    """Rows that are being filled. Each document goes into one of them, until one arrives that fits into none."""

    def __init__(self, count: int, lengths: Sequence[int], limit: int | None) -> None:
        self._count = count
        self._lengths = lengths
        self._seats = [sys.maxsize if limit is None else limit] * count
        # While all features of every document have the same length, the first one represents all.
        self._are_alike = len(set(lengths)) == 1
        self._free = [[length] * count for length in lengths[: 1 if self._are_alike else None]]
        self._chosen: list[int] = []
        self._is_full = False

    def take(self, sizes: NDArray[np.int64]) -> int:
        if self._is_full:
            return 0
        sizes = sizes[: len(self._lengths)]
        before = len(self._chosen)
        if self._are_alike and not (sizes == sizes[0]).all():
            self._are_alike = False
            self._free = [list(self._free[0]) for _ in self._lengths]
        if self._are_alike:
            self._put(sizes[0].tolist())
        else:
            self._put_unlike(zip(*sizes.tolist(), strict=True))
        taken = len(self._chosen) - before
        self._is_full = taken < sizes.shape[1]
        return taken

    @property
    def is_full(self) -> bool:
        return self._is_full

    def decisions(self) -> NDArray[np.int64]:
        return np.array([self._chosen], dtype=np.int64)

    @abc.abstractmethod
    def _put(self, sizes: Iterable[int]) -> None:
        """Chooses rows for documents whose features have the same length, up to the first that fits into none."""

    @abc.abstractmethod
    def _put_unlike(self, sizes: Iterable[tuple[int, ...]]) -> None:
        """Chooses rows for documents whose features differ in length."""


class BinPack(GroupingOperation):
    """A packer of whole documents. Subclasses choose the row of each document."""

    bins: ClassVar[type[Bins]]

    @named_arguments()
    def __init__(
        self,
        length_struct: Mapping[str, int],
        *,
        num_packing_bins: SupportsIndex,
        seed: SupportsIndex | None = None,
        shuffle_bins: bool = True,
        meta_features: Collection[str] = (),
        padding_struct: Mapping[str, Any] | None = None,
        max_sequences_per_bin: SupportsIndex | None = None,
        overflow: str = "error",
        pack_alignment_struct: Mapping[str, int] | None = None,
    ) -> None:
        """Packs documents into rows of features.

        Args:
            length_struct: the number of tokens per row, for each feature.
            num_packing_bins: the number of rows that are open at a time, at least 1. More rows are filled better, and
                take more memory: 64 rows of 2,048 tokens are 98 to 99 % full for usual texts.
            seed: selects the order of the rows, 0 … 2**64 - 1. None derives it from the seed of the pipeline; it is 0
                if the pipeline has none.
            shuffle_bins: True to return the rows of a group in a random order; False to begin with those of the
                earliest documents.
            meta_features: features without segment ids and positions of their own. If a name is not in length_struct,
                the feature is not a sequence: a row has a list with the value of each of its documents.
            padding_struct: the padding value, per feature; 0 for the other features.
            max_sequences_per_bin: the maximum number of documents per row; None for no limit.
            overflow: the treatment of a document longer than a row: "error" raises an error when it is reached;
                "truncate" keeps its beginning; "split" cuts it into segments of a row's length and a shorter remainder;
                "drop" drops it.
            pack_alignment_struct: the multiples of tokens at which documents begin, per feature; 1 for the other
                features. The lengths of rows must be multiples of it.

        Raises:
            TypeError, ValueError: an argument has the wrong type or is out of range. While reading, a ValueError if a
                document is too long, lacks a feature, or differs in dtype or shape from the others of its row.
        """
        carried = []
        if isinstance(length_struct, Mapping) and not isinstance(meta_features, str):
            carried = [name for name in meta_features if name not in length_struct]
            meta_features = [name for name in meta_features if name in length_struct]
        self.rows = RowFormat(length_struct, meta_features, padding_struct, pack_alignment_struct, carried)
        self.num_packing_bins = as_integer(num_packing_bins, "num_packing_bins", minimum=1, maximum=1 << 24)
        self.seed = None if seed is None else as_seed(seed)
        self.shuffle_bins = as_flag(shuffle_bins, "shuffle_bins")
        self.max_sequences_per_bin = as_integer_or_none(max_sequences_per_bin, "max_sequences_per_bin")
        self.overflow = as_overflow(overflow)

    @property
    def splits(self) -> bool:
        return self.overflow == "split"

    @property
    def may_drop(self) -> bool:
        """True, because documents without tokens are dropped."""
        return True

    @property
    def length_struct(self) -> dict[str, int]:
        """The length of a row, per feature."""
        return self.rows.length_struct

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows}, num_packing_bins={self.num_packing_bins})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        columns = self.rows.columns(values, takes_numbers=True)
        sizes = lengths_of(columns)
        documents: list[Document] = list(zip(*columns, *self.rows.carried_values(values), strict=True))
        is_long = sizes > np.array(self.rows.lengths)[:, np.newaxis]
        if not is_long.any() and sizes.any(axis=0).all():
            return Prepared(documents, self.rows.spaces(sizes))
        if is_long.any() and self.overflow == "error":
            feature, number = np.argwhere(is_long)[0].tolist()
            name, length = list(self.rows.length_struct.items())[feature]
            raise ValueError(
                f"A document has {sizes[feature, number]} {name!r}, but a row takes {length}. Use "
                "overflow='truncate', 'split' or 'drop', or longer rows."
            )
        kept = [self._cut(document) for document in documents]
        cut = [segment for segments in kept for segment in segments]
        features = list(zip(*cut, strict=True))[: len(columns)]
        sizes = lengths_of(features) if cut else sizes[:, :0]
        return Prepared(cut, self.rows.spaces(sizes), list(map(len, kept)))

    def begin(self, skip: int = 0) -> Bins:
        del skip
        return self.bins(self.num_packing_bins, self.rows.lengths, self.max_sequences_per_bin)

    def arrange(self, measures: NDArray[np.int64], group: GroupId) -> Segments:
        rows = Segments.by_output(measures[-1])
        if not self.shuffle_bins:
            return rows
        return rows.permuted(group.generator(self.seed).permutation(len(rows.offsets) - 1))

    def make(self, values: Sequence[Any], segments: Segments, allocate: Allocate = np.empty) -> Sequence[Any]:
        return self.rows.lay_out(values, segments, allocate)

    def _cut(self, document: Document) -> list[Document]:
        """Returns the documents to pack for one document, after truncating, splitting or dropping it."""
        lengths = self.rows.lengths
        features, carried = document[: len(lengths)], document[len(lengths) :]
        if not any(map(len, features)):
            return []
        counts = [-(-len(array) // length) for array, length in zip(features, lengths, strict=True)]
        if max(counts) <= 1:
            return [document]
        if self.overflow == "drop":
            return []
        return [
            (*(array[n * length : (n + 1) * length] for array, length in zip(features, lengths, strict=True)), *carried)
            for n in range(max(counts) if self.overflow == "split" else 1)
        ]


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


@final
class BestFitBins(Bins):
    """Chooses the fullest row with room; the first among equals.

    The rows that accept more documents are sorted by their space over all features, as one number each: space * count +
    row.
    """

    def __init__(self, count: int, lengths: Sequence[int], limit: int | None) -> None:
        super().__init__(count, lengths, limit)
        self._sorted = [sum(lengths) * count + row for row in range(count)]

    def _put(self, sizes: Iterable[int]) -> None:
        (free,) = self._free
        for size in sizes:
            index = bisect.bisect_left(self._sorted, size * len(self._lengths) * self._count)
            if index == len(self._sorted):
                return
            free[self._choose(index, size * len(self._lengths))] -= size

    def _put_unlike(self, sizes: Iterable[tuple[int, ...]]) -> None:
        for needs in sizes:
            index = bisect.bisect_left(self._sorted, sum(needs) * self._count)
            # Enough space over all features may be too little in one of them.
            while index < len(self._sorted) and not self._fits(self._sorted[index] % self._count, needs):
                index += 1
            if index == len(self._sorted):
                return
            row = self._choose(index, sum(needs))
            for free, need in zip(self._free, needs, strict=True):
                free[row] -= need

    def _fits(self, row: int, needs: tuple[int, ...]) -> bool:
        return all(free[row] >= need for free, need in zip(self._free, needs, strict=True))

    def _choose(self, index: int, need: int) -> int:
        """Takes space from the row at an index of the sorted rows, and returns its number."""
        space, row = divmod(self._sorted.pop(index), self._count)
        self._chosen.append(row)
        self._seats[row] -= 1
        if self._seats[row]:
            bisect.insort(self._sorted, (space - need) * self._count + row)
        return row


@final
class BestFitPack(BinPack):
    """Packs documents into rows as they arrive, each into the row in which it leaves the least space.

    Everything else is as in `FirstFitPack`. Rows are fuller by some tenths of a percent.

    Examples:
        >>> documents = [{"tokens": np.full(length, length)} for length in (3, 5, 2, 6, 4)]
        >>> operations = [millstream.BestFitPack({"tokens": 10}, num_packing_bins=2), millstream.Batch(2)]
        >>> next(iter(millstream.load(documents, num_epochs=1, transformations=operations)))["tokens"]
        array([[3, 3, 3, 5, 5, 5, 5, 5, 2, 2],
               [6, 6, 6, 6, 6, 6, 4, 4, 4, 4]])
    """

    bins = BestFitBins
