"""A pool of worker processes, as the parent sees it: the fork server, the workers, their channels and arenas.

Guarantees:
    * The parent never blocks on a worker: it reads what has come, writes what goes out, and waits on all sockets and
      process handles together.
    * Any end of a worker that the parent has not asked for is a death, whatever its status; all that it sent before
      still counts. The pool reports deaths and forks replacements; what is done about lost calls is the executor's.
    * `stop()` takes at most CLOSE_SECONDS, and so does the end of the pool's life; nothing is left then. Another thread
      may call it: one lock guards the list of the workers and all that passes descriptors, so each is closed once.
    * Processes are started and waited for, and descriptors opened, in threads made for it, which Ctrl-C and other
      signals' handlers do not interrupt: there is none without an owner, and none that stays a zombie.
    * A stall is time that the consumer has waited, a look at a time: what lasted longer was no waiting, but a system
      that had suspended all of us.

The pool costs three descriptors a worker (channel, process handle, last words) and two for itself.
"""

import contextlib
import functools
import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.processes.channel import Channel, close_all
from millstream.loader.processes.crash_log import create_crash_log
from millstream.loader.processes.interpreter import (
    Surroundings,
    command,
    folder_to_enter,
    tracker_descriptor,
    write_surroundings,
)
from millstream.loader.processes.limits import arena_size, explained_limits
from millstream.loader.processes.messages import (
    Exited,
    Fork,
    Forked,
    Kill,
    NotForked,
    PipelineFailed,
    Ready,
    Result,
    Task,
)
from millstream.loader.processes.process_control import kill_session, looks
from millstream.loader.threads.memory_budget import affordable_threads, buffer_budget, memory_budget
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.thread_settings import in_fresh_thread
from millstream.loader.transport.arena import ArenaView, create_arena_file
from millstream.loader.transport.pipeline_file import pack_pipelines, write_chunks
from millstream.signal_safe_lock import SignalSafeLock

CLOSE_SECONDS = 2.0
"""How long stopping may take: the fork server gives workers a quarter of it to leave, then kills them."""

EXIT_SECONDS = 2.0
"""How long to wait for the fork server to tell how a worker ended."""

_SINGLE_THREADED = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")

logger = logging.getLogger("millstream")


@final
class Worker:
    """One worker process.

    Attributes:
        number: which worker.
        channel: the conversation with it.
        arena: the memory that it writes.
        crash_log: the file with the call that it has begun, and its stacks.
        pid: its process; None until it, or the fork server, has said.
        handle: the process's handle (pidfd), where there are such.
        exited: how it ended; None until the fork server has said.
        is_ready: whether it has the pipeline.
        calls: the numbers of the calls it was given and has not answered, in order.
        waited: seconds that the consumer has waited since the worker began with the first of them, or was last heard.
        warned: whether it has been reported in the log since then.
    """

    def __init__(self, number: int, channel: Channel, arena: ArenaView, crash_log: int) -> None:
        self.number = number
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
        """Whether calls may be given to it: they wait for it to be ready."""
        return True

    def is_forked(self, pid: int, handle: int | None) -> None:
        """Takes note of its process, and takes over the process's handle."""
        self.pid = pid
        if handle is not None:
            self.handle = handle
            self._unclosed.append(handle)

    def give(self, message: Task) -> None:
        """Sends a call."""
        if not self.calls:
            self.waited = 0.0
        self.calls.append(message.call)
        self.channel.send(message)

    def answered(self, call: int) -> None:
        """Takes note of an answer."""
        self.calls.remove(call)
        self.waited = 0.0
        self.warned = False

    def ask_for_stacks(self) -> None:
        """Makes a worker that is ready write its stacks, even from inside C code."""
        with contextlib.suppress(ProcessLookupError):
            if self.handle is not None:
                signal.pidfd_send_signal(self.handle, signal.SIGUSR1)
            elif self.pid is not None:
                os.kill(self.pid, signal.SIGUSR1)

    def close(self) -> None:
        """Closes what the parent holds of it; arrays on its arena live on. Idempotent, wherever it is interrupted."""
        self.channel.hang_up()
        close_all(self._unclosed)


class Died(NamedTuple):
    """A worker is gone; None where the fork server did not say how."""

    exited: Exited | None


Event = Result | PipelineFailed | Died


