"""Elements that are transferred to a device in advance."""

from typing import Any, SupportsIndex, final

from millstream.checks import as_integer
from millstream.dataset.grain_compat.prefetching import ThreadPrefetchIterDataset
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.streams import as_stream
from millstream.loader.device_iterator import DeviceIterator
from millstream.loader.insight import Insight
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
class _PlacedIterator(DatasetIterator[Any]):
    """Yields the elements of a `DeviceIterator`, with the names that iterators of datasets have."""

    def __init__(self, parent: DatasetIterator[Any], placement: Placement, buffer_size: int) -> None:
        super().__init__(parent)
        self._placed = DeviceIterator(parent, placement, max(1, buffer_size))

    def __next__(self) -> Any:
        """Returns the next element."""
        self._check_open()
        return next(self._placed)

    @property
    def step(self) -> int:
        """The number of elements yielded."""
        return self._placed.step

    @property
    def epoch(self) -> int | None:  # type: ignore[override]  # Nobody sets it here.
        """The epoch that the next element begins in, from 0; None if the elements have no epochs."""
        return self._placed.epoch

    def __len__(self) -> int:
        """Returns the number of elements left; TypeError if it is not known."""
        return len(self._placed)

    @property
    def insight(self) -> Insight:
        """The views of the iterator that it draws from, in which the trainer's waits are those for this iterator."""
        return self._placed.insight

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last element that was yielded: what is staged does not count."""
        state: dict[str, Any] = self._placed.get_state()
        return state

    def set_state(self, state: dict[str, Any], **options: Any) -> None:
        """Moves to a position. The options are those of the iterator that it draws from."""
        self._check_open()
        self._placed.set_state(state, **options)

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` elements, if the iterator that it draws from can."""
        self._check_open()
        self._placed.seek(step)

    def start_prefetch(self) -> None:
        """Begins to put elements on the device."""
        self._check_open()
        self._placed.start_prefetch()

    def close(self) -> None:
        """Ends the thread that puts elements on the device, and what it draws from."""
        self._placed.close()
        super().close()
