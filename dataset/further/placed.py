"""Elements on a device before the training step asks for them."""

import collections
from typing import Any, SupportsIndex, final

from millstream.checks import as_integer
from millstream.dataset.dataset_iterator import DatasetIterator
from millstream.dataset.further.working_ahead import ThreadPrefetchIterDataset
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.streams import as_stream
from millstream.loader.placement import Placement


def device_put(
    ds: Any, device: Any, *, cpu_buffer_size: SupportsIndex = 4, device_buffer_size: SupportsIndex = 2
) -> IterDataset[Any]:
    """Returns the same elements as `jax.Array`s, which are on their way to the device before they are asked for.

    For the batches of a `DataLoader`, use `millstream.device_put(iter(loader))`.

    Args:
        ds: the dataset.
        device: a `jax.Device` or a `jax.sharding.Sharding`; None for the default device. Where the sharding spans
            several processes, each gives its part of the global batch.
        cpu_buffer_size: how many elements are made ahead, where nothing is before; as in `ThreadPrefetchIterDataset`.
        device_buffer_size: how many elements may be on the device, or on their way, before they are asked for.

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
    """Draws a few elements more than were asked for: JAX moves them while the training step computes."""

    def __init__(self, parent: DatasetIterator[Any], placement: Placement, buffer_size: int) -> None:
        super().__init__(parent)
        self._placement = placement
        self._buffer_size = buffer_size
        # What `next` is to give or to raise, each with the state after it.
        self._staged: collections.deque[tuple[Any, BaseException | None, Any]] = collections.deque()
        self._state: Any = None

    def __next__(self) -> Any:
        """Returns the next element."""
        self._check_open()
        self._fill(1)
        element, error, self._state = self._staged.popleft()
        if error is not None:
            self._state = None
            raise error
        self._fill(self._buffer_size)
        return element

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last element that was given: what is staged does not count."""
        state: dict[str, Any] = self._parent.get_state() if self._state is None else self._state
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position."""
        self._check_open()
        self._parent.set_state(state)
        self._staged.clear()
        self._state = None

    def _fill(self, count: int) -> None:
        while len(self._staged) < count and not (self._staged and self._staged[-1][1]):
            try:
                element, error = self._placement.put(next(self._parent)), None
            except Exception as failure:  # noqa: BLE001  (it comes at its turn)
                element, error = None, failure
            self._staged.append((element, error, self._parent.get_state()))
