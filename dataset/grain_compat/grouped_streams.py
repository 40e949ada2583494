"""Operations as datasets, under Grain's names: packers, window shuffles, rebatching, splitting."""

from collections.abc import Collection, Mapping
from typing import Any, SupportsIndex, TypeVar

from millstream.dataset.iter_dataset import IterDataset, as_stream
from millstream.dataset.map_dataset import MapDataset
from millstream.dataset.node_source import node_of
from millstream.dataset.stream_steps import Operate, step_of
from millstream.transforms import FlatMap, Transformation
from millstream.transforms.batching.rebatch import Rebatch
from millstream.transforms.packing.best_fit import BestFitPack
from millstream.transforms.packing.bins import BinPack
from millstream.transforms.packing.concat_then_split import BOSHandling, ConcatThenSplit
from millstream.transforms.packing.first_fit import FirstFitPack
from millstream.transforms.window_shuffle import WindowShuffle

T = TypeVar("T")


class _Operated(IterDataset[Any]):
    """A stream after an operation."""

    def __init__(self, parent: Any, operation: Transformation) -> None:
        stream = as_stream(parent, "parent")
        self._made_of(Operate.after(step_of(stream), operation), stream)


class _PackIterDataset(_Operated):
    """Whole documents packed into rows. Subclasses choose the row of a document."""

    _operation: type[BinPack]

    def __init__(
        self,
        parent: Any,
        *,
        length_struct: Mapping[str, int],
        num_packing_bins: SupportsIndex,
        seed: SupportsIndex = 0,
        shuffle_bins: bool = True,
        shuffle_bins_group_by_feature: str | None = None,
        meta_features: Collection[str] = (),
        pack_alignment_struct: Mapping[str, int] | None = None,
        padding_struct: Mapping[str, Any] | None = None,
        max_sequences_per_bin: SupportsIndex | None = None,
        overflow: str = "error",
    ) -> None:
        operation = self._operation(
            length_struct,
            num_packing_bins=num_packing_bins,
            seed=seed,
            shuffle_bins=shuffle_bins,
            meta_features=meta_features,
            padding_struct=padding_struct,
            max_sequences_per_bin=max_sequences_per_bin,
            overflow=overflow,
            pack_alignment_struct=pack_alignment_struct,
            shuffle_bins_group_by_feature=shuffle_bins_group_by_feature,
        )
        super().__init__(parent, operation)


class FirstFitPackIterDataset(_PackIterDataset):
    """Rows packed from documents in order of arrival. Each document goes into the first row that has room for it.

    It is `parent.apply(FirstFitPack(...))` with Grain's arguments; see `FirstFitPack` for rows and errors.

    Args:
        parent: the dataset of documents: dicts of arrays.
        length_struct: the number of tokens per row, for each feature; other features are dropped.
        num_packing_bins: the number of open rows, at least 1.
        seed: selects the order of the rows, 0 … 2**64 - 1.
        shuffle_bins: True to shuffle rows that are completed together.
        shuffle_bins_group_by_feature: the feature by which rows that are completed together are sorted first; None for
            no sorting.
        meta_features: features without segment ids and positions. A row has a list of each not in length_struct.
        pack_alignment_struct: documents begin at multiples of this number of tokens, for each feature; None for no
            alignment.
        padding_struct: the padding value of each feature; the default is 0.
        max_sequences_per_bin: the maximum number of documents per row; None for no limit.
        overflow: the treatment of documents longer than a row: "error", "truncate", "split" or "drop".

    Raises:
        TypeError: the parent is not a dataset.
        TypeError, ValueError: as `FirstFitPack`.

    Examples:
        >>> documents = [{"tokens": np.full(length, length)} for length in (3, 5, 2, 6, 4)]
        >>> rows = millstream.experimental.FirstFitPackIterDataset(
        ...     millstream.MapDataset.source(documents),
        ...     length_struct={"tokens": 10},
        ...     num_packing_bins=2,
        ...     shuffle_bins=False,
        ... )
        >>> [row["tokens"].tolist() for row in rows]
        [[3, 3, 3, 5, 5, 5, 5, 5, 2, 2], [6, 6, 6, 6, 6, 6, 4, 4, 4, 4]]
    """

    _operation = FirstFitPack


