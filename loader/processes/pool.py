"""A pool of worker processes, seen from the parent: workers, channels, arenas, descriptors, pipelines and events.

Guarantees:
    * The parent never blocks on a worker. It sends what the sockets take, receives what has arrived, and waits for all
      sockets and process handles together.
    * A worker that exits without being asked to has died, whatever its exit status. Results that it sent before still
      count. The pool reports deaths and forks replacements. The engine decides what happens to the lost calls.
    * Only time that the consumer spends waiting counts as a stall. If a wait outlasts its timeout, the machine was
      suspended, and the excess does not count.
    * `stop()` and the pool's finalizer take at most `fork_servers.CLOSE_SECONDS`, and leave no process of the pool and
      no descriptor. Any thread may call `stop()`: one lock guards the list of workers and every transfer of
      descriptors, so each descriptor is closed exactly once.
    * Processes are started and reaped, and descriptors opened, in fresh threads, where Ctrl-C and other signal handlers
      cannot interrupt. Every process and descriptor therefore has an owner, and no zombie remains.

A pool costs three descriptors per worker (channel, process handle, crash log), and three for itself. Its fork server
costs one.
"""

import contextlib
import functools
import itertools
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

from millstream.core.signals import SignalSafeLock
from millstream.loader.pipeline.pipeline import Pipeline, Variant
from millstream.loader.processes.channel import (
    Channel,
    Exited,
    Fork,
    Forked,
    Imported,
    Kill,
    Load,
    Logged,
    NotForked,
    PipelineFailed,
    Ready,
    Result,
    Unload,
    Vary,
    close_all,
)
from millstream.loader.processes.fork_servers import FORK_SERVERS, Connection, Launch
from millstream.loader.processes.log_records import log_here
from millstream.loader.processes.process_control import wait_slices
from millstream.loader.processes.process_report import arena_size, create_crash_log, explained_limits
from millstream.loader.threads.options import (
    MultiprocessingOptions,
    ReadOptions,
    affordable_threads,
    buffer_budget,
    flight_budget,
    memory_budget,
)
from millstream.loader.threads.thread_settings import in_fresh_thread
from millstream.loader.transport.arena import ArenaView, create_arena_file
from millstream.loader.transport.importable_modules import LaunchContext
from millstream.loader.transport.pickling import ClassTable
from millstream.loader.transport.pipeline_file import pack_pipelines, write_chunks
from millstream.loader.workers.pools import AnyWorker, first_free
from millstream.loader.workers.process_settings import ProcessSettings, Trainer, variables_of
from millstream.loader.workers.worker_imports import changed, code_digests
from millstream.sources.shared_units import SharedFolder

if TYPE_CHECKING:
    import subprocess


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

    def __init__(
        self, number: int, index: int, channel: Channel, arena: ArenaView, crash_log: int, *, stall_timeout: float
    ) -> None:
        super().__init__(number, stall_timeout)
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
        self._units: SharedFolder | None = None
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

    @property
    def units(self) -> str:
        """The path of the folder in which workers share units; "" without one."""
        return "" if self._units is None else self._units.path

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
        """Gets a fork server, unless the pool was stopped. No other pool uses it if it is not `shared`.

        It runs in a thread of its own, in which no signal handler can interrupt the creation of the folder.
        """
        with self.lock:
            if not self.is_shut_down:
                self._units = self._units or SharedFolder()
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
            if self._units is not None:
                self._units.remove()


MAX_IDLE_PIPELINES = 64
"""The maximum number of pipelines without calls that workers keep, of those that they got while they ran."""


class _Loaded(NamedTuple):
    """A pipeline that the workers get while they run: the message to each, and the descriptor of its file, if any."""

    message: Load | Vary
    file: list[int]
    has_new_classes: bool  # Replacements need it, because later elements may have a class that crossed with it.


