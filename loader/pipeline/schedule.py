"""Which call of a plan comes next, and in which order the outputs leave: pure bookkeeping.

An executor takes calls, runs them anywhere and in any order, and hands the results back; the schedule lines the
results up, regroups them for the next stage, and gives the outputs out in the order of the stream. It is used by one
thread at a time.
"""

from collections import deque
from typing import TYPE_CHECKING

from millstream.loader.pipeline.calls import BlockCall, Call, GroupCall, failed_call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.outputs import Cursor, Outputs
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.source_end import SourceEnded, text_of

if TYPE_CHECKING:
    from millstream.loader.pipeline.empty_epochs import EmptyEpochs
    from millstream.loader.pipeline.filter_windows import FilterWindows
    from millstream.loader.pipeline.regrouping import FormedGroup, Regrouping


class Schedule:
    """The calls of one pass over a logical shard, from a cursor on.

    Args:
        plan: what the calls are of.
        cursor: where the first one begins: the numbers of each of its stages.
        shard: the number of the logical shard.
        stages: how many of the plan's stages it has; None for all.
    """

    def __init__(self, plan: Plan, cursor: Cursor, shard: int = 0, stages: int | None = None) -> None:
        self._plan = plan
        self._shard = plan.shards[shard]
        self._stages = plan.stages[:stages]
        self._block = cursor.block
        # How many outputs of the first group of each stage are used up.
        self._skip = [0] * len(self._stages)
        self._failed = False
        # Where the source has ended the stream, nothing more is read either, but what was read is used up.
        self._has_ended = False
        self._ended_stages = 0
        self._pending: list[deque[Call]] = [deque() for _ in self._stages]
        self._untaken: list[deque[Call]] = [deque() for _ in self._stages]
        self._outputs: deque[Outputs] = deque()
        # The bytes of an element that each stage has made last.
        self._element_bytes = [0.0 for _ in self._stages]
        self._regroupings: list[Regrouping] = []
        if len(self._stages) > 1:
            self._regroup(cursor)
        else:
            self._skip[0] = cursor.skip[0]
        self._empty_epochs: EmptyEpochs | None = None
        self._windows: FilterWindows | None = None
        if any(stage.filters for stage in self._stages):
            self._watch_filters(cursor.block)
        self._end_stages()

    # Most pipelines do without what these import.
    def _regroup(self, cursor: Cursor) -> None:
        from millstream.loader.pipeline.regrouping import Regrouping  # noqa: PLC0415

        first = 0
        for number, stage in enumerate(self._stages):
            stop = first + stage.num_cursor_numbers
            used = 0 if stage.unit is None else cursor.skip[first]
            if stage.unit is None or stage.divides_units:
                self._skip[number] = cursor.skip[stop - 1]
            if stage.grouping is not None:
                start = Cursor(cursor.block, cursor.skip[:first])
                self._regroupings.append(Regrouping(stage.grouping, start, used, divides_units=stage.divides_units))
            first = stop

    def _watch_filters(self, block: int) -> None:
        from millstream.loader.pipeline.empty_epochs import EmptyEpochs  # noqa: PLC0415
        from millstream.loader.pipeline.filter_windows import FilterWindows  # noqa: PLC0415

        self._empty_epochs = EmptyEpochs(self._plan)
        if any(limit is not None for limit in self._plan.pipeline.filter_limits) and self._stages[0].filters:
            self._windows = FilterWindows(self._plan, block)

    @property
    def exhausted(self) -> bool:
        """Whether everything has been given out."""
        return self._ended_stages == len(self._pending) and not self._outputs

    @property
    def backlog(self) -> int:
        """How many calls are begun, or can begin, or have outputs that were not given out."""
        return sum(map(len, self._pending)) + len(self._outputs)

    @property
    def ready(self) -> int:
        """How many of these are made. Any thread may ask."""
        made = sum(call.outputs is not None for pending in self._pending for call in pending.copy())
        return made + len(self._outputs)

    @property
    def records_ahead(self) -> int:
        """How many records the backlog is about: those that calls of stage 0 read, and elements from there on."""
        in_work = sum(call.num_records for pending in self._pending for call in pending)
        return in_work + sum(outputs.num_records for outputs in self._outputs)

    def bytes_ahead(self, block_bytes: float) -> float:
        """Returns approximately how many bytes the backlog takes, given what a block of a call in work will take."""
        held = float(sum(outputs.num_bytes for outputs in self._outputs))
        for stage, pending in enumerate(self._pending):
            size = block_bytes if stage == 0 else self._element_bytes[stage - 1]
            for call in pending:
                done = call.outputs
                held += size * (call.num_blocks or call.num_records) if done is None else done.num_bytes
        return held

    def next_blocks(self, most: int) -> int:
        """Returns how many blocks a call of stage 0 that makes `most` at most would make now."""
        if self._failed:
            return 0
        last = self._shard.num_blocks
        return most if last is None else max(0, min(most, last - self._block))

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
        call = BlockCall(self._shard, self._block, self._block + blocks, self._take_skip(0))
        self._block = call.stop
        self._pending[0].append(call)
        return call

    def wants(self, call: Call) -> bool:
        """Whether the outputs of a call that was taken are still waited for: after an error, no later ones are."""
        return call in self._pending[call.stage]

    def describe(self, call: Call) -> str:
        """Returns which records a call is about."""
        return self._plan.describe(call.request)

    def split(self, call: BlockCall) -> list[BlockCall]:
        """Returns calls of one block each that replace a call, to find out which block is at fault.

        There are none if the outputs of the call are no longer wanted.
        """
        if not self.wants(call):
            return []
        pieces = [BlockCall(self._shard, block, block + 1) for block in range(call.start, call.stop)]
        pieces[0].skip = call.skip
        pending = list(self._pending[0])
        row = pending.index(call)
        self._pending[0] = deque([*pending[:row], *pieces, *pending[row + 1 :]])
        return pieces

    def complete(self, call: Call, elements: Elements) -> None:
        """Takes the result of a call."""
        call.complete(elements)
        for stage, pending in enumerate(self._pending):
            while pending and (outputs := pending[0].outputs) is not None:
                made = pending.popleft()
                if outputs.failures:
                    self._plan.note_failures(outputs)
                # What ends in an error has not let nothing through; what ends with the source may have.
                if self._empty_epochs is not None and (outputs.error is None or isinstance(outputs.error, SourceEnded)):
                    self._empty_epochs.note(stage, made.num_blocks, len(outputs.values))
                if self._windows is not None and isinstance(made, BlockCall):
                    self._windows.check(outputs, made.stop)
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
        error = outputs.error
        if error is not None:
            # Nothing after an error is ever wanted.
            self._failed, self._has_ended = True, isinstance(error, SourceEnded)
            if isinstance(error, SourceEnded):
                self._plan.tell_once("end", text_of(error))
            self._pending[stage].clear()
            self._untaken[stage].clear()
        if stage + 1 == len(self._pending):
            self._outputs.append(outputs)
            return
        self._element_bytes[stage] = outputs.num_bytes / max(1, len(outputs.values))
        for group in self._regroupings[stage].add(outputs):
            self._enqueue(stage + 1, group)
        if error is not None and not self._has_ended:
            for group in self._regroupings[stage].cut():
                self._enqueue(stage + 1, group)
            self._pending[stage + 1].append(failed_call(self._shard.number, stage + 1, error))

    def _enqueue(self, stage: int, group: "FormedGroup") -> None:
        skip, span = self._take_skip(stage), (group.start, group.end)
        made_by = self._stages[stage]
        call = GroupCall(self._shard.number, stage, group.elements, span, skip=skip, made_by=made_by)
        self._pending[stage].append(call)
        self._untaken[stage].append(call)

    def _end_stages(self) -> None:
        """Closes each stage that has no more to come, and lets its last, short group pass."""
        while self._ended_stages < len(self._pending):
            stage = self._ended_stages
            if self._pending[stage] or (stage == 0 and self.next_blocks(1)):
                return
            self._ended_stages += 1
            if stage + 1 < len(self._pending) and (self._has_ended or not self._failed):
                for group in self._regroupings[stage].finish():
                    self._enqueue(stage + 1, group)

    def _take_skip(self, stage: int) -> int:
        skip, self._skip[stage] = self._skip[stage], 0
        return skip
