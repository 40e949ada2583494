"""Which call of a plan comes next, and in which order the outputs leave: pure bookkeeping.

An executor takes calls, runs them anywhere and in any order, and hands the results back; the schedule lines the
results up, regroups them for the next stage, and gives the outputs out in the order of the stream. It is used by one
thread at a time.
"""

import dataclasses
from collections import deque

from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.empty_epochs import EmptyEpochs
from millstream.loader.pipeline.outputs import BlockOutputs, Cursor, GroupOutputs, Outputs
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.regrouping import FormedGroup, Regrouping
from millstream.loader.pipeline.requests import Blocks, Group


@dataclasses.dataclass(eq=False, slots=True)
class BlockCall:
    """A call of stage 0: make blocks `start … stop - 1`, of which `skip` outputs are used up."""

    start: int
    stop: int
    skip: int
    outputs: Outputs | None = None

    @property
    def request(self) -> Blocks:
        """What to ask the plan for."""
        return Blocks(self.start, self.stop)

    @property
    def stage(self) -> int:
        """The stage that makes it."""
        return 0

    @property
    def num_blocks(self) -> int:
        """How many blocks it makes."""
        return self.stop - self.start


@dataclasses.dataclass(eq=False, slots=True)
class GroupCall:
    """A call of a later stage: make the outputs of one group, of which `skip` are used up.

    Attributes:
        stage: the stage that makes them.
        group: the elements.
        start: the position before the first output, or before those that were used up earlier.
        end: the position after the last output.
        skip: how many outputs are used up.
        unit: how far an output takes the position within the group; None where outputs are counted.
        outputs: what came of it.
    """

    stage: int
    group: Elements
    start: Cursor
    end: Cursor
    skip: int
    unit: int | None = None
    outputs: Outputs | None = None

    @property
    def request(self) -> Group:
        """What to ask the plan for."""
        return Group(self.stage, self.group)

    @property
    def num_blocks(self) -> int:
        """How many blocks it reads: stage 0 has read them."""
        return 0


Call = BlockCall | GroupCall


