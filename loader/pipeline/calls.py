"""The calls of a plan: a request each, and the outputs that its result becomes."""

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
        shard: the number of the logical shard; 0 for a call of all of them.
        stage: the stage that computes the outputs.
        num_records: the number of records to read, or of elements of the stage before.
        num_blocks: the number of blocks to read; 0 for later stages.
        outputs: the result; None before the call is complete.
        substream: the number of the substream if the workers have several, otherwise 0.
        seconds_before: the seconds that drawing its elements took, before it was dispatched.
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
        """The request to the plan."""

    @abc.abstractmethod
    def complete(self, elements: Elements) -> None:
        """Stores the result."""


class BlockCall(Call):
    """A call of stage 0 for blocks `start … stop - 1`. The first `skip` outputs are consumed already."""

    __slots__ = ("_of", "skip", "start", "stop")

    def __init__(self, of: LogicalShard, start: int, stop: int, skip: int = 0) -> None:
        super().__init__(of.number, 0, (stop - start) * of.partition.block, stop - start)
        self._of = of
        self.start = start
        self.stop = stop
        self.skip = skip

    @property
    def request(self) -> Blocks:
        """The request to the plan."""
        return Blocks(self.start, self.stop, self.shard)

    def complete(self, elements: Elements) -> None:
        """Stores the result."""
        self.outputs = BlockOutputs(elements, self.skip, self.num_records, self._of, self.stop)

    def split(self) -> "list[BlockCall]":
        """Returns calls of one block each, in order."""
        return [
            BlockCall(self._of, block, block + 1, self.skip if block == self.start else 0)
            for block in range(self.start, self.stop)
        ]


class GroupCall(Call):
    """A call of a later stage for the outputs of one group.

    Args:
        shard: the number of the logical shard.
        stage: the stage that computes the outputs.
        group: the elements.
        span: the positions before the first output, consumed ones included, and after the last.
        skip: the number of outputs that are consumed already.
        compiled: the compiled stage; None if the call only carries an error.
    """

    __slots__ = ("_group", "_skip", "_span", "_stage")

    def __init__(
        self,
        shard: int,
        stage: int,
        group: Elements,
        span: tuple[Cursor, Cursor],
        *,
        skip: int = 0,
        compiled: Stage | None = None,
    ) -> None:
        super().__init__(shard, stage, len(group.values), 0)
        self._group = group
        self._span = span
        self._skip = skip
        self._stage = compiled

    @property
    def request(self) -> Group:
        """The request to the plan."""
        return Group(self.stage, self._group)

    def complete(self, elements: Elements) -> None:
        """Stores the result."""
        self.outputs = GroupOutputs(elements, self._skip, self.num_records, self._span, self._stage)


class JoinedCall(Call):
    """A call of the last stage for one batch of elements of several logical shards.

    Args:
        stage: the last stage.
        elements: the concatenated elements of the logical shards.
        end: the position after the batch.
    """

    __slots__ = ("_elements", "_end")

    def __init__(self, stage: int, elements: Elements, end: Position) -> None:
        super().__init__(0, stage, len(elements.values), 0)
        self._elements = elements
        self._end = end

    @property
    def request(self) -> Group:
        """The request to the plan."""
        return Group(self.stage, self._elements)

    def complete(self, elements: Elements) -> None:
        """Stores the result."""
        self.outputs = JoinedOutputs(elements, self.num_records, self._end)


def failed_call(shard: int, stage: int, error: BaseException) -> Call:
    """Returns a complete call whose only output is an error."""
    nothing, nowhere = Elements.failed(error), Cursor(0, (0,))
    call = GroupCall(shard, stage, nothing, (nowhere, nowhere))
    call.complete(nothing)
    return call
