"""Grouping of one stage's elements for the next stage, and the position of each group.

The position of a group is the position, in the stage before, of the first element that is not consumed. If a group may
begin within an element, it also contains the part of the element that is consumed.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple, Self, final

from millstream.loader.operations.elements import Elements, Origins
from millstream.loader.pipeline.outputs import Cursor, Outputs
from millstream.transforms.grouping import Grouping


class FormedGroup(NamedTuple):
    """A group of elements.

    Attributes:
        elements: its elements, whose origins contain the group's decisions about each.
        start, end: the positions before its first output and after its last.
        others: the positions after it in the other logical shards, if it has elements of several.
    """

    elements: Elements
    start: Cursor
    end: Cursor
    others: tuple[Cursor, ...] = ()

    @classmethod
    def failed(cls, error: BaseException) -> Self:
        nowhere = Cursor(0, (0,))
        return cls(Elements.failed(error), nowhere, nowhere)


@final
class Regrouping:
    """Groups the outputs of one stage for the next one.

    Args:
        grouping: the rule.
        start: the position in the stage before.
        used: the part of the first group that is consumed, if the grouping has a unit.
        divides_units: True if positions in the stage contain a second number, of outputs (see `Stage`).
    """

    def __init__(self, grouping: Grouping, start: Cursor, used: int = 0, *, divides_units: bool = False) -> None:
        self._grouping = grouping
        self._start = start
        self._used = used
        self._outputs = (0,) * divides_units
        self._group = grouping.begin(used)
        self._taken: list[tuple[Outputs, int, int]] = []

    def add(self, outputs: Outputs) -> Iterator[FormedGroup]:
        """Adds outputs, and yields the groups that are full."""
        row, stop, sizes = outputs.first, len(outputs.values), outputs.origins.sizes
        while row < stop:
            taken = self._group.take(sizes[:, row:stop])
            if taken:
                self._taken.append((outputs, row, row + taken))
                row += taken
            while self._group.is_full:
                yield self._take_group()

    def finish(self) -> Iterator[FormedGroup]:
        """Yields the last, short group, if there is one and it is to be kept."""
        if self._taken and self._grouping.keeps_remainder:
            group = self._take_group()
            yield group._replace(end=group.end._replace(is_final=True))

    def truncate(self) -> Iterator[FormedGroup]:
        """Yields the complete outputs of the last group, because an error follows.

        The bounds of such groups depend on where a stream was resumed, but the outputs do not.
        """
        if self._taken and (count := self._group.truncate()):
            used = self._used + count * (self._grouping.output_size or 1)
            yield FormedGroup(self._elements(), self._position(), self._within(used))

    def _take_group(self) -> FormedGroup:
        elements, start, used = self._elements(), self._position(), self._group.used
        last, _, stop = self._taken[-1]
        self._start, self._used = self._before_last() if used else last.after(stop - 1), used
        self._group, self._taken = self._grouping.begin(used), []
        if used:
            # The remainder of the last element belongs to the next group.
            self._group.take(last.origins.sizes[:, stop - 1 : stop])
            self._taken.append((last, stop - 1, stop))
        return FormedGroup(elements, start, self._position())

    def _elements(self) -> Elements:
        runs = [outputs.values[row:stop] for outputs, row, stop in self._taken]
        values = runs[0] if len(runs) == 1 else list(itertools.chain.from_iterable(runs))
        origins = Origins.concatenate([outputs.origins.take(slice(row, stop)) for outputs, row, stop in self._taken])
        return Elements(values, origins.with_sizes(self._group.decisions()))

    def _before_last(self) -> Cursor:
        """Returns the position in the stage before at which the last element of the group begins."""
        last, first, stop = self._taken[-1]
        if stop - 1 > first:
            return last.after(stop - 2)
        if len(self._taken) > 1:
            earlier, _, end = self._taken[-2]
            return earlier.after(end - 1)
        return self._start

    def _position(self) -> Cursor:
        return self._within(self._used)

    def _within(self, used: int) -> Cursor:
        """Returns the position in the group after a consumed amount."""
        start = self._start
        return Cursor(start.block, (*start.skip, used, *self._outputs), start.is_final)
