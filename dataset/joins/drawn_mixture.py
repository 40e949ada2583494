"""The iterator of mixed streams, which draws from the stream that is due, as a MixtureSampler computes it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.iterators.chain_iterator import ReadIterator
from millstream.dataset.iterators.dataset_iterator import DatasetIterator, Drawn, drawn_from, move_to, state_below
from millstream.dataset.iterators.recovering_iterator import RecoveringIterator
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.state import (
    Check,
    Sealed,
    canonical,
    is_anything,
    is_flag,
    is_list,
    is_number,
    sealed,
    unsealed,
)
from millstream.samplers.mixtures.mixing_schedule import FIRST_EXHAUSTED, MixingSchedule
from millstream.samplers.order import by_number

LOOK_AHEAD = 1024
"""The number of elements whose streams are computed in one call."""


@final
class MixedIterator(RecoveringIterator[Any]):
    """Draws from the stream that is due; ends when that has ended. Without names, states list streams in order."""

    _reads_together = True

    def __init__(
        self,
        parents: Sequence[DatasetIterator[Any]],
        weights: tuple[int, ...],
        names: Sequence[Any] | None,
    ) -> None:
        super().__init__(parents)
        self._names = names
        # A stream that a state does not name begins again.
        self._beginnings = {} if names is None else dict(zip(names, map(state_below, self._parents), strict=True))
        self._weights = weights
        (self._schedule,) = MixingSchedule([(0, weights)], [None] * len(self._parents), FIRST_EXHAUSTED).phases
        self._ended = False
        self._first = 0
        self._due: NDArray[Any] = np.empty(0, np.int64)
        self._weights_text = canonical(list(weights))

    def below(self) -> Iterator[tuple[str, Any]]:
        return zip(map(str, self._names or range(len(self._parents))), self._parents, strict=True)

    def skip_absent(self) -> None:
        """Skips the missing elements of streams from now on."""
        for parent in self._parents:
            if isinstance(parent, ReadIterator):
                parent.raises_absent = False

    def _draw(self, count: int) -> Drawn[Any]:
        if self._ended:
            return Drawn([])
        values: list[Any] = [None] * count
        end, failure = count, None
        for number, own in self._turns(count):
            drawn = drawn_from(self._parents[number], len(own))
            for position, value in zip(own, drawn.values, strict=False):
                values[position] = value
            if len(drawn.values) < len(own) and own[len(drawn.values)] < end:
                end, failure = own[len(drawn.values)], drawn.error
        self._ended = end < count and failure is None
        return Drawn(values[:end], failure)

    def _draw_one(self) -> Any:
        if self._ended:
            raise StopIteration
        (due,) = self._streams_due(1).tolist()
        try:
            return next(self._parents[due])
        except StopIteration:
            self._ended = True
            raise

    def _turns(self, count: int) -> Iterator[tuple[int, list[int]]]:
        """Yields each stream that is due among the next elements, and the positions of its elements among them."""
        positions = np.arange(count)
        for number, rows in by_number(self._streams_due(count)):
            yield number, positions[rows].tolist()

    def _streams_due(self, count: int) -> NDArray[Any]:
        """Returns the streams of the next elements."""
        row = self._step - self._first
        if not 0 <= row <= len(self._due) - count:
            row, self._first = 0, self._step
            positions = np.arange(self._first, self._first + max(count, LOOK_AHEAD))
            self._due = self._schedule.locate(positions)[0]
        return self._due[row : row + count]

    def _state(self) -> Sealed:
        return self._state_of([state_below(parent) for parent in self._parents], self._step, ended=self._ended)

    def drawn_at(self, position: int) -> tuple[int, ...]:
        """Returns the number of elements of each stream before a position, if all begin with the mixture."""
        return self._schedule.drawn_at(position)

    @property
    def drawn(self) -> tuple[int, ...] | None:
        """The number of elements drawn from each stream; None if it has ended, or if a stream has no random access."""
        counts = [parent.next_index if isinstance(parent, ReadIterator) else None for parent in self._parents]
        known = tuple(count for count in counts if count is not None)
        return known if len(known) == len(counts) and not self._ended else None

    def state_after(self, position: int, drawn: Sequence[int]) -> Sealed:
        """Returns the state at a position, given the number of elements drawn from each stream.

        All of them have random access.
        """
        states = [parent.brief_state_after(count) for parent, count in zip(self._parents, drawn, strict=True)]
        return self._state_of(states, position, ended=False)

    def _state_of(self, states: list[Any], position: int, *, ended: bool) -> Sealed:
        fields: dict[str, Any] = {"position": position, "ended": ended}
        texts = {"ended": "true" if ended else "false"}
        if self._names is None:
            fields |= {"weights": list(self._weights), "parents": states}
            texts["weights"] = self._weights_text
            if set(map(type, states)) == {str}:
                # Brief states have only letters, digits, spaces and commas.
                texts["parents"] = '["' + '","'.join(states) + '"]'
        else:
            fields["parents"] = dict(zip(self._names, states, strict=True))
        return sealed("a mixture", fields, texts)

    def _move(self, state: dict[str, Any]) -> None:
        """Moves to a position. With names, unknown streams start at their beginning."""
        checks: dict[str, Check] = {"position": is_number, "ended": is_flag, "parents": is_anything}
        # Named datasets may have other weights from here on.
        if isinstance(state, Mapping) and "weights" in state:
            checks["weights"] = is_list
        checked = unsealed(state, "a mixture", checks)
        saved = checked["parents"]
        if (weights := checked.get("weights")) is not None and tuple(weights) != self._weights:
            raise CheckpointError(
                f"The state is of a mixture with other weights: saved {tuple(weights)}, here {self._weights}. Build it "
                "as it was saved; or name the datasets, whose weights may then change."
            )
        if (self._names is not None) != isinstance(saved, Mapping):
            raise CheckpointError(
                "A mixture of a mapping has its states by name, and one of a list in order: build it as it was saved."
            )
        # Without names, there are as many states as weights.
        states = list(saved)
        if self._names is not None:
            states = [saved[name] if name in saved else self._beginnings[name] for name in self._names]
        for parent, own in zip(self._parents, states, strict=True):
            move_to(parent, own)
        self._step, self._ended, self._due = checked["position"], checked["ended"], np.empty(0, np.int64)
