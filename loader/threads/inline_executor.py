"""The executor that works on demand, in the consumer's thread.

Guarantees:
    * User code never sees settings that only the consumer's thread has. If it has any, a thread of the library runs the
      calls (see `thread_settings`).
    * An exception of a signal handler in the consumer's thread leaves `next_outputs` immediately and unchanged.
"""

import math
import time
from typing import TYPE_CHECKING, final

from millstream.columnar import Allocate
from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.executor import Executor
from millstream.loader.pipeline.outputs import Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.threads.call_size import CallSize, taken_call
from millstream.loader.threads.reader_threads import CLOSE_SECONDS, ReaderThreads
from millstream.loader.threads.thread_settings import ThreadSettings
from millstream.loader.threads.threaded_calls import ThreadedCalls
from millstream.signal_exceptions import is_from_signal_handler

if TYPE_CHECKING:
    from millstream.loader.pipeline.assignments import Wanting
    from millstream.loader.pipeline.feed import Feed


def run_here(plan: Plan, schedule: "Wanting", call: Call, allocate: Allocate) -> float:
    """Runs a call in this thread, completes it and returns the seconds it took.

    Raises:
        Exception: an exception of a signal handler. It concerns this moment, whereas a record's error is delivered in
            order.
    """
    start = time.perf_counter()
    elements = plan.make(call.request, allocate)
    seconds = time.perf_counter() - start
    if elements.error is not None and is_from_signal_handler(elements.error):
        raise elements.error
    schedule.complete(call, elements)
    return seconds


@final
class InlineExecutor(Executor):
    """Runs each call on demand: in the consumer's thread, or in another one if that has settings of its own."""

    def __init__(
        self, plan: Plan, position: Position, feed: "Feed | None" = None, *, stall_timeout: float = math.inf
    ) -> None:
        super().__init__(plan, position, feed)
        self._memory = RecycledMemory()
        self._size = CallSize(plan)
        self._settings = ThreadSettings()
        self._may_work_here = True
        self._readers = ReaderThreads(1)
        self._readers.end_with(self)
        self._thread = ThreadedCalls(plan, self._readers, self._memory.allocate, self, stall_timeout)

    def close(self) -> None:
        """Stops the thread, if there is one. Waits at most CLOSE_SECONDS if it is inside user code."""
        self._readers.stop()
        self._thread.close()
        self._readers.join(CLOSE_SECONDS)

    def _begin(self) -> None:
        self._may_work_here = self._settings.are_neutral()
        if not self._may_work_here:
            self._thread.check_process()

    def _advance(self) -> None:
        stage = self._schedule.next_stage
        call = None if stage is None else taken_call(self._schedule, stage, self._size.blocks)
        if call is None:
            return
        if self._may_work_here:
            seconds = run_here(self._plan, self._schedule, call, self._memory.allocate)
        else:
            self._thread.submit(call)
            _, elements, seconds = self._thread.receive()
            self._schedule.complete(call, elements)
        self._size.record(call, seconds)

    def _end(self) -> None:
        """Does nothing: no call runs in advance."""
