"""The iterator of mixed streams, which draws from the stream that is due, as a MixtureSampler computes it."""

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.iterators.chain_iterator import ReadIterator
from millstream.dataset.iterators.dataset_iterator import DatasetIterator, Drawn, drawn_from, move_to, position_of
from millstream.dataset.iterators.recovering_iterator import RecoveringIterator
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import (
    SavedPosition,
    is_anything,
    is_flag,
    is_list,
    is_number,
    values_of,
)
from millstream.samplers.mixtures.mixing_schedule import FIRST_EXHAUSTED, MixingSchedule
from millstream.samplers.order import by_number

_KIND = "a mixture"
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
        self._beginnings = {} if names is None else dict(zip(names, map(position_of, self._parents), strict=True))
        self._weights = weights
        (self._schedule,) = MixingSchedule([(0, weights)], [None] * len(self._parents), FIRST_EXHAUSTED).phases
        self._ended = False
        self._first = 0
        self._due: NDArray[Any] = np.empty(0, np.int64)
        # Named datasets may have other weights from a saved position on.
        self._saved_names = None if names is None else SavedPosition(names)
        self._saved_weights = SavedPosition(weights) if names is None else None

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

    def _state(self) -> SavedPosition:
        return self._position([position_of(parent) for parent in self._parents], self._step, ended=self._ended)

    def drawn_at(self, position: int) -> tuple[int, ...]:
        """Returns the number of elements of each stream before a position, if all begin with the mixture."""
        return self._schedule.drawn_at(position)

    @property
    def drawn(self) -> tuple[int, ...] | None:
        """The number of elements drawn from each stream; None if it has ended, or if a stream has no random access."""
        counts = [parent.next_index if isinstance(parent, ReadIterator) else None for parent in self._parents]
        known = tuple(count for count in counts if count is not None)
        return known if len(known) == len(counts) and not self._ended else None

    def position_after(self, position: int, drawn: Sequence[int]) -> SavedPosition:
        """Returns the saved position at a position, given the number of elements drawn from each stream.

        All of them have random access.
        """
        parents = [parent.position_after(count) for parent, count in zip(self._parents, drawn, strict=True)]
        return self._position(parents, position, ended=False)

    def _position(self, parents: list[Any], step: int, *, ended: bool) -> SavedPosition:
        return SavedPosition((_KIND, step, ended, self._saved_names, self._saved_weights, tuple(parents)))

    def _move(self, position: Any) -> None:
        """Moves to a position. With names, unknown streams start at their beginning."""
        values = values_of(position, _KIND, is_number, is_flag, is_anything, is_anything, is_list)
        step, ended, names, weights, saved = values
        if (self._names is None) != (names is None):
            raise CheckpointError(
                "A mixture of a mapping has its states by name, and one of a list in order: build it as it was saved."
            )
        if self._names is None and tuple(weights) != self._weights:
            raise CheckpointError(
                f"The state is of a mixture with other weights: saved {tuple(weights)}, here {self._weights}. Build it "
                "as it was saved; or name the datasets, whose weights may then change."
            )
        # Without names, there are as many positions as weights.
        if self._names is not None:
            by_name = dict(zip(names, saved, strict=True))
            saved = [by_name[name] if name in by_name else self._beginnings[name] for name in self._names]
        for parent, own in zip(self._parents, saved, strict=True):
            move_to(parent, own)
        self._step, self._ended, self._due = step, ended, np.empty(0, np.int64)
