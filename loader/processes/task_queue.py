"""The tasks of a worker in order, with several of their reads in flight.

A worker runs one call at a time. While a read waits for storage, later ones can wait as well. Threads therefore read
the records of the tasks received, as many at a time as the parent allows. The worker takes the tasks in order, each
when its records are there.

Guarantees:
    * Tasks leave in the order received.
    * A task that allows one read is alone. It leaves unread, after all tasks before it have ended, and no later task
      begins before it has left.
    * A pipeline is loaded as soon as it arrives, and unloaded when all tasks before have left.
    * Only the worker's thread uses the channel. Reading threads write a byte to a pipe to wake it.
"""

import contextlib
import os
import select
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, final

from millstream.loader.pipeline.pipeline import Variant
from millstream.loader.processes.channel import Channel
from millstream.loader.processes.messages import Load, Task, Unload
from millstream.loader.workers.call_runner import AdvanceRead

Ready: TypeAlias = tuple[Task, AdvanceRead | None]
"""A task to run now, and its records if they were read in advance."""

_WAKE_BYTES = 4096


@final
class TaskQueue:
    """Receives tasks, has their records read in advance, and returns the tasks in order."""

    def __init__(
        self,
        channel: Channel,
        runner_of: Callable[[int, Variant], Any],
        record_begun: Callable[[int], None],
        load: Callable[[Load, int], None],
        unload: Callable[[int], None],
    ) -> None:
        self._channel = channel
        self._load = load
        self._unload = unload
        self._runner_of = runner_of
        self._record_begun = record_begun
        self._unread: deque[Task | Unload] = deque()
        self._reading: deque[tuple[Task, AdvanceRead]] = deque()
        # Not closed before the process ends: a read that outlasts the last task would write to another file of this
        # number.
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def next(self, release: Callable[[int], None]) -> Ready | None:
        """Returns the next task when its records are there, or None when the parent has closed the channel.

        `release` takes back chunks of the arena that the parent no longer holds.
        """
        while True:
            self._receive(release)
            if not self._channel.is_open:
                return None
            self._begin_reads()
            if self._reading:
                if self._reading[0][1].is_done:
                    return self._reading.popleft()
            elif self._unread and isinstance(task := self._unread[0], Task):
                self._unread.popleft()
                self._record_begun(task.call)
                return task, None

    def _receive(self, release: Callable[[int], None]) -> None:
        """Receives tasks. If there is nothing to do, waits for a task or for the end of a read."""
        is_ready = self._reading[0][1].is_done if self._reading else bool(self._unread)
        for descriptor, _ in self._poll.poll(0 if is_ready else None):
            if descriptor == self._woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, _WAKE_BYTES)
                continue
            for message in self._channel.receive():
                if isinstance(message, Load):
                    (file,) = self._channel.take_descriptors()
                    self._load(message, file)
                    continue
                if isinstance(message, Task):
                    for offset in message.released:
                        release(offset)
                self._unread.append(message)

    def _begin_reads(self) -> None:
        while self._unread:
            task = self._unread[0]
            if isinstance(task, Unload):
                if self._reading:
                    return
                self._unread.popleft()
                self._unload(task.number)
                continue
            if isinstance(task.request, bytes) or task.num_reads == 1 or len(self._reading) >= task.num_reads:
                return
            self._unread.popleft()
            self._record_begun(task.call)
            runner = self._runner_of(task.pipeline, task.variant)
            self._reading.append((task, runner.read(task.request, self._wake_up)))

    def _wake_up(self) -> None:
        # If the pipe is full, it wakes the worker already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")
