"""Packing of whole documents into rows as they arrive: the common code of first fit and best fit."""

import abc
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex

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
        shuffle_bins_group_by_feature: str | None = None,
    ) -> None:
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
        self.group_feature = shuffle_bins_group_by_feature
        if self.group_feature is not None:
            if self.group_feature not in {*self.rows.length_struct, *self.rows.carried}:
                raise ValueError(
                    f"shuffle_bins_group_by_feature={self.group_feature!r} must be one of the features, "
                    f"{[*self.rows.length_struct, *self.rows.carried]}: name it in length_struct or meta_features."
                )
            if not self.shuffle_bins:
                raise ValueError("shuffle_bins_group_by_feature needs shuffle_bins=True, got False.")

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
            return Prepared(documents, self._numbers(documents, sizes))
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
        return Prepared(cut, self._numbers(cut, sizes), list(map(len, kept)))

    def begin(self, skip: int = 0) -> Bins:
        del skip
        return self.bins(self.num_packing_bins, self.rows.lengths, self.max_sequences_per_bin)

    def arrange(self, measures: NDArray[np.int64], group: GroupId) -> Segments:
        rows = Segments.by_output(measures[-1])
        if not self.shuffle_bins:
            return rows
        order = group.generator(self.seed).permutation(len(rows.offsets) - 1)
        if self.group_feature is not None:
            groups = np.split(measures[-2][rows.elements], rows.offsets[1:-1])
            order = np.lexsort((order, np.array(list(map(_mean_group, groups)))))
        return rows.permuted(order)

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

    def _numbers(self, documents: Sequence[Document], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the space that documents take, followed by the group of each, if rows are sorted by groups."""
        spaces = self.rows.spaces(sizes)
        if self.group_feature is None:
            return spaces
        column = [*self.rows.length_struct, *self.rows.carried].index(self.group_feature)
        groups = [_group(document[column], self.group_feature) for document in documents]
        return np.concatenate([spaces, np.array([groups], dtype=np.int64).reshape(1, -1)])


def _group(value: Any, name: str) -> int:
    """Returns the single number that a document has for a feature; 0 if it is empty."""
    array = np.asarray(value)
    if array.dtype.kind not in "iub" or (array != array.flat[:1]).any():
        raise ValueError(f"shuffle_bins_group_by_feature={name!r} must be one integer per document, got {value!r}.")
    return int(array.flat[0]) if array.size else 0


def _mean_group(groups: NDArray[np.int64]) -> float:
    """Returns the mean of the distinct groups in a row; as in Grain, 0 is not a group."""
    different = np.unique(groups[groups != 0])
    return float(different.mean()) if different.size else 0.0
