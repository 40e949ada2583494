"""The weights of a mixture and its end, as a value; and its phases: where which weights hold, and where it ends.

A *phase* begins at some position and has one set of weights. Within it, the components come as `proportions` says; the
elements of each component are numbered on from those of the phases before, so that none is left out and none comes
twice. New phases begin where the user changes the weights, and where a component has no more and the others continue.

A schedule can have thousands of phases. To add one costs what counting the elements of the phase before it takes; no
phase keeps the order of its components.
"""

import bisect
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import LARGEST_COUNT, as_integer, is_listed
from millstream.samplers.base import POSITION_LIMIT
from millstream.samplers.mixtures.proportions import earliest_position, proportions
from millstream.samplers.order import by_number

PERIOD_LIMIT = 1 << 31
"""Whole numbers that stand for weights have a smaller sum: products of two of them fit 62 bits."""

Weights: TypeAlias = Sequence[Any] | Mapping[str, Any]

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
        if not self._turns:
            return self.drawn
        counts = proportions(self._turns).counts(position - self.start)
        if len(counts) == len(self.drawn):
            return tuple(map(operator.add, self.drawn, counts)) if self.start else tuple(counts)
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
        candidates = [
            (
                self.start + earliest_position(period, self.weights[component], index - self.drawn[component]),
                component,
                index,
            )
            for component, index in elements
        ]
        # The first ones rule out nearly all others, and a position takes long to compute.
        for earliest, component, index in sorted(candidates):
            if first is not None and earliest >= first:
                break
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
        self._begun: Sequence[Phase] = before
        for position, weights in changes:
            self._begun = self._with_change(self._begun, position, weights)

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
        phases, length = self._continued(self._begun, None)
        if not phases[-1].having:
            # No component is left: the mixture ends where this phase would begin.
            phases = phases[:-1]
        return _Whole(tuple(phases), np.array([phase.start for phase in phases], dtype=np.int64), length)

    def _with_change(self, phases: Sequence[Phase], position: int, weights: tuple[int, ...] | None) -> Sequence[Phase]:
        """Returns the phases with those up to a position, where other weights begin; None for the same ones."""
        drawn: tuple[int, ...] = (0,) * len(self._lengths)
        if phases:
            phases, end = self._continued(phases, position)
            if end is not None:
                raise ValueError(
                    f"position must be between 0 and {end * self._batch}, because the mixture ends there, got "
                    f"{position * self._batch}. For positions in later epochs, give the samplers of the components a "
                    "larger num_epochs, or None."
                )
            drawn = phases[-1].drawn_at(position) if weights else drawn
        return [*phases, self._phase(position, weights, drawn)] if weights else phases

    def _phase(self, start: int, weights: tuple[int, ...], drawn: tuple[int, ...]) -> Phase:
        """Returns the phase from a position on. Components that drop out at their end have no turn after it."""
        if self._stop == DROP_EXHAUSTED:
            left = [
                weight if length is None or count < length else 0
                for weight, count, length in zip(weights, drawn, self._lengths, strict=True)
            ]
            weights = reduced(left) if any(left) else tuple(left)
        return Phase(start, weights, drawn)

    def _continued(self, phases: Sequence[Phase], until: int | None) -> tuple[Sequence[Phase], int | None]:
        """Returns the phases with those in which components have dropped out, and the end of the mixture.

        Those and the end count only before position `until`, at which other weights begin; None for no limit.
        """
        phase = phases[-1]
        if self._stop == FIRST_EXHAUSTED:
            lacks = [(component, max(length, phase.drawn[component])) for component, length in self._ending(phase)]
            return phases, phase.first_before(until, lacks)
        if self._stop == ALL_EXHAUSTED:
            return phases, self._all_through(phase, until)
        found = list(phases)
        while (phase := found[-1]).having:
            last_elements = [(component, length - 1) for component, length in self._ending(phase)]
            last = phase.first_before(None if until is None else until - 1, last_elements)
            # No position from POSITION_LIMIT on is ever located.
            if last is None or last + 1 >= POSITION_LIMIT:
                return found, None if last is None else last + 1
            found.append(self._phase(last + 1, phase.weights, phase.drawn_at(last + 1)))
        return found, found[-1].start

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


