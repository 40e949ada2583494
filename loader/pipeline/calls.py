"""The calls of a plan: what each asks for, and which outputs the answer becomes."""

import abc
import dataclasses

from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.logical_shard import LogicalShard
from millstream.loader.pipeline.outputs import BlockOutputs, Cursor, GroupOutputs, JoinedOutputs, Outputs, Position
from millstream.loader.pipeline.requests import Blocks, Group, Request
from millstream.loader.pipeline.stages import Stage


@dataclasses.dataclass(eq=False, slots=True)
class Call(abc.ABC):
    """A call of a plan.

    Attributes:
        shard: the number of the logical shard that it is of; 0 where it is of all of them.
        stage: the stage that makes it.
        num_records: how many records it reads, or how many elements of the stage before it takes.
        num_blocks: how many blocks it reads; later stages read none.
        outputs: what came of it.
        substream: the number of the substream that it is of, where the workers have several; else 0.
        seconds_before: the seconds that its elements took to be drawn, before it was handed out.
    """

    shard: int
    stage: int
    num_records: int
    num_blocks: int
    outputs: Outputs | None = dataclasses.field(default=None, init=False)
    substream: int = dataclasses.field(default=0, init=False)
    seconds_before: float = dataclasses.field(default=0.0, init=False)

    @property
    @abc.abstractmethod
    def request(self) -> Request:
        """What to ask the plan for."""

    @abc.abstractmethod
    def complete(self, elements: Elements) -> None:
        """Takes the result."""


class BlockCall(Call):
    """A call of stage 0: make blocks `start … stop - 1`, of which `skip` outputs are used up."""

    __slots__ = ("_of", "skip", "start", "stop")

    def __init__(self, of: LogicalShard, start: int, stop: int, skip: int = 0) -> None:
        super().__init__(of.number, 0, (stop - start) * of.partition.block, stop - start)
        self._of = of
        self.start = start
        self.stop = stop
        self.skip = skip

    @property
    def request(self) -> Blocks:
        """What to ask the plan for."""
        return Blocks(self.start, self.stop, self.shard)

    def complete(self, elements: Elements) -> None:
        """Takes the result."""
        self.outputs = BlockOutputs(elements, self.skip, self.num_records, self._of, self.stop)


class GroupCall(Call):
    """A call of a later stage: make the outputs of one group.

    Args:
        shard: the number of the logical shard.
        stage: the stage that makes them.
        group: the elements.
        span: the positions before the first output, or before those that were used up earlier, and after the last.
        skip: how many outputs are used up.
        made_by: the compiled stage; None for what is only an error.
    """

    __slots__ = ("_group", "_made_by", "_skip", "_span")

    def __init__(
        self,
        shard: int,
        stage: int,
        group: Elements,
        span: tuple[Cursor, Cursor],
        *,
        skip: int = 0,
        made_by: Stage | None = None,
    ) -> None:
        super().__init__(shard, stage, len(group.values), 0)
        self._group = group
        self._span = span
        self._skip = skip
        self._made_by = made_by

    @property
    def request(self) -> Group:
        """What to ask the plan for."""
        return Group(self.stage, self._group)

    def complete(self, elements: Elements) -> None:
        """Takes the result."""
        self.outputs = GroupOutputs(elements, self._skip, self.num_records, self._span, self._made_by)


class JoinedCall(Call):
    """A call of the last stage: make one batch of the elements of several logical shards.

    Args:
        stage: the last stage.
        elements: those of each logical shard, end to end.
        end: the position after the batch.
    """

    __slots__ = ("_elements", "_end")

    def __init__(self, stage: int, elements: Elements, end: Position) -> None:
        super().__init__(0, stage, len(elements.values), 0)
        self._elements = elements
        self._end = end

    @property
    def request(self) -> Group:
        """What to ask the plan for."""
        return Group(self.stage, self._elements)

    def complete(self, elements: Elements) -> None:
        """Takes the result."""
        self.outputs = JoinedOutputs(elements, self.num_records, self._end)


def failed_call(shard: int, stage: int, error: BaseException) -> Call:
    """Returns a call that is complete: an error came instead of what it would take."""
    nothing, nowhere = Elements.failed(error), Cursor(0, (0,))
    call = GroupCall(shard, stage, nothing, (nowhere, nowhere))
    call.complete(nothing)
    return call
