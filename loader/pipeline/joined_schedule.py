"""The calls of a shard that runs several logical shards. Each has its own schedule, and the last stage joins them.

    logical shard 0   blocks -> groups -> elements ─┐
    logical shard 1   blocks -> groups -> elements ─┼─▶ a share of each, concatenated ─▶ the last stage
    logical shard 2   blocks -> groups -> elements ─┘

A batch takes the same number of elements from each logical shard, in their order, whenever they arrive. Its content
depends on these logical shards only, not on which others the same shard runs. At the end of the streams, a batch
contains the remaining elements, or is omitted if it would be short. An error of a logical shard is raised in place of
the first batch that lacks its share.

Blocks are read for the logical shard with the fewest elements ready. Each is therefore at most one call ahead of the
others, however different their numbers of elements are.
"""

from collections import deque
from typing import final

from millstream.loader.pipeline.calls import BlockCall, Call, JoinedCall, failed_call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.outputs import Cursor, Outputs, Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.regrouping import FormedGroup, Regrouping
from millstream.loader.pipeline.schedule import Schedule
from millstream.loader.pipeline.source_end import SourceEnded
from millstream.transforms.grouping import Grouping


@final
class JoinedSchedule:
    """The calls of one pass over several logical shards, from a position on, with the interface of `Schedule`.

    Args:
        plan: the plan of the calls.
        share: groups the elements of a logical shard for one batch.
        position: the position of the first output.
    """

    def __init__(self, plan: Plan, share: Grouping, position: Position) -> None:
        self._plan = plan
        self._keeps_remainder = share.keeps_remainder
        self._last_stage = len(plan.stages) - 1
        self._lanes = [_Lane(plan, share, number, cursor) for number, cursor in enumerate(position)]
        self._pending: deque[Call] = deque()
        self._untaken: deque[Call] = deque()
        self._outputs: deque[Outputs] = deque()
        self._is_over = False
        # The choice of the lane to read for is cached, because it is needed several times before anything changes.
        self._is_chosen = False
        self._chosen: _Lane | None = None
        self._join()

    @property
    def exhausted(self) -> bool:
        """True if everything has been delivered."""
        return self._is_over and not self._pending and not self._outputs

    @property
    def backlog(self) -> int:
        """The number of calls that have begun, can begin, or have outputs that were not delivered."""
        in_lanes = 0 if self._is_over else sum(lane.schedule.backlog for lane in self._lanes)
        return in_lanes + len(self._pending) + len(self._outputs)

    @property
    def ready(self) -> int:
        """The number of these calls that are complete. Thread-safe."""
        in_lanes = 0 if self._is_over else sum(lane.schedule.ready for lane in self._lanes)
        made = sum(call.outputs is not None for call in self._pending.copy())
        return in_lanes + made + len(self._outputs)

    @property
    def records_ahead(self) -> int:
        """The number of records in the backlog: those that calls of stage 0 read, and elements in later stages."""
        in_lanes = 0 if self._is_over else sum(lane.schedule.records_ahead for lane in self._lanes)
        in_flight = sum(call.num_records for call in self._pending)
        return in_lanes + in_flight + sum(outputs.num_records for outputs in self._outputs)

    def bytes_ahead(self, block_bytes: float) -> float:
        """Returns the estimated size of the backlog in bytes, given the expected size of a block."""
        held = float(sum(outputs.num_bytes for outputs in self._outputs))
        for lane in [] if self._is_over else self._lanes:
            held += lane.schedule.bytes_ahead(block_bytes) + lane.ready * lane.element_bytes
        element_bytes = max([lane.element_bytes for lane in self._lanes], default=0.0)
        return held + element_bytes * sum(call.num_records for call in self._pending)

    def next_blocks(self, limit: int) -> int:
        """Returns the number of blocks of the next call of stage 0, at most `limit`."""
        lane = self._neediest_lane()
        return 0 if lane is None else lane.schedule.next_blocks(limit)

    @property
    def next_stage(self) -> int | None:
        """The latest stage with a call that may run now, or None."""
        if self._untaken:
            return self._last_stage
        if self._is_over:
            return None
        # Usually there is a single stage before the last one.
        latest = 0 if self._last_stage == 1 else max(lane.schedule.next_stage or 0 for lane in self._lanes)
        return latest if latest or self._neediest_lane() is not None else None

    def take(self, stage: int, max_blocks: int = 1) -> Call | None:
        """Takes the next call of a stage. Returns None if none may run now.

        Args:
            stage: the stage.
            max_blocks: the maximum number of blocks of a call of stage 0.
        """
        if stage == self._last_stage:
            return self._untaken.popleft() if self._untaken else None
        if stage == 0:
            lane, self._is_chosen = self._neediest_lane(), False
            return None if lane is None else lane.take_blocks(max_blocks)
        calls = (lane.schedule.take(stage) for lane in ([] if self._is_over else self._lanes))
        return next((call for call in calls if call is not None), None)

    def wants(self, call: Call) -> bool:
        """Returns True if the outputs of a call are still waited for."""
        if call.stage == self._last_stage:
            return call in self._pending
        return not self._is_over and self._lanes[call.shard].schedule.wants(call)

    def describe(self, call: Call) -> str:
        """Returns a description of a call's records."""
        return self._plan.describe(call.request)

    def split(self, call: BlockCall) -> list[BlockCall]:
        """Replaces a call by calls of one block each. Returns none if it is no longer wanted."""
        return [] if self._is_over else self._lanes[call.shard].schedule.split(call)

    def complete(self, call: Call, elements: Elements) -> None:
        """Stores the result of a call."""
        if call.stage == self._last_stage:
            call.complete(elements)
            self._line_up()
        elif not self._is_over:
            self._is_chosen = False
            self._lanes[call.shard].complete(call, elements)
            self._join()

    def pop(self) -> Outputs | None:
        """Returns the next outputs in order, if they are complete. Outputs with an error are the last."""
        return self._outputs.popleft() if self._outputs else None

    def _neediest_lane(self) -> "_Lane | None":
        """Returns the logical shard to read blocks for, or None."""
        if not self._is_chosen:
            self._chosen, self._is_chosen = self._choose_lane(), True
        return self._chosen

    def _choose_lane(self) -> "_Lane | None":
        open_lanes = [lane for lane in self._lanes if lane.may_read]
        # No batch is built after the one that lacks the share of a logical shard.
        ended = [len(lane.shares) for lane in self._lanes if lane.has_ended and not self._continues_without(lane)]
        if ended:
            open_lanes = [lane for lane in open_lanes if len(lane.shares) <= min(ended)]
        if not open_lanes:
            return None
        made = sum([lane.made for lane in self._lanes])
        elements_per_record = (made + 1) / (sum([lane.read for lane in self._lanes]) + 1)
        supplies = [lane.ready + (lane.begun - lane.read) * elements_per_record for lane in open_lanes]
        smallest = min(supplies)
        equals = [lane for lane, supply in zip(open_lanes, supplies, strict=True) if supply == smallest]
        return min(equals, key=lambda lane: lane.begun)

    def _continues_without(self, lane: "_Lane") -> bool:
        """Returns True if batches are built without a logical shard that has ended."""
        return self._keeps_remainder and lane.error is None

    def _join(self) -> None:
        """Begins the batches whose shares are complete."""
        while not self._is_over:
            shares: list[FormedGroup] = []
            for lane in self._lanes:
                if lane.shares:
                    shares.append(lane.shares[0])
                elif not lane.has_ended:
                    return
                elif not self._continues_without(lane):
                    self._end(lane.error)
                    return
            if not shares:
                self._end(None)
                return
            end = tuple(lane.use_share() for lane in self._lanes)
            call = JoinedCall(self._last_stage, Elements.concatenate([share.elements for share in shares]), end)
            self._pending.append(call)
            self._untaken.append(call)

    def _end(self, error: BaseException | None) -> None:
        """Ends the stream after the batches that have begun, possibly with an error."""
        self._is_over, self._is_chosen = True, False
        self._lanes.clear()
        if error is not None:
            self._pending.append(failed_call(0, self._last_stage, error))
            self._line_up()

    def _line_up(self) -> None:
        """Delivers complete batches in order. Nothing after an error is wanted."""
        while self._pending and (outputs := self._pending[0].outputs) is not None:
            self._pending.popleft()
            self._outputs.append(outputs)
            if outputs.error is not None:
                self._is_over = True
                self._is_chosen = False
                self._lanes.clear()
                self._pending.clear()
                self._untaken.clear()


