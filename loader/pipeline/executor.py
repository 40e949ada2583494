"""What runs the calls of a plan: the one loop that all executors share."""

import abc
from typing import TYPE_CHECKING

from millstream.loader.pipeline.outputs import Outputs, Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.schedules import schedule_from

if TYPE_CHECKING:
    from millstream.loader.pipeline.feed import Feed
    from millstream.loader.pipeline.load import Load


class Executor(abc.ABC):
    """Runs the calls of one pass over a stream. Used by one thread, but for `close`.

    Args:
        plan: what makes the outputs.
        position: where the pass begins.
        feed: where the elements of stage 0 come from; None where they are read.
    """

    def __init__(self, plan: Plan, position: Position, feed: "Feed | None" = None) -> None:
        self._plan = plan
        self._schedule = schedule_from(plan, position, feed)

    def next_outputs(self) -> Outputs | None:
        """Returns the next outputs in order, None at the end.

        What is raised here is about this moment, and not about a record, whose error comes with its outputs. The
        executor is of no use then: its owner closes it.
        """
        self._begin()
        while (outputs := self._schedule.pop()) is None:
            if self._schedule.exhausted:
                return None
            self._advance()
        self._end()
        return outputs

    def load(self) -> "Load":
        """Returns what there is to do now. Any thread may ask; what it gets may be a moment old."""
        from millstream.loader.pipeline.load import Load  # noqa: PLC0415  (for those who look)

        return Load(self._schedule.backlog, self._schedule.ready)

    def stacks(self) -> dict[int, str]:
        """Returns the stacks of its worker processes, by process: by default, there are none. Any thread may ask."""
        return {}

    def start(self) -> None:
        """Begins to work ahead, where the executor can: by default, it cannot."""
        return

    def pause(self) -> None:
        """Stops working for this iterator, but keeps what can serve the next one: by default, nothing can."""
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Stops all work. Idempotent; any thread may call it."""

    @abc.abstractmethod
    def _begin(self) -> None:
        """Gets ready for the consumer's question, without waiting."""

    @abc.abstractmethod
    def _advance(self) -> None:
        """Completes a call, or waits for a bounded time for one to be completed elsewhere."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Makes sure that work continues while the consumer is away, without waiting."""
