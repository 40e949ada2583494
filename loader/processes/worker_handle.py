"""A worker process, seen from the parent."""

import contextlib
import os
import signal
from typing import NamedTuple, final

from millstream.loader.processes.channel import Channel, close_all
from millstream.loader.processes.messages import Exited, PipelineFailed, Result
from millstream.loader.transport.arena import ArenaView
from millstream.loader.workers.any_worker import AnyWorker


@final
class Worker(AnyWorker):
    """The parent's side of a worker process. The worker or the fork server reports its process ID.

    Attributes:
        index: its index among the workers that run, which a replacement takes over.
        handle: the process handle (pidfd); None if the system has none.
        is_ready: True once the worker has unpickled the pipelines.
    """

    def __init__(self, number: int, index: int, channel: Channel, arena: ArenaView, crash_log: int) -> None:
        super().__init__(number)
        self.index = index
        self.channel = channel
        self.arena = arena
        self.crash_log = crash_log
        self.handle: int | None = None
        self._unclosed = [crash_log]
        self.exited: Exited | None = None
        self.is_ready = False

    def set_process(self, pid: int, handle: int | None) -> None:
        """Takes ownership of the process handle."""
        self.pid = pid
        if handle is not None:
            self.handle = handle
            self._unclosed.append(handle)

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
