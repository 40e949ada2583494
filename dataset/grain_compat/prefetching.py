"""Prefetching by threads and to devices, and options for a whole chain, under Grain's names."""

import dataclasses
from typing import Any, SupportsIndex, final

from millstream.core.checks import as_integer
from millstream.dataset.chain import Chain
from millstream.dataset.iter_dataset import IterDataset, as_stream, made
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.options import DatasetOptions
from millstream.dataset.stream_steps import Ahead, Leaf, OpenBelow, StreamStep, WithOptions, step_of, steps_of
from millstream.loader.device_iterator import DeviceIterator
from millstream.loader.device_placement import Placement
from millstream.loader.threads.options import ReadOptions


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
        reading = ReadOptions(1, size) if size and not _works_ahead(step_of(stream)) else None
        self._made_of(_ThreadAhead(steps_of([stream]), reading=reading, size=size), stream)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _ThreadAhead(Ahead):
    """The same elements, prefetched by a thread unless the chain prefetches by itself."""

    size: int = 0

    @property
    def text(self) -> str:
        return f"ThreadPrefetchIterDataset(prefetch_buffer_size={self.size})"


class WithOptionsIterDataset(IterDataset[Any]):
    """The same elements, with options for the whole chain.

    Args:
        parent: the dataset.
        options: the options.

    Raises:
        TypeError: an argument is of the wrong kind.

    Examples:
        >>> options = millstream.experimental.DatasetOptions(on_error="skip")
        >>> list(millstream.experimental.WithOptionsIterDataset(millstream.MapDataset.range(3), options))
        [0, 1, 2]
    """

    def __init__(self, parent: Any, options: DatasetOptions) -> None:
        if not isinstance(options, DatasetOptions):
            raise TypeError(f"options must be DatasetOptions, got {type(options).__name__}.")
        stream = as_stream(parent, "parent")
        self._made_of(WithOptions(steps_of([stream]), options), stream)


def _works_ahead(step: StreamStep) -> bool:
    """True if a stream prefetches by itself."""
    chain = Chain.of(step)
    if chain.num_local:
        return chain.local_reading is not None
    if chain.workers.num_workers or chain.reading:
        return True
    return chain.read is not None and chain.read.reading.reads_ahead


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
        return _PlacedIterator(open_below(*self.above), self.placement, self.buffer_size)

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
