"""Bookkeeping for the streams whose calls one set of workers runs: usually one; below a join, several.

    calls of the streams below ──┐               ┌─▶ elements: combined, and drawn by the feed of the last stream
                                 ├─▶ workers ────┤
    calls of the operations ─────┘               └─▶ batches, which the consumer waits for
    after them: the last stream

Guarantees:
    * Streams, like schedules, only keep books. Only the consumer's thread uses them.
    * A stream belongs to one engine. If another one replaces it, the stream begins again at a position.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Protocol, Self, final

from millstream.loader.engine.policy import CallSize, Costs
from millstream.loader.measuring import Profiler
from millstream.loader.pipeline.calls import BlockCall, Call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.assignments import NO_LONGER_WANTED
from millstream.loader.scheduling.schedule import Schedule

RECORDS_PER_MESSAGE = 2048
"""Upper bound on the records of a call with many small blocks. It makes the cost of a message per record small."""


class Sink(Protocol):
    """An object that takes the results of calls. It refers to no place, because places refer to it."""

    def complete(self, call: Call, elements: Elements, seconds: float, *, is_here: bool = False) -> None:
        """Completes a call, given the seconds that a single thread would have needed.

        `is_here` is true if the consumer's thread has run it.
        """


@final
@dataclasses.dataclass(eq=False)
class Substream:
    """One pass over the stream of a pipeline, and the estimates of its calls in one kind of place.

    Attributes:
        costs: the durations of its calls, if they decide who runs them.
        profiler: the measurements of its pipeline, to which those of workers are added.
        pipeline: the number of the pipeline in the workers.
        number: the number of the stream, which its calls carry.
        in_flight: the number of calls that workers got and did not complete.
        drawn: the number of elements drawn from it.
        is_retired: True if no more calls begin.
    """

    plan: Plan
    schedule: Schedule
    size: CallSize
    costs: Costs | None = None
    profiler: Profiler | None = None
    pipeline: int = dataclasses.field(default=0, init=False)
    number: int = dataclasses.field(default=0, init=False)
    in_flight: int = dataclasses.field(default=0, init=False)
    drawn: int = dataclasses.field(default=0, init=False)
    is_retired: bool = dataclasses.field(default=False, init=False)

    @classmethod
    def in_workers(cls, plan: Plan, schedule: Schedule, profiler: Profiler, *, max_bytes: int = sys.maxsize) -> Self:
        """Returns a stream whose calls run in workers."""
        size = CallSize(plan, RECORDS_PER_MESSAGE, max_bytes, are_messages=True)
        return cls(plan, schedule, size, profiler=profiler)

    @property
    def bytes_ahead(self) -> float:
        """The total size of its elements in work or finished, including the next call."""
        size = self.size
        return self.schedule.bytes_ahead(size.block_bytes) + size.blocks * size.block_bytes

    def take(self, stage: int | None, max_blocks: int | None = None) -> Call | None:
        """Takes the next call of a stage (None for local operations), if any, and records the seconds that this took.

        It has up to `max_blocks` blocks; by default, as many as measured durations recommend.
        """
        begin, blocks = time.perf_counter(), self.size.blocks if max_blocks is None else max_blocks
        call = self.schedule.take_local(blocks) if stage is None else self.schedule.take(stage, blocks)
        if call is not None:
            call.substream = self.number
            call.seconds_before += time.perf_counter() - begin
        return call

    def complete(self, call: Call, elements: Elements, seconds: float, *, is_here: bool = False) -> None:
        self.schedule.complete(call, elements)
        self.size.record(call, seconds)
        if self.costs is not None:
            self.costs.record(call, seconds, is_here=is_here)


@final
class Substreams:
    """The streams whose calls are wanted.

    Args:
        max_bytes: the maximum total size of elements in work or finished, over all streams.
        flight_bytes: the size of these up to which more calls may begin than workers have room for in their buffers.
    """

    def __init__(self, max_bytes: int = sys.maxsize, flight_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes
        self._flight_bytes = flight_bytes
        # The last one, whose outputs the trainer gets; None if it gets those of all.
        self._last: Substream | None = None
        # The other streams that may have to begin calls, because something has changed since the last attempt.
        self._awake: dict[Substream, None] = {}
        self._substreams: dict[int, Substream] = {}
        self._numbers = itertools.count(1)
        # The number of elements drawn from the others, plus one for each.
        self._drawn = 0

    @property
    def pipelines(self) -> set[int]:
        return {substream.pipeline for substream in self._substreams.values()}

    def by_urgency(self, waited_for: Substream | None = None) -> Iterator[Substream]:
        """Yields the streams that may have to begin calls: first one that is waited for, then the last one."""
        if waited_for is not None:
            yield waited_for
        if self._last is not None and self._last is not waited_for:
            yield self._last
        while self._awake:
            substream = next(iter(self._awake))
            del self._awake[substream]
            yield substream

    def wake(self, substream: Substream) -> None:
        """Marks a stream as possibly able to begin calls. The last one always is."""
        is_known = self._substreams.get(substream.number) is substream
        if is_known and substream is not self._last and not substream.is_retired:
            self._awake[substream] = None

    def may_begin(self, substream: Substream, max_calls: int, buffered_calls: int) -> bool:
        """Returns True if a call of stage 0 may begin now: it is not too far ahead, and its inputs are there.

        The last stream has up to `max_calls` calls; up to `buffered_calls` if more would take too many bytes. The
        others together stay as far ahead of it.
        """
        backlog = substream.schedule.backlog
        if not self._may_begin(substream, backlog, max_calls):
            return False
        # The bytes are added up last, because that takes longest.
        if backlog == 0:
            return True
        held = sum(other.bytes_ahead for other in self._substreams.values())
        return held <= self._flight_bytes or (
            held <= self._max_bytes and self._may_begin(substream, backlog, buffered_calls)
        )

    def _may_begin(self, substream: Substream, backlog: int, max_calls: int) -> bool:
        last = self._last
        if substream is last:
            return backlog < max_calls
        share = (substream.drawn + 1) / self._drawn
        drawing = substream if last is None or last.schedule.exhausted else last
        max_records = max_calls * drawing.size.blocks * drawing.plan.partition.block
        return backlog == 0 or substream.schedule.records_ahead < share * max_records

    def record_drawn(self, substream: Substream, count: int) -> None:
        substream.drawn += count
        if self._substreams.get(substream.number) is substream:
            self._drawn += count
            self.wake(substream)

    def blocks_text(self, call: Call) -> str:
        """Returns the blocks of a call as text. Finding the keys of their records would call the user's sampler."""
        if not isinstance(call, BlockCall):
            return "a group"
        first, last, substream = call.start, call.stop - 1, self.find(call)
        noun = "batch" if substream is not None and substream.plan.blocks_are_batches else "block"
        if first == last:
            return f"{noun} {first:,}"
        return f"{'batches' if noun == 'batch' else 'blocks'} {first:,} to {last:,}"

    def find(self, call: Call) -> Substream | None:
        """Returns the substream of a call, or None if it was removed."""
        return self._substreams.get(call.substream)

    def add(self, substream: Substream, *, is_last: bool = False) -> None:
        substream.number = next(self._numbers)
        self._substreams[substream.number] = substream
        substream.size.sharers = self._substreams
        if is_last:
            self._last = substream
            return
        self._drawn += substream.drawn + 1
        self.wake(substream)

    @property
    def in_flight(self) -> int:
        """The number of calls taken for workers and not completed, of all streams."""
        return sum(substream.in_flight for substream in self._substreams.values())

    def retire(self, substream: Substream) -> None:
        """Begins no more calls of a stream, but completes those in flight."""
        substream.is_retired = True
        self._awake.pop(substream, None)
        if self._last is substream:
            self._last = None

    def remove(self, substream: Substream) -> None:
        if self._substreams.get(substream.number) is substream:
            del self._substreams[substream.number]
            self._awake.pop(substream, None)
            self._drawn -= substream.drawn + 1

    def wants(self, call: Call) -> bool:
        substream = self.find(call)
        return substream is not None and substream.schedule.wants(call)

    def describe(self, call: Call) -> str:
        substream = self.find(call)
        return NO_LONGER_WANTED if substream is None else substream.schedule.describe(call)

    def split(self, call: BlockCall) -> list[BlockCall]:
        """Replaces a call by calls of one block each. Returns none if it is no longer wanted."""
        substream = self.find(call)
        if substream is None:
            return []
        calls = substream.schedule.split(call)
        for single in calls:
            single.substream = substream.number
        substream.in_flight += len(calls) - 1
        return calls

    def complete(self, call: Call, elements: Elements, _seconds: float = 0.0, *, is_here: bool = False) -> None:  # noqa: ARG002
        substream = self.find(call)
        if substream is not None:
            substream.in_flight -= 1
            substream.schedule.complete(call, elements)
            self.wake(substream)
