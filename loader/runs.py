"""The outputs of one call, and the position after each of them."""

import abc
import dataclasses

import numpy as np

from millstream.loader.elements import Elements
from millstream.loader.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Cursor:
    """A place between two outputs of a stream.

    Attributes:
        unit: the first unit that is not used up.
        skip: what is used up of it, one number a phase: skip[0] elements of phase 0, then skip[1] outputs of the group
            that begins there, and so on. All zero between the outputs of a 1:1 pipeline.
        is_final: whether an output before this position is what it is because the order ends: made of a short group, or
            of a tail that is dealt out in another way than whole units. Not told of 1:1 pipelines, whose unit says it.
    """

    unit: int
    skip: tuple[int, ...]
    is_final: bool = False


class Run(abc.ABC):
    """The outputs of one call, in order.

    Attributes:
        values: the outputs; the consumer clears what it has taken.
        origins: where each came from.
        error: what was raised instead of the next output.
        first: how many outputs at the start were already used before the schedule began.
        num_records: how many records, or elements of the phase before, it was made of.
    """

    def __init__(self, elements: Elements, first: int) -> None:
        self.values = list(elements.values)
        self.origins = elements.origins
        self.error = elements.error
        self.first = min(first, len(elements.values))
        self.num_records = 0

    @abc.abstractmethod
    def after(self, row: int) -> Cursor:
        """Returns the place behind output `row`."""


class UnitRun(Run):
    """Outputs of phase 0."""

    def __init__(self, elements: Elements, first: int, plan: Plan, stop: int) -> None:
        super().__init__(elements, first)
        self._plan = plan
        self._stop = stop

    def after(self, row: int) -> Cursor:
        """Returns the place behind output `row`: the next unit, if this output is the last of its own."""
        if self._plan.one_to_one and row + 1 == len(self.values) and self.error is None:
            return Cursor(self._stop, (0,))
        units = self._plan.deal.units_of(self.origins.position)
        unit = int(units[row])
        is_last = row + 1 == len(units) or units[row + 1] != unit
        # Where an error follows, its record may be of the same unit: to leave the unit would be to skip the error.
        error_may_follow = row + 1 == len(units) and self.error is not None and not self._plan.one_to_one
        is_tail = unit == self._plan.deal.whole_units
        # The tail of a single shard grows with the order, so that to leave it would be to skip what may be added.
        grows = is_tail and self._plan.tail_grows
        is_final = is_tail and not grows
        if is_last and not error_may_follow and not grows:
            return Cursor(unit + 1, (0,), is_final)
        return Cursor(unit, (row - int(np.searchsorted(units, unit)) + 1,), is_final)


class GroupRun(Run):
    """Outputs of a later phase, made of one group."""

    def __init__(self, elements: Elements, first: int, start: Cursor, end: Cursor) -> None:
        super().__init__(elements, first)
        self._start = start
        self._end = end

    def after(self, row: int) -> Cursor:
        """Returns the place behind output `row`: that behind the whole group, if this output is the last."""
        if row + 1 == len(self.values) and self.error is None:
            return Cursor(self._end.unit, (*self._end.skip, 0), self._end.is_final)
        return Cursor(self._start.unit, (*self._start.skip, row + 1), self._end.is_final)
