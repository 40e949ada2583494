"""The iterator of mixed streams, which draws from the stream that is due, as a MixtureSampler computes it."""

import dataclasses
import functools
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
from millstream.samplers.mixtures.mixing import Mixing
from millstream.samplers.mixtures.mixing_schedule import DROP_EXHAUSTED, Phase
from millstream.samplers.mixtures.mixture_checks import reduced
from millstream.samplers.order import by_number

_KIND = "a mixture"
LOOK_AHEAD = 1024
"""The number of elements whose streams are computed in one call."""


@functools.lru_cache(maxsize=16)
def _saved_weights(mixing: Mixing, count: int) -> SavedPosition:
    if count == 1:
        return SavedPosition(mixing.weights)
    return SavedPosition((position, *weights) for position, weights in mixing.changes[:count])


def saved_weights(mixing: Mixing, position: int) -> SavedPosition:
    """Returns the weights before a position, or, if they change, with the positions from which on they hold."""
    return _saved_weights(mixing, len(mixing.changes_before(max(1, position))))


def check_weights(saved: Any, mixing: Mixing, position: int) -> None:
    """Raises CheckpointError unless the weights of a state are those of a mixture before its position."""
    here = saved_weights(mixing, position)
    if SavedPosition(tuple(one) if isinstance(one, list | tuple) else one for one in saved) != here:
        raise CheckpointError(
            f"The state is of a mixture with other weights: saved {tuple(saved)}, here {tuple(here)}. Build it as it "
            "was saved, and write .reweighted(position, weights) for others from a position on; or name the datasets, "
            "whose weights may then change."
        )


@final
class MixedIterator(RecoveringIterator[Any]):
    """Draws from the stream that is due; ends when that has ended. Without names, states list streams in order."""

    _reads_together = True

    def __init__(self, parents: Sequence[DatasetIterator[Any]], mixing: Mixing, *, is_named: bool) -> None:
        super().__init__(parents)
        self._names = mixing.names if is_named else None
        # A stream that a state does not name begins again.
        self._beginnings = dict(zip(mixing.names, map(position_of, self._parents), strict=True)) if is_named else {}
        self._mixing = mixing
        self._schedule = mixing.schedule([None] * len(self._parents))
        self._ended = False
        self._first = 0
        self._due: NDArray[Any] = np.empty(0, np.int64)
        # Named datasets may have other weights from a saved position on.
        self._saved_names = SavedPosition(mixing.names) if is_named else None

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
        weights = saved_weights(self._mixing, step) if self._names is None else None
        return SavedPosition((_KIND, step, ended, self._saved_names, weights, tuple(parents)))

    def _move(self, position: Any) -> None:
        """Moves to a position. With names, unknown streams start at their beginning."""
        values = values_of(position, _KIND, is_number, is_flag, is_anything, is_anything, is_list)
        step, ended, names, weights, saved = values
        if (self._names is None) != (names is None):
            raise CheckpointError(
                "A mixture of a mapping has its states by name, and one of a list in order: build it as it was saved."
            )
        if self._names is None:
            check_weights(weights, self._mixing, step)
        # Without names, there are as many positions as weights.
        if self._names is not None:
            by_name = dict(zip(names, saved, strict=True))
            saved = [by_name[name] if name in by_name else self._beginnings[name] for name in self._names]
        for parent, own in zip(self._parents, saved, strict=True):
            move_to(parent, own)
        self._step, self._ended, self._due = step, ended, np.empty(0, np.int64)


_TO_THE_END = "a mixture to the end of all"


@dataclasses.dataclass
class _Next:
    """The next element of a stream, which is drawn before its turn, to know whether there is one.

    Attributes:
        is_known: True once it is drawn.
        before: the state of the stream before it.
        drawn: the element, the error in its place, or neither at the end of the stream.
    """

    is_known: bool = False
    before: Any = None
    drawn: Drawn[Any] = dataclasses.field(default_factory=lambda: Drawn([]))


