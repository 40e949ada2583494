"""Batches that one thread draws and puts on the device, from one position on, before they are requested."""

import dataclasses
import queue
from collections.abc import Callable
from typing import Any, final

from millstream.errors import WorkerStalledError
from millstream.loader.devices.agreement import Agreement
from millstream.loader.devices.placement import Placement, leaves_of
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.threads.waiting import TimedQueue, Wait


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePosition:
    """A position between two batches: its state, step and epoch."""

    state: Any
    step: int | None
    epoch: int | None

    @classmethod
    def of(cls, iterator: Any) -> "DevicePosition":
        return cls(iterator.get_state(), getattr(iterator, "step", None), getattr(iterator, "epoch", None))


@dataclasses.dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch on the device, and the position after it."""

    batch: Any
    position: DevicePosition


@final
class DeviceStaging:
    """The batches staged from one position on. The thread runs jobs; the consumer takes their outcomes in order.

    Attributes:
        outcomes: the outcome of each job: a batch, or an exception.
        next_position: the position before the batch that `take` returns next; None if it may be another one.
        has_delivered: True once the consumer has got a batch.
        is_awaited: True if the consumer waits for an outcome, or was interrupted while it did.
        is_over: True if jobs must do nothing more. Either side may set it.
    """

    def __init__(self, iterator: Any, placement: Placement, start: Any, agreement: Agreement | None = None) -> None:
        self._iterator = iterator
        self._placement = placement
        self._agreement = agreement
        self._start = start
        self._has_begun = False
        self.outcomes: TimedQueue[StagedBatch | BaseException] = TimedQueue()
        self.next_position: DevicePosition | None = None
        self.has_delivered = False
        self.is_awaited = False
        self.is_over = False

    def stage(self) -> None:
        self.run(self._next_on_device)

    def run(self, work: Callable[[], Any]) -> None:
        """Adds the outcome of a function: its result with the position after it, or its exception. Also a job."""
        if self.is_over:
            return
        try:
            outcome: StagedBatch | BaseException = StagedBatch(work(), DevicePosition.of(self._iterator))
        except BaseException as error:  # noqa: BLE001  (the consumer raises it)
            self.is_over = True
            outcome = error
        self.outcomes.put(outcome)

    def take(self, wait: Wait, readers: ReaderThreads) -> StagedBatch:
        """Waits for the outcome of the next job; returns its batch, or raises its exception or a WorkerStalledError."""
        self.next_position = None
        self.is_awaited = True
        outcome: StagedBatch | BaseException | None = None
        while outcome is None:
            try:
                outcome = self.outcomes.get(timeout=wait.seconds)
            except queue.Empty:
                describe = getattr(self._iterator, "describe_next", None)
                text = "a batch in flight to the device" if describe is None else describe()
                outcome = wait.timed_out(text, readers.busy_threads)
        self.is_awaited = isinstance(outcome, WorkerStalledError)
        if isinstance(outcome, BaseException):
            raise outcome
        self.next_position = outcome.position
        return outcome

    def _next_on_device(self) -> Any:
        if not self._has_begun:
            # The previous staging may have drawn more than was delivered.
            if self._iterator.get_state() != self._start:
                self._iterator.set_state(self._start)
            self._has_begun = True
        if self._agreement is None:
            return self._placement.put(next(self._iterator))
        step = getattr(self._iterator, "step", None)
        batch = next(self._iterator)
        self._agreement.check_rows(list(leaves_of(batch)), step)
        return self._placement.put(batch)
