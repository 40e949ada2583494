"""The iterator of mixed streams, which draws from the stream that is due, as a MixtureSampler computes it."""

import collections
import functools
import itertools
import sys
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
from millstream.samplers.mixtures.mixing import DROP_EXHAUSTED, Mixing, Phase, reduced
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
        # At the latest position that was saved: the number of elements drawn from each stream, the values of the
        # position of each, and their texts.
        count = len(self._parents)
        self._known_below: tuple[Sequence[int], list[Any], list[str]] = [-1] * count, [None] * count, [""] * count

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
        below = SavedPosition([position_of(parent) for parent in self._parents])
        return self._position(below, self._step, ended=self._ended)

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
        # The streams that did not move have the positions that they had.
        before, positions, texts = self._known_below
        positions, texts = positions.copy(), texts.copy()
        for number, (count, old) in enumerate(zip(drawn, before, strict=True)):
            if count != old:
                positions[number], texts[number] = self._parents[number].values_after(count)
        self._known_below = drawn, positions, texts
        below = SavedPosition(positions)
        below.text = f"[{','.join(texts)}]"
        return self._position(below, position, ended=False)

    def _position(self, below: SavedPosition, step: int, *, ended: bool) -> SavedPosition:
        weights = saved_weights(self._mixing, step) if self._names is None else None
        return SavedPosition((_KIND, step, ended, self._saved_names, weights, below))

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


@final
class _Input:
    """A stream of a mixture, which is drawn from before its turn, to know whether it has another element.

    Attributes:
        parent: its iterator.
        values: the elements that were drawn before their turn.
        error: the error that followed them; None if there was none.
        has_ended: True if no element follows them.
    """

    def __init__(self, parent: DatasetIterator[Any]) -> None:
        self.parent = parent
        self.forget()

    def forget(self) -> None:
        """Forgets what was drawn, because the iterator has moved."""
        self.values: collections.deque[Any] = collections.deque()
        self.error: BaseException | None = None
        self.has_ended = False
        # The position before `values`, if they do not count it.
        self._before: Any = None

    @property
    def is_counted(self) -> bool:
        """True if its position before each element is known, so that many may be drawn before their turn."""
        return isinstance(self.parent, ReadIterator) and self.parent.next_index is not None

    @property
    def has_no_more(self) -> bool:
        """True if it has ended after the elements that were taken from it, which is known after `fill`."""
        return self.has_ended and not self.values and self.error is None

    def position(self) -> Any:
        """Returns the position before `values`."""
        if isinstance(self.parent, ReadIterator) and self.parent.next_index is not None:
            return self.parent.position_after(self.parent.next_index - len(self.values))
        return position_of(self.parent) if self._before is None else self._before

    def fill(self, count: int) -> None:
        """Draws up to `count` elements before their turn: one, unless positions are counted."""
        missing = count - len(self.values)
        if missing <= 0 or self.has_ended:
            return
        was_counted, before = self.is_counted, self.position()
        drawn = drawn_from(self.parent, missing)
        if was_counted and not self.is_counted:
            # An element was missing, so that the position before each is not known any more.
            move_to(self.parent, before)
            self.forget()
            self.fill(1)
            return
        self._before = None if was_counted else before
        self.values += drawn.values
        self.error, self.has_ended = drawn.error, len(drawn.values) < missing

    def take(self) -> Any:
        self._before = None
        return self.values.popleft()

    def end_among(self, turns: Sequence[int]) -> int:
        """Returns the turn after its last element, or the one at which it fails; a large number if neither is due."""
        num_values = len(self.values)
        if self.has_ended and self.error is None and num_values <= len(turns):
            return turns[num_values - 1] + 1 if num_values else turns[0]
        return turns[num_values] if self.has_ended and num_values < len(turns) else sys.maxsize


