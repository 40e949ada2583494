"""The order of a plan's calls, and the order in which their outputs leave. Pure bookkeeping.

An executor takes calls, runs them anywhere and in any order, and returns the results. The schedule puts the results in
order, regroups them for the next stage, and delivers the outputs in the order of the stream. One thread uses it.
"""

from collections import deque
from typing import TYPE_CHECKING

from millstream.loader.pipeline.calls import BlockCall, Call, GroupCall, failed_call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.leaves import BlockLeaf, Leaf
from millstream.loader.pipeline.outputs import Cursor, Outputs
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.source_end import SourceEnded, text_of

if TYPE_CHECKING:
    from millstream.loader.pipeline.empty_epochs import EmptyEpochs
    from millstream.loader.pipeline.feed import Feed
    from millstream.loader.pipeline.filter_windows import FilterWindows
    from millstream.loader.pipeline.regrouping import FormedGroup, Regrouping


class Schedule:
    """The calls of one pass over a logical shard, from a cursor on.

    Args:
        plan: the plan of the calls.
        cursor: the position of the first output.
        shard: the number of the logical shard.
        stages: the number of the plan's stages to run; None for all.
        feed: the leaf if elements are drawn from an iterator; None if records are read.
    """

    def __init__(
        self, plan: Plan, cursor: Cursor, shard: int = 0, stages: int | None = None, feed: "Feed | None" = None
    ) -> None:
        self._plan = plan
        self._shard = plan.shards[shard]
        self._stages = plan.stages[:stages]
        self._feed = feed
        self._leaf: Leaf = BlockLeaf(self._shard.num_blocks, cursor.block) if feed is None else feed
        # The number of consumed outputs in the first group of each stage.
        self._skip = [0] * len(self._stages)
        self._failed = False
        # True if the source has ended the stream. Nothing more is read, but the records read are consumed.
        self._has_ended = False
        self._ended_stages = 0
        self._pending: list[deque[Call]] = [deque() for _ in self._stages]
        self._untaken: list[deque[Call]] = [deque() for _ in self._stages]
        self._outputs: deque[Outputs] = deque()
        # The size of an element in the latest outputs of each stage.
        self._element_bytes = [0.0 for _ in self._stages]
        self._regroupings: list[Regrouping] = []
        if len(self._stages) > 1:
            self._regroup(cursor)
        else:
            self._skip[0] = cursor.skip[0]
        self._empty_epochs: EmptyEpochs | None = None
        self._windows: FilterWindows | None = None
        if any(stage.filters for stage in self._stages):
            self._check_filters(cursor.block)
        self._end_stages()

    # The late imports are not needed by most pipelines.
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

    def _check_filters(self, block: int) -> None:
        from millstream.loader.pipeline.empty_epochs import EmptyEpochs  # noqa: PLC0415
        from millstream.loader.pipeline.filter_windows import FilterWindows  # noqa: PLC0415

        self._empty_epochs = EmptyEpochs(self._plan)
        if any(limit is not None for limit in self._plan.pipeline.filter_limits) and self._stages[0].filters:
            self._windows = FilterWindows(self._plan, block)

    @property
    def exhausted(self) -> bool:
        """True if everything has been delivered."""
        return self._ended_stages == len(self._pending) and not self._outputs

    @property
    def backlog(self) -> int:
        """The number of calls that have begun, can begin, or have outputs that were not delivered."""
        return sum(map(len, self._pending)) + len(self._outputs)

    @property
    def ready(self) -> int:
        """The number of these calls that are complete. Thread-safe."""
        made = sum(call.outputs is not None for pending in self._pending for call in pending.copy())
        return made + len(self._outputs)

    @property
    def records_ahead(self) -> int:
        """The number of records in the backlog: those that calls of stage 0 read, and elements in later stages."""
        in_flight = sum(call.num_records for pending in self._pending for call in pending)
        return in_flight + sum(outputs.num_records for outputs in self._outputs)

    def bytes_ahead(self, block_bytes: float) -> float:
        """Returns the estimated size of the backlog in bytes, given the expected size of a block."""
        held = float(sum(outputs.num_bytes for outputs in self._outputs))
        for stage, pending in enumerate(self._pending):
            size = block_bytes if stage == 0 else self._element_bytes[stage - 1]
            for call in pending:
                done = call.outputs
                held += size * (call.num_blocks or call.num_records) if done is None else done.num_bytes
        return held

    def next_blocks(self, limit: int) -> int:
        """Returns the number of blocks of the next call of stage 0, at most `limit`."""
        return 0 if self._failed else self._leaf.next_blocks(limit)

    @property
    def next_stage(self) -> int | None:
        """The latest stage with a call that may run now, or None."""
        for stage in reversed(range(len(self._untaken))):
            if self._untaken[stage]:
                return stage
        return 0 if self.next_blocks(1) else None

    def take(self, stage: int, max_blocks: int = 1) -> Call | None:
        """Takes the next call of a stage. Returns None if none may run now, or if the leaf has just ended.

        Args:
            stage: the stage.
            max_blocks: the maximum number of blocks of a call of stage 0.
        """
        if self._untaken[stage]:
            return self._untaken[stage].popleft()
        blocks = self.next_blocks(max_blocks) if stage == 0 else 0
        if not blocks:
            return None
        call = self._leaf.take(self._shard, blocks, self._skip[0])
        if call is None:
            self._end_stages()
        else:
            self._skip[0] = 0
            self._pending[0].append(call)
        return call

    def wants(self, call: Call) -> bool:
        """Returns True if the outputs of a call are still waited for. After an error, no later ones are."""
        return call in self._pending[call.stage]

    def describe(self, call: Call) -> str:
        """Returns a description of a call's records."""
        return self._plan.describe(call.request)

    def split(self, call: BlockCall) -> list[BlockCall]:
        """Replaces a call by calls of one block each, to find the faulty block.

        Returns none if the outputs of the call are no longer wanted.
        """
        if not self.wants(call):
            return []
        calls = call.split()
        pending = list(self._pending[0])
        row = pending.index(call)
        self._pending[0] = deque([*pending[:row], *calls, *pending[row + 1 :]])
        return calls

    def complete(self, call: Call, elements: Elements) -> None:
        """Stores the result of a call."""
        call.complete(elements)
        for stage, pending in enumerate(self._pending):
            while pending and (outputs := pending[0].outputs) is not None:
                made = pending.popleft()
                if outputs.failures:
                    self._plan.record_failures(outputs)
                # Outputs that end with an error do not count as empty, unless the source has ended.
                if self._empty_epochs is not None and (outputs.error is None or isinstance(outputs.error, SourceEnded)):
                    self._empty_epochs.record(stage, made.num_blocks, len(outputs.values))
                if self._windows is not None and isinstance(made, BlockCall):
                    self._windows.check(outputs, made.stop)
                self._forward(stage, outputs)
        self._end_stages()

    def pop(self) -> Outputs | None:
        """Returns the next outputs in order, if they are complete. Outputs with an error are the last."""
        if not self._outputs:
            return None
        outputs = self._outputs.popleft()
        if self._feed is not None:
            self._feed.delivered(outputs)
        if outputs.error is not None:
            self._ended_stages = len(self._pending)
            self._outputs.clear()
            for untaken in self._untaken:
                untaken.clear()
        return outputs

    def _forward(self, stage: int, outputs: Outputs) -> None:
        """Passes outputs to the next stage, or out of the last one."""
        error = outputs.error
        if error is not None:
            # Nothing after an error is wanted.
            self._failed, self._has_ended = True, isinstance(error, SourceEnded)
            if isinstance(error, SourceEnded):
                self._plan.warn_once("end", text_of(error))
            self._pending[stage].clear()
            self._untaken[stage].clear()
        if stage + 1 == len(self._pending):
            self._outputs.append(outputs)
            return
        self._element_bytes[stage] = outputs.num_bytes / max(1, len(outputs.values))
        for group in self._regroupings[stage].add(outputs):
            self._enqueue(stage + 1, group)
        if error is not None and not self._has_ended:
            for group in self._regroupings[stage].truncate():
                self._enqueue(stage + 1, group)
            self._pending[stage + 1].append(failed_call(self._shard.number, stage + 1, error))

    def _enqueue(self, stage: int, group: "FormedGroup") -> None:
        skip, span = self._take_skip(stage), (group.start, group.end)
        call = GroupCall(self._shard.number, stage, group.elements, span, skip=skip, compiled=self._stages[stage])
        self._pending[stage].append(call)
        self._untaken[stage].append(call)

    def _end_stages(self) -> None:
        """Closes each stage that gets no more input, and forms its last, short group."""
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
