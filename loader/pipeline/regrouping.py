"""Elements of one stage collected into the groups of the next one, and the position of each group.

A group's position is the first element that is not used up, as a position in the stage before; and, where a group may
begin within an element, how much of that is used up.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple, final

from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.outputs import Cursor, Outputs
from millstream.transforms.grouping import Grouping


class FormedGroup(NamedTuple):
    """A group of elements.

    Attributes:
        elements: what it consists of; their origins have what the group has decided about each.
        start: the position before its first output.
        end: the position after its last output.
    """

    elements: Elements
    start: Cursor
    end: Cursor


@final
class Regrouping:
    """Collects the outputs of one stage into the groups of the next one.

    Args:
        grouping: the rule.
        start: the position in the stage before at which the first group begins.
        used: how much of that group is used up, where the grouping has a unit.
        divides_units: whether positions in the stage have a number of outputs after that (see `Stage`).
    """

    def __init__(self, grouping: Grouping, start: Cursor, used: int = 0, *, divides_units: bool = False) -> None:
        self._grouping = grouping
        self._start = start
        self._used = used
        self._outputs = (0,) * divides_units
        self._group = grouping.begin(used)
        self._pieces: list[tuple[Outputs, int, int]] = []

    def add(self, outputs: Outputs) -> Iterator[FormedGroup]:
        """Yields the groups that are full now."""
        row, stop, sizes = outputs.first, len(outputs.values), outputs.origins.sizes
        while row < stop:
            taken = self._group.take(sizes[:, row:stop])
            if taken:
                self._pieces.append((outputs, row, row + taken))
                row += taken
            while self._group.is_full:
                yield self._take_group()

    def finish(self) -> Iterator[FormedGroup]:
        """Yields the last, short group, if there is one and it is wanted."""
        if self._pieces and self._grouping.keeps_remainder:
            group = self._take_group()
            yield group._replace(end=group.end._replace(is_final=True))

    def cut(self) -> Iterator[FormedGroup]:
        """Yields what is whole of the last group, since an error follows.

        Where a stream was resumed decides where such groups begin and end, but not which outputs there are.
        """
        if self._pieces and (whole := self._group.truncate()):
            used = self._used + whole * (self._grouping.output_size or 1)
            yield FormedGroup(self._elements(), self._position(), self._within(used))

    def _take_group(self) -> FormedGroup:
        elements, start, used = self._elements(), self._position(), self._group.used
        last, _, stop = self._pieces[-1]
        self._start, self._used = self._before_last() if used else last.after(stop - 1), used
        self._group, self._pieces = self._grouping.begin(used), []
        if used:
            # What is left of the last element belongs to the next group.
            self._group.take(last.origins.sizes[:, stop - 1 : stop])
            self._pieces.append((last, stop - 1, stop))
        return FormedGroup(elements, start, self._position())

    def _elements(self) -> Elements:
        """Returns the elements that the group has taken, with what it has decided about each."""
        runs = [outputs.values[row:stop] for outputs, row, stop in self._pieces]
        values = runs[0] if len(runs) == 1 else list(itertools.chain.from_iterable(runs))
        origins = Origins.concatenate([outputs.origins.take(slice(row, stop)) for outputs, row, stop in self._pieces])
        return Elements(values, origins.with_sizes(self._group.decisions()))

    def _before_last(self) -> Cursor:
        """Returns the position in the stage before at which the last element of the group begins."""
        last, first, stop = self._pieces[-1]
        if stop - 1 > first:
            return last.after(stop - 2)
        if len(self._pieces) > 1:
            earlier, _, end = self._pieces[-2]
            return earlier.after(end - 1)
        return self._start

    def _position(self) -> Cursor:
        """Returns the position at which the group begins."""
        return self._within(self._used)

    def _within(self, used: int) -> Cursor:
        """Returns the position in the group of which something is used up."""
        start = self._start
        return Cursor(start.block, (*start.skip, used, *self._outputs), start.is_final)
