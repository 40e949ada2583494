"""Operations under the names that Grain gives them as datasets: packers, a shuffle in windows, rebatching."""

from collections.abc import Collection, Mapping
from typing import Any, SupportsIndex

from millstream.checks import as_flag
from millstream.dataset.stream_nodes import Operated
from millstream.dataset.streams import as_stream
from millstream.transforms import FlatMap
from millstream.transforms.best_fit import BestFitPack
from millstream.transforms.bins import BinPack
from millstream.transforms.concat_then_split import BOSHandling, ConcatThenSplit
from millstream.transforms.first_fit import FirstFitPack
from millstream.transforms.rebatch import Rebatch
from millstream.transforms.window_shuffle import WindowShuffle


class _PackIterDataset(Operated):
    """Whole documents in rows; its subclasses say which row a document goes into."""

    _operation: type[BinPack]

    def __init__(
        self,
        parent: Any,
        *,
        length_struct: Mapping[str, int],
        num_packing_bins: SupportsIndex,
        seed: SupportsIndex = 0,
        shuffle_bins: bool = True,
        shuffle_bins_group_by_feature: None = None,
        meta_features: Collection[str] = (),
        pack_alignment_struct: Mapping[str, int] | None = None,
        padding_struct: Mapping[str, Any] | None = None,
        max_sequences_per_bin: SupportsIndex | None = None,
        overflow: str = "error",
    ) -> None:
        if shuffle_bins_group_by_feature is not None:
            raise ValueError(
                f"shuffle_bins_group_by_feature={shuffle_bins_group_by_feature!r} is not supported: rows that are "
                "given out together are shuffled as one group. Leave it out."
            )
        if any(alignment != 1 for alignment in (pack_alignment_struct or {}).values()):
            raise ValueError(
                f"pack_alignment_struct={dict(pack_alignment_struct or {})} is not supported: documents lie end to "
                "end. Pad each one to a multiple of the alignment in a map before."
            )
        operation = self._operation(
            length_struct,
            num_packing_bins=num_packing_bins,
            seed=seed,
            shuffle_bins=shuffle_bins,
            meta_features=meta_features,
            padding_struct=padding_struct,
            max_sequences_per_bin=max_sequences_per_bin,
            overflow=overflow,
        )
        super().__init__(as_stream(parent, "parent"), operation)


class FirstFitPackIterDataset(_PackIterDataset):
    """Rows packed from documents as they come, each of which goes into the first row that has room for it.

    It is `parent.apply(FirstFitPack(...))` with Grain's arguments; see `FirstFitPack` for rows and errors.

    Args:
        parent: the dataset of documents: dicts of arrays.
        length_struct: how long a row is, for each feature; other features are left out.
        num_packing_bins: how many rows are open at a time.
        seed: selects the order of the rows, 0 … 2**64 - 1.
        shuffle_bins: whether rows that are given out together come in a random order.
        shuffle_bins_group_by_feature: refused unless None.
        meta_features: features, of length_struct, without segment ids and positions.
        pack_alignment_struct: refused unless all its numbers are 1.
        padding_struct: what fills up each feature; 0 for those that are not named.
        max_sequences_per_bin: how many documents a row takes at most; None for any number.
        overflow: what becomes of a document longer than a row: "error", "truncate", "split" or "drop".
    """

    _operation = FirstFitPack


class BestFitPackIterDataset(_PackIterDataset):
    """Rows packed from documents as they come, each of which goes into the row in which it leaves the least space.

    All else is as in `FirstFitPackIterDataset`, arguments too.
    """

    _operation = BestFitPack


class ConcatThenSplitIterDataset(Operated):
    """Rows cut from documents laid end to end: none has padding but the last one.

    It is `parent.apply(ConcatThenSplit(...))` with Grain's arguments; see `ConcatThenSplit` for rows and errors.

    Args:
        parent: the dataset of documents: dicts of arrays.
        length_struct: how long a row is, the same for all features; other features are left out.
        meta_features: features, of length_struct, without segment ids and positions.
        split_full_length_features: refused unless True: a document as long as a row is cut where rows end, too.
        bos_handling: whether first tokens are replaced.
        bos_features: the features in which they are.
        bos_token_id: what they are replaced by.
    """

    def __init__(
        self,
        parent: Any,
        *,
        length_struct: Mapping[str, int],
        meta_features: Collection[str] = (),
        split_full_length_features: bool = True,
        bos_handling: BOSHandling = BOSHandling.DO_NOTHING,
        bos_features: Collection[str] = (),
        bos_token_id: SupportsIndex | None = None,
    ) -> None:
        if not as_flag(split_full_length_features, "split_full_length_features"):
            raise ValueError(
                "split_full_length_features=False is not supported: rows come in the order of the documents, and each "
                "document is cut where a row ends. Leave it out."
            )
        if bos_handling is BOSHandling.DO_NOTHING:
            # Grain takes both here, and ignores them.
            bos_features, bos_token_id = (), None
        operation = ConcatThenSplit(
            length_struct,
            meta_features=meta_features,
            bos_handling=bos_handling,
            bos_features=bos_features,
            bos_token_id=bos_token_id,
        )
        super().__init__(as_stream(parent, "parent"), operation)


class WindowShuffleIterDataset(Operated):
    """The elements of a dataset, shuffled within windows of `window_size` in a row.

    Each window has an order of its own, and is in memory as a whole.

    Args:
        parent: the dataset.
        window_size: how many elements are shuffled together, at least 1.
        seed: 0 … 2**64 - 1.
    """

    def __init__(self, parent: Any, *, window_size: SupportsIndex, seed: SupportsIndex) -> None:
        super().__init__(as_stream(parent, "parent"), WindowShuffle(window_size, seed))


class RebatchIterDataset(Operated):
    """Batches of one size, made of batches of any size: rows keep their order, and none is lost.

    Args:
        parent: the dataset of batches: structures of arrays with one row for each element in their first axis.
        batch_size: how many rows a batch has, at least 1.
        drop_remainder: whether rows at the end that do not fill a batch are left out.
    """

    def __init__(self, parent: Any, batch_size: SupportsIndex, drop_remainder: bool = False) -> None:
        super().__init__(as_stream(parent, "parent"), Rebatch(batch_size, drop_remainder))


class FlatMapIterDataset(Operated):
    """The elements, none or several, into which an operation splits each one.

    Args:
        parent: the dataset.
        transform: a `FlatMap`.
    """

    def __init__(self, parent: Any, transform: FlatMap[Any, Any]) -> None:
        if not isinstance(transform, FlatMap):
            raise TypeError(
                f"transform must be a FlatMap, which knows its max_fan_out, got {transform!r}: "
                "write FlatMap(function, max_fan_out)."
            )
        super().__init__(as_stream(parent, "parent"), transform)