@final
class LoadedPipelines:
    """The numbers of pipelines by name. Those that each worker starts with have the numbers 0, 1, …."""

    def __init__(self, names: Iterable[Hashable]) -> None:
        self._first = {name: number for number, name in enumerate(names)}
        self._next_number = len(self._first)
        # The one used last comes last.
        self._loaded: dict[Hashable, _Loaded] = {}
        # Those that workers have dropped, and replacements get for their classes.
        self._dropped: list[_Loaded] = []

    def find(self, name: Hashable) -> int | None:
        """Returns the number of a pipeline, or None if the workers lack it."""
        if name in self._loaded:
            loaded = self._loaded[name] = self._loaded.pop(name)
            return loaded.message.number
        return self._first.get(name)

    def pack(self, pipeline: Pipeline, classes: ClassTable) -> tuple[list[memoryview], Load, bool]:
        """Returns the content of the file of a new pipeline, the message to each worker, and True if it has classes.

        These are new classes that cross by value with it. They are added to `classes`.
        """
        content, file, crossed = pack_pipelines([pipeline])
        number, num_known = self._next_number, len(classes)
        self._next_number += 1
        message = Load(number, file, classes.number(list(crossed)), variables_of([pipeline]))
        return content, message, len(classes) > num_known

    def vary(self, base: int, variant: Variant) -> Vary:
        """Returns the message to each worker about a new variant of a pipeline."""
        self._next_number += 1
        return Vary(self._next_number - 1, base, variant)

    def add(
        self, name: Hashable, message: Load | Vary, file: list[int], workers: Iterable[Worker], *, has_new: bool
    ) -> None:
        """Adds a pipeline, and sends it to the workers. They, and their replacements, share its file."""
        self._loaded[name] = loaded = _Loaded(message, file, has_new)
        _send(loaded, workers)

    def send_all(self, worker: Worker) -> None:
        """Sends a new worker the pipelines that it does not start with."""
        for loaded in [*self._dropped, *self._loaded.values()]:
            _send(loaded, [worker])
        for loaded in self._dropped:
            worker.channel.send(Unload(loaded.message.number))

    def forget(self, name: Hashable) -> None:
        """Forgets a pipeline that workers may lack, because sending it has failed."""
        if (loaded := self._loaded.pop(name, None)) is not None:
            self._drop(loaded)

    def drop_idle(self, in_use: Collection[int], workers: Collection[Worker]) -> None:
        """Drops the oldest pipelines, if more than MAX_IDLE_PIPELINES are not in use."""
        idle = [name for name, loaded in self._loaded.items() if loaded.message.number not in in_use]
        for name in idle[: max(0, len(idle) - MAX_IDLE_PIPELINES)]:
            loaded = self._loaded.pop(name)
            self._drop(loaded)
            for worker in workers:
                worker.channel.send(Unload(loaded.message.number))

    def _drop(self, loaded: _Loaded) -> None:
        if loaded.has_new_classes:
            self._dropped.append(loaded)
        else:
            close_all(loaded.file)


def _send(loaded: _Loaded, workers: Iterable[Worker]) -> None:
    # Closed by another thread that stops the pool.
    is_lost = isinstance(loaded.message, Load) and not loaded.file
    for worker in () if is_lost else workers:
        worker.channel.send(loaded.message, loaded.file)


EXIT_SECONDS = 2.0
"""The time to wait for the fork server's report of a worker's exit status."""


class Died(NamedTuple):
    """A worker has died. `exited` is None if the fork server sent no exit report."""

    exited: Exited | None


Event: TypeAlias = Result | PipelineFailed | Died


