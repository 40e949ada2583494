"""The processes and descriptors of a pool: started once, and ended by any thread.

Guarantees:
    * `stop()` and the pool's finalizer take at most `fork_servers.CLOSE_SECONDS`, and leave no process of the pool and
      no descriptor. Any thread may call `stop()`: one lock guards the list of workers and every transfer of
      descriptors, so each descriptor is closed exactly once.
    * Processes are started and reaped, and descriptors opened, in fresh threads, where Ctrl-C and other signal handlers
      cannot interrupt. Every process and descriptor therefore has an owner, and no zombie remains.
"""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

from millstream.core.signals import SignalSafeLock
from millstream.loader.processes.channel import Channel, close_all
from millstream.loader.processes.fork_servers import FORK_SERVERS, Connection, Launch
from millstream.loader.processes.launch_context import LaunchContext
from millstream.loader.threads.thread_settings import in_fresh_thread
from millstream.loader.transport.arena import ArenaView
from millstream.loader.transport.pipeline_file import write_chunks
from millstream.loader.workers.any_worker import AnyWorker

if TYPE_CHECKING:
    import subprocess

    from millstream.loader.processes.messages import Exited


@final
class Worker(AnyWorker):
    """The parent's side of a worker process. The worker or the fork server reports its process ID.

    Attributes:
        index: its index among the workers that run, which a replacement takes over.
        handle: the process handle (pidfd); None if the system has none.
        is_ready: True once the worker has unpickled the pipelines.
        is_extra: True for a worker that was added to others: these do the work until it is ready.
        is_leaving: True for a worker that gets no more calls, and ends after those that it has.
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
        self.is_extra = False
        self.is_leaving = False

    @property
    def accepts_calls(self) -> bool:
        return not self.is_leaving and (self.is_ready or not self.is_extra)

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


@final
class PoolProcesses:
    """The processes and descriptors of a pool. The pool's finalizer holds this object, but not the pool."""

    def __init__(self, context: LaunchContext, environment: Mapping[str, str]) -> None:
        self._context = context
        self._environment = environment
        self._connection: Connection | None = None
        self.control: Channel | None = None
        self.workers: list[Worker] = []
        self.owner = os.getpid()
        # The descriptors of the files of pipelines, the first one that of those that workers start with.
        self._files: list[list[int]] = []
        # One thread may close the iterator while another one, waiting for a batch, restarts the pool.
        self.lock = SignalSafeLock(threading.RLock())
        self.is_shut_down = False  # True once the end of the pool has begun.

    @property
    def fork_server(self) -> "subprocess.Popen[bytes] | None":
        """The process of the fork server; None before the start and after the end of the pool."""
        return None if self._connection is None else self._connection.server.process

    @property
    def pipelines(self) -> int:
        """The descriptor of the file of the pipelines that workers start with."""
        return self._files[0][0]

    def store(self, chunks: Sequence[memoryview]) -> list[int]:
        """Returns a list with the descriptor of a new file of pipelines, or an empty one after the pool was stopped.

        `close_all` of the list closes the file early.
        """
        with self.lock:
            file: list[int] = []
            if not self.is_shut_down:
                self._files = [other for other in self._files if other]
                self._files.append(file)
                file.append(write_chunks(chunks))
            return file

    def connect(self, *, shared: bool = True) -> None:
        """Gets a fork server, unless the pool was stopped. No other pool uses it if it is not `shared`."""
        with self.lock:
            if not self.is_shut_down:
                launch = Launch.now(self._context, self._environment)
                self._connection = FORK_SERVERS.connect(launch, self.workers, shared=shared)
                self.control = self._connection.channel

    def release(self, worker: Worker) -> None:
        """Closes the parent's descriptors of a worker, and removes it from the pool."""
        with self.lock:
            worker.close()
            # Another thread may have released it.
            if worker in self.workers:
                self.workers.remove(worker)
                worker.arena.retire()

    def stop(self) -> None:
        """Ends the processes. Does nothing in a forked process, which only has copies of the descriptors."""
        if self.owner != os.getpid():
            return
        # An interrupt may end any step, and the next call repeats it. So state is cleared after a step is complete.
        with self.lock:
            self.control = None
            # All channels close before the first wait, so that workers exit together.
            for worker in self.workers:
                worker.channel.shut_down()
        if (connection := self._connection) is not None:
            # A list instead of an Event: `append` is atomic, but a signal handler may interrupt `Event.set` halfway.
            interrupted: list[bool] = []
            try:
                # In a fresh thread: an interrupt inside Popen.wait may leave its lock locked, and the process unreaped.
                in_fresh_thread(functools.partial(connection.close, interrupted))
            except BaseException:
                # A second Ctrl-C.
                interrupted.append(True)
                raise
            finally:
                if connection.is_closed:
                    self._connection = None
        with self.lock:
            while self.workers:
                self.workers[-1].close()
                # After the process has exited: a running worker would allocate the pages again.
                self.workers[-1].arena.retire()
                self.workers.pop()

    def shut_down(self) -> None:
        try:
            # Not in a forked process: the thread that holds the lock may not exist there.
            if self.owner == os.getpid():
                with self.lock:
                    self.is_shut_down = True
                self.stop()
        finally:
            for file in self._files:
                close_all(file)