@final
class ExhaustingIterator(RecoveringIterator[Any]):
    """Draws from the stream that is due until all have ended. One that ends earlier is dropped, or begins again.

    As in a `MixtureSampler`, what follows depends on the last element of a stream, not on a turn that it has to miss.
    Each stream is therefore one element ahead.
    """

    _reads_together = True

    def __init__(self, parents: Sequence[DatasetIterator[Any]], mixing: Mixing) -> None:
        super().__init__(parents)
        self._mixing = mixing
        self._later_changes = [position for position, _ in mixing.changes[1:]]
        self._beginnings = list(map(position_of, self._parents))
        self._next = [_Next() for _ in self._parents]
        # True for the streams that have come whole.
        self._is_over = [False] * len(self._parents)
        self._at = 0
        self._phase: Phase | None = None
        self._due: list[int] = []

    def below(self) -> Iterator[tuple[str, Any]]:
        return zip(map(str, self._mixing.names), self._parents, strict=True)

    def _draw(self, count: int) -> Drawn[Any]:
        values: list[Any] = []
        while len(values) < count:
            drawn = self._draw_next()
            values += drawn.values
            if not drawn.values:
                return Drawn(values, drawn.error)
        return Drawn(values)

    def _draw_next(self) -> Drawn[Any]:
        if self._phase is None:
            self._find_empty()
        if self._phase is None or self._at in self._later_changes:
            self._begin_phase()
        if self._is_at_end_of_all:
            return Drawn([])
        number = self._stream_due()
        self._draw_ahead(number)
        drawn, self._next[number] = self._next[number].drawn, _Next()
        if drawn.values:
            self._at += 1
            if self._is_last(number):
                self._is_over[number] = True
                if self._mixing.stop == DROP_EXHAUSTED:
                    self._begin_phase()
                else:
                    move_to(self._parents[number], self._beginnings[number])
                    self._next[number] = _Next()
        return drawn

    @property
    def _is_at_end_of_all(self) -> bool:
        return self._phase is None or all(self._is_over[number] for number in self._phase.having)

    def _find_empty(self) -> None:
        for number, name in enumerate(self._mixing.names):
            if self._is_last(number):
                if self._mixing.stop != DROP_EXHAUSTED:
                    raise ValueError(f"Dataset {name!r} is empty: leave it out of the mixture.")
                self._is_over[number] = True

    def _begin_phase(self) -> None:
        """Begins to mix in the proportions of the weights here, of streams that have elements left."""
        _, weights = self._mixing.changes_before(self._at + 1)[-1]
        drawn = (0,) * len(weights) if self._phase is None else self._phase.drawn_at(self._at)
        self._phase = self._phase_of(self._at, weights, drawn)
        self._due = []

    def _phase_of(self, start: int, weights: tuple[int, ...], drawn: tuple[int, ...]) -> Phase:
        if self._mixing.stop == DROP_EXHAUSTED:
            left = [0 if is_over else weight for weight, is_over in zip(weights, self._is_over, strict=True)]
            weights = reduced(left) if any(left) else tuple(left)
        return Phase(start, weights, drawn)

    def _stream_due(self) -> int:
        if self._phase is None:
            raise AssertionError("a phase has begun")
        if not self._due:
            later = [position for position in self._later_changes if position > self._at]
            positions = np.arange(self._at, min([*later, self._at + LOOK_AHEAD]))
            self._due = self._phase.locate(positions)[0].tolist()[::-1]
        return self._due.pop()

    def _draw_ahead(self, number: int) -> None:
        """Draws the next element of a stream before its turn."""
        if not self._next[number].is_known:
            before = position_of(self._parents[number])
            self._next[number] = _Next(True, before, drawn_from(self._parents[number], 1))

    def _is_last(self, number: int) -> bool:
        """Returns True if a stream has no further element."""
        self._draw_ahead(number)
        drawn = self._next[number].drawn
        return not drawn.values and drawn.error is None

    def _state(self) -> SavedPosition:
        phase = self._phase
        begun = () if phase is None else (phase.start, *phase.drawn)
        parents = [
            ahead.before if ahead.is_known else position_of(parent)
            for ahead, parent in zip(self._next, self._parents, strict=True)
        ]
        weights = saved_weights(self._mixing, self._step)
        fields = self._step, self._mixing.stop, weights, begun, tuple(map(int, self._is_over)), tuple(parents)
        return SavedPosition((_TO_THE_END, *fields))

    def _move(self, position: Any) -> None:
        values = values_of(position, _TO_THE_END, is_number, is_anything, is_list, is_list, is_list, is_list)
        step, stop, weights, begun, over, parents = values
        if stop != self._mixing.stop:
            raise CheckpointError(
                f"The state is of a mixture with stop={stop!r}, here it is {self._mixing.stop!r}: build it as it was "
                "saved."
            )
        check_weights(weights, self._mixing, step)
        for parent, own in zip(self._parents, parents, strict=True):
            move_to(parent, own)
        self._next = [_Next() for _ in self._parents]
        self._step = self._at = step
        self._is_over, self._due, self._phase = list(map(bool, over)), [], None
        if begun:
            start, *drawn = begun
            _, here = self._mixing.changes_before(start + 1)[-1]
            self._phase = self._phase_of(start, here, tuple(drawn))
