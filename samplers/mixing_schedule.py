"""How a mixture proceeds from position to position: which weights hold where, and where it ends.

A *part* begins at some position and has one set of weights. Within it, the components come as `proportions` says; the
elements of each component are numbered on from those of the parts before, so that none is left out and none comes
twice. New parts begin where the user changes the weights, and where a component has no more and the others continue.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from millstream.samplers.base import POSITION_LIMIT
from millstream.samplers.proportions import Proportions, proportions
from millstream.samplers.weights import reduced

FIRST_EXHAUSTED, ALL_EXHAUSTED, DROP_EXHAUSTED = "first_exhausted", "all_exhausted", "drop_exhausted"


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Positions in a row with one set of weights.

    Attributes:
        start: the first position.
        weights: whole numbers, one for each component, without a common divisor; 0 for those that have no turn.
        drawn: how many elements of each component come before.
    """

    start: int
    weights: tuple[int, ...]
    drawn: tuple[int, ...]
    _order: Proportions = dataclasses.field(init=False, repr=False)
    _having: tuple[int, ...] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        having = tuple(component for component, weight in enumerate(self.weights) if weight)
        object.__setattr__(self, "_having", having)
        object.__setattr__(self, "_order", proportions(tuple(self.weights[component] for component in having)))

    @property
    def having(self) -> tuple[int, ...]:
        """The components that have a turn."""
        return self._having

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Returns the component at each position of this part, and the number of its element."""
        components, indices = self._order.locate(positions - self.start)
        if len(self._having) < len(self.weights):
            components = np.array(self._having, dtype=np.intp)[components]
        if self.start:
            indices = indices + np.array(self.drawn, dtype=np.int64)[components]
        return components, indices

    def drawn_at(self, position: int) -> tuple[int, ...]:
        """Returns how many elements of each component come before a position of this part, or its end."""
        drawn = list(self.drawn)
        for component, count in zip(self._having, self._order.counts(position - self.start), strict=True):
            drawn[component] += count
        return tuple(drawn)

    def position_of(self, component: int, index: int) -> int:
        """Returns the position of an element of a component that has a turn; number `drawn` or a later one."""
        return self.start + self._order.position_of(self._having.index(component), index - self.drawn[component])


EndRule: TypeAlias = Callable[[Part, Sequence[int | None]], int | None]
"""Returns where a part would end for lack of elements; None where it would not."""


class MixingSchedule:
    """The parts of a mixture, in order.

    Args:
        changes: from which position on the user wants which weights; the first from 0 on, positions ascending.
        lengths: how many elements each component has; None for endlessly many.
        stop: which rule decides about the end.

    Attributes:
        parts: the parts.
        length: how many positions there are; None for endlessly many.
    """

    def __init__(
        self, changes: Sequence[tuple[int, tuple[int, ...]]], lengths: Sequence[int | None], stop: str
    ) -> None:
        self.parts: list[Part] = []
        self.length: int | None = None
        self._lengths = lengths
        fill = self._fill_dropping if stop == DROP_EXHAUSTED else self._fill
        end_of = _first_lack if stop == FIRST_EXHAUSTED else _all_through
        drawn: tuple[int, ...] = (0,) * len(lengths)
        for number, (start, weights) in enumerate(changes):
            until = changes[number + 1][0] if number + 1 < len(changes) else None
            self.length = fill(Part(start, weights, drawn), until, end_of)
            if self.length is not None:
                break
            if until is not None:
                drawn = self.parts[-1].drawn_at(until)
        self._starts = np.array([part.start for part in self.parts], dtype=np.int64)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Returns the component at each position, and the number of its element, from 0; both of shape (m,)."""
        if len(self.parts) == 1 or not len(positions):
            return self.parts[0].locate(positions)
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        first, last = int(numbers.min()), int(numbers.max())
        if first == last:
            return self.parts[first].locate(positions)
        components, indices = np.empty(len(positions), dtype=np.intp), np.empty(len(positions), dtype=np.int64)
        for number in range(first, last + 1):
            rows = np.flatnonzero(numbers == number)
            if len(rows):
                components[rows], indices[rows] = self.parts[number].locate(positions[rows])
        return components, indices

    def _fill(self, part: Part, until: int | None, end_of: EndRule) -> int | None:
        """Adds a part; returns where the mixture ends, if that is before position `until`."""
        self.parts.append(part)
        end = end_of(part, self._lengths)
        return end if end is not None and (until is None or end < until) else None

    def _fill_dropping(self, part: Part, until: int | None, _: EndRule) -> int | None:
        """Adds a part, and one after each position at which a component drops out; returns as `_fill`."""
        while True:
            left = [
                weight if length is None or drawn < length else 0
                for weight, drawn, length in zip(part.weights, part.drawn, self._lengths, strict=True)
            ]
            if not any(left):
                return part.start
            part = dataclasses.replace(part, weights=reduced(left))
            self.parts.append(part)
            end = _first_through(part, self._lengths)
            if end is None or (until is not None and end >= until):
                return None
            if end >= POSITION_LIMIT:
                # Parts from there on would never be asked for.
                return end
            part = Part(end, part.weights, part.drawn_at(end))


def _first_through(part: Part, lengths: Sequence[int | None]) -> int | None:
    """Returns the first position before which some component with a turn has come whole; None where none does."""
    ends = []
    for component in part.having:
        length = lengths[component]
        if length is not None:
            ends.append(part.position_of(component, length - 1) + 1)
    return min(ends, default=None)


def _first_lack(part: Part, lengths: Sequence[int | None]) -> int | None:
    """Returns the first position whose component has no element for it; None where that never comes."""
    lacks = []
    for component in part.having:
        length = lengths[component]
        if length is not None:
            lacks.append(part.position_of(component, max(length, part.drawn[component])))
    return min(lacks, default=None)


def _all_through(part: Part, lengths: Sequence[int | None]) -> int | None:
    """Returns the first position before which each component with a turn has come whole; None where none does."""
    through = part.start
    for component in part.having:
        length = lengths[component]
        if length is None:
            return None
        if part.drawn[component] < length:
            through = max(through, part.position_of(component, length - 1) + 1)
    return through
