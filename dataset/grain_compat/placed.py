"""Elements that are transferred to a device in advance."""

from typing import Any, SupportsIndex, final

from millstream.checks import as_integer
from millstream.dataset.grain_compat.prefetching import ThreadPrefetchIterDataset
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.streams import as_stream
from millstream.loader.device_iterator import DeviceIterator
from millstream.loader.placement import Placement


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
    return _PlacedIterDataset(ahead, Placement(device), as_integer(device_buffer_size, "device_buffer_size", 0))


@final
class _PlacedIterDataset(IterDataset[Any]):
    """Elements on a device."""

    def __init__(self, parent: IterDataset[Any], placement: Placement, buffer_size: int) -> None:
        super().__init__(parent)
        self.placement = placement
        self.buffer_size = buffer_size

    def __iter__(self) -> DatasetIterator[Any]:
        return _PlacedIterator(iter(self._parent), self.placement, self.buffer_size)

    def _line(self) -> str:
        return f".device_put({self.placement!r})"


@final
class _PlacedIterator(DeviceIterator, DatasetIterator[Any]):  # type: ignore[override]  # The first has all members.
    """A `DeviceIterator` that is an iterator of a dataset, too."""

    _call_for_another = "iter(dataset)"

    def __init__(self, parent: DatasetIterator[Any], placement: Placement, buffer_size: int) -> None:
        super().__init__(parent, placement, max(1, buffer_size))
        self._parents = (parent,)
