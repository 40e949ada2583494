"""Streams and datasets under Grain's names, which are results of methods of chains; and transfer to devices.

The methods document the arguments and the errors. A `parent` may be an `IterDataset` or a `MapDataset`.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsIndex, TypeVar, final

from millstream.core.checks import as_flag, as_integer
from millstream.dataset.arguments import as_map_dataset
from millstream.dataset.chain import Chain
from millstream.dataset.iter_dataset import IterDataset, made
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.iterators.join_iterator import iterator_of
from millstream.dataset.map_dataset import MapDataset
from millstream.dataset.options import DatasetOptions
from millstream.dataset.stream_steps import (
    Leaf,
    OpenBelow,
    StreamStep,
    WithOptions,
    as_stream,
    as_streams,
    step_of,
    steps_of,
)
from millstream.loader.device_iterator import DeviceIterator
from millstream.loader.device_placement import Placement
from millstream.loader.threads.options import ReadOptions
from millstream.transforms import FlatMap
from millstream.transforms.packing.bins import BestFitPack, BinPack, FirstFitPack
from millstream.transforms.packing.concat_then_split import BOSHandling, ConcatThenSplit


class LimitIterDataset(IterDataset[Any]):
    """The first elements of a dataset: `parent.take(count)`.

    Examples:
        >>> list(millstream.experimental.LimitIterDataset(millstream.MapDataset.range(100), 3))
        [0, 1, 2]
    """

    def __init__(self, parent: Any, count: SupportsIndex) -> None:
        self._made_as(as_stream(parent, "parent").take(count))


class RepeatIterDataset(IterDataset[Any]):
    """The elements of a dataset several times, with the same draws: `parent.repeat(num_epochs)`.

    Examples:
        >>> list(millstream.experimental.RepeatIterDataset(millstream.MapDataset.source(["a", "b"]), num_epochs=2))
        ['a', 'b', 'a', 'b']
    """

    def __init__(self, parent: Any, num_epochs: SupportsIndex | None = None) -> None:
        self._made_as(as_stream(parent, "parent").repeat(num_epochs))


class CacheIterDataset(IterDataset[Any]):
    """The elements of a dataset, kept in memory once they have been drawn: `parent.cache()`.

    All of them must fit into memory. Where it is resumed in another process, the elements before are drawn once more.

    Examples:
        >>> kept = millstream.experimental.CacheIterDataset(millstream.MapDataset.range(3).map(lambda x: x * 10))
        >>> list(millstream.experimental.RepeatIterDataset(kept, num_epochs=2))
        [0, 10, 20, 0, 10, 20]
    """

    def __init__(self, parent: Any) -> None:
        self._made_as(as_stream(parent, "parent").cache())


class ZipIterDataset(IterDataset[tuple[Any, ...]]):
    """Tuples of the elements that datasets yield at the same time: `first.zip(*others, strict=strict)`.

    Examples:
        >>> numbers, letters = millstream.MapDataset.range(2), millstream.MapDataset.source(["a", "b", "c"])
        >>> list(millstream.experimental.ZipIterDataset([numbers, letters], strict=False))
        [(0, 'a'), (1, 'b')]
    """

    def __init__(self, parents: Sequence[Any], *, strict: bool = True) -> None:
        if not parents:
            raise ValueError("ZipIterDataset needs at least one dataset, got none.")
        first, *others = as_streams(parents, "parents")
        self._made_as(first.zip(*others, strict=strict))


class ZipMapDataset(MapDataset[tuple[Any, ...]]):
    """Tuples of the elements that datasets have at the same position: `first.zip(*others)`.

    Examples:
        >>> numbers, letters = millstream.MapDataset.range(2), millstream.MapDataset.source(["a", "b"])
        >>> millstream.experimental.ZipMapDataset([numbers, letters])[1]
        (1, 'b')
    """

    def __init__(self, parents: Sequence[MapDataset[Any]]) -> None:
        if not parents:
            raise ValueError("ZipMapDataset needs datasets of equal length, at least one, got none.")
        self._made_as(MapDataset.zip(*parents))


class InterleaveIterDataset(IterDataset[Any]):
    """One element of each of `cycle_length` datasets, in turn: `IterDataset.interleave(datasets, cycle_length)`.

    `num_make_iter_threads`, `make_iter_buffer_size` and `iter_buffer_size` are without effect: one set of threads reads
    all open datasets, up to the number that their own `ReadOptions` allow.

    Examples:
        >>> datasets = [millstream.MapDataset.source(list(text)) for text in ("aaa", "b", "cc")]
        >>> list(millstream.experimental.InterleaveIterDataset(datasets, cycle_length=2))
        ['a', 'b', 'a', 'a', 'c', 'c']
    """

    def __init__(
        self,
        datasets: Any,
        *,
        cycle_length: SupportsIndex,
        num_make_iter_threads: int = 1,
        make_iter_buffer_size: int = 1,
        iter_buffer_size: int = 1,
    ) -> None:
        del num_make_iter_threads, make_iter_buffer_size, iter_buffer_size
        self._made_as(IterDataset.interleave(datasets, cycle_length))


T = TypeVar("T")


class _PackIterDataset(IterDataset[Any]):
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
        """Packs the documents of a dataset.

        The arguments are those of `FirstFitPack`. `shuffle_bins_group_by_feature` must be None, because there is no
        other order.
        """
        if shuffle_bins_group_by_feature is not None:
            raise ValueError(
                f"shuffle_bins_group_by_feature must be None, got {shuffle_bins_group_by_feature!r}: write "
                "shuffle_bins=False, and sort the rows in an operation after them."
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
            pack_alignment_struct=pack_alignment_struct,
        )
        self._made_as(as_stream(parent, "parent").apply(operation))


class FirstFitPackIterDataset(_PackIterDataset):
    """Rows packed from documents in order of arrival. Each document goes into the first row that has room for it.

    It is `parent.apply(FirstFitPack(...))` with Grain's arguments; see `FirstFitPack` for rows.

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

    It is `parent.apply(BestFitPack(...))` with Grain's arguments; see `FirstFitPack` for rows.

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


