"""The iterator of mixed streams, which draws from the stream that is due, as a MixtureSampler computes it."""

import abc
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.signals import interrupts
from millstream.dataset.iterators.chain_iterator import ReadIterator
from millstream.dataset.iterators.inputs import Input, JoinedInput
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import (
    SavedPosition,
    is_anything,
    is_flag,
    is_list,
    is_number,
    values_of,
)
from millstream.loader.pipeline.elements import END, Awaited, Lack
from millstream.samplers.mixtures.mixing import DROP_EXHAUSTED, Mixing, Phase, reduced
from millstream.samplers.order import by_number

_KIND = "a mixture"
LOOK_AHEAD = 1024
"""The number of elements whose streams are computed in one call."""

FEW = 64
"""Up to this number of elements, Python sorts them by stream in less time than NumPy."""


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
            "was saved, and write .reweighted(position, weights) for others from a position on; or, if the mixture "
            "stops at the first end, name the datasets, whose weights may then change."
        )


class _Mixture(JoinedInput):
    """The element of the input that is due. Subclasses locate the inputs, and know their ends."""

    def __init__(self, inputs: Sequence[Input], mixing: Mixing) -> None:
        super().__init__(inputs)
        self._mixing = mixing
        # The inputs of the next elements, and those of the latest ones that were taken.
        self._due: NDArray[Any] = np.empty(0, np.int64)
        self._latest = self._due
        # The number of elements to look ahead: up to twice as many as could be taken together lately.
        self._window = 2
        self._ended = False

    def below(self) -> Iterator[tuple[str, Input]]:
        return zip(map(str, self._mixing.names), self.inputs, strict=True)

    def fetch(self, limit: int) -> Lack | None:
        if self._ended:
            return END
        self.read_together()
        if (lack := self._find_end()) is not None:
            return lack
        if not len(self._due):
            self._due = self._following()
        due = self._due[: min(limit, self._window)]
        if (lack := self._fetch_first(int(due[0]), due)) is not None:
            return lack
        ready = len(due)
        for number, rows in _rows_of(due):
            count, is_end = self._ready_of(number, len(rows))
            if count < len(rows):
                ready = min(ready, rows[count])
            if is_end and count <= len(rows):
                # What follows depends on the last element of an input, which is therefore taken alone.
                ready = min(ready, rows[count - 1] or 1)
        self._ready, self._window = ready, min(max(2 * ready, self._window // 2), LOOK_AHEAD)
        return None

    def _find_end(self) -> Lack | None:
        """Returns END if no element is due, or the reason if that cannot be known yet."""
        return None

    @abc.abstractmethod
    def _following(self) -> NDArray[Any]:
        """Returns the inputs of the elements from here on, some of them."""

    @abc.abstractmethod
    def _fetch_first(self, number: int, due: NDArray[Any]) -> Lack | None:
        """Fetches an element of the input that is due first. Returns the reason if there is none."""

    @abc.abstractmethod
    def _ready_of(self, number: int, wanted: int) -> tuple[int, bool]:
        """Returns the number of elements that an input has, of those wanted, and True if it ends after them."""

    @abc.abstractmethod
    def _take_of(self, number: int, count: int) -> list[Any]: ...

    def take(self, count: int) -> list[Any]:
        taken, self._due = self._due[:count], self._due[count:]
        if count == 1:
            values = self._take_of(int(taken[0]), 1)
        else:
            values = [None] * count
            for number, rows in _rows_of(taken):
                for row, value in zip(rows, self._take_of(number, len(rows)), strict=True):
                    values[row] = value
        self._latest = taken
        self._count(count)
        return values

    def _backs(self, back: int) -> list[int]:
        """Returns the number of elements of each input among the last ones."""
        latest, count = self._latest, len(self.inputs)
        return np.bincount(latest[len(latest) - back :], minlength=count).tolist() if back else [0] * count

    def _moved(self, step: int) -> None:
        self.step, self._due, self._ready, self.is_prefetching = step, self._due[:0], 0, False


def _rows_of(due: NDArray[Any]) -> Iterable[tuple[int, list[int]]]:
    """Returns the inputs that are due, each with its positions among them."""
    if len(due) > FEW:
        positions = np.arange(len(due))
        return [(number, positions[rows].tolist()) for number, rows in by_number(due)]
    found: dict[int, list[int]] = {}
    for position, number in enumerate(due.tolist()):
        found.setdefault(number, []).append(position)
    return found.items()


@final
class MixedInputs(_Mixture):
    """The element of the input that is due; ends when that has ended. Without names, states list inputs in order."""

    def __init__(self, inputs: Sequence[Input], mixing: Mixing, *, is_named: bool) -> None:
        super().__init__(inputs, mixing)
        # The iterators of straight chains; None for other inputs.
        self._chains = [one if isinstance(one, ReadIterator) else None for one in inputs]
        # Named datasets may have other weights from a saved position on. One that a state does not name begins again.
        self._names = SavedPosition(mixing.names) if is_named else None
        self._beginnings = {name: one.position() for name, one in self.below()} if is_named else {}
        self._schedule = mixing.schedule([None] * len(inputs))
        # At the latest position that was saved: the number of elements drawn from each input, the values of the
        # position of each, and their texts.
        count = len(inputs)
        self._known_below: tuple[Sequence[int], list[Any], list[str]] = [-1] * count, [None] * count, [""] * count

    def skip_absent(self) -> None:
        """Skips the missing elements of inputs from now on."""
        for chain in self._chains:
            if chain is not None:
                chain.raises_absent = False

    def _following(self) -> NDArray[Any]:
        return self._schedule.locate(np.arange(self.step, self.step + LOOK_AHEAD))[0]

    def _fetch_first(self, number: int, due: NDArray[Any]) -> Lack | None:
        first = self.inputs[number]
        if first.num_ready():
            return None
        lack = self.fetch_from(first, due.tolist().count(number), self._mixing.names[number])
        self._ended = lack is END
        return lack

    def _ready_of(self, number: int, wanted: int) -> tuple[int, bool]:
        return self.inputs[number].fill(wanted), False

    def _take_of(self, number: int, count: int) -> list[Any]:
        return self.inputs[number].take(count)

    def position(self, back: int = 0) -> SavedPosition:
        backs = self._backs(back)
        below = SavedPosition([one.position(own) for one, own in zip(self.inputs, backs, strict=True)])
        return self._position(below, self.step - back, ended=self._ended)

    def drawn_at(self, position: int) -> tuple[int, ...]:
        """Returns the number of elements of each stream before a position, if all begin with the mixture."""
        return self._schedule.drawn_at(position)

    @property
    def drawn(self) -> tuple[int, ...] | None:
        """The number of elements drawn from each stream; None if it has ended, or if a stream has no random access."""
        counts = [None if chain is None else chain.next_index for chain in self._chains]
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
            if count != old and (chain := self._chains[number]) is not None:
                positions[number], texts[number] = chain.values_after(count)
        self._known_below = drawn, positions, texts
        below = SavedPosition(positions)
        below.text = f"[{','.join(texts)}]"
        return self._position(below, position, ended=False)

    def _position(self, below: SavedPosition, step: int, *, ended: bool) -> SavedPosition:
        weights = saved_weights(self._mixing, step) if self._names is None else None
        return SavedPosition((_KIND, step, ended, self._names, weights, below))

    def move(self, position: Any) -> None:
        """Moves to a position. With names, unknown inputs start at their beginning."""
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
        for one, own in zip(self.inputs, saved, strict=True):
            one.move(own)
        self._moved(step)
        self._ended = ended


_TO_THE_END = "a mixture to the end of all"


@final
class _Ahead:
    """An input of a mixture of which it is known whether another element follows those that may be taken.

    The last fetched element is therefore held back until the next ones are fetched.

    Attributes:
        input: the input itself.
        error: the error that follows what was fetched; None if there was none.
        has_ended: True if no element follows.
    """

    def __init__(self, one: Input) -> None:
        self.input = one
        self.forget()

    def forget(self) -> None:
        """Forgets what was held back, because the input has moved."""
        self._held: list[Any] = []
        self.error: BaseException | None = None
        self.has_ended = False
        # The position before the element that is held back, or was; and that before the next one, if it is known.
        self._before: Any = None
        self._following: Any = None
        # The number of the latest elements that were taken, and True if the first of them was held back.
        self._latest = 0, False

    @property
    def is_known(self) -> bool:
        """True if it is known what follows the fetched elements."""
        return self.has_ended or self.error is not None

    @property
    def has_no_more(self) -> bool:
        """True if it has ended after the elements that were taken from it, which is known after `fill`."""
        return self.has_ended and not self._held and not self.input.num_ready()

    def usable(self) -> int:
        """Returns the number of elements of which it is known whether another one follows them."""
        return max(0, len(self._held) + self.input.num_ready() - (not self.is_known))

    def fill(self) -> Awaited | None:
        """Fetches until an element can be taken, or nothing follows. Returns a call to wait for before that, if any."""
        while not self.usable() and not self.is_known:
            if not self.input.num_ready():
                # Before the first fetch, because an iterator of the user's moves on then, and one that waits for a call
                # may have gone on to its next dataset.
                self._following = self._before_next
                if (awaited := self._fetch()) is not None:
                    return awaited
            if not self._held and self.input.num_ready() == 1:
                self._before = self._before_next
                self._held, self._following = self.input.take(1), None
        return None

    def _fetch(self) -> Awaited | None:
        try:
            lack = self.input.fetch(1)
        except BaseException as error:
            if interrupts(error):
                raise
            self.error = error
            return None
        self.has_ended = lack is END
        return None if lack is END else lack

    def take(self, count: int) -> list[Any]:
        was_held = bool(self._held)
        taken = self._held
        if count > was_held:
            taken = [*taken, *self.input.take(count - was_held)]
            self._following = None
        self._held, self._latest = [], (count, was_held)
        return taken

    def position(self, back: int) -> Any:
        """Returns the position before the last elements that were taken."""
        count, was_held = self._latest
        if self._held or (back and was_held and back == count):
            return self._before
        return self.input.position(back) if back else self._before_next

    @property
    def _before_next(self) -> Any:
        return self.input.position() if self._following is None else self._following


@final
class ExhaustingMixture(_Mixture):
    """The element of the input that is due, until all have ended. One that ends earlier is dropped, or begins again.

    As in a `MixtureSampler`, what follows depends on the last element of an input, not on a turn that it has to miss.
    Each input is therefore at least one element ahead.
    """

    def __init__(self, inputs: Sequence[Input], mixing: Mixing) -> None:
        super().__init__(inputs, mixing)
        self._later_changes = [position for position, _ in mixing.changes[1:]]
        self._beginnings = [one.position() for one in inputs]
        self._ahead = list(map(_Ahead, inputs))
        # True for the inputs that have come whole.
        self._is_over = [False] * len(inputs)
        self._phase: Phase | None = None
        # If an input has ended with the latest element, which was taken alone: the phase before it, the number of the
        # input, True if that was over, and its position.
        self._earlier: tuple[Phase | None, int, bool, Any] | None = None

    def _find_end(self) -> Lack | None:
        if (awaited := self._find_empty()) is not None:
            return awaited
        phase = self._current_phase()
        return END if all(self._is_over[number] for number in phase.having) else None

    def _following(self) -> NDArray[Any]:
        later = [position for position in self._later_changes if position > self.step]
        positions = np.arange(self.step, min([*later, self.step + LOOK_AHEAD]))
        return self._current_phase().locate(positions)[0]

    def _fetch_first(self, number: int, due: NDArray[Any]) -> Lack | None:  # noqa: ARG002  (each fetches one by one)
        first = self._ahead[number]
        if (awaited := first.fill()) is not None or first.usable():
            return awaited
        if first.error is None:
            return END
        error, first.error = first.error, None
        self.locate(error, self._mixing.names[number])
        raise error

    def _ready_of(self, number: int, wanted: int) -> tuple[int, bool]:
        ahead = self._ahead[number]
        usable = ahead.usable()
        return usable, bool(usable) and ahead.has_ended and usable <= wanted

    def _take_of(self, number: int, count: int) -> list[Any]:
        return self._ahead[number].take(count)

    def take(self, count: int) -> list[Any]:
        values = super().take(count)
        self._earlier = None
        ahead = self._ahead[number := int(self._latest[-1])]
        if ahead.has_no_more:
            self._earlier = self._phase, number, self._is_over[number], ahead.position(count)
            self._follow(number)
        return values

    def _follow(self, number: int) -> None:
        """Drops an input that has ended, or sends it back to its beginning."""
        self._is_over[number] = True
        if self._mixing.stop == DROP_EXHAUSTED:
            self._begin_phase()
        else:
            self._ahead[number].input.move(self._beginnings[number])
            self._ahead[number].forget()

    def _current_phase(self) -> Phase:
        if self._phase is None or self.step in self._later_changes:
            return self._begin_phase()
        return self._phase

    def _find_empty(self) -> Awaited | None:
        """Finds inputs without elements, at the beginning. Raises an error if there may be none."""
        if self._phase is not None:
            return None
        for number, (name, ahead) in enumerate(zip(self._mixing.names, self._ahead, strict=True)):
            if (awaited := ahead.fill()) is not None:
                return awaited
            if ahead.has_no_more:
                if self._mixing.stop != DROP_EXHAUSTED:
                    raise ValueError(f"Dataset {name!r} is empty: leave it out of the mixture.")
                self._is_over[number] = True
        return None

    def _begin_phase(self) -> Phase:
        """Begins to mix in the proportions of the weights here, of inputs that have elements left."""
        _, weights = self._mixing.changes_before(self.step + 1)[-1]
        drawn = (0,) * len(weights) if self._phase is None else self._phase.drawn_at(self.step)
        self._phase = self._phase_of(self.step, weights, drawn)
        self._due = self._due[:0]
        return self._phase

    def _phase_of(self, start: int, weights: tuple[int, ...], drawn: tuple[int, ...]) -> Phase:
        if self._mixing.stop == DROP_EXHAUSTED:
            left = [0 if is_over else weight for weight, is_over in zip(weights, self._is_over, strict=True)]
            weights = reduced(left) if any(left) else tuple(left)
        return Phase(start, weights, drawn)

    def position(self, back: int = 0) -> SavedPosition:
        phase, over = self._phase, list(map(int, self._is_over))
        backs = self._backs(back if self._earlier is None else 0)
        inputs = [ahead.position(own) for ahead, own in zip(self._ahead, backs, strict=True)]
        if back and self._earlier is not None:
            phase, number, was_over, inputs[number] = self._earlier
            over[number] = int(was_over)
        begun = () if phase is None else (phase.start, *phase.drawn)
        step = self.step - back
        fields = step, self._mixing.stop, saved_weights(self._mixing, step), begun, tuple(over), tuple(inputs)
        return SavedPosition((_TO_THE_END, *fields))

    def move(self, position: Any) -> None:
        values = values_of(position, _TO_THE_END, is_number, is_anything, is_list, is_list, is_list, is_list)
        step, stop, weights, begun, over, inputs = values
        if stop != self._mixing.stop:
            raise CheckpointError(
                f"The state is of a mixture with stop={stop!r}, here it is {self._mixing.stop!r}: build it as it was "
                "saved."
            )
        check_weights(weights, self._mixing, step)
        for ahead, own in zip(self._ahead, inputs, strict=True):
            ahead.input.move(own)
            ahead.forget()
        self._moved(step)
        self._is_over, self._phase, self._earlier = list(map(bool, over)), None, None
        if begun:
            start, *drawn = begun
            _, here = self._mixing.changes_before(start + 1)[-1]
            self._phase = self._phase_of(start, here, tuple(drawn))
