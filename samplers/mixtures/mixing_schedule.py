"""The phases of a mixture: from which position on which weights hold, and where the mixture ends.

A *phase* begins at some position and has one set of weights. Within it, the components come as `proportions` says; the
elements of each component are numbered on from those of the phases before, so that none is left out and none comes
twice. New phases begin where the user changes the weights, and where a component has no more and the others continue.

A schedule can have thousands of phases. To add one costs what counting the elements of the phase before it takes; no
phase keeps the order of its components.
"""

import bisect
import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.samplers.base import POSITION_LIMIT
from millstream.samplers.mixtures.mixture_checks import reduced
from millstream.samplers.mixtures.proportions import earliest_position, proportions
from millstream.samplers.order import by_number

FIRST_EXHAUSTED, ALL_EXHAUSTED, DROP_EXHAUSTED = "first_exhausted", "all_exhausted", "drop_exhausted"


def batches_in(length: int | None, size: int, stop: str, name: object) -> int | None:
    """Returns the number of batches that a component has until it is exhausted; None for endlessly many."""
    if length is None:
        return None
    if stop == ALL_EXHAUSTED:
        return -(-length // size)
    if length < size:
        raise ValueError(
            f"batches_of must be at most the number of positions of each component, got {size}, but the sampler of "
            f"component {name!r} has {length}. Use stop={ALL_EXHAUSTED!r}, or an endless sampler (num_epochs=None)."
        )
    return length // size


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """A run of positions with one set of weights.

    Attributes:
        start: the first position.
        weights: whole numbers, one for each component, without a common divisor; 0 for those that have no turn.
        drawn: the number of elements of each component that come before.
        having: the components that have a turn.
    """

    start: int
    weights: tuple[int, ...]
    drawn: tuple[int, ...]
    having: tuple[int, ...] = dataclasses.field(init=False, repr=False)
    _turns: tuple[int, ...] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        having = tuple(component for component, weight in enumerate(self.weights) if weight)
        object.__setattr__(self, "having", having)
        object.__setattr__(self, "_turns", tuple(self.weights[component] for component in having))

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        components, indices = proportions(self._turns).locate(positions - self.start)
        if len(self.having) < len(self.weights):
            components = np.array(self.having, dtype=np.intp)[components]
        if self.start:
            indices = indices + np.array(self.drawn, dtype=np.int64)[components]
        return components, indices

    def drawn_at(self, position: int) -> tuple[int, ...]:
        counts = proportions(self._turns).counts(position - self.start)
        if len(counts) == len(self.drawn):
            return tuple(map(operator.add, self.drawn, counts))
        drawn = list(self.drawn)
        for component, count in zip(self.having, counts, strict=True):
            drawn[component] += count
        return tuple(drawn)

    def position_of(self, component: int, index: int) -> int:
        """Returns the position of an element of a component that has a turn; number `drawn` or a later one."""
        turn = bisect.bisect_left(self.having, component)
        return self.start + proportions(self._turns).position_of(turn, index - self.drawn[component])

    def positions_of(self, component: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        turn = bisect.bisect_left(self.having, component)
        return proportions(self._turns).positions_of(turn, indices - self.drawn[component]) + self.start

    def first_before(self, until: int | None, elements: Sequence[tuple[int, int]]) -> int | None:
        """Returns the first of the positions of elements, (component, index), if it is before `until`."""
        first, period = until, sum(self._turns)
        for component, index in elements:
            earliest = earliest_position(period, self.weights[component], index - self.drawn[component])
            if first is None or self.start + earliest < first:
                position = self.position_of(component, index)
                first = position if first is None else min(first, position)
        return None if first == until else first


class _Whole(NamedTuple):
    """All phases of a schedule, where they start, and the number of positions (None for endlessly many)."""

    phases: tuple[Phase, ...]
    starts: NDArray[np.int64]
    length: int | None


class MixingSchedule:
    """The phases of a mixture, in order.

    Args:
        changes: the positions from which on other weights hold, and the weights; ascending, the first at 0.
        lengths: the number of elements of each component; None for endlessly many.
        stop: the rule that decides about the end.
        before: phases that come before the changes.
        batch: the number of records that a position stands for; only errors need it.

    Raises:
        ValueError: the mixture ends before a change.
    """

    def __init__(
        self,
        changes: Sequence[tuple[int, tuple[int, ...] | None]],
        lengths: Sequence[int | None],
        stop: str,
        before: Sequence[Phase] = (),
        batch: int = 1,
    ) -> None:
        self._lengths, self._stop, self._batch = tuple(lengths), stop, batch
        # The phases up to the last change of weights. `_whole` finds those that follow.
        self._begun = list(before)
        for position, weights in changes:
            self._change(position, weights)

    def changed(self, position: int, weights: tuple[int, ...] | None) -> "MixingSchedule":
        """Returns the schedule with other weights from a position on; None for those that hold before it.

        Changes at the position and after it are dropped.
        """
        before = self._begun[: bisect.bisect_left(self._begun, position, key=_start)]
        return MixingSchedule([(position, weights)], self._lengths, self._stop, before, self._batch)

    @property
    def phases(self) -> Sequence[Phase]:
        return self._whole.phases

    @property
    def length(self) -> int | None:
        return self._whole.length

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        phases = self.phases
        if len(phases) == 1 or not len(positions):
            return phases[0].locate(positions)
        numbers = np.searchsorted(self._whole.starts, positions, side="right") - 1
        components, indices = np.empty(len(positions), dtype=np.intp), np.empty(len(positions), dtype=np.int64)
        for number, rows in by_number(numbers):
            components[rows], indices[rows] = phases[number].locate(positions[rows])
        return components, indices

    def drawn_at(self, position: int) -> tuple[int, ...]:
        number = bisect.bisect_left(self.phases, position, lo=1, key=_start) - 1
        return self.phases[number].drawn_at(position)

    def positions_of(self, component: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        drawn = np.array([phase.drawn[component] for phase in self.phases], dtype=np.int64)
        numbers = np.searchsorted(drawn, indices, side="right") - 1
        positions = np.empty(len(indices), dtype=np.int64)
        for number, rows in by_number(numbers):
            positions[rows] = self.phases[number].positions_of(component, indices[rows])
        return positions

    @functools.cached_property
    def _whole(self) -> _Whole:
        phases = self._begun.copy()
        length = self._end(phases, None)
        if not phases[-1].having:
            # No component is left: the mixture ends where this phase would begin.
            phases.pop()
        return _Whole(tuple(phases), np.array([phase.start for phase in phases], dtype=np.int64), length)

    def _change(self, position: int, weights: tuple[int, ...] | None) -> None:
        drawn = (0,) * len(self._lengths)
        if self._begun:
            end = self._end(self._begun, position)
            if end is not None:
                raise ValueError(
                    f"position must be between 0 and {end * self._batch}, because the mixture ends there, got "
                    f"{position * self._batch}. For positions in later epochs, give the samplers of the components a "
                    "larger num_epochs, or None."
                )
            drawn = self._begun[-1].drawn_at(position) if weights else drawn
        if weights:
            self._begin(self._begun, Phase(position, weights, drawn))

    def _begin(self, phases: list[Phase], phase: Phase) -> None:
        """Adds a phase; components that drop out at their end have no turn in it if they are through."""
        if self._stop == DROP_EXHAUSTED:
            left = [
                weight if length is None or drawn < length else 0
                for weight, drawn, length in zip(phase.weights, phase.drawn, self._lengths, strict=True)
            ]
            phase = dataclasses.replace(phase, weights=reduced(left) if any(left) else tuple(left))
        phases.append(phase)

    def _end(self, phases: list[Phase], until: int | None) -> int | None:
        """Returns the end of the mixture if it is before position `until`; adds the phases that begin before it.

        Args:
            phases: the phases from the first one on. Those are added in which some component has dropped out.
            until: a position, at which other weights begin; None for no limit.
        """
        if self._stop == FIRST_EXHAUSTED:
            phase = phases[-1]
            lacks = [(component, max(length, phase.drawn[component])) for component, length in self._ending(phase)]
            return phase.first_before(until, lacks)
        if self._stop == ALL_EXHAUSTED:
            return self._all_through(phases[-1], until)
        while phases[-1].having:
            phase = phases[-1]
            last = phase.first_before(
                None if until is None else until - 1,
                [(component, length - 1) for component, length in self._ending(phase)],
            )
            if last is None:
                return None
            if last + 1 >= POSITION_LIMIT:
                # No position from there on is ever located.
                return last + 1
            self._begin(phases, Phase(last + 1, phase.weights, phase.drawn_at(last + 1)))
        return phases[-1].start

    def _ending(self, phase: Phase) -> list[tuple[int, int]]:
        found = [(component, self._lengths[component]) for component in phase.having]
        return [(component, length) for component, length in found if length is not None]

    def _all_through(self, phase: Phase, until: int | None) -> int | None:
        """Returns the first position by which each component with a turn has come whole, if it is before `until`."""
        through = phase.start
        ending = self._ending(phase)
        if len(ending) < len(phase.having):
            return None
        for component, length in ending:
            if phase.drawn[component] < length:
                last = phase.first_before(None if until is None else until - 1, [(component, length - 1)])
                if last is None:
                    return None
                through = max(through, last + 1)
        return through


def _start(phase: Phase) -> int:
    return phase.start