class ConcatThenSplitIterDataset(IterDataset[Any]):
    """Rows split from concatenated documents: `parent.apply(ConcatThenSplit(...))` with Grain's arguments.

    `split_full_length_features` must be True, because documents as long as a row are split like all others.

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
        if not as_flag(split_full_length_features, "split_full_length_features"):
            raise ValueError(
                "split_full_length_features must be True, got False: documents as long as a row are split like all "
                "others. Use FirstFitPackIterDataset to keep documents whole."
            )
        operation = ConcatThenSplit(
            length_struct,
            meta_features=meta_features,
            bos_handling=bos_handling,
            bos_features=bos_features,
            bos_token_id=bos_token_id,
        )
        self._made_as(as_stream(parent, "parent").apply(operation))


class WindowShuffleIterDataset(IterDataset[Any]):
    """The elements of a dataset, shuffled within windows: `parent.window_shuffle(window_size, seed)`.

    Examples:
        >>> dataset = millstream.MapDataset.range(8)
        >>> list(millstream.experimental.WindowShuffleIterDataset(dataset, window_size=4, seed=0))
        [2, 0, 3, 1, 4, 6, 5, 7]
    """

    def __init__(self, parent: Any, *, window_size: SupportsIndex, seed: SupportsIndex) -> None:
        self._made_as(as_stream(parent, "parent").window_shuffle(window_size, seed))


class RebatchIterDataset(IterDataset[Any]):
    """Batches of one size, rebuilt from batches of any size: `parent.rebatch(batch_size)`.

    Examples:
        >>> batches = millstream.MapDataset.source([np.array([1, 2, 3]), np.array([4]), np.array([5, 6])])
        >>> list(millstream.experimental.RebatchIterDataset(batches, batch_size=2))
        [array([1, 2]), array([3, 4]), array([5, 6])]
    """

    def __init__(self, parent: Any, batch_size: SupportsIndex, drop_remainder: bool = False) -> None:
        self._made_as(as_stream(parent, "parent").rebatch(batch_size, drop_remainder=drop_remainder))


class FlatMapIterDataset(IterDataset[Any]):
    """The children that an operation splits elements into: `parent.flat_map(transform)`.

    Examples:
        >>> texts = millstream.MapDataset.source(["a b", "", "c"])
        >>> words = millstream.FlatMap(str.split, max_fan_out=4)
        >>> list(millstream.experimental.FlatMapIterDataset(texts, words))
        ['a', 'b', 'c']
    """

    def __init__(self, parent: Any, transform: FlatMap[Any, Any]) -> None:
        self._made_as(as_stream(parent, "parent").flat_map(transform))


class WindowShuffleMapDataset(MapDataset[T]):
    """The elements of a dataset, shuffled within windows: `parent.window_shuffle(window_size, seed)`.

    Examples:
        >>> dataset = millstream.MapDataset.range(8)
        >>> list(millstream.experimental.WindowShuffleMapDataset(dataset, window_size=4, seed=0))
        [0, 2, 3, 1, 6, 5, 4, 7]
    """

    def __init__(self, parent: MapDataset[T], *, window_size: SupportsIndex, seed: SupportsIndex) -> None:
        self._made_as(as_map_dataset(parent, "parent").window_shuffle(window_size, seed))


class FlatMapMapDataset(MapDataset[Any]):
    """The children that an operation splits elements into: `parent.flat_map(transform)`.

    Examples:
        >>> texts = millstream.MapDataset.source(["a b", "c"])
        >>> words = millstream.FlatMap(str.split, max_fan_out=2)
        >>> dataset = millstream.experimental.FlatMapMapDataset(texts, words)
        >>> [dataset[position] for position in range(4)]
        ['a', 'b', 'c', None]
    """

    def __init__(self, parent: MapDataset[Any], transform: FlatMap[Any, Any]) -> None:
        self._made_as(as_map_dataset(parent, "parent").flat_map(transform))


class ThreadPrefetchIterDataset(IterDataset[Any]):
    """The same elements, prefetched by a thread.

    A chain over a `MapDataset` prefetches by itself, as set by its `ReadOptions`, and is unchanged. After a stream
    (a mixture, or a user-defined dataset), the operations run in the thread, and the stream itself in the thread of the
    consumer. Directly after a combination, the thread serves those of its datasets that do not prefetch.

    Args:
        parent: the dataset.
        prefetch_buffer_size: the maximum number of elements that are ready or in work, rounded up as in `ReadOptions`;
            0 for no thread.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> dataset = millstream.MapDataset.range(4).map(lambda x: x * 10)
        >>> list(millstream.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2))
        [0, 10, 20, 30]
    """

    def __init__(self, parent: Any, *, prefetch_buffer_size: SupportsIndex) -> None:
        size = as_integer(prefetch_buffer_size, "prefetch_buffer_size", minimum=0)
        stream = as_stream(parent, "parent")
        ahead = stream.prefetch(ReadOptions(1, size)) if size and not _prefetches(step_of(stream)) else stream
        self._made_as(made(step_of(ahead), stream))


def _prefetches(step: StreamStep) -> bool:
    chain = Chain.of(step)
    if chain.num_local:
        return chain.local_reading is not None
    if chain.workers.num_workers or chain.reading:
        return True
    return chain.read is not None and chain.read.reading.reads_ahead


class WithOptionsIterDataset(IterDataset[Any]):
    """The same elements, with options for the whole chain, as `parent.options(...)` sets them.

    Examples:
        >>> options = millstream.experimental.DatasetOptions(on_error="skip")
        >>> list(millstream.experimental.WithOptionsIterDataset(millstream.MapDataset.range(3), options))
        [0, 1, 2]
    """

    def __init__(self, parent: Any, options: DatasetOptions) -> None:
        if not isinstance(options, DatasetOptions):
            raise TypeError(f"options must be DatasetOptions, got {type(options).__name__}.")
        stream = as_stream(parent, "parent")
        self._made_as(made(WithOptions(steps_of([stream]), options), stream))


def device_put(
    ds: Any, device: Any, *, cpu_buffer_size: SupportsIndex = 4, device_buffer_size: SupportsIndex = 2
) -> IterDataset[Any]:
    """Returns the same elements as `jax.Array`s, which are transferred to the device in advance.

    For the batches of a `DataLoader`, use `millstream.device_put(iter(loader))`.

    Args:
        ds: the dataset.
        device: a `jax.Device` or a `jax.sharding.Sharding`; None for the default device. If the sharding spans
            several processes, each transfers its part of the global batch.
        cpu_buffer_size: the number of elements to prefetch if the dataset does not prefetch by itself, as in
            `ThreadPrefetchIterDataset`.
        device_buffer_size: the maximum number of elements that are transferred in advance.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> import jax
        >>> dataset = millstream.MapDataset.range(8).to_iter_dataset().batch(4)
        >>> next(iter(millstream.experimental.device_put(dataset, jax.devices()[0])))
        Array([0, 1, 2, 3], dtype=int32)
    """
    buffer_size = as_integer(cpu_buffer_size, "cpu_buffer_size", 0)
    ahead = ThreadPrefetchIterDataset(as_stream(ds, "ds"), prefetch_buffer_size=buffer_size)
    placed = _Placed(steps_of([ahead]), Placement(device), as_integer(device_buffer_size, "device_buffer_size", 0))
    return made(placed, ahead)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _Placed(Leaf):
    """The same elements on a device."""

    placement: Placement
    buffer_size: int
    reads_in_threads = False

    def opened(self, open_below: OpenBelow) -> DatasetIterator[Any]:
        return _PlacedIterator(iterator_of(open_below(*self.above)), self.placement, self.buffer_size)

    @property
    def text(self) -> str:
        return f".device_put({self.placement!r})"


@final
class _PlacedIterator(DeviceIterator, DatasetIterator[Any]):  # type: ignore[override]  # The first has all members.
    """A `DeviceIterator` that is an iterator of a dataset, too."""

    _call_for_another = "iter(dataset)"
    _owns_states = True

    def __init__(self, parent: DatasetIterator[Any], placement: Placement, buffer_size: int) -> None:
        super().__init__(parent, placement, max(1, buffer_size))
        self._parents = (parent,)
