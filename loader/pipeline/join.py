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
from collections.abc import Iterator
from typing import final

from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.outputs import Cursor, Outputs
from millstream.loader.pipeline.regrouping import FormedGroup, Regrouping
from millstream.loader.pipeline.source_end import SourceEnded
from millstream.loader.pipeline.stages import Stage


@final
class Lane:
    """The elements of one logical shard in front of a stage.

    Args:
        stage: the stage.
        cursor: the position of the first output of the stream.
        number: the number of cursor numbers of the stages before.

    Attributes:
        groups: its groups, each a share of a group of the join.
        error: the error in place of its next element, if any.
        has_ended: True if no element follows.
        made: the number of elements so far.
        ready: the number of these elements that are not in a group of the join.
    """

    def __init__(self, stage: Stage, cursor: Cursor, number: int) -> None:
        if stage.grouping is None:
            raise AssertionError("stage 0 has a leaf")
        self.keeps_remainder = stage.grouping.keeps_remainder
        self.groups: deque[FormedGroup] = deque()
        self.error: BaseException | None = None
        self.has_ended = False
        self.made = self.ready = 0
        start = Cursor(cursor.block, cursor.skip[:number])
        used = 0 if stage.unit is None else cursor.skip[number]
        self._regrouping = Regrouping(stage.grouping, start, used, divides_units=stage.divides_units)
        self._position = cursor

    def add(self, outputs: Outputs) -> None:
        """Adds outputs of the stage before."""
        count = len(outputs.values) - outputs.first
        self.made += count
        self.ready += count
        self.groups.extend(self._regrouping.add(outputs))
        if isinstance(outputs.error, SourceEnded):
            self.end()
        elif outputs.error is not None:
            self.groups.extend(self._regrouping.truncate())
            self.error, self.has_ended = outputs.error, True

    def end(self) -> None:
        """Forms the last, short group, unless an error came before."""
        if not self.has_ended:
            self.groups.extend(self._regrouping.finish())
            self.has_ended = True

    def use_group(self) -> Cursor:
        """Removes the first group, if there is one, and returns the position after it."""
        if self.groups:
            group = self.groups.popleft()
            self.ready -= len(group.elements.values)
            self._position = group.end
        else:
            # Other logical shards continue. Their batches are short because this one has ended.
            self._position = self._position._replace(is_final=True)
        return self._position

    @property
    def stops(self) -> bool:
        """True if no group of the join is formed without this lane, which has ended."""
        return self.has_ended and (self.error is not None or not self.keeps_remainder)


@final
class Join:
    """The groups in front of a stage, of a share of each lane.

    Args:
        lanes: the elements of each logical shard.

    Attributes:
        lanes: the same.
        has_ended: True if no group follows.
    """

    def __init__(self, lanes: list[Lane]) -> None:
        self.lanes = lanes
        self.has_ended = False

    def groups(self) -> Iterator[FormedGroup]:
        """Yields the groups that are complete. An error is a group of its own, the last one."""
        while not self.has_ended:
            empty = [lane for lane in self.lanes if not lane.groups]
            for lane in empty:
                if not lane.has_ended:
                    return
                if lane.stops:
                    self.has_ended = True
                    if lane.error is not None:
                        nowhere = Cursor(0, (0,))
                        yield FormedGroup(Elements.failed(lane.error), nowhere, nowhere)
                    return
            if len(empty) == len(self.lanes):
                self.has_ended = True
                return
            shares = [lane.groups[0] for lane in self.lanes if lane.groups]
            end, *others = [lane.use_group() for lane in self.lanes]
            elements = Elements.concatenate([share.elements for share in shares])
            yield FormedGroup(elements, shares[0].start, end, tuple(others))
