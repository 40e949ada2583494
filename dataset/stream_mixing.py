"""Streams mixed in exact proportions: which one is due is arithmetic, as in a MixtureSampler."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from millstream.dataset.dataset_iterator import DatasetIterator
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


@final
class _MixedIterator(DatasetIterator[Any]):
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
        self._due: list[int] = []

    def __next__(self) -> Any:
        """Returns the next element of the stream that is due."""
        self._check_open()
        if self._ended:
            raise StopIteration
        row = self._position - self._first
        if not 0 <= row < len(self._due):
            row, self._first = 0, self._position
            self._due = self._schedule.locate(np.arange(self._first, self._first + LOOK_AHEAD))[0].tolist()
        try:
            element = next(self._parents[self._due[row]])
        except StopIteration:
            self._ended = True
            raise
        self._position += 1
        return element

    def get_state(self) -> dict[str, Any]:
        """Returns how many elements have come, and where each stream is."""
        states = [parent.get_state() for parent in self._parents]
        named = dict(zip(self._mixture.names, states, strict=True))
        return {
            "parents": named if self._mixture.is_named else states,
            "position": self._position,
            "ended": self._ended,
        }

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
                f"The state is of a mixture of {len(states)} datasets, and here are {len(self._parents)}. Mixtures of "
                "a mapping can be resumed with others: name the datasets."
            )
        parents = list(self._parents)
        known = [number for number, own in enumerate(states) if own is not None]
        move_all([parents[number] for number in known], [states[number] for number in known])
        for number in set(range(len(parents))) - set(known):
            parents[number].close()
            parents[number] = opened_below(self._mixture.parents[number])
        self._parents = tuple(parents)
        self._position, self._ended, self._due = checked["position"], checked["ended"], []
