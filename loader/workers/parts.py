"""What one set of workers works for: most often one pipeline; or several, where one is fed with what the others make.

    the others' calls ─┐               ┌─▶ elements, which are mixed, say, and drawn by the first part's feed
                       ├─▶ workers ────┤
     the first's calls ┘               └─▶ batches: what the consumer waits for

Guarantees:
    * Parts are pure bookkeeping, as schedules are, and used by the consumer's thread only.
    * A part belongs to one executor. Where another takes its place, all that is drawn from begins anew, at a position.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import final

from millstream.loader.pipeline.assignments import NO_LONGER_WANTED
from millstream.loader.pipeline.calls import BlockCall, Call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.schedules import AnySchedule
from millstream.loader.threads.call_size import CallSize, taken_call
from millstream.loader.threads.profiler import Profiler

RECORDS_PER_MESSAGE = 2048
"""A call of many small blocks has this many records at most: enough to make its message cheap for each."""


@final
@dataclasses.dataclass(eq=False)
class Part:
    """One pass over the stream of a pipeline.

    Attributes:
        plan: what makes it.
        schedule: which calls are to be made.
        profiler: adds up what they cost.
        pipeline: the number of the pipeline, as workers know it.
        is_fed: whether the elements of its stage 0 are drawn, from other parts perhaps.
        number: what its calls are marked with.
        size: how many blocks a call makes.
        is_drawing: whether they are being drawn now.
        in_work: how many calls were taken from the schedule, and are not completed.
        given: how many elements have come of it.
    """

    plan: Plan
    schedule: AnySchedule
    profiler: Profiler
    pipeline: int = 0
    is_fed: bool = False
    number: int = dataclasses.field(default=0, init=False)
    size: CallSize = dataclasses.field(init=False)
    is_drawing: bool = dataclasses.field(default=False, init=False)
    in_work: int = dataclasses.field(default=0, init=False)
    given: int = dataclasses.field(default=0, init=False)

    max_bytes: dataclasses.InitVar[int] = sys.maxsize

    def __post_init__(self, max_bytes: int) -> None:
        self.size = CallSize(self.plan, RECORDS_PER_MESSAGE, max_bytes)

    @property
    def bytes_ahead(self) -> float:
        """How many bytes its elements take that are made or in work, the next call included."""
        size = self.size
        return self.schedule.bytes_ahead(size.block_bytes) + size.blocks * size.block_bytes

    @property
    def records_per_call(self) -> int:
        """How many records a call of stage 0 makes."""
        return self.size.blocks * self.plan.partition.block

    def take(self, stage: int) -> Call | None:
        """Returns the next call of a stage, if there is one."""
        if stage > 0 or not self.is_fed:
            call = taken_call(self.schedule, stage, self.size.blocks)
        else:
            self.is_drawing = True
            try:
                call = taken_call(self.schedule, stage, self.size.blocks)
            finally:
                self.is_drawing = False
        if call is not None:
            call.part = self.number
            self.in_work += 1
        return call


@final
class Parts:
    """The parts that want the outputs of calls; calls of others are wanted by nobody.

    Args:
        own: the part that the consumer waits for; its number is 0.
        max_bytes: how many bytes the elements of all parts may take that are made or in work.
    """

    def __init__(self, own: Part, max_bytes: int = sys.maxsize) -> None:
        self._own = own
        self._max_bytes = max_bytes
        self._others: list[Part] = []
        # Those of the others of which calls may have to be begun: something has come of them since it was last tried.
        self._stirred: dict[Part, None] = {}
        self._waited_for: list[Part] = []
        self._parts = {own.number: own}
        self._last = own.number
        # What the others have given, and one element for each.
        self._given = 0

    def in_turn(self) -> Iterator[Part]:
        """Yields the parts of which calls may have to be begun: first those that somebody waits for, then the first."""
        yield from self._waited_for[::-1]
        yield self._own
        for part in list(self._stirred):
            # Where calls were drawn meanwhile, it may have had its turn, or be gone.
            if part in self._stirred:
                del self._stirred[part]
                yield part

    def stir(self, part: Part) -> None:
        """Has one of the others tried again, of which calls may have to be begun."""
        if part is not self._own and self._parts.get(part.number) is part:
            self._stirred[part] = None

    @contextlib.contextmanager
    def waiting_for(self, part: Part) -> Iterator[None]:
        """Takes note that somebody waits for the outputs of a part."""
        self._waited_for.append(part)
        try:
            yield
        finally:
            self._waited_for.pop()

    def may_begin(self, part: Part, most_calls: int) -> bool:
        """Whether a call of stage 0 may be taken from a part now: not too far ahead, and without waiting in vain.

        Args:
            part: which one.
            most_calls: how many calls of the first part may be under way. All others together are as far ahead of it.
        """
        backlog = part.schedule.backlog
        if backlog and sum(one.bytes_ahead for one in self._parts.values()) > self._max_bytes:
            return False
        if part is self._own:
            # To draw what is not there would have the consumer wait for more than it has asked for.
            return not part.is_drawing and backlog < most_calls and (backlog == 0 or self._can_be_drawn)
        if part.is_fed:
            return not part.is_drawing and backlog == 0 and part in self._waited_for
        share = (part.given + 1) / self._given
        return backlog == 0 or part.schedule.records_ahead < share * most_calls * self._own.records_per_call

    @property
    def _can_be_drawn(self) -> bool:
        """Whether all others have something made: the first part need hardly wait for what it draws."""
        return all(other.is_fed or other.schedule.ready or other.schedule.exhausted for other in self._others)

    def give(self, part: Part, count: int) -> None:
        """Takes note that elements have come of one of the others."""
        part.given += count
        if self._parts.get(part.number) is part:
            self._given += count
            self.stir(part)

    def of(self, call: Call) -> Part | None:
        """Returns the part that a call is of, if it is still there."""
        return self._parts.get(call.part)

    def admit(self, part: Part) -> None:
        """Adds a part, of which no call was taken."""
        self._last = part.number = self._last + 1
        self._parts[part.number] = part
        self._others.append(part)
        self._given += part.given + 1
        self.stir(part)

    def dismiss(self, part: Part) -> None:
        """Forgets a part. Idempotent."""
        if self._parts.get(part.number) is part:
            del self._parts[part.number]
            self._others.remove(part)
            self._stirred.pop(part, None)
            self._given -= part.given + 1

    def wants(self, call: Call) -> bool:
        """Whether the outputs of a call are still waited for."""
        part = self.of(call)
        return part is not None and part.schedule.wants(call)

    def describe(self, call: Call) -> str:
        """Returns which records a call is about."""
        part = self.of(call)
        return NO_LONGER_WANTED if part is None else part.schedule.describe(call)

    def split(self, call: BlockCall) -> list[BlockCall]:
        """Returns calls of one block each that replace a call; none if it is no longer wanted."""
        part = self.of(call)
        if part is None:
            return []
        pieces = part.schedule.split(call)
        for piece in pieces:
            piece.part = part.number
        part.in_work += len(pieces) - 1
        return pieces

    def complete(self, call: Call, elements: Elements) -> None:
        """Takes the result of a call."""
        part = self.of(call)
        if part is not None:
            part.in_work -= 1
            part.schedule.complete(call, elements)
            self.stir(part)
