"""The calls of a plan: a request each, which can be sent to any thread or process, and the outputs that follow."""

import abc
import dataclasses
from typing import NamedTuple, TypeAlias

from millstream.loader.operations.elements import Elements
from millstream.loader.pipeline.logical_shard import LogicalShard
from millstream.loader.pipeline.outputs import BlockOutputs, FormedGroup, GroupOutputs, Outputs, num_bytes
from millstream.loader.pipeline.stages import Stage


class Blocks(NamedTuple):
    """Requests the outputs of blocks `start … stop - 1` of stage 0 of a logical shard."""

    start: int
    stop: int
    shard: int = 0


class Group(NamedTuple):
    """Requests the outputs of a later stage, made from the elements of one group."""

    stage: int
    elements: Elements


class Fed(NamedTuple):
    """Requests the outputs of stage 0, made from elements that were not read from the source."""

    elements: Elements


class Rest(NamedTuple):
    """Requests the local operations of a stage, given the results of the operations before them."""

    stage: int
    elements: Elements


Request: TypeAlias = Blocks | Group | Fed | Rest


@dataclasses.dataclass(eq=False, slots=True)
class Call(abc.ABC):
    """A call of a plan.

    Attributes:
        shard: the number of the logical shard; 0 for a call of all of them.
        num_records: the number of records to read, or of elements of the stage before.
        num_blocks: the number of blocks to read; 0 for later stages.
        local_input: the elements that its local operations have to process; None before they exist.
        is_local: True once its local operations are requested.
        num_bytes: the estimated size of its elements in memory; None before they exist.
        substream: the number of the substream if the workers have several, otherwise 0.
        seconds_before: the seconds that drawing its elements took, and its operations before the local ones.
    """

    shard: int
    stage: int
    num_records: int
    num_blocks: int
    outputs: Outputs | None = dataclasses.field(default=None, init=False)
    local_input: Elements | None = dataclasses.field(default=None, init=False)
    is_local: bool = dataclasses.field(default=False, init=False)
    num_bytes: int | None = dataclasses.field(default=None, init=False)
    substream: int = dataclasses.field(default=0, init=False)
    seconds_before: float = dataclasses.field(default=0.0, init=False)

    @property
    def request(self) -> Request:
        if self.is_local and self.local_input is not None:
            return Rest(self.stage, self.local_input)
        return self._first_request

    def receive(self, elements: Elements) -> None:
        """Stores the input of its local operations, which are not requested yet."""
        self.local_input, self.num_bytes = elements, num_bytes(elements.values)

    def begin_local(self) -> None:
        request = self._first_request
        if self.local_input is None and isinstance(request, Fed | Group):
            self.local_input = request.elements
        self.is_local = True

    def complete(self, elements: Elements) -> None:
        self.outputs = outputs = self._outputs_of(elements)
        self.local_input, self.num_bytes = None, outputs.num_bytes

    @property
    @abc.abstractmethod
    def _first_request(self) -> Request:
        """The request for all operations but the local ones."""

    @abc.abstractmethod
    def _outputs_of(self, elements: Elements) -> Outputs: ...


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
    def _first_request(self) -> Blocks:
        return Blocks(self.start, self.stop, self.shard)

    def _outputs_of(self, elements: Elements) -> Outputs:
        return BlockOutputs(elements, self.skip, self.num_records, self._of, self.stop)

    def split(self) -> "list[BlockCall]":
        return [
            BlockCall(self._of, block, block + 1, self.skip if block == self.start else 0)
            for block in range(self.start, self.stop)
        ]


class GroupCall(Call):
    """A call of a later stage for the outputs of one group."""

    __slots__ = ("_elements", "_skip", "_span", "_stage")

    def __init__(self, shard: int, stage: int, group: FormedGroup, compiled: Stage, skip: int) -> None:
        super().__init__(shard, stage, len(group.elements.values), 0)
        self._elements = group.elements
        self._span = group[1:]
        self._skip = skip
        self._stage = compiled

    @property
    def _first_request(self) -> Group:
        return Group(self.stage, self._elements)

    def _outputs_of(self, elements: Elements) -> Outputs:
        return GroupOutputs(elements, self._skip, self.num_records, self._span, self._stage)