@final
class Pool:
    """Worker processes that have the same pipelines, most often one."""

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        workers: MultiprocessingOptions,
        reading: ReadOptions,
        surroundings: Surroundings,
    ) -> None:
        self._options = workers
        self.max_bytes = buffer_budget(reading.max_buffer_bytes)
        self.max_reads = max(1, affordable_threads(reading.num_threads))
        self._num_threads = reading.num_threads
        self._numbers = itertools.count()
        self.call_numbers: Iterator[int] = itertools.count()
        self._state = _Resources(surroundings)
        self._finalizer = weakref.finalize(self, _Resources.end, self._state)
        try:
            with explained_limits(self._options.num_workers):
                # First, since nothing takes as long: it starts while the pipelines are pickled.
                in_fresh_thread(self._state.start_fork_server)
                pieces, self._pipeline_file, self.classes = pack_pipelines(pipelines)
                in_fresh_thread(functools.partial(self._state.keep_pipeline, pieces))
                self._arena_bytes = arena_size(
                    min(memory_budget(), reading.max_buffer_bytes or sys.maxsize), workers.num_workers
                )
                in_fresh_thread(self._fork_all)
        except BaseException:
            self.stop()
            raise

    @property
    def workers(self) -> list[Worker]:
        """The workers, dead ones not counted."""
        return self._state.workers

    @property
    def is_ours(self) -> bool:
        """Whether this process has made it: a forked one has only a copy, which it must not use."""
        return self._state.owner == os.getpid()

    @property
    def is_usable(self) -> bool:
        """Whether another iterator may use it: it is this process's, and has not been stopped."""
        return self.is_ours and self._state.control is not None

    def restart(self) -> None:
        """Starts a new fork server and all workers; what is left of the old ones goes."""
        self._state.stop()
        with explained_limits(self._options.num_workers):
            in_fresh_thread(self._state.start_fork_server)
            in_fresh_thread(self._fork_all)

    def replace(self, worker: Worker) -> None:
        """Forks a worker to replace a dead one, or of one to be killed."""
        self.kill(worker)
        self._state.dismiss(worker)
        with explained_limits(self._options.num_workers):
            in_fresh_thread(self._fork)

    def wait(self, seconds: float) -> Iterator[tuple[Worker, Event]]:
        """Yields what has happened, having waited for something to happen for at most this many seconds.

        Raises:
            ForkServerDied: the fork server is gone, and with it all workers. What they had sent was yielded before.
        """
        poll = select.poll()
        control = self._control
        poll.register(control.fileno(), select.POLLIN | (select.POLLOUT if control.has_unsent else 0))
        for worker in self.workers:
            wanted = select.POLLIN | (select.POLLOUT if worker.channel.has_unsent else 0)
            poll.register(worker.channel.fileno(), wanted)
            if worker.handle is not None:
                poll.register(worker.handle, select.POLLIN)
        seconds = 0.0 if any(worker.exited is not None for worker in self.workers) else max(0.0, seconds)
        begin = time.monotonic()
        ready = dict(poll.poll(seconds * 1000))
        waited = min(seconds, time.monotonic() - begin)
        # Which worker is meant is settled now: what follows closes descriptors, and opens others with their numbers.
        news = [(worker, ready.get(worker.channel.fileno(), 0), worker.handle in ready) for worker in self.workers]
        if ready.get(self._control.fileno(), 0) & ~select.POLLOUT:
            self._listen_to_fork_server()
        with self._state.lock:
            self._control.flush()
        for worker, flags, handle_says_so in news:
            worker.waited += waited
            if flags & select.POLLOUT:
                worker.channel.flush()
            # Without a handle: something that it has started may still hold its end of the channel.
            has_exited = handle_says_so or worker.exited is not None
            if flags & ~select.POLLOUT or has_exited:
                yield from self._listen_to(worker, has_exited=has_exited)
        if not control.is_open:
            for worker in list(self.workers):
                yield from self._answers(worker, worker.channel.receive_rest())
            raise ForkServerDied

    def kill(self, worker: Worker) -> None:
        """Kills a worker and what it has started."""
        if worker.pid is not None:
            with self._state.lock:
                self._control.send(Kill(worker.pid))

    @contextlib.contextmanager
    def crash_log_of(self, worker: Worker) -> Iterator[int]:
        """Yields a descriptor of a worker's crash log, the caller's own. For any thread: the worker may go meanwhile.

        Raises:
            ValueError: the worker is gone.
        """
        with self._state.lock:
            if worker not in self._state.workers:
                raise ValueError(f"Worker {worker.number} is gone.")
            crash_log = os.dup(worker.crash_log)
        try:
            yield crash_log
        finally:
            os.close(crash_log)

    def ask_for_stacks(self) -> dict[int, Worker]:
        """Makes the workers that are ready write their stacks; returns them by process. For any thread."""
        with self._state.lock:
            workers = {worker.pid: worker for worker in self.workers if worker.is_ready and worker.pid is not None}
            for worker in workers.values():
                worker.ask_for_stacks()
        return workers

    def stop(self) -> None:
        """Ends all processes. Idempotent: what an interrupt leaves is done by the next call, or the end of the pool."""
        self._state.end()
        self._finalizer.detach()

    @property
    def _control(self) -> Channel:
        control = self._state.control
        if control is None:
            raise ValueError("The worker processes are stopped: the iterator was closed, perhaps by another thread.")
        return control

    def _fork_all(self) -> None:
        for _ in range(self._options.num_workers):
            self._fork()

    def _fork(self) -> None:
        number = next(self._numbers)
        with contextlib.ExitStack() as sent, contextlib.ExitStack() as kept:
            ours, theirs = socket.socketpair()
            kept.callback(ours.close)
            sent.callback(theirs.close)
            arena = create_arena_file(self._arena_bytes)
            sent.callback(os.close, arena)
            crash_log = create_crash_log()
            kept.callback(os.close, crash_log)
            worker = Worker(number, Channel(ours, blocking=False), ArenaView(arena, self._arena_bytes), crash_log)
            fork = Fork(number, self._arena_bytes, self._num_threads, self._pipeline_file)
            with self._state.lock:
                control = self._control
                # Before it can run: whoever ends the pool ends it too.
                self._state.workers.append(worker)
                kept.pop_all()
                control.send(fork, [theirs.fileno(), arena, crash_log, self._state.pipeline])

    def _listen_to(self, worker: Worker, *, has_exited: bool) -> Iterator[tuple[Worker, Event]]:
        received = worker.channel.receive_rest() if has_exited else worker.channel.receive()
        # Part of a message is progress too: a long one, or a consumer that was away for long, is not a stall.
        worker.waited = 0.0
        yield from self._answers(worker, received)
        if has_exited or not worker.channel.is_open:
            # Not killed before it is known how it ends. Should it live on without its channel, replacing it kills it.
            self._wait_for_exit(worker)
            # Where the fork server has died as well, it took the worker with it: it is the pool that died.
            if self._control.is_open:
                yield worker, Died(worker.exited)

    def _wait_for_exit(self, worker: Worker) -> None:
        """Waits until the fork server has said how a worker ended, for at most EXIT_SECONDS."""
        for seconds in looks(EXIT_SECONDS):
            if worker.exited is not None or not self._control.is_open:
                break
            poll = select.poll()
            poll.register(self._control.fileno(), select.POLLIN)
            poll.poll(seconds * 1000)
            self._listen_to_fork_server()

    def _answers(self, worker: Worker, messages: Iterator[Any]) -> Iterator[tuple[Worker, Event]]:
        for message in messages:
            if isinstance(message, Ready):
                worker.is_ready = True
                # The fork server may be slower to say so than the worker was to begin.
                worker.pid = message.pid
                worker.waited = 0.0
            elif isinstance(message, Result):
                worker.answered(message.call)
                yield worker, message
            else:
                yield worker, message

    def _listen_to_fork_server(self) -> None:
        with self._state.lock, explained_limits(self._options.num_workers):
            for message in self._control.receive():
                if isinstance(message, Exited):
                    for worker in self.workers:
                        if worker.pid == message.pid:
                            worker.exited = message
                elif isinstance(message, NotForked):
                    raise OSError(message.errno, f"{os.strerror(message.errno)}: a worker process cannot be forked")
                else:
                    self._take_forked(message, self._control.take_descriptors())

    def _take_forked(self, forked: Forked, handles: list[int]) -> None:
        worker = next((worker for worker in self.workers if worker.number == forked.number), None)
        if worker is None:
            # It was replaced before it was there.
            self._control.send(Kill(forked.pid))
            close_all(handles)
        else:
            worker.is_forked(forked.pid, handles[0] if handles else None)


