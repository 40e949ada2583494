"""The base of executors, which run the calls of a plan: one loop for all of them."""

import abc
from typing import TYPE_CHECKING

from millstream.loader.pipeline.calls import Outputs, Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.schedule import Schedule

if TYPE_CHECKING:
    from millstream.loader.scheduling.feed import Feed
    from millstream.loader.scheduling.status import ExecutorStatus


class GivenUp(Exception):  # noqa: N818  (internal)
    """An executor cannot go on. Another one at the same position does."""


class Executor(abc.ABC):
    """Runs the calls of one pass over a stream from a position on. Except for `close`, it is used by one thread.

    Args:
        schedule: the order of the calls if this executor shares it with others, see `AutoExecutor`; None for its own.
    """

    def __init__(
        self, plan: Plan, position: Position, feed: "Feed | None" = None, schedule: Schedule | None = None
    ) -> None:
        self._plan = plan
        self._schedule = Schedule(plan, position, feed) if schedule is None else schedule
        self.failures = self._schedule.failures

    def next_outputs(self) -> Outputs | None:
        """Returns the next outputs in order, or None at the end.

        Exceptions raised here concern the executor, not a record, whose error is part of its outputs. The owner must
        then close the executor.
        """
        self.begin_request()
        while (outputs := self._schedule.pop()) is None:
            if self._schedule.exhausted:
                return None
            if not self.run_local():
                self.advance()
        self.end_request()
        return outputs

    @property
    def is_orphaned(self) -> bool:
        """True if it makes no progress any more. Its owner then begins another one at the same position."""
        return False

    @property
    def runs_user_code_here(self) -> bool:
        """True if the consumer's thread may run code of the user."""
        return True

    def status(self) -> "ExecutorStatus":
        """Returns a snapshot of the work in progress. Thread-safe: it may be slightly outdated."""
        from millstream.loader.scheduling.status import ExecutorStatus  # noqa: PLC0415  (lazy: only monitoring needs it)

        return ExecutorStatus(self._schedule.backlog, self._schedule.ready)

    def stacks(self) -> dict[int, str]:
        """Returns the stacks of worker processes by process ID. The default is none. Thread-safe."""
        return {}

    def finish_call(self) -> bool:
        """Waits for a call that has begun here, and completes it. Returns False if there is none."""
        return False

    def start(self) -> None:
        """Starts to work ahead, if the executor can. The default does nothing."""
        return

    def pause(self) -> None:
        """Stops working for this iterator, but keeps resources for the next one. The default closes the executor."""
        self.close()

    @abc.abstractmethod
    def close(self, deadline: float | None = None) -> None:
        """Stops all work. Idempotent and thread-safe.

        `deadline` is the time of `time.monotonic` until which it waits for user code in threads; None for its own.
        """

    def run_local(self) -> bool:
        """Runs local operations of one call; returns False if none can run now. The default has no such operations."""
        return False

    @abc.abstractmethod
    def begin_request(self) -> None:
        """Prepares for a request of the consumer, without waiting."""

    @abc.abstractmethod
    def advance(self) -> None:
        """Completes a call, or waits for another thread or process to complete one, for a bounded time."""

    @abc.abstractmethod
    def end_request(self) -> None:
        """Ensures that work continues while the consumer is away, without waiting."""