class BestFitPackIterDataset(_PackIterDataset):
    """Rows packed from documents in order of arrival. Each goes into the row in which it leaves the least space.

    It is `parent.apply(BestFitPack(...))` with Grain's arguments; see `FirstFitPack` for rows and errors.

    Args:
        parent: the dataset of documents: dicts of arrays.
        length_struct: the number of tokens per row, for each feature; other features are dropped.
        num_packing_bins: the number of open rows, at least 1.
        seed: selects the order of the rows, 0 … 2**64 - 1.
        shuffle_bins: True to shuffle rows that are completed together.
        shuffle_bins_group_by_feature: the feature by which rows that are completed together are sorted first; None for
            no sorting.
        meta_features: features without segment ids and positions. A row has a list of each not in length_struct.
        pack_alignment_struct: documents begin at multiples of this number of tokens, for each feature; None for no
            alignment.
        padding_struct: the padding value of each feature; the default is 0.
        max_sequences_per_bin: the maximum number of documents per row; None for no limit.
        overflow: the treatment of documents longer than a row: "error", "truncate", "split" or "drop".

    Raises:
        TypeError: the parent is not a dataset.
        TypeError, ValueError: as `FirstFitPack`.

    Examples:
        >>> documents = [{"tokens": np.full(length, length)} for length in (3, 5, 2, 6, 4)]
        >>> rows = millstream.experimental.BestFitPackIterDataset(
        ...     millstream.MapDataset.source(documents),
        ...     length_struct={"tokens": 10},
        ...     num_packing_bins=2,
        ...     shuffle_bins=False,
        ... )
        >>> [row["tokens"].tolist() for row in rows]
        [[3, 3, 3, 5, 5, 5, 5, 5, 2, 2], [6, 6, 6, 6, 6, 6, 4, 4, 4, 4]]
    """

    _operation = BestFitPack