class Schedule:
    """The calls of one pass over the stream, from a cursor on.

    Args:
        plan: what the calls are of.
        cursor: where the first one begins.
    """

    def __init__(self, plan: Plan, cursor: Cursor) -> None:
        self._plan = plan
        self._block = cursor.block
        self._skip = list(cursor.skip)
        self._failed = False
        self._ended_stages = 0
        self._pending: list[deque[Call]] = [deque() for _ in plan.stages]
        self._untaken: list[deque[Call]] = [deque() for _ in plan.stages]
        self._outputs: deque[Outputs] = deque()
        self._regroupings = []
        for number, stage in enumerate(plan.stages):
            if stage.grouping is not None:
                used = 0 if stage.grouping.unit is None else self._take_skip(number)
                start = Cursor(cursor.block, cursor.skip[:number])
                self._regroupings.append(Regrouping(stage.grouping, start, used))
        self._empty_epochs = EmptyEpochs(plan) if any(stage.filters for stage in plan.stages) else None
        self._end_stages()

    @property
    def exhausted(self) -> bool:
        """Whether everything has been given out."""
        return self._ended_stages == len(self._pending) and not self._outputs

    @property
    def backlog(self) -> int:
        """How many calls are begun, or can begin, or have outputs that were not given out."""
        return sum(map(len, self._pending)) + len(self._outputs)

    @property
    def records_ahead(self) -> int:
        """How many records the backlog is about: those that calls of stage 0 read, and elements from there on."""
        in_work = sum(self._num_records(call) for pending in self._pending for call in pending)
        return in_work + sum(outputs.num_records for outputs in self._outputs)

    def next_blocks(self, most: int) -> int:
        """Returns how many blocks a call of stage 0 that makes `most` at most would make now."""
        if self._failed:
            return 0
        return most if self._plan.num_blocks is None else max(0, min(most, self._plan.num_blocks - self._block))

    @property
    def next_stage(self) -> int | None:
        """The latest stage that has a call which may run now; None when there is none."""
        for stage in reversed(range(len(self._untaken))):
            if self._untaken[stage]:
                return stage
        return 0 if self.next_blocks(1) else None

    def take(self, stage: int, most_blocks: int = 1) -> Call | None:
        """Returns the next call of a stage, in order, or None if none may run now.

        Args:
            stage: which one.
            most_blocks: how many blocks a call of stage 0 makes at most.
        """
        if self._untaken[stage]:
            return self._untaken[stage].popleft()
        blocks = self.next_blocks(most_blocks) if stage == 0 else 0
        if not blocks:
            return None
        call = BlockCall(self._block, self._block + blocks, self._take_skip(0))
        self._block = call.stop
        self._pending[0].append(call)
        return call

    def wants(self, call: Call) -> bool:
        """Whether the outputs of a call that was taken are still waited for: after an error, no later ones are."""
        return call in self._pending[call.stage]

    def split(self, call: BlockCall) -> list[BlockCall]:
        """Returns calls of one block each that replace a call, to find out which block is at fault.

        There are none if the outputs of the call are no longer wanted.
        """
        if not self.wants(call):
            return []
        pieces = [BlockCall(block, block + 1, 0) for block in range(call.start, call.stop)]
        pieces[0].skip = call.skip
        pending = list(self._pending[0])
        row = pending.index(call)
        self._pending[0] = deque([*pending[:row], *pieces, *pending[row + 1 :]])
        return pieces

    def complete(self, call: Call, elements: Elements) -> None:
        """Takes the result of a call."""
        num_records = self._num_records(call)
        if isinstance(call, BlockCall):
            call.outputs = BlockOutputs(elements, call.skip, num_records, self._plan, call.stop)
        else:
            call.outputs = GroupOutputs(elements, call.skip, num_records, (call.start, call.end), call.unit)
        for stage, pending in enumerate(self._pending):
            while pending and (outputs := pending[0].outputs) is not None:
                made = pending.popleft()
                if self._empty_epochs is not None:
                    self._empty_epochs.note(stage, made.num_blocks, len(outputs.values))
                self._forward(stage, outputs)
        self._end_stages()

    def pop(self) -> Outputs | None:
        """Returns the next outputs in order, if they are ready. Outputs with an error are the last."""
        if not self._outputs:
            return None
        outputs = self._outputs.popleft()
        if outputs.error is not None:
            self._ended_stages = len(self._pending)
            self._outputs.clear()
            for untaken in self._untaken:
                untaken.clear()
        return outputs

    def _forward(self, stage: int, outputs: Outputs) -> None:
        """Passes outputs on to the next stage, or out."""
        if outputs.error is not None:
            # Nothing after an error is ever wanted.
            self._failed = True
            self._pending[stage].clear()
            self._untaken[stage].clear()
        if stage + 1 == len(self._pending):
            self._outputs.append(outputs)
            return
        for group in self._regroupings[stage].add(outputs):
            self._enqueue(stage + 1, group)
        if outputs.error is not None:
            for group in self._regroupings[stage].cut():
                self._enqueue(stage + 1, group)
            nothing, nowhere = Elements.failed(outputs.error), Cursor(0, (0,))
            call = GroupCall(stage + 1, nothing, nowhere, nowhere, 0)
            call.outputs = GroupOutputs(nothing, 0, 0, (nowhere, nowhere))
            self._pending[stage + 1].append(call)

    def _enqueue(self, stage: int, group: FormedGroup) -> None:
        grouping = self._plan.stages[stage].grouping
        unit = None if grouping is None else grouping.unit
        call = GroupCall(stage, *group, self._take_skip(stage), unit)
        self._pending[stage].append(call)
        self._untaken[stage].append(call)

    def _end_stages(self) -> None:
        """Closes each stage that has no more to come, and lets its last, short group pass."""
        while self._ended_stages < len(self._pending):
            stage = self._ended_stages
            if self._pending[stage] or (stage == 0 and self.next_blocks(1)):
                return
            self._ended_stages += 1
            if stage + 1 < len(self._pending) and not self._failed:
                for group in self._regroupings[stage].finish():
                    self._enqueue(stage + 1, group)

    def _num_records(self, call: Call) -> int:
        if isinstance(call, GroupCall):
            return len(call.group.values)
        return call.num_blocks * self._plan.partition.block

    def _take_skip(self, stage: int) -> int:
        skip, self._skip[stage] = self._skip[stage], 0
        return skip