@final
class ExhaustingIterator(RecoveringIterator[Any]):
    """Draws from the stream that is due until all have ended. One that ends earlier is dropped, or begins again.

    As in a `MixtureSampler`, what follows depends on the last element of a stream, not on a turn that it has to miss.
    Each stream is therefore at least one element ahead. Those whose positions are counted are drawn from in runs.
    """

    _reads_together = True

    def __init__(self, parents: Sequence[DatasetIterator[Any]], mixing: Mixing) -> None:
        super().__init__(parents)
        self._mixing = mixing
        self._later_changes = [position for position, _ in mixing.changes[1:]]
        self._beginnings = list(map(position_of, self._parents))
        self._inputs = list(map(_Input, self._parents))
        # True for the streams that have come whole.
        self._is_over = [False] * len(self._parents)
        self._at = 0
        self._phase: Phase | None = None
        # The streams of the next elements of the phase.
        self._due: NDArray[np.intp] = np.empty(0, np.intp)

    def below(self) -> Iterator[tuple[str, Any]]:
        return zip(map(str, self._mixing.names), self._parents, strict=True)

    def _draw(self, count: int) -> Drawn[Any]:
        values: list[Any] = []
        if (error := self._find_empty()) is not None:
            return Drawn(values, error)
        while left := count - len(values):
            phase = self._current_phase()
            if all(self._is_over[number] for number in phase.having):
                break
            drawn = self._draw_of(phase, left)
            values += drawn.values
            if drawn.error is not None or not drawn.values:
                return Drawn(values, drawn.error)
        return Drawn(values)

    def _current_phase(self) -> Phase:
        if self._phase is None or self._at in self._later_changes:
            return self._begin_phase()
        return self._phase

    def _find_empty(self) -> ValueError | None:
        """Finds streams without elements, at the beginning. Returns an error if there may be none."""
        if self._phase is not None:
            return None
        for number, (name, stream) in enumerate(zip(self._mixing.names, self._inputs, strict=True)):
            stream.fill(1)
            if stream.has_no_more:
                if self._mixing.stop != DROP_EXHAUSTED:
                    return ValueError(f"Dataset {name!r} is empty: leave it out of the mixture.")
                self._is_over[number] = True
        return None

    def _begin_phase(self) -> Phase:
        """Begins to mix in the proportions of the weights here, of streams that have elements left."""
        _, weights = self._mixing.changes_before(self._at + 1)[-1]
        drawn = (0,) * len(weights) if self._phase is None else self._phase.drawn_at(self._at)
        self._phase = self._phase_of(self._at, weights, drawn)
        self._due = self._due[:0]
        return self._phase

    def _phase_of(self, start: int, weights: tuple[int, ...], drawn: tuple[int, ...]) -> Phase:
        if self._mixing.stop == DROP_EXHAUSTED:
            left = [0 if is_over else weight for weight, is_over in zip(weights, self._is_over, strict=True)]
            weights = reduced(left) if any(left) else tuple(left)
        return Phase(start, weights, drawn)

    def _draw_one(self) -> Any:
        if (error := self._find_empty()) is not None:
            raise error
        phase = self._current_phase()
        if all(self._is_over[number] for number in phase.having):
            raise StopIteration
        stream = self._inputs[self._next_due(phase, 1)[0]]
        stream.fill(1)
        if not stream.values:
            raise stream.error or StopIteration
        element = stream.take()
        stream.fill(1)
        self._advance(1)
        return element

    def _draw_of(self, phase: Phase, limit: int) -> Drawn[Any]:
        """Returns the next elements of a phase, up to the end of one of its streams."""
        due = self._next_due(phase, limit)
        turns = {number: np.arange(len(due))[rows].tolist() for number, rows in by_number(due)}
        counted = [(self._inputs[number], rows) for number, rows in turns.items() if self._inputs[number].is_counted]
        for stream, rows in counted:
            stream.fill(len(rows) + 1)
        if not all(stream.is_counted for stream, _ in counted):
            return self._draw_of(phase, limit)
        values: list[Any] = [None] * min([len(due), *(stream.end_among(rows) for stream, rows in counted)])
        stop = len(values) if len(counted) == len(turns) else self._take_singly(due, values)
        for stream, rows in counted:
            for row in itertools.takewhile(stop.__gt__, rows):
                values[row] = stream.take()
        last, following = (self._inputs[number] for number in (due[stop - 1], due[min(stop, len(due) - 1)]))
        has_failed = stop < len(due) and not following.values and not (stop and last.has_no_more)
        self._advance(stop)
        return Drawn(values[:stop], following.error if has_failed else None)

    def _take_singly(self, due: NDArray[np.intp], values: list[Any]) -> int:
        """Sets the values of streams that are not counted. Returns the number of elements before the first end.

        Each is drawn one element ahead, in order, so that none is drawn beyond the end of another.
        """
        for row, number in enumerate(due[: len(values)]):
            stream = self._inputs[number]
            if stream.is_counted:
                continue
            stream.fill(1)
            if not stream.values:
                return row
            values[row] = stream.take()
            stream.fill(1)
            if stream.has_no_more:
                return row + 1
        return len(values)

    def _next_due(self, phase: Phase, limit: int) -> NDArray[np.intp]:
        if not len(self._due):
            later = [position for position in self._later_changes if position > self._at]
            positions = np.arange(self._at, min([*later, self._at + LOOK_AHEAD]))
            self._due = phase.locate(positions)[0]
        return self._due[:limit]

    def _advance(self, count: int) -> None:
        """Counts elements that were taken. If the stream of the last one has ended, it is dropped or begins again."""
        taken, self._due = self._due[:count], self._due[count:]
        self._at += count
        if not count or not (stream := self._inputs[number := int(taken[-1])]).has_no_more:
            return
        self._is_over[number] = True
        if self._mixing.stop == DROP_EXHAUSTED:
            self._begin_phase()
        else:
            move_to(stream.parent, self._beginnings[number])
            stream.forget()

    def _state(self) -> SavedPosition:
        phase = self._phase
        begun = () if phase is None else (phase.start, *phase.drawn)
        parents = tuple(stream.position() for stream in self._inputs)
        weights = saved_weights(self._mixing, self._step)
        fields = self._step, self._mixing.stop, weights, begun, tuple(map(int, self._is_over)), parents
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
        for stream, own in zip(self._inputs, parents, strict=True):
            move_to(stream.parent, own)
            stream.forget()
        self._step = self._at = step
        self._is_over, self._due, self._phase = list(map(bool, over)), self._due[:0], None
        if begun:
            start, *drawn = begun
            _, here = self._mixing.changes_before(start + 1)[-1]
            self._phase = self._phase_of(start, here, tuple(drawn))
