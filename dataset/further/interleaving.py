"""Datasets in turn, some of them open at a time."""

from collections.abc import Sequence
from typing import Any, SupportsIndex, final

from millstream.checks import as_integer
from millstream.dataset.dataset_iterator import DatasetIterator
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.map_dataset import MapDataset
from millstream.dataset.recovering_iterator import RecoveringIterator
from millstream.dataset.streams import as_stream, checked_state, opened_below
from millstream.errors import CheckpointError


@final
class InterleaveIterDataset(IterDataset[Any]):
    """One element of each of `cycle_length` datasets in turn; where one has ended, the next one takes its turns.

    With `[a, b, c]` and `cycle_length=2`, it yields of a, b, a, b, …, and of c instead of the one that ends first.

    Args:
        datasets: a list of datasets; or a `MapDataset` whose elements are datasets, such as one that maps names of
            files to datasets. It is asked for one when its turn comes, so it may have no end.
        cycle_length: how many are open at a time, at least 1.
        num_make_iter_threads: accepted for Grain's sake, and without effect, as the next two: what stands after in the
            chain may have threads and workers.
        make_iter_buffer_size: see `num_make_iter_threads`.
        iter_buffer_size: see `num_make_iter_threads`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> datasets = [millstream.MapDataset.source(list(text)) for text in ("aaa", "b", "cc")]
        >>> list(millstream.experimental.InterleaveIterDataset(datasets, cycle_length=2))
        ['a', 'b', 'a', 'c', 'a', 'c']
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
        if not isinstance(datasets, MapDataset):
            if isinstance(datasets, str | bytes) or not isinstance(datasets, Sequence):
                raise TypeError(f"datasets must be a list or a MapDataset of datasets, got {type(datasets).__name__}.")
            datasets = [as_stream(dataset, f"datasets[{number}]") for number, dataset in enumerate(datasets)]
        super().__init__(datasets)
        self.datasets = datasets
        self.cycle_length = as_integer(cycle_length, "cycle_length", minimum=1)

    def __iter__(self) -> DatasetIterator[Any]:
        return _InterleaveIterator(self.datasets, min(self.cycle_length, len(self.datasets)))

    def _line(self) -> str:
        return f"interleave({len(self.datasets)} datasets, cycle_length={self.cycle_length})"


class _Slot:
    """One of the datasets that are open.

    Attributes:
        number: which dataset; -1 for none.
        iterator: draws from it; None where it has ended.
        last: the state in which it has ended.
    """

    def __init__(self) -> None:
        self.number = -1
        self.iterator: DatasetIterator[Any] | None = None
        self.last: Any = None

    def state(self) -> dict[str, Any]:
        last = self.last if self.iterator is None else self.iterator.get_state()
        return {"dataset": self.number, "ended": self.iterator is None, "state": last}


@final
class _InterleaveIterator(RecoveringIterator[Any]):
    """Draws from one slot after the other."""

    def __init__(self, datasets: Any, num_slots: int) -> None:
        super().__init__()
        self._datasets = datasets
        self._slots = [_Slot() for _ in range(num_slots)]
        self._next = 0
        self._turn = 0
        self._is_begun = False

    def _draw(self) -> Any:
        self._begin()
        ended = 0
        while ended < len(self._slots):
            slot = self._slots[self._turn]
            if slot.iterator is not None:
                try:
                    element = next(slot.iterator)
                except StopIteration:
                    self._open_next(slot)
                    continue
                self._turn = (self._turn + 1) % len(self._slots)
                return element
            ended += 1
            self._turn = (self._turn + 1) % len(self._slots)
        raise StopIteration

    def _state(self) -> dict[str, Any]:
        self._begin()
        return {"next": self._next, "turn": self._turn, "slots": [slot.state() for slot in self._slots]}

    def _move(self, state: dict[str, Any]) -> None:
        checked = checked_state(state, {"next", "turn", "slots"}, "interleaved datasets")
        if len(checked["slots"]) != len(self._slots):
            raise CheckpointError(
                f"The state is of {len(checked['slots'])} datasets that were open at a time, but here it is "
                f"{len(self._slots)}: build InterleaveIterDataset with the cycle_length that it had."
            )
        slots = []
        for saved in checked["slots"]:
            slot = _Slot()
            slot.number, slot.last = saved["dataset"], saved["state"]
            slots.append(slot)
            if not saved["ended"]:
                slot.iterator = _opened(self._datasets[slot.number], slot.number)
                slot.iterator.set_state(saved["state"])
        self._close_slots()
        self._slots, self._next, self._turn, self._is_begun = slots, checked["next"], checked["turn"], True

    def start_prefetch(self) -> None:
        """Opens the first datasets, and has those begin to work ahead that do."""
        self._check_open()
        self._begin()
        for slot in self._slots:
            if slot.iterator is not None:
                slot.iterator.start_prefetch()

    def close(self) -> None:
        """Closes the datasets that are open."""
        self._close_slots()
        super().close()

    def _begin(self) -> None:
        if not self._is_begun and not self._closed:
            for slot in self._slots:
                if slot.iterator is None:
                    self._open_next(slot)
            self._is_begun = True

    def _open_next(self, slot: _Slot) -> None:
        """Gives a slot the next dataset; none where there are no more."""
        if slot.iterator is not None:
            slot.last = slot.iterator.get_state()
            slot.iterator.close()
            slot.iterator = None
        while self._next < len(self._datasets):
            number = self._next
            dataset = self._datasets[number]
            # A hole of the MapDataset is not a dataset.
            if dataset is not None:
                slot.number, slot.iterator = number, _opened(dataset, number)
                self._next += 1
                return
            self._next += 1

    def _close_slots(self) -> None:
        for slot in self._slots:
            if slot.iterator is not None:
                slot.iterator.close()


def _opened(dataset: Any, number: int) -> DatasetIterator[Any]:
    """Returns a new iterator of the dataset of a number."""
    return opened_below(as_stream(dataset, f"datasets[{number}]"))