class ConcatThenSplitIterDataset(_Operated):
    """Rows split from concatenated documents. Only the last row has padding.

    It is `parent.apply(ConcatThenSplit(...))` with Grain's arguments; see `ConcatThenSplit` for rows and errors.

    Args:
        parent: the dataset of documents: dicts of arrays.
        length_struct: the number of tokens per row, for each feature; other features are dropped.
        meta_features: features, of length_struct, without segment ids and positions.
        split_full_length_features: True to split documents that are as long as a row like all others; False to make
            each of them a row, after the row that is being filled.
        bos_handling: the treatment of the first tokens of rows.
        bos_features: the features in which they are replaced.
        bos_token_id: the token that replaces them; None for no replacement.

    Raises:
        TypeError: the parent is not a dataset.
        TypeError, ValueError: as `ConcatThenSplit`.

    Examples:
        >>> documents = millstream.MapDataset.source([{"tokens": np.full(length, length)} for length in (3, 5, 2)])
        >>> rows = millstream.experimental.ConcatThenSplitIterDataset(documents, length_struct={"tokens": 4})
        >>> [row["tokens"].tolist() for row in rows]
        [[3, 3, 3, 5], [5, 5, 5, 5], [2, 2, 0, 0]]
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
        if bos_handling is BOSHandling.DO_NOTHING:
            # Grain accepts both here, and ignores them.
            bos_features, bos_token_id = (), None
        operation = ConcatThenSplit(
            length_struct,
            meta_features=meta_features,
            split_full_length_features=split_full_length_features,
            bos_handling=bos_handling,
            bos_features=bos_features,
            bos_token_id=bos_token_id,
        )
        super().__init__(parent, operation)


class WindowShuffleIterDataset(_Operated):
    """The elements of a dataset, shuffled within windows of `window_size` in a row.

    Each window has its own order, and is kept in memory as a whole.

    Args:
        parent: the dataset.
        window_size: the number of elements per window, at least 1.
        seed: 0 … 2**64 - 1.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> dataset = millstream.MapDataset.range(8)
        >>> list(millstream.experimental.WindowShuffleIterDataset(dataset, window_size=4, seed=0))
        [2, 0, 3, 1, 4, 6, 5, 7]
    """

    def __init__(self, parent: Any, *, window_size: SupportsIndex, seed: SupportsIndex) -> None:
        super().__init__(parent, WindowShuffle(window_size, seed))


class RebatchIterDataset(_Operated):
    """Batches of one size, rebuilt from batches of any size. Rows keep their order, and no row is lost.

    Args:
        parent: the dataset of batches: structures of arrays with one row for each element in their first axis.
        batch_size: the number of rows per batch, at least 1.
        drop_remainder: True to drop the last rows if they do not fill a batch.

    Raises:
        TypeError, ValueError: as `Rebatch`; the parent is not a dataset.

    Examples:
        >>> batches = millstream.MapDataset.source([np.array([1, 2, 3]), np.array([4]), np.array([5, 6])])
        >>> list(millstream.experimental.RebatchIterDataset(batches, batch_size=2))
        [array([1, 2]), array([3, 4]), array([5, 6])]
    """

    def __init__(self, parent: Any, batch_size: SupportsIndex, drop_remainder: bool = False) -> None:
        super().__init__(parent, Rebatch(batch_size, drop_remainder))


class FlatMapIterDataset(_Operated):
    """The children into which an operation splits each element.

    Args:
        parent: the dataset.
        transform: a `FlatMap`.

    Raises:
        TypeError: the parent is not a dataset, or the transform is not a `FlatMap`.

    Examples:
        >>> texts = millstream.MapDataset.source(["a b", "", "c"])
        >>> words = millstream.FlatMap(str.split, max_fan_out=4)
        >>> list(millstream.experimental.FlatMapIterDataset(texts, words))
        ['a', 'b', 'c']
    """

    def __init__(self, parent: Any, transform: FlatMap[Any, Any]) -> None:
        if not isinstance(transform, FlatMap):
            raise TypeError(
                f"transform must be a FlatMap, which knows its max_fan_out, got {transform!r}: "
                "write FlatMap(function, max_fan_out)."
            )
        super().__init__(parent, transform)


class WindowShuffleMapDataset(MapDataset[T]):
    """The elements of a dataset, shuffled within windows of `window_size`. Neighbours stay near.

    Each window and epoch has its own order. Each element occurs once per epoch, also in a shorter last window.

    Args:
        parent: the dataset.
        window_size: the number of elements per window, at least 1.
        seed: 0 … 2**64 - 1.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> dataset = millstream.MapDataset.range(8)
        >>> list(millstream.experimental.WindowShuffleMapDataset(dataset, window_size=4, seed=0))
        [0, 2, 3, 1, 6, 5, 4, 7]
    """

    def __init__(self, parent: MapDataset[T], *, window_size: SupportsIndex, seed: SupportsIndex) -> None:
        super().__init__(parent)
        self._node = node_of(parent.window_shuffle(window_size, seed))


class FlatMapMapDataset(MapDataset[Any]):
    """The children that an operation splits elements into: `parent.flat_map(transform)`.

    Args:
        parent: the dataset.
        transform: a `FlatMap`. Element i has the positions from `i * max_fan_out` on; those for which there is no child
            hold None.

    Raises:
        TypeError: the transform is not a `FlatMap`.

    Examples:
        >>> texts = millstream.MapDataset.source(["a b", "c"])
        >>> words = millstream.FlatMap(str.split, max_fan_out=2)
        >>> dataset = millstream.experimental.FlatMapMapDataset(texts, words)
        >>> [dataset[position] for position in range(4)]
        ['a', 'b', 'c', None]
    """

    def __init__(self, parent: MapDataset[Any], transform: FlatMap[Any, Any]) -> None:
        super().__init__(parent)
        self._node = node_of(parent.flat_map(transform))