@final
class _Lane:
    """One of the logical shards: its elements before they are batched.

    Attributes:
        schedule: the calls that compute its elements.
        shares: its shares of the next batches, in order.
        error: the error in place of its next element, if any.
        has_ended: True if no element follows those that are here.
        may_read: True if blocks are left that have not begun.
        begun: the number of records requested.
        read: the number of these records that were read.
        made: the number of elements made from them.
        ready: the number of these elements that are not in a batch.
        element_bytes: the size of an element in its latest outputs.
    """

    def __init__(self, plan: Plan, share: Grouping, number: int, cursor: Cursor) -> None:
        # The last number belongs to the last stage, which never consumes a group in part.
        start = Cursor(cursor.block, cursor.skip[:-1])
        self.schedule = Schedule(plan, start, number, len(plan.stages) - 1)
        self.shares: deque[FormedGroup] = deque()
        self.error: BaseException | None = None
        self.has_ended = False
        self.begun = self.read = self.made = self.ready = 0
        self.element_bytes = 0.0
        self._regrouping = Regrouping(share, start)
        self._position = cursor
        self._check_end()

    def take_blocks(self, limit: int) -> Call | None:
        """Takes the next call of stage 0."""
        call = self.schedule.take(0, limit)
        if call is not None:
            self.begun += call.num_records
            self.may_read = self.schedule.next_blocks(1) > 0
        return call

    def complete(self, call: Call, elements: Elements) -> None:
        """Stores the result of a call."""
        if isinstance(call, BlockCall):
            self.read += call.num_records
        self.schedule.complete(call, elements)
        while (outputs := self.schedule.pop()) is not None:
            count = len(outputs.values) - outputs.first
            self.made += count
            self.element_bytes = outputs.num_bytes / max(1, len(outputs.values))
            self.ready += count
            self.shares.extend(self._regrouping.add(outputs))
            self.error = None if isinstance(outputs.error, SourceEnded) else outputs.error
        self._check_end()

    def use_share(self) -> Cursor:
        """Removes the first share, if there is one, and returns the position after it."""
        if not self.shares:
            # Other logical shards continue. Their batches are short because this one has ended.
            self._position = self._position._replace(is_final=True)
            return self._position
        share = self.shares.popleft()
        self.ready -= len(share.elements.values)
        self._position = share.end
        return share.end

    def _check_end(self) -> None:
        self.may_read = self.schedule.next_blocks(1) > 0
        if self.schedule.exhausted and not self.has_ended:
            self.has_ended = True
            if self.error is None:
                self.shares.extend(self._regrouping.finish())