@final
class Pool:
    """Worker processes that all run the same pipelines, to which others may be added.

    Args:
        num_workers: the number of workers to begin with, see `resize`; None for those of the options.
    """

    def __init__(
        self,
        pipelines: Mapping[Hashable, Pipeline],
        workers: MultiprocessingOptions,
        reading: ReadOptions,
        context: LaunchContext,
        *,
        settings: ProcessSettings,
        num_workers: int | None = None,
    ) -> None:
        self._options = workers
        self._num_workers = workers.num_workers if num_workers is None else num_workers
        self.max_bytes = buffer_budget(reading.max_buffer_bytes)
        self.flight_bytes = min(self.max_bytes, flight_budget(reading.max_buffer_bytes))
        self.max_reads = max(1, affordable_threads(reading.num_threads))
        self._num_threads = reading.num_threads
        self._numbers = itertools.count()
        self._pipelines = LoadedPipelines(pipelines)
        self.call_numbers: Iterator[int] = itertools.count()
        self.settings = settings
        self._state = PoolProcesses(context, settings.environment)
        # Those that are not known to be dead.
        self.workers = self._state.workers
        self._finalizer = weakref.finalize(self, PoolProcesses.shut_down, self._state)
        try:
            with explained_limits(self._options.num_workers):
                # First, because a new fork server takes longest: meanwhile, the pipelines are pickled.
                in_fresh_thread(self._state.connect)
                self._trainer = Trainer(os.getpid(), settings, code_digests(), self._state.units)
                chunks, self._pipeline_file, self.classes = pack_pipelines(
                    list(pipelines.values()), workers.worker_init_fn
                )
                in_fresh_thread(functools.partial(self._state.store, chunks))
                self._arena_bytes = arena_size(
                    min(memory_budget(), reading.max_buffer_bytes or sys.maxsize), workers.num_workers
                )
                in_fresh_thread(self._fork_missing)
        except BaseException:
            self.stop()
            raise

    @property
    def is_ours(self) -> bool:
        return self._state.owner == os.getpid()

    @property
    def is_usable(self) -> bool:
        return self.is_ours and not self._state.is_shut_down

    def load(self, name: Hashable, pipeline: Pipeline, in_use: Callable[[], Collection[int]]) -> int:
        """Returns the number of a pipeline, which the workers get if they lack it. Those of the same name are the same.

        Of the pipelines that are not `in_use`, which may get no calls, the oldest are dropped.
        """
        number = self._pipelines.find(name)
        if number is None:
            content, message, has_new = self._pipelines.pack(pipeline, self.classes)
            number = self._send(name, message, content, has_new=has_new)
            self._pipelines.drop_idle({*in_use(), number}, self.workers)
        return number

    def vary(self, variant: Variant) -> int:
        """Returns the number of a variant of the first pipeline, which the workers get if they lack it."""
        name = Vary, variant
        number = 0 if variant is None else self._pipelines.find(name)
        if number is None:
            number = self._send(name, self._pipelines.vary(0, variant), (), has_new=False)
            self._pipelines.drop_idle({number}, self.workers)
        return number

    def _send(self, name: Hashable, message: Load | Vary, content: Sequence[memoryview], *, has_new: bool) -> int:
        try:
            with explained_limits(self._options.num_workers):
                in_fresh_thread(functools.partial(self._add, name, message, content, has_new=has_new))
        except BaseException:
            self._pipelines.forget(name)
            raise
        return message.number

    @property
    def has_fork_server(self) -> bool:
        """False once the fork server has died, until `restart`."""
        return self._control.is_open

    @property
    def are_ready(self) -> bool:
        """True if there are as many workers as wanted, and all have read their pipelines."""
        workers = self.workers
        return len(workers) >= self._num_workers and all(worker.is_ready for worker in workers)

    def resize(self, num_workers: int) -> None:
        """Changes the number of workers. New ones get calls once they are ready, and others end after their calls.

        Raises:
            OSError: the system has no process left. The number is unchanged.
        """
        if num_workers == self._num_workers:
            return
        before, self._num_workers = self._num_workers, num_workers
        known = list(self.workers)
        for number, worker in enumerate(known):
            worker.is_leaving = number >= num_workers
        try:
            with explained_limits(self._options.num_workers):
                in_fresh_thread(self._fork_missing)
        except OSError:
            self._num_workers = before
            raise
        finally:
            for worker in self.workers[len(known) :]:
                worker.is_extra = any(other.is_ready for other in known)

    def restart(self) -> None:
        self._state.stop()
        with explained_limits(self._options.num_workers):
            # A pipeline that kills its fork server again and again must not harm other pools.
            in_fresh_thread(functools.partial(self._state.connect, shared=False))
            in_fresh_thread(self._fork_missing)

    def replace(self, worker: Worker) -> None:
        self.kill(worker)
        self._state.release(worker)
        with explained_limits(self._options.num_workers):
            in_fresh_thread(self._fork_missing)

    def wait(self, seconds: float) -> Iterator[tuple[Worker, Event]]:
        """Waits up to `seconds` for an event, then yields all events that have arrived.

        If the fork server has died, and all workers with it, these are their last events.
        """
        if len(self.workers) != self._num_workers:
            self._adjust_number()
        poll = select.poll()
        control = self._control
        # Descriptors belong to workers now. The code below closes some, whose numbers may be reused.
        control_descriptor, watched = control.watch(poll), []
        for worker in self.workers:
            watched.append((worker, worker.channel.watch(poll), worker.handle))
            if worker.handle is not None:
                poll.register(worker.handle, select.POLLIN)
        begin = time.monotonic()
        ready = dict(poll.poll(seconds * 1000))
        waited = min(seconds, time.monotonic() - begin)
        if control_descriptor in ready:
            self._serve_fork_server()
        for worker, descriptor, handle in watched:
            worker.clock.passed(waited)
            flags = ready.get(descriptor, 0)
            if flags & select.POLLOUT:
                worker.channel.flush()
            # A worker without a handle: a process that it has started may keep its end of the channel open.
            has_exited = handle in ready or worker.exited is not None
            if flags & ~select.POLLOUT or has_exited:
                yield from self._receive_from(worker, has_exited=has_exited)
        if not control.is_open:
            for worker in list(self.workers):
                yield from self._handle(worker, worker.channel.receive_rest())

    def kill(self, worker: Worker) -> None:
        """Kills a worker and all processes that it has started."""
        if worker.pid is not None:
            in_fresh_thread(functools.partial(self._control.send, Kill(worker.pid)))

    @contextlib.contextmanager
    def open_crash_log(self, worker: Worker) -> Iterator[int]:
        """Yields a new descriptor of a worker's crash log, which another thread cannot close.

        Raises:
            ValueError: the worker is no longer in the pool.
        """

        def copy() -> int:
            with self._state.lock:
                if worker not in self._state.workers:
                    raise ValueError(f"Worker {worker.number} is no longer in the pool.")
                return os.dup(worker.crash_log)

        # Here, and for stacks, the caller holds no lock: a signal handler may call `next`, whose threads wait for it.
        crash_log = in_fresh_thread(copy)
        try:
            yield crash_log
        finally:
            os.close(crash_log)

    def request_stacks(self) -> dict[int, Worker]:
        """Makes all ready workers write their stacks, and returns these workers by process ID. Thread-safe."""

        def request() -> dict[int, Worker]:
            with self._state.lock:
                workers = {worker.pid: worker for worker in self.workers if worker.is_ready and worker.pid is not None}
                for worker in workers.values():
                    worker.request_stacks()
                return workers

        return in_fresh_thread(request)

    def stop(self) -> None:
        self._state.shut_down()
        self._finalizer.detach()

    @property
    def _control(self) -> Channel:
        control = self._state.control
        if control is None:
            raise ValueError(
                "The worker processes have stopped because the iterator was closed, possibly by another thread."
            )
        return control

    def _adjust_number(self) -> None:
        """Ends the workers that are leaving and have no calls, and starts those that could not be started earlier."""
        for worker in [worker for worker in self.workers if worker.is_leaving and not worker.calls]:
            # They end as at the end of the pool.
            in_fresh_thread(functools.partial(self._state.release, worker))
        if len(self.workers) < self._num_workers:
            with explained_limits(self._options.num_workers):
                in_fresh_thread(self._fork_missing)

    def _fork_missing(self) -> None:
        while len(self.workers) < self._num_workers:
            self._fork()

    def _fork(self) -> None:
        number = next(self._numbers)
        with contextlib.ExitStack() as always, contextlib.ExitStack() as on_failure:
            ours, theirs = socket.socketpair()
            on_failure.callback(ours.close)
            always.callback(theirs.close)
            arena = create_arena_file(self._arena_bytes)
            always.callback(os.close, arena)
            crash_log = create_crash_log()
            on_failure.callback(os.close, crash_log)
            index = first_free(worker.index for worker in self.workers)
            channel, view = Channel(ours, blocking=False), ArenaView(arena, self._arena_bytes)
            timeout = self._options.stall_timeout
            worker = Worker(number, index, channel, view, crash_log, stall_timeout=timeout)
            fork = Fork(
                number,
                index,
                self._options.num_workers,
                self._arena_bytes,
                self._num_threads,
                FORK_SERVERS.import_libraries,
                self._pipeline_file,
                self._trainer,
            )
            with self._state.lock:
                control = self._control
                # Registered before the process can exist, so a concurrent `stop` ends it as well.
                self._state.workers.append(worker)
                on_failure.pop_all()
                control.send(fork, [theirs.fileno(), arena, crash_log, self._state.pipelines])
                self._pipelines.send_all(worker)

    def _add(self, name: Hashable, message: Load | Vary, content: Sequence[memoryview], *, has_new: bool) -> None:
        with self._state.lock:
            file = self._state.store(content) if content else []
            self._pipelines.add(name, message, file, self.workers, has_new=has_new)

    def _receive_from(self, worker: Worker, *, has_exited: bool) -> Iterator[tuple[Worker, Event]]:
        messages = worker.channel.receive_rest() if has_exited else worker.channel.receive()
        yield from self._handle(worker, messages)
        if has_exited or not worker.channel.is_open:
            # Not killed here, because that would hide how it exits. If it still lives, `replace` kills it.
            self._wait_for_exit(worker)
            # Without the fork server, this is the death of the pool, not of a single worker.
            if self._control.is_open:
                yield worker, Died(worker.exited)

    def _wait_for_exit(self, worker: Worker) -> None:
        for seconds in wait_slices(EXIT_SECONDS):
            if worker.exited is not None or not self._control.is_open:
                break
            poll = select.poll()
            poll.register(self._control.fileno(), select.POLLIN)
            poll.poll(seconds * 1000)
            self._serve_fork_server()

    def _handle(self, worker: Worker, messages: Iterator[Any]) -> Iterator[tuple[Worker, Event]]:
        # An incomplete message is progress as well: it may be long, or the consumer may have been away for long.
        clock = worker.clock
        before = clock.waited, clock.is_reported
        clock.restart()
        for message in messages:
            if isinstance(message, Logged):
                # A call that logs for ever hangs, too, and the consumer has nothing else to do.
                begin = time.monotonic()
                clock.waited, clock.is_reported = before
                log_here(message)
                for other in self.workers:
                    other.clock.passed(time.monotonic() - begin)
                before = clock.waited, clock.is_reported
                continue
            clock.restart()
            before = 0.0, False
            if isinstance(message, Imported):
                self._compare_code(message)
                continue
            if isinstance(message, Ready):
                worker.is_ready = True
                # The report of the fork server may arrive later.
                worker.pid = message.pid
            elif isinstance(message, Result):
                worker.record_result(message.call)
                yield worker, message
            else:
                yield worker, message

    def _compare_code(self, module: Imported) -> None:
        """Raises a RuntimeError if a module of a worker has another content than in a worker before, or here since."""
        known = self._trainer.code.get(module.name) or code_digests().get(module.name, module.digest)
        self._trainer.code[module.name] = known
        if known != module.digest:
            raise changed(module.name, "its file")

    def _serve_fork_server(self) -> None:
        # An interrupt would lose the process handles that have arrived.
        in_fresh_thread(self._exchange)

    def _exchange(self) -> None:
        with self._state.lock, explained_limits(self._options.num_workers):
            self._control.flush()
            for message in self._control.receive():
                if isinstance(message, Exited):
                    for worker in self.workers:
                        if worker.pid == message.pid:
                            worker.exited = message
                elif isinstance(message, NotForked):
                    raise OSError(message.errno, f"Cannot fork a worker process: {os.strerror(message.errno)}")
                else:
                    self._adopt(message, self._control.take_descriptors())

    def _adopt(self, forked: Forked, handles: list[int]) -> None:
        worker = next((worker for worker in self.workers if worker.number == forked.number), None)
        if worker is None:
            # Replaced before it was forked.
            close_all(handles)
            self._control.send(Kill(forked.pid))
        else:
            worker.set_process(forked.pid, handles[0] if handles else None)
