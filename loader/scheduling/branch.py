"""A branch: the leaf and the stages of one logical shard, with their calls."""

from collections import deque
from typing import TYPE_CHECKING, final

from millstream.loader.pipeline.calls import BlockCall, Call, Cursor, Outputs
from millstream.loader.pipeline.elements import SourceEnded
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.stages import LogicalShard, Stage

if TYPE_CHECKING:
    from millstream.loader.pipeline.failing_records import FailuresOfPass
    from millstream.loader.scheduling.dropped_records import EmptyEpochs, FilterWindows
    from millstream.loader.scheduling.feed import Feed
    from millstream.loader.scheduling.join import Join, Lane


@final
class BlockLeaf:
    """The blocks of positions of a logical shard, from `block` on: an input of stage 0. A `Feed` is the other kind."""

    def __init__(self, num_blocks: int | None, block: int) -> None:
        self._num_blocks = num_blocks
        self._block = block
        self._held_back: int | None = None

    def hold_back(self, stop: int) -> None:
        """Ends before a block, until all are released."""
        if self._num_blocks is not None and stop < self._num_blocks:
            self._num_blocks, self._held_back = stop, self._num_blocks

    def release(self) -> None:
        if self._held_back is not None:
            self._num_blocks, self._held_back = self._held_back, None

    @property
    def has_ended(self) -> bool:
        return self._num_blocks is not None and self._block >= self._num_blocks

    def next_blocks(self, limit: int) -> int:
        last = self._num_blocks
        return limit if last is None else max(0, min(limit, last - self._block))

    def take(self, shard: LogicalShard, max_blocks: int, skip: int) -> BlockCall:
        """Returns the next call. The first `skip` outputs of its first block are consumed already."""
        start = self._block
        self._block += self.next_blocks(max_blocks)
        return BlockCall(shard, start, self._block, skip)


@final
class CallQueue:
    """The calls of one stage, in order, until their outputs are complete.

    Attributes:
        shard: the number of the logical shard in its calls.
        branches: the branches that it gets elements from.
        skip: the number of consumed outputs in the next call.
        is_checked: True if the outputs may contain failures, or lack records that were dropped.
        element_bytes: the size of an element in the latest outputs of the stage before.
        has_ended: True if no call follows.
    """

    def __init__(self, shard: int, skip: int, *, is_checked: bool) -> None:
        self.shard = shard
        self.branches = slice(shard, shard + 1)
        self.skip = skip
        self.is_checked = is_checked
        self.pending: deque[Call] = deque()
        self.element_bytes = 0.0
        self.has_ended = False


@final
class Branch:
    """The leaf and the stages of one logical shard. Branches share their last join and the last stage.

    Attributes:
        leaf: the input of stage 0.
        queues: the calls of each stage.
        may_read: True if the leaf may have blocks that were not requested, and they are wanted.
        lanes: the elements of this branch in front of each stage but the first.
        inputs: the groups in front of each of these stages: those of the lane, or of the join that it belongs to.
        begun: the number of records requested.
        read: the number of these records that were read.
    """

    def __init__(
        self, plan: Plan, shard: int, cursor: Cursor, *, feed: "Feed | None", failures: "FailuresOfPass | None"
    ) -> None:
        self._plan = plan
        self._failures = failures
        self.shard = plan.shards[shard]
        self.leaf = BlockLeaf(self.shard.num_blocks, cursor.block) if feed is None else feed
        self.may_read = not self.leaf.has_ended
        self.queues: list[CallQueue] = []
        self.lanes: list[Lane] = []
        self.inputs: list[Lane | Join] = []
        self.begun = self.read = 0
        first = 0
        for stage in plan.stages:
            stop = first + stage.num_cursor_numbers
            # If the stage has a unit, its first number is the consumed size of the group, which the lane skips.
            counts_outputs = stage.unit is None or stage.divides_units
            skip = cursor.skip[stop - 1] if counts_outputs else 0
            self.queues.append(CallQueue(shard, skip, is_checked=not self.queues or bool(stage.filters)))
            if stage.grouping is not None:
                self._add_lane(stage, cursor, first)
            first = stop
        # The leaf, while blocks of a remainder that a Batch drops are held back.
        self._held_back: BlockLeaf | None = None
        if self.lanes and isinstance(self.leaf, BlockLeaf) and (needed := self._needed_blocks(cursor)) is not None:
            self.leaf.hold_back(needed)
            self.may_read, self._held_back = not self.leaf.has_ended, self.leaf
        self._empty_epochs: EmptyEpochs | None = None
        self._windows: FilterWindows | None = None
        if any(stage.filters for stage in plan.stages):
            self._check_filters(cursor.block)

    # The late imports are not needed by most pipelines.
    def _add_lane(self, stage: Stage, cursor: Cursor, first: int) -> None:
        from millstream.loader.scheduling.join import Lane  # noqa: PLC0415

        self.lanes.append(Lane(stage, cursor, first, is_last=stage is self._plan.stages[-1]))
        self.inputs.append(self.lanes[-1])

    def _check_filters(self, block: int) -> None:
        from millstream.loader.scheduling.dropped_records import EmptyEpochs, FilterWindows  # noqa: PLC0415

        self._empty_epochs = EmptyEpochs(self._plan)
        if any(limit is not None for limit in self._plan.pipeline.filter_limits) and self._plan.stages[0].filters:
            self._windows = FilterWindows(self._plan, block)

    def _needed_blocks(self, cursor: Cursor) -> int | None:
        """Returns the block after the last that outputs need if no element is dropped; None if all may be needed."""
        count, groups = self.shard.outputs_from(cursor.block), list[tuple[int, int, int]]()
        for skipped, stage in zip(cursor.skip, self._plan.stages[1:], strict=False):
            size = None if stage.grouping is None else stage.grouping.fixed_size
            if count is None or size is None or stage.grouping is None:
                break
            given = max(0, count - skipped)
            groups.append((skipped, size, given))
            count = given // size if not stage.grouping.keeps_remainder else -(-given // size)
            if stage.filters or stage.splits:
                break
        if count is None or not groups:
            return None
        for skipped, size, given in reversed(groups):
            count = skipped + min(given, count * size)
        block = 1 if self.shard.first_batches else self.shard.partition.block
        return cursor.block + -(-count // block)

    def check(self, call: Call, outputs: Outputs) -> None:
        """Records failures and dropped records, in the order of the stream. May truncate the outputs."""
        if self._failures is not None and call.stage == 0:
            self._failures.check(call.shard, outputs, are_blocks=self._plan.gathers_first)
        # Outputs that end with an error do not count as empty, unless the source has ended.
        if self._empty_epochs is not None and (outputs.error is None or isinstance(outputs.error, SourceEnded)):
            self._empty_epochs.record(call.stage, call.num_blocks, len(outputs.values))
        if self._windows is not None and isinstance(call, BlockCall):
            self._windows.check(outputs, call.stop)
        if self._held_back is not None and call.stage == 0 and outputs.error is None:
            self._release_if_short(self._held_back, call, outputs)

    def _release_if_short(self, leaf: BlockLeaf, call: Call, outputs: Outputs) -> None:
        """Lets the blocks that were held back be read if elements were dropped, because theirs may fill the batches."""
        if len(outputs.values) < (call.num_blocks if self.shard.first_batches else call.num_records):
            leaf.release()
            self.may_read, self._held_back = not leaf.has_ended, None
