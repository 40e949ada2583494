"""The executor that works on demand, in the consumer's thread (see `local_calls`)."""

import math
from typing import TYPE_CHECKING, final

from millstream.loader.pipeline.outputs import Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.scheduling.executor import Executor
from millstream.loader.threads.call_size import CallSize, taken_call
from millstream.loader.threads.local_calls import LocalCalls

if TYPE_CHECKING:
    from millstream.loader.scheduling.feed import Feed


@final
class InlineExecutor(Executor):
    """Runs each call on demand: in the consumer's thread, or in another one if that has settings of its own."""

    def __init__(
        self, plan: Plan, position: Position, feed: "Feed | None" = None, *, stall_timeout: float = math.inf
    ) -> None:
        super().__init__(plan, position, feed)
        self._size = CallSize(plan)
        self._calls = LocalCalls(plan, self._schedule, RecycledMemory().allocate, self, stall_timeout=stall_timeout)

    @property
    def is_orphaned(self) -> bool:
        return self._calls.is_stopped

    def close(self) -> None:
        self._calls.close()

    def _begin(self) -> None:
        self._calls.begin()

    def _advance(self) -> None:
        stage = self._schedule.next_stage
        call = None if stage is None else taken_call(self._schedule, stage, self._size.blocks)
        if call is not None:
            self._size.record(call, self._calls.run(call))

    def _end(self) -> None:
        """Does nothing: no call runs in advance."""