@final
@dataclasses.dataclass(frozen=True)
class Mixing:
    """The weights of components, which may change at positions, and the rule for the end.

    Attributes:
        names: the names of the components; their numbers if they have none.
        changes: the positions from which on weights hold, ascending from 0, and the weights: whole numbers without a
            common divisor.
        stop: "first_exhausted", "all_exhausted" or "drop_exhausted", see `MixtureSampler`.
    """

    names: tuple[Any, ...]
    changes: tuple[tuple[int, tuple[int, ...]], ...]
    stop: str = FIRST_EXHAUSTED

    def __post_init__(self) -> None:
        if self.stop not in (FIRST_EXHAUSTED, ALL_EXHAUSTED, DROP_EXHAUSTED):
            raise ValueError(
                f"stop must be {FIRST_EXHAUSTED!r}, {ALL_EXHAUSTED!r} or {DROP_EXHAUSTED!r}, got {self.stop!r}."
            )

    @classmethod
    def of(cls, names: tuple[Any, ...], weights: Weights | None, stop: str = FIRST_EXHAUSTED) -> Self:
        """Returns the mixing by weights, which are checked; equal ones if None."""
        return cls(names, ((0, checked_weights([1] * len(names) if weights is None else weights, names)),), stop)

    @property
    def weights(self) -> tuple[int, ...]:
        """The weights at the beginning."""
        return self.changes[0][1]

    @property
    def is_plain(self) -> bool:
        """True if the weights never change, and the first component without another element ends the mixture."""
        return len(self.changes) == 1 and self.stop == FIRST_EXHAUSTED

    def reweighted(self, position: int, weights: Weights, optional: Collection[Any] = ()) -> Self:
        """Returns the mixing with other weights from a position on. Those set for it or later ones are replaced.

        Names in `optional` may lack a weight, which is then 0. If the same weights hold before, nothing changes at the
        position, because their period would begin again.
        """
        position = as_integer(position, "position", minimum=0, maximum=LARGEST_COUNT - 1)
        if position >= POSITION_LIMIT:
            raise ValueError(f"position must be between 0 and {POSITION_LIMIT - 1}, got {position}.")
        changed = checked_weights(weights, self.names, optional)
        kept = self.changes_before(position)
        is_same = bool(kept) and kept[-1][1] == changed
        return dataclasses.replace(self, changes=kept if is_same else (*kept, (position, changed)))

    def changes_before(self, position: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Returns the changes that hold before a position."""
        return self.changes[: bisect.bisect_left(self.changes, position, key=operator.itemgetter(0))]

    def schedule(self, lengths: Sequence[int | None]) -> MixingSchedule:
        """Returns the phases of the mixture, given the number of elements of each component, None if it is endless."""
        return MixingSchedule(self.changes, lengths, self.stop)

    @property
    def described_changes(self) -> list[tuple[int, Any]]:
        """The changes with the weights as a dict by name, or as a list if the components have no names."""
        is_named = isinstance(self.names[0], str)
        return [
            (position, dict(zip(self.names, weights, strict=True)) if is_named else list(weights))
            for position, weights in self.changes
        ]

    @property
    def shares(self) -> Sequence[tuple[str, float]]:
        """The names with the weights at the beginning, for a diagram."""
        return [(str(name), weight) for name, weight in zip(self.names, self.weights, strict=True)]

    @property
    def rest(self) -> str:
        """A description of all but the first weights, to append to them; "" for a plain mixing."""
        later = [] if len(self.changes) == 1 else [f", changes={self.described_changes[1:]}"]
        return "".join([*([] if self.stop == FIRST_EXHAUSTED else [f", stop={self.stop!r}"]), *later])


def checked_changes(changes: Any) -> list[tuple[Any, Any]]:
    rule = "changes must be pairs of a position and weights, positions ascending"
    if isinstance(changes, Mapping) or not is_listed(changes):
        raise TypeError(f"{rule}, got {type(changes).__name__}.")
    pairs = [tuple(change) if isinstance(change, list | tuple) else (change,) for change in changes]
    for before, change in itertools.pairwise([(-1, None), *pairs]):
        if len(change) != 2:
            raise TypeError(f"{rule}, got {change!r}.")
        if as_integer(change[0], "The position of a change") <= before[0]:
            raise ValueError(f"{rule}, got position {change[0]} after {before[0]}.")
    return pairs


def checked_weights(
    weights: Sequence[Any] | Mapping[str, Any], names: Sequence[str], optional: Collection[str] = ()
) -> tuple[int, ...]:
    """Returns one whole number for each component, in the ratios of the weights and without a common divisor.

    Components that need not be named have the weight 0.

    Decimals are taken as they are written: 0.3 and 0.7 are 3 and 7. If that makes the numbers' sum 2**31 or more, as
    with computed weights, the numbers are as near as a sum just below that allows.
    """
    if isinstance(weights, Mapping):
        missing = [n for n in names if n not in weights and n not in optional]
        unknown = [n for n in weights if n not in names]
        if missing or unknown:
            raise ValueError(
                "weights must name exactly the components: "
                + ", ".join(
                    [f"there is no weight for {name!r}" for name in missing]
                    + [f"there is no component {name!r}" for name in unknown]
                )
                + ". A component that is to be left out has the weight 0."
                + (" To add one by reweighted, pass its sampler: samplers={name: sampler}." if unknown else "")
            )
        weights = [weights.get(name, 0) for name in names]
    if not is_listed(weights) or not hasattr(weights, "__len__"):
        raise TypeError(f"weights must be a list of numbers, or a mapping from names to numbers, got {weights!r}.")
    if len(weights) != len(names):
        raise ValueError(f"weights must have one number for each of the {len(names)} components, got {len(weights)}.")
    fractions = [_as_fraction(weight, name) for weight, name in zip(weights, names, strict=True)]
    if not any(fractions):
        raise ValueError("At least one of the weights must be above 0, got nothing but zeros.")
    whole = _whole_numbers(fractions)
    for name, fraction, number in zip(names, fractions, whole, strict=True):
        if fraction and not number:
            raise ValueError(
                f"The weight {float(fraction)!r} of component {name!r} is less than 2**-31 of all weights together, "
                "so that it would never have a turn: write 0, or a larger weight."
            )
    return whole


def _as_fraction(weight: Any, name: str) -> Fraction:
    what = f"The weight of component {name!r} must be a number, 0 or above"
    if isinstance(weight, (bool, np.bool_, str, bytes)):
        raise TypeError(f"{what}, got {weight!r} of type {type(weight).__name__}.")
    try:
        is_finite = math.isfinite(weight)
    except TypeError:
        raise TypeError(f"{what}, got {weight!r} of type {type(weight).__name__}.") from None
    except OverflowError:
        raise ValueError(f"{what}, and below 2**1024, got one of {weight.bit_length()} bits.") from None
    if not is_finite or weight < 0:
        raise ValueError(f"{what}, got {weight!r}.")
    # As it is written, not as it is stored: 0.1 is a tenth.
    return Fraction(str(weight))


def _whole_numbers(fractions: Sequence[Fraction]) -> tuple[int, ...]:
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * scale) for fraction in fractions]
    if sum(numbers) // math.gcd(*numbers) >= PERIOD_LIMIT:
        numbers = _rounded(numbers, PERIOD_LIMIT - 1)
    return reduced(numbers)


def reduced(numbers: Sequence[int]) -> tuple[int, ...]:
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def _rounded(numbers: Sequence[int], total: int) -> list[int]:
    """Returns whole numbers of that sum in nearly the same ratios; the remainder goes to the largest fractions."""
    whole = sum(numbers)
    rounded = [number * total // whole for number in numbers]
    by_rest = sorted(range(len(numbers)), key=lambda number: -(numbers[number] * total % whole))
    for number in by_rest[: total - sum(rounded)]:
        rounded[number] += 1
    return rounded
