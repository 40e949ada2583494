"""The input of a later stage: groups of the elements of the stage before, of one or of several logical shards.

    logical shard 0   blocks -> groups -> elements ─┐
    logical shard 1   blocks -> groups -> elements ─┼─▶ a share of each, concatenated ─▶ the last stage
    logical shard 2   blocks -> groups -> elements ─┘

A batch takes the same number of elements from each logical shard, in their order, whenever they arrive. Its content
depends on these logical shards only, not on which others the same shard runs. At the end of the streams, a batch
contains the remaining elements, or is omitted if it would be short. An error of a logical shard is raised in place of
the first batch that lacks its share, whichever other shares are missing.

If short batches are omitted, an error is none if too few records would be left to fill a batch, had they not failed:
nothing depends on these. So an error in the remainder is the same whether that is read or not.

The position of a group is the position, in the stage before, of the first element that is not consumed. If a group may
begin within an element, it also contains the part of the element that is consumed.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from millstream.loader.pipeline.calls import Cursor, FormedGroup, Outputs
from millstream.loader.pipeline.elements import Elements, Origins, SourceEnded
from millstream.loader.pipeline.stages import Stage


@final
class Lane:
    """The elements of one logical shard in front of a stage, in groups.

    Args:
        stage: the stage.
        cursor: the position of the first output of the stream, `number` of whose numbers are of the stages before.
        is_last: True if no stage follows.

    Attributes:
        groups: the complete groups that were not taken, each a share of a group of the join if there is one.
        error: the error in place of its next element, if any.
        has_ended: True if no element follows.
        stops: True if it has ended, and a join forms no group without it.
        made: the number of elements so far.
        ready: the number of these elements that are not in a group of the join.
    """

    def __init__(self, stage: Stage, cursor: Cursor, number: int, *, is_last: bool) -> None:
        if stage.grouping is None:
            raise AssertionError("stage 0 has a leaf")
        self._size, self._is_last = stage.grouping.fixed_size, is_last
        self.groups: deque[FormedGroup] = deque()
        self.error: BaseException | None = None
        # The largest number of groups that would follow in place of the error, and after it; None if it is not known.
        self._lost: int | None = None
        self.has_ended = self.stops = False
        self.made = self.ready = 0
        self._grouping = stage.grouping
        # The position after the last share that was taken.
        self._position = cursor
        # The position in the stage before at which the group begins, and the part of its first element that is used.
        self._start = Cursor(cursor.block, cursor.skip[:number], cursor.is_final)
        self._used = 0 if stage.unit is None else cursor.skip[number]
        # If outputs divide units, positions in the stage contain a second number, of outputs.
        self._outputs = (0,) * stage.divides_units
        self._group = self._grouping.begin(self._used)
        self._taken: list[tuple[Outputs, int, int]] = []

    def add(self, outputs: Outputs) -> None:
        row, stop, sizes = outputs.first, len(outputs.values), outputs.origins.sizes
        self.made += stop - row
        self.ready += stop - row
        while row < stop:
            taken = self._group.take(sizes[:, row:stop])
            if taken:
                self._taken.append((outputs, row, row + taken))
                row += taken
            while self._group.is_full:
                self.groups.append(self._take_group())
        if outputs.error is None:
            return
        self._lost = None if self._size is None else self._num_groups(outputs.num_lost())
        if isinstance(outputs.error, SourceEnded) or self._lost == 0:
            # Too few records would be left to fill a group: it is dropped, whatever they are.
            self.end()
        else:
            self._truncate()
            self.error, self.has_ended, self.stops = outputs.error, True, True

    def _num_groups(self, following: int | None) -> int | None:
        """Returns the largest number of groups of the elements that were taken and of some that follow."""
        if following is None or self._size is None:
            return None
        complete, rest = divmod(sum([stop - row for _, row, stop in self._taken]) + following, self._size)
        return complete + (rest > 0 and self._grouping.keeps_remainder)

    def end(self) -> None:
        """Forms the last, short group if it is to be kept, unless an error came before."""
        if not self.has_ended:
            keeps = self._grouping.keeps_remainder
            if self._taken and keeps:
                group = self._take_group()
                self.groups.append(group._replace(end=group.end._replace(is_final=True), following=0))
            self.has_ended, self.stops = True, not keeps

    def _truncate(self) -> None:
        """Forms a group of the complete outputs of the last one, because an error follows.

        The bounds of such groups depend on where a stream was resumed, but the outputs do not.
        """
        if self._taken and (count := self._group.truncate()):
            used = self._used + count * (self._grouping.output_size or 1)
            self.groups.append(FormedGroup(self._elements(), self._within(self._used), self._within(used)))

    def _take_group(self) -> FormedGroup:
        elements, start, used = self._elements(), self._within(self._used), self._group.used
        last, _, stop = self._taken[-1]
        self._start, self._used = self._before_last() if used else last.after(stop - 1), used
        self._group, self._taken = self._grouping.begin(used), []
        if used:
            # The remainder of the last element belongs to the next group.
            self._group.take(last.origins.sizes[:, stop - 1 : stop])
            self._taken.append((last, stop - 1, stop))
        following = None
        if self._size is not None and not self._is_last:
            following = self._num_groups(last.num_after(stop - 1))
        return FormedGroup(elements, start, self._within(used), following=following)

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

    def _within(self, used: int) -> Cursor:
        """Returns the position in the group after a consumed amount."""
        start = self._start
        return Cursor(start.block, (*start.skip, used, *self._outputs), start.is_final)

    def take_groups(self) -> Sequence[FormedGroup]:
        """Removes and returns the complete groups. An error is a group of its own, the last one."""
        groups, self.groups = self.groups, deque()
        if self.error is not None:
            groups.append(FormedGroup.failed(self.error, self._lost and self._lost - 1))
            self.error = None
        return groups

    @property
    def is_at_last_share(self) -> bool:
        """True if its share of the next group is short, so that it has ended."""
        return not self.groups or len(self.groups[0].elements.values) != self._size

    def take_share(self) -> Cursor:
        """Removes the first group, if there is one, and returns the position after it."""
        if self.groups:
            group = self.groups.popleft()
            self.ready -= len(group.elements.values)
            self._position = group.end
        else:
            # Other logical shards continue. Their batches are short because this one has ended.
            self._position = self._position._replace(is_final=True)
        return self._position


@final
class Join:
    """The groups in front of the last stage, of a share of each lane. No group follows once it has ended.

    `check` returns the error in place of a group, if any, given the positions after it; None for lanes at their ends.
    """

    def __init__(
        self, lanes: Sequence[Lane], check: "Callable[[Sequence[Cursor | None]], BaseException | None] | None"
    ) -> None:
        self._lanes = lanes
        self._check = check
        # The first lane that may lack its share of the next group.
        self._next = 0
        # True if a lane before it does, so that the group is dropped unless another one has an error in its place.
        self._is_last = False
        self._error: BaseException | None = None
        self.has_ended = False

    def take_groups(self) -> Sequence[FormedGroup]:
        groups: list[FormedGroup] = []
        while not self.has_ended and self._has_shares():
            group = self._next_group()
            self.has_ended = group is None or group.elements.error is not None
            if group is not None:
                groups.append(group)
        return groups

    def _has_shares(self) -> bool:
        """Returns True if each lane has its share of the next group, or has ended, or if one has an error instead."""
        # Each lane is visited once per group: one that has its share keeps it.
        while self._next < len(self._lanes):
            lane = self._lanes[self._next]
            if not lane.groups:
                if not lane.has_ended:
                    return False
                if lane.error is not None:
                    self._error = lane.error
                    return True
                self._is_last = self._is_last or lane.stops
            self._next += 1
        self._next = 0
        return True

    def _next_group(self) -> FormedGroup | None:
        """Returns the next group, or the error in its place; None at the end."""
        if self._error is not None:
            return FormedGroup.failed(self._error)
        if self._is_last:
            return None
        shares = [lane.groups[0] for lane in self._lanes if lane.groups]
        are_last = [lane.is_at_last_share for lane in self._lanes]
        end, *others = [lane.take_share() for lane in self._lanes]
        if self._check is not None:
            ends = zip((end, *others), are_last, strict=True)
            if (error := self._check([None if is_last else after for after, is_last in ends])) is not None:
                return FormedGroup.failed(error)
        if not shares:
            return None
        return FormedGroup(Elements.concatenate([share.elements for share in shares]), end, end, tuple(others))
