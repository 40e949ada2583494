"""Streams mixed in exact proportions: which one is due is arithmetic, as in a MixtureSampler."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.dataset_iterator import DatasetIterator
from millstream.dataset.drawing import Drawn, DrawnIterator, drawn_from, noted_state
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.streams import as_stream, checked_state, move_all, opened_below
from millstream.errors import CheckpointError
from millstream.samplers.components import named_parts
from millstream.samplers.mixing_schedule import FIRST_EXHAUSTED, MixingSchedule
from millstream.samplers.weights import checked_weights

LOOK_AHEAD = 1024
"""For this many elements it is found at once which streams they come from."""


@final
class MixedIterDataset(IterDataset[Any]):
    """The elements of several streams, in the proportions of weights: what `IterDataset.mix` returns.

    Attributes:
        names: what the streams are called; their numbers where they have no names.
        weights: whole numbers without a common divisor, one for each.
        is_named: whether states go by name.
    """

    def __init__(
        self,
        datasets: "Sequence[Any] | Mapping[str, Any]",
        weights: "Sequence[Any] | Mapping[str, Any] | None" = None,
    ) -> None:
        self.names, parts = named_parts(datasets, "datasets")
        super().__init__([as_stream(part, f"datasets[{name!r}]") for name, part in zip(self.names, parts, strict=True)])
        self.weights = checked_weights([1] * len(parts) if weights is None else weights, self.names)
        self.is_named = isinstance(datasets, Mapping)

    def __iter__(self) -> DatasetIterator[Any]:
        return _MixedIterator(self)

    def _line(self) -> str:
        return f"mix(weights={dict(zip(self.names, self.weights, strict=True))})"

    def _shares(self) -> Sequence[tuple[str, float]]:
        return [(str(name), weight) for name, weight in zip(self.names, self.weights, strict=True)]


@final
class _MixedIterator(DrawnIterator):
    """Draws from the stream that is due; ends where that has ended.

    Args:
        mixture: the dataset.
    """

    def __init__(self, mixture: MixedIterDataset) -> None:
        super().__init__([opened_below(part) for part in mixture.parents])
        self._mixture = mixture
        (self._schedule,) = MixingSchedule([(0, mixture.weights)], [None] * len(self._parents), FIRST_EXHAUSTED).parts
        self._position = 0
        self._ended = False
        self._first = 0
        self._due: NDArray[Any] = np.empty(0, np.int64)

    def __next__(self) -> Any:
        """Returns the next element of the stream that is due."""
        self._check_open()
        if self._ended:
            raise StopIteration
        (due,) = self._streams_due(1)
        try:
            element = next(self._parents[due])
        except StopIteration:
            self._ended = True
            raise
        self._position += 1
        return element

    def draw(self, count: int) -> Drawn:
        """Returns the next elements, of each stream all that are due at once.

        Where there are fewer than `count`, streams have been drawn from beyond the end: it has to be moved to a state.
        """
        self._check_open()
        if self._ended:
            return Drawn([], None)
        due = self._streams_due(count)
        places = np.argsort(due, kind="stable")
        bounds = np.searchsorted(due[places], np.arange(len(self._parents) + 1)).tolist()
        values: list[Any] = [None] * count
        end, failure = count, None
        for parent, (start, stop) in zip(self._parents, itertools.pairwise(bounds), strict=True):
            if start == stop:
                continue
            own = places[start:stop].tolist()
            drawn = drawn_from(parent, len(own))
            for place, value in zip(own, drawn.values, strict=False):
                values[place] = value
            if len(drawn.values) < len(own) and own[len(drawn.values)] < end:
                end, failure = own[len(drawn.values)], drawn.error
        self._position += end
        self._ended = end < count and failure is None
        return Drawn(values[:end], failure)

    def _streams_due(self, count: int) -> NDArray[Any]:
        """Returns which streams the next elements come from."""
        row = self._position - self._first
        if not 0 <= row <= len(self._due) - count:
            row, self._first = 0, self._position
            positions = np.arange(self._first, self._first + max(count, LOOK_AHEAD))
            self._due = self._schedule.locate(positions)[0]
        return self._due[row : row + count]

    def get_state(self) -> dict[str, Any]:
        """Returns how many elements have come, and where each stream is."""
        return self.noted_state()()

    def noted_state(self) -> Callable[[], dict[str, Any]]:
        """Returns what gives that."""
        noted = [noted_state(parent) for parent in self._parents]
        position, ended = self._position, self._ended

        def state() -> dict[str, Any]:
            states = [of_parent() for of_parent in noted]
            named = dict(zip(self._mixture.names, states, strict=True))
            return {"parents": named if self._mixture.is_named else states, "position": position, "ended": ended}

        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position. By name, streams that it does not know begin anew.

        Raises:
            CheckpointError: it is not the state of such a mixture.
        """
        self._check_open()
        checked = checked_state(state, {"parents", "position", "ended"}, "a mixture")
        saved = checked["parents"]
        if self._mixture.is_named != isinstance(saved, Mapping):
            raise CheckpointError(
                "A mixture of a mapping has its states by name, and one of a list in order: build it as it was saved."
            )
        states = [saved.get(name) for name in self._mixture.names] if isinstance(saved, Mapping) else list(saved)
        if len(states) != len(self._parents):
            raise CheckpointError(
                f"The state is of a mixture of {len(states)} datasets, but there are {len(self._parents)} here. "
                "Mixtures of a mapping can be resumed with others: name the datasets."
            )
        parents = list(self._parents)
        known = [number for number, own in enumerate(states) if own is not None]
        move_all([parents[number] for number in known], [states[number] for number in known])
        for number in set(range(len(parents))) - set(known):
            parents[number].close()
            parents[number] = opened_below(self._mixture.parents[number])
        self._parents = tuple(parents)
        self._position, self._ended, self._due = checked["position"], checked["ended"], np.empty(0, np.int64)
