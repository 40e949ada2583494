"""Streams as users write them: of an iterator without states, and with them."""

from collections.abc import Iterator
from typing import Any

from millstream import DatasetIterator, IterDataset


class Counted(IterDataset[int]):
    """Numbers from 0. Its iterator has no states."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]  # wrapped by the class
        return iter(range(self.count))


class Numbers(Counted):
    """The same numbers from an iterator with states, which fails the first time at one of them."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        super().__init__(count)
        self.fails_at = fails_at

    def __iter__(self) -> "NumbersIterator":
        return NumbersIterator(self)


class NumbersIterator(DatasetIterator[int]):
    """Yields the numbers of a dataset."""

    step = 0

    def __init__(self, dataset: Numbers) -> None:
        # One of Python's own iterators as the parent.
        super().__init__(iter(range(dataset.count)))
        self._dataset = dataset

    def __next__(self) -> int:
        if self.step == self._dataset.fails_at:
            self._dataset.fails_at = None
            raise ConnectionError("the network is gone")
        if self.step == self._dataset.count:
            raise StopIteration
        self.step += 1
        return self.step - 1

    def get_state(self) -> dict[str, Any]:
        """Returns the number of elements yielded."""
        return {"step": self.step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves there."""
        self.step = state["step"]
