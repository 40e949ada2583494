"""The order of a plan's calls, and the order in which their outputs leave. Pure bookkeeping.

An engine takes calls, runs them anywhere and in any order, and returns the results. The schedule puts the results in
order, regroups them for the next stage, and delivers the outputs in the order of the stream. One thread uses it.

    branch 0   leaf -> stage 0 -> lane -> stage 1 -> lane ─┐
    branch 1   leaf -> stage 0 -> lane -> stage 1 -> lane ─┴─▶ join -> the last stage

There is one branch per logical shard. Without others, the lane itself is the input of the last stage. Blocks are read
in rounds, for the branches with the fewest elements ready. Each is therefore at most two calls ahead of the others,
however different their numbers of elements are. No call takes time in proportion to the number of branches.
"""

import math
from collections import deque
from typing import TYPE_CHECKING, final

from millstream.loader.pipeline.calls import BlockCall, Call, GroupCall, Outputs, Position
from millstream.loader.pipeline.elements import Elements, SourceEnded, text_of_end
from millstream.loader.pipeline.failing_records import FailuresOfPass
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.branch import BlockLeaf, Branch, CallQueue

if TYPE_CHECKING:
    from millstream.loader.scheduling.feed import Feed


@final
class Schedule:
    """The calls of one pass over the stream of a shard, from a position on.

    Args:
        feed: the source of the elements of stage 0; None if they are read.

    Attributes:
        failures: the failed records of the pass; None if the first error is raised.
        num_stages: the number of stages with operations that are not local. `take` takes their calls.
    """

    def __init__(self, plan: Plan, position: Position, feed: "Feed | None" = None) -> None:
        self._plan = plan
        self._last_stage = len(plan.stages) - 1
        # The first stage with local operations. It is shared if others of its operations are not local.
        self._first_local = first_local = plan.num_remote_stages
        self._is_shared = first_local <= self._last_stage and (
            plan.stages[first_local].num_remote_steps > 0 or (first_local == 0 and feed is None)
        )
        self.num_stages = first_local + self._is_shared
        self.failures = None if plan.errors is None else FailuresOfPass(plan.errors, position, plan.num_in_a_row)
        self._branches = [
            Branch(plan, shard, cursor, feed=feed, failures=self.failures) for shard, cursor in enumerate(position)
        ]
        first, *others = self._branches
        self._last = first.queues[-1]
        if others:
            self._join()
        # The calls of each stage that were not taken, of all branches.
        self._untaken: list[deque[Call]] = [deque() for _ in plan.stages]
        self._outputs: deque[Outputs] = deque()
        # The queues with calls, and the elements in front of the join that are not in a group of it.
        self._active: dict[CallQueue, None] = {}
        self._num_ready = 0
        # The branches to read for next. The round of a single branch has no end.
        self._round: deque[Branch] = deque([first] if not others else ())
        # True if no branch can be read for until a call is complete.
        self._is_starved = False
        for branch in self._branches:
            self._settle(branch, 0)

    def _join(self) -> None:
        from millstream.loader.scheduling.join import Join  # noqa: PLC0415  (lazy: rare)

        self._last.branches = slice(None)
        check = None if self.failures is None else self.failures.error_in_group
        join = Join([branch.lanes[-1] for branch in self._branches], check)
        for branch in self._branches:
            branch.inputs[-1], branch.queues[-1] = join, self._last

    @property
    def exhausted(self) -> bool:
        return self._last.has_ended and not self._outputs

    @property
    def backlog(self) -> int:
        """The number of calls that have begun, can begin, or have outputs that were not delivered."""
        return sum([len(queue.pending) for queue in self._active]) + len(self._outputs)

    @property
    def ready(self) -> int:
        """The number of these calls whose elements exist, before or after local operations. Thread-safe."""
        finished = sum(call.num_bytes is not None for queue in list(self._active) for call in queue.pending.copy())
        return finished + len(self._outputs)

    @property
    def records_ahead(self) -> int:
        """The number of records in the backlog: those that calls of stage 0 read, and elements in later stages."""
        in_flight = sum([call.num_records for queue in self._active for call in queue.pending])
        return in_flight + sum([outputs.num_records for outputs in self._outputs])

    def bytes_ahead(self, block_bytes: float) -> float:
        """Returns the estimated size of the backlog in bytes, given the expected size of a block."""
        held = float(sum([outputs.num_bytes for outputs in self._outputs]))
        for queue in self._active:
            for call in queue.pending:
                if call.num_bytes is not None:
                    held += call.num_bytes
                elif call.stage == 0:
                    held += block_bytes * call.num_blocks
                else:
                    held += queue.element_bytes * call.num_records
        return held + self._last.element_bytes * self._num_ready

    def next_blocks(self, limit: int) -> int:
        branch = self._branch_to_read()
        return 0 if branch is None else branch.leaf.next_blocks(limit)

    @property
    def next_stage(self) -> int | None:
        """The latest stage with a call that may run now, or None. Local operations do not count."""
        for stage in reversed(range(self.num_stages)):
            if self._untaken[stage]:
                return stage
        branch = self._branch_to_read() if self.num_stages else None
        return None if branch is None or not branch.leaf.next_blocks(1) else 0

    def take(self, stage: int, max_blocks: int = 1) -> Call | None:
        """Takes the next call of a stage. Returns None if none may run now, or if the leaf has no elements for it."""
        if self._untaken[stage]:
            return self._untaken[stage].popleft()
        branch = None if stage else self._branch_to_read()
        if branch is None:
            return None
        queue, leaf = branch.queues[0], branch.leaf
        call = leaf.take(branch.shard, max_blocks, queue.skip)
        if call is None and not isinstance(leaf, BlockLeaf) and not self.backlog:
            # Nothing is in work, so the blocks that were drawn do not wait for others.
            call = leaf.take_drawn(branch.shard, queue.skip)
        branch.may_read = branch.may_read and not leaf.has_ended
        if len(self._branches) > 1:
            self._round.popleft()
        if call is None:
            self._settle(branch, 0)
            return None
        queue.skip = 0
        queue.pending.append(call)
        self._active[queue] = None
        branch.begun += call.num_records
        return call

    def take_local(self, max_blocks: int = 1) -> Call | None:
        """Takes the next call of local operations, whose input is known. Returns None if none may run now."""
        for stage in reversed(range(self._first_local, self._last_stage + 1)):
            is_shared = stage == self._first_local and self._is_shared
            call = self._next_received(stage) if is_shared else self.take(stage, max_blocks)
            if call is not None:
                call.begin_local()
                return call
        return None

    def _next_received(self, stage: int) -> Call | None:
        # Local operations belong to chains, which have one logical shard.
        for call in self._branches[0].queues[stage].pending:
            if call.num_bytes is None:
                return None
            if not call.is_local and call.outputs is None:
                return call
        return None

    def wants(self, call: Call) -> bool:
        """Returns True if the outputs of a call are still waited for. After an error, no later ones are."""
        return call in self._branches[call.shard].queues[call.stage].pending

    def describe(self, call: Call) -> str:
        return self._plan.describe(call.request)

    def split(self, call: BlockCall) -> list[BlockCall]:
        if not self.wants(call):
            return []
        calls, pending = call.split(), self._branches[call.shard].queues[0].pending
        row = pending.index(call)
        del pending[row]
        for number, single in enumerate(calls, row):
            pending.insert(number, single)
        return calls

    def complete(self, call: Call, elements: Elements) -> None:
        """Stores the result of a call, or of its operations before the local ones."""
        if call.stage == self._first_local and self._is_shared and not call.is_local:
            call.receive(elements)
            return
        call.complete(elements)
        branch = self._branches[call.shard]
        if call.stage < self._last_stage:
            branch.read += call.num_records if call.stage == 0 else 0
            self._is_starved = False
        self._settle(branch, call.stage)

    def pop(self) -> Outputs | None:
        """Returns the next outputs in order, if they are complete. Outputs with an error are the last."""
        return self._outputs.popleft() if self._outputs else None

    def _settle(self, branch: Branch, first: int) -> None:
        """Forwards complete outputs of the stages from `first` on, and ends stages that get no more input."""
        for stage in range(first, self._last_stage + 1):
            queue = branch.queues[stage]
            while queue.pending and (outputs := queue.pending[0].outputs) is not None:
                call = queue.pending.popleft()
                if not queue.pending:
                    del self._active[queue]
                if queue.is_checked:
                    branch.check(call, outputs)
                self._forward(branch, stage, outputs)
            if not queue.has_ended:
                if queue.pending or (branch.may_read if stage == 0 else not branch.inputs[stage - 1].has_ended):
                    # The stages after this one have got no error, and no end.
                    return
                queue.has_ended = True
                if stage < self._last_stage:
                    branch.lanes[stage].end()
                    self._begin_groups(branch, stage)

    def _forward(self, branch: Branch, stage: int, outputs: Outputs) -> None:
        if outputs.error is not None:
            if isinstance(outputs.error, SourceEnded):
                self._plan.warn_once("end", text_of_end(outputs.error))
            # Nothing after an error is wanted.
            self._close(branch.queues[stage], stage)
        if stage == self._last_stage:
            self._outputs.append(outputs)
            return
        branch.queues[stage + 1].element_bytes = outputs.num_bytes / max(1, len(outputs.values))
        branch.lanes[stage].add(outputs)
        if stage == self._last_stage - 1 and len(self._branches) > 1:
            self._num_ready += len(outputs.values) - outputs.first
        self._begin_groups(branch, stage)

    def _begin_groups(self, branch: Branch, stage: int) -> None:
        """Begins a call of the next stage for each group of outputs of a stage."""
        queue, groups = branch.queues[stage + 1], branch.inputs[stage]
        for group in groups.take_groups():
            call = GroupCall(queue.shard, stage + 1, group, self._plan.stages[stage + 1], queue.skip)
            queue.skip = 0
            queue.pending.append(call)
            self._active[queue] = None
            if groups is not branch.lanes[stage]:
                self._num_ready -= len(group.elements.values)
            if group.elements.error is None:
                self._untaken[stage + 1].append(call)
            else:
                call.complete(group.elements)
        if groups.has_ended:
            self._close(queue, stage)

    def _close(self, queue: CallQueue, last: int) -> None:
        """Drops the calls of all stages up to a last one, in the branches that a queue gets elements from."""
        for branch in self._branches[queue.branches]:
            branch.may_read = False
            for closed in branch.queues[: last + 1]:
                closed.pending.clear()
                closed.has_ended = True
                self._active.pop(closed, None)
        for stage in range(last + 1):
            self._untaken[stage] = deque(call for call in self._untaken[stage] if self.wants(call))

    def _branch_to_read(self) -> Branch | None:
        """Returns a branch with the fewest elements that are ready or expected from blocks in work, or None."""
        if len(self._branches) > 1:
            while self._round and not self._round[0].may_read:
                self._round.popleft()
            if not self._round and not self._is_starved:
                self._round = deque(self._next_round())
                self._is_starved = not self._round
        return self._round[0] if self._round and self._round[0].may_read else None

    def _next_round(self) -> list[Branch]:
        """Returns the branches with the fewest elements: those within the elements of one block of the first."""
        lanes = [branch.lanes[-1] for branch in self._branches]
        # No batch is built after the one that lacks the share of a branch.
        limit = min([len(lane.groups) for lane in lanes if lane.stops], default=math.inf)
        made, read = sum([lane.made for lane in lanes]), sum([branch.read for branch in self._branches])
        elements_per_record = (made + 1) / (read + 1)
        supplies = sorted(
            (lane.ready + (branch.begun - branch.read) * elements_per_record, branch.begun, number)
            for number, (branch, lane) in enumerate(zip(self._branches, lanes, strict=True))
            if branch.may_read and len(lane.groups) <= limit
        )
        if not supplies:
            return []
        most = supplies[0][0] + elements_per_record * self._plan.partition.block
        return [self._branches[number] for supply, _, number in supplies if supply <= most]
