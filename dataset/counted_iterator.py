"""An iterator without states, resumed by drawing from its beginning."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, final

from millstream.dataset.dataset_iterator import DatasetIterator
from millstream.errors import CheckpointError


@final
class CountedIterator(DatasetIterator[Any]):
    """An iterator without states: its position is how many elements it has yielded.

    Args:
        name: what to call it in errors.
        begin: returns the iterator at its beginning.
        first: what it has returned the first time.
    """

    def __init__(self, name: str, begin: Callable[[], Iterator[Any]], first: Iterator[Any]) -> None:
        super().__init__()
        self.name = name
        self._begin = begin
        self._iterator = first
        self._count = 0
        # True if the iterator may be at another element than `_count`, or over.
        self._has_failed = False

    def __next__(self) -> Any:
        """Returns the next element."""
        self._check_open()
        if self._has_failed:
            # A generator is over once it has raised.
            self._restart(self._count)
        self._has_failed = True
        try:
            element = next(self._iterator)
        except StopIteration:
            self._has_failed = False
            raise
        self._count, self._has_failed = self._count + 1, False
        return element

    def get_state(self) -> dict[str, Any]:
        """Returns the number of elements."""
        return {"count": self._count}

    def set_state(self, state: dict[str, Any]) -> None:
        """Begins again, and drops as many elements."""
        self._check_open()
        if not isinstance(state, dict) or state.keys() != {"count"}:
            raise CheckpointError(f"The state is not that of an iterator whose elements are counted: {state!r}.")
        self._restart(state["count"])

    def _restart(self, count: int) -> None:
        """Begins again, and drops the first elements."""
        self._has_failed = True
        self.close_iterator()
        self._iterator = self._begin()
        for _ in itertools.islice(self._iterator, count):
            pass
        self._count, self._has_failed = count, False

    def close(self) -> None:
        """Closes the iterator, where it can be closed."""
        self.close_iterator()
        super().close()

    def close_iterator(self) -> None:
        """Closes the iterator at hand."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()
