"""A worker process, seen from the parent."""

import contextlib
import os
import signal
from typing import NamedTuple, final

from millstream.loader.processes.channel import Channel, close_all
from millstream.loader.processes.messages import Exited, PipelineFailed, Result, Task
from millstream.loader.transport.arena import ArenaView


@final
class Worker:
    """The parent's side of a worker process.

    Attributes:
        number: the worker's number. It is unique in the pool, and replacements get new ones.
        index: its index among the workers that run, which a replacement takes over.
        channel: the parent's end of the channel.
        arena: the memory that the worker writes batches to.
        crash_log: the descriptor of the worker's crash log.
        pid: the process ID; None until the worker or the fork server reports it.
        handle: the process handle (pidfd); None if the system has none.
        exited: the exit report; None until the fork server sends it.
        is_ready: True once the worker has unpickled the pipelines.
        calls: the numbers of the unanswered calls, in the order sent.
        waited: seconds that the consumer has waited since the worker began its first unanswered call, or since its
            last sign of life.
        warned: True if a warning about the current stall has been logged.
    """

    def __init__(self, number: int, index: int, channel: Channel, arena: ArenaView, crash_log: int) -> None:
        self.number = number
        self.index = index
        self.channel = channel
        self.arena = arena
        self.crash_log = crash_log
        self.pid: int | None = None
        self.handle: int | None = None
        self._unclosed = [crash_log]
        self.exited: Exited | None = None
        self.is_ready = False
        self.calls: list[int] = []
        self.waited = 0.0
        self.warned = False

    @property
    def accepts_calls(self) -> bool:
        """Always True: calls wait in the channel until the worker is ready."""
        return True

    def set_process(self, pid: int, handle: int | None) -> None:
        """Records the worker's process, and takes ownership of the process handle."""
        self.pid = pid
        if handle is not None:
            self.handle = handle
            self._unclosed.append(handle)

    def submit(self, message: Task) -> None:
        """Sends a call to the worker."""
        if not self.calls:
            self.waited = 0.0
        self.calls.append(message.call)
        self.channel.send(message)

    def record_result(self, call: int) -> None:
        """Removes a call that was answered."""
        self.calls.remove(call)
        self.waited = 0.0
        self.warned = False

    def request_stacks(self) -> None:
        """Makes a ready worker write its stacks, even from inside C code."""
        with contextlib.suppress(ProcessLookupError):
            if self.handle is not None:
                signal.pidfd_send_signal(self.handle, signal.SIGUSR1)
            elif self.pid is not None:
                os.kill(self.pid, signal.SIGUSR1)

    def close(self) -> None:
        """Closes the parent's descriptors. Arrays on the arena stay valid. Idempotent, even after an interrupt."""
        self.channel.shut_down()
        close_all(self._unclosed)


class Died(NamedTuple):
    """A worker has died. `exited` is None if the fork server sent no exit report."""

    exited: Exited | None


Event = Result | PipelineFailed | Died
