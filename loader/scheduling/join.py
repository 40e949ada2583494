"""The input of a later stage: groups of the elements of the stage before, of one or of several logical shards.

    logical shard 0   blocks -> groups -> elements ─┐
    logical shard 1   blocks -> groups -> elements ─┼─▶ a share of each, concatenated ─▶ the last stage
    logical shard 2   blocks -> groups -> elements ─┘

A batch takes the same number of elements from each logical shard, in their order, whenever they arrive. Its content
depends on these logical shards only, not on which others the same shard runs. At the end of the streams, a batch
contains the remaining elements, or is omitted if it would be short. An error of a logical shard is raised in place of
the first batch that lacks its share.
"""

from collections import deque
from collections.abc import Sequence
from typing import final

from millstream.loader.operations.elements import Elements, SourceEnded
from millstream.loader.pipeline.outputs import Cursor, Outputs
from millstream.loader.pipeline.regrouping import FormedGroup, Regrouping
from millstream.loader.pipeline.stages import Stage


@final
class Lane:
    """The elements of one logical shard in front of a stage, in groups.

    Args:
        stage: the stage.
        cursor: the position of the first output of the stream, `number` of whose numbers are of the stages before.

    Attributes:
        groups: the complete groups that were not taken, each a share of a group of the join if there is one.
        error: the error in place of its next element, if any.
        has_ended: True if no element follows.
        stops: True if it has ended, and a join forms no group without it.
        made: the number of elements so far.
        ready: the number of these elements that are not in a group of the join.
    """

    def __init__(self, stage: Stage, cursor: Cursor, number: int) -> None:
        if stage.grouping is None:
            raise AssertionError("stage 0 has a leaf")
        self._keeps_remainder = stage.grouping.keeps_remainder
        self.groups: deque[FormedGroup] = deque()
        self.error: BaseException | None = None
        self.has_ended = self.stops = False
        self.made = self.ready = 0
        start = Cursor(cursor.block, cursor.skip[:number])
        used = 0 if stage.unit is None else cursor.skip[number]
        self._regrouping = Regrouping(stage.grouping, start, used, divides_units=stage.divides_units)
        self._position = cursor

    def add(self, outputs: Outputs) -> None:
        count = len(outputs.values) - outputs.first
        self.made += count
        self.ready += count
        self.groups.extend(self._regrouping.add(outputs))
        if isinstance(outputs.error, SourceEnded):
            self.end()
        elif outputs.error is not None:
            self.groups.extend(self._regrouping.truncate())
            self.error, self.has_ended, self.stops = outputs.error, True, True

    def end(self) -> None:
        """Forms the last, short group, unless an error came before."""
        if not self.has_ended:
            self.groups.extend(self._regrouping.finish())
            self.has_ended, self.stops = True, not self._keeps_remainder

    def take_groups(self) -> Sequence[FormedGroup]:
        """Removes and returns the complete groups. An error is a group of its own, the last one."""
        groups, self.groups = self.groups, deque()
        if self.error is not None:
            groups.append(FormedGroup.failed(self.error))
            self.error = None
        return groups

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
    """The groups in front of the last stage, of a share of each lane. No group follows once it has ended."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self.has_ended = False

    def take_groups(self) -> Sequence[FormedGroup]:
        groups: list[FormedGroup] = []
        while not self.has_ended:
            shares: list[FormedGroup] = []
            for lane in self._lanes:
                if lane.groups:
                    shares.append(lane.groups[0])
                elif not lane.has_ended:
                    return groups
                elif lane.stops:
                    self.has_ended = True
                    return groups if lane.error is None else [*groups, FormedGroup.failed(lane.error)]
            if shares:
                elements = Elements.concatenate([share.elements for share in shares])
                end, *others = [lane.take_share() for lane in self._lanes]
                groups.append(FormedGroup(elements, end, end, tuple(others)))
            else:
                self.has_ended = True
        return groups