class ForkServerDied(Exception):  # noqa: N818  (an event, not an error: the pool is started again)
    """The fork server is gone, and all workers with it."""


@final
class _Resources:
    """What must end when a pool ends: kept apart from it, so that its finalizer can hold on to this."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        self.fork_server: subprocess.Popen[bytes] | None = None
        self.control: Channel | None = None
        self.workers: list[Worker] = []
        self.owner = os.getpid()
        self._unclosed: list[int] = []
        # One thread may close an iterator while another waits for its next batch, and finds that it must restart.
        self.lock = SignalSafeLock(threading.RLock())
        self._ended = False

    @property
    def pipeline(self) -> int:
        """The descriptor of the pipeline's file."""
        return self._unclosed[0]

    def keep_pipeline(self, pieces: Sequence[memoryview]) -> None:
        """Writes the pipeline's file."""
        with self.lock:
            if not self._ended:
                self._unclosed.append(write_chunks(pieces))

    def start_fork_server(self) -> None:
        with self.lock:
            if self._ended:
                return
            environment = {**dict.fromkeys(_SINGLE_THREADED, "1"), **os.environ, "JAX_PLATFORMS": "cpu"}
            ours, theirs = socket.socketpair()
            # Before the process can run: the end of this channel ends it, whatever happens here.
            self.control = Channel(ours, blocking=False)
            with theirs, os.fdopen(write_surroundings(self.surroundings)) as written:
                tracker = tracker_descriptor()
                inherited = [written.fileno(), theirs.fileno(), *([] if tracker is None else [tracker])]
                self.fork_server = subprocess.Popen(  # noqa: S603  (our own code in our own interpreter)
                    command(inherited[0], self.owner, *inherited[1:]),
                    stdin=subprocess.DEVNULL,
                    pass_fds=inherited,
                    env=environment,
                    cwd=folder_to_enter(self.surroundings),
                    start_new_session=True,
                )

    def dismiss(self, worker: Worker) -> None:
        """Closes what the parent holds of a worker."""
        with self.lock:
            worker.close()
            # Perhaps another thread has, in the meantime.
            if worker in self.workers:
                self.workers.remove(worker)
                worker.arena.retire()

    def stop(self) -> None:
        """Ends the processes; in a forked process, which has copies of all this, it leaves them alone."""
        if self.owner != os.getpid():
            return
        # Each step may be interrupted, and is done again then by the next call: what has ended is forgotten afterwards.
        with self.lock:
            if self.control is not None:
                self.control.hang_up()
                self.control = None
            # All at once: then they leave together.
            for worker in self.workers:
                worker.channel.hang_up()
        if (fork_server := self.fork_server) is not None:
            is_urgent: list[bool] = []
            try:
                workers = [worker.pid for worker in self.workers if worker.pid is not None]
                # An interrupt inside Popen.wait may leave its lock locked, and nobody could reap the process any more.
                in_fresh_thread(functools.partial(_end_fork_server, fork_server, workers, is_urgent))
            except BaseException:
                # Ctrl-C came once more.
                is_urgent.append(True)
                raise
            finally:
                # Once reaped, its number may become somebody else's.
                self.fork_server = None if fork_server.returncode is not None else fork_server
        with self.lock:
            while self.workers:
                self.workers[-1].close()
                # Once its process has ended: one that still works would make pages real again.
                self.workers[-1].arena.retire()
                self.workers.pop()

    def end(self) -> None:
        """Ends the processes for good."""
        try:
            # Not in a forked process, in which nobody might give the lock back.
            if self.owner == os.getpid():
                with self.lock:
                    self._ended = True
                self.stop()
        finally:
            close_all(self._unclosed)


def _end_fork_server(fork_server: subprocess.Popen[bytes], workers: list[int], is_urgent: list[bool]) -> None:
    """Waits for the fork server, which knows that it is to end; where it fails to, ends what it should have ended.

    Where somebody puts something into `is_urgent`, it waits no longer.
    """
    status = _status_of(fork_server, is_urgent)
    if status is None:
        # It is stopped, perhaps.
        fork_server.kill()
    if status != 0:
        # The kernel kills the workers with it, on Linux, and nobody what they have started.
        kill_session(fork_server.pid, workers)
    _status_of(fork_server, [])


def _status_of(fork_server: subprocess.Popen[bytes], is_urgent: list[bool]) -> int | None:
    """Returns how the fork server has ended, having waited for it; None where it has not."""
    for seconds in looks(CLOSE_SECONDS / 2):
        if is_urgent:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            return fork_server.wait(seconds)
    return None
