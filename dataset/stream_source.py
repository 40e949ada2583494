"""A stream that draws from any iterable, resumed by the iterable's own states if it has them."""

import copy
from collections.abc import Iterable
from typing import Any, final

from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.iterators.dataset_iterator import DatasetIterator, ForeignHolder, call_if_possible
from millstream.dataset.iterators.drawing import drawn_from
from millstream.dataset.iterators.recovering_iterator import Drawn, RecoveringIterator
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import is_anything, is_number, sealed, unsealed

_KIND = "a stream with states of its own"


@final
class SourceIterDataset(IterDataset[Any]):
    """The elements of an iterable, in its order: what `IterDataset.source` returns.

    Args:
        iterable: the iterable, whose `iter` begins again each time.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        if hasattr(iterable, "__next__"):
            raise TypeError(
                f"iterable must begin again with each iter(iterable), got {type(iterable).__name__}, an iterator that "
                "is read once. Pass what it is made of: an object whose __iter__ returns a new iterator."
            )
        if not hasattr(iterable, "__iter__"):
            raise TypeError(f"iterable must be an iterable, got {iterable!r:.80} of type {type(iterable).__name__}.")
        super().__init__()
        self.iterable = iterable

    def __iter__(self) -> DatasetIterator[Any]:
        if _has_states(self.iterable) or _has_states(iterator := iter(self.iterable)):
            return _StatefulIterator(self.iterable)
        return iterator  # type: ignore[return-value]  # the base class counts its elements

    def _line(self) -> str:
        return f"stream({type(self.iterable).__name__})"


@final
class _StatefulIterator(ForeignHolder[Any], RecoveringIterator[Any]):
    """Draws from an iterable that has `state_dict` and `load_state_dict`, or whose iterators have.

    Hugging Face datasets have them for the iterator that was begun last. So each iterator has a copy of its own.
    """

    def __init__(self, iterable: Any) -> None:
        super().__init__()
        self._iterable = iterable
        self.name = type(iterable).__name__
        self._begin()

    def _begin(self, state: Any = None) -> None:
        self._stateful = iterable = self._iterable
        if has_own := _has_states(iterable):
            self._stateful = iterable = copy.deepcopy(iterable)
            if state is not None:
                iterable.load_state_dict(state)
        self._iterator = iter(iterable)
        if not has_own:
            self._stateful = self._iterator
            if state is not None:
                self._iterator.load_state_dict(state)

    def _draw(self, count: int) -> Drawn[Any]:
        return self._use(lambda: drawn_from(self._iterator, count))

    def _state(self) -> dict[str, Any]:
        # At the beginning, not all have a state yet.
        below = self._stateful.state_dict() if self._step else None
        return sealed(_KIND, {"count": self._step, "stream": self.name, "source": below})

    def _move(self, state: dict[str, Any]) -> None:
        checked = unsealed(state, _KIND, {"count": is_number, "stream": is_anything, "source": is_anything})
        if checked["stream"] != self.name:
            raise CheckpointError(
                f"The state belongs to another stream: saved {checked['stream']!r}, here {self.name!r}."
            )
        call_if_possible(self._iterator, "close")
        self._begin(copy.deepcopy(checked["source"]) if checked["count"] else None)
        self._step = checked["count"]


def _has_states(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
