"""The loop of a worker process: receive a call, compute its outputs, send them.

            ┌──────────┐  pipeline read   ┌─────────┐  Task   ┌─────────┐
    fork ──▶│ STARTING ├─────── Ready ───▶│ WAITING ├────────▶│ RUNNING │
            └────┬─────┘                  └────┬────┘◀────────┴───┬─────┘
                 │ PipelineFailed              │       Result     │ the process dies: the parent sees the end of
                 ▼                             ▼ end of channel   ▼ the channel, and dispatches the call again
               exit                     source.close(), exit

A worker runs one call at a time. While a read waits for storage, later ones can wait as well. Threads therefore read
the records of the tasks received, as many at a time as the parent allows (`TaskQueue`). The worker takes the tasks in
order, each when its records are there.

Guarantees:
    * Tasks run in the order received. One that allows one read is alone: it runs unread, after all tasks before it have
      ended, and no later task begins before it has.
    * A pipeline is loaded as soon as it arrives, and unloaded when all tasks before have run.
    * A call is recorded when it, or its read, begins. If the worker dies, the parent knows the calls to blame.
    * Only the worker's thread receives. Reading threads write a byte to a pipe to wake it.
    * A worker does not outlive the fork server, which does not outlive the parent: the kernel kills it in any state.
"""

import contextlib
import faulthandler
import functools
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias, final

from millstream.core.warn import log_warning
from millstream.loader.pipeline.elements import Elements, Origins, add_note
from millstream.loader.pipeline.pipeline import Pipeline, Variant
from millstream.loader.processes.channel import (
    Channel,
    Fork,
    Imported,
    Load,
    PipelineFailed,
    Ready,
    Result,
    Task,
    Unload,
    Vary,
)
from millstream.loader.processes.log_records import WorkerLog
from millstream.loader.processes.process_control import open_handle, worker_name
from millstream.loader.processes.process_report import record_call
from millstream.loader.threads.options import affordable_threads
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.transport.arena import Allocator
from millstream.loader.transport.payload import Payload, pack, pack_failure
from millstream.loader.transport.pickling import ClassTable
from millstream.loader.transport.pipeline_file import read_pipelines
from millstream.loader.workers.call_runner import AdvanceRead, CallResult, CallRunner, leave_if_forked, runner_of_epochs
from millstream.loader.workers.process_settings import apply_variables


def work(channel_descriptor: int, arena: int, crash_log: int, pipeline: int, fork: Fork) -> None:
    """Runs calls until the channel closes."""
    faulthandler.enable(crash_log)
    faulthandler.register(signal.SIGUSR1, crash_log)
    with contextlib.closing(Channel(socket.socket(fileno=channel_descriptor), blocking=True)) as channel:
        answer_calls(channel, arena, crash_log, pipeline, fork)


def answer_calls(channel: Channel, arena: int, crash_log: int, pipeline: int, fork: Fork) -> None:
    owner, log = os.getpid(), WorkerLog(channel, worker_name(fork.number))
    try:
        pipelines = WorkerPipelines(pipeline, arena, fork, log)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  (unpickling user classes may raise anything)
        leave_if_forked(owner, status=1)
        log.send(PipelineFailed(pack_failure(error, ClassTable())))
        return
    leave_if_forked(owner)
    log.send(Ready(owner))
    record_begun = functools.partial(record_call, crash_log)
    tasks = TaskQueue(channel, pipelines, record_begun)
    while (ready := tasks.next(pipelines.allocator.take_back)) is not None:
        task, reading = ready
        runner = pipelines.runner(task.pipeline)
        log.send(Result(task.call, tuple(runner.make(task.request, reading))))
        # Memory of this call must be free before the next one is waited for.
        del task, ready, reading
    pipelines.close()


@final
class FailingRunner:
    """Answers the calls of a pipeline that could not be read, or whose epoch could not be begun, with the error."""

    def __init__(self, error: BaseException, nothing: Payload, classes: ClassTable) -> None:
        self._error = error
        self._nothing = nothing
        self._classes = classes

    def read(self, _: tuple[int, int, int], done: Callable[[], object]) -> AdvanceRead:
        reading = AdvanceRead()
        reading.is_done = True
        done()
        return reading

    def make(self, *_: object) -> CallResult[Payload]:
        failure = pack_failure(self._error, self._classes)
        return CallResult(self._nothing, failure, 0.0, 0.0, 0.0, (), time.perf_counter(), ())


Runner: TypeAlias = CallRunner[Payload] | FailingRunner
"""Computes the outputs of the calls of one pipeline."""


@final
class WorkerPipelines:
    """The pipelines of a worker, by their numbers, compiled to call runners."""

    def __init__(self, descriptor: int, arena: int, fork: Fork, log: WorkerLog) -> None:
        open_parent = functools.partial(open_handle, fork.trainer.pid)
        trainer, report = fork.trainer, lambda *module: log.post(Imported(*module))
        with (
            _reading(descriptor),
            trainer.served(worker_name(fork.number), open_parent, report) as self._imports,
        ):
            pipelines, init, self._classes = read_pipelines(descriptor, fork.pipeline)
        log.install()
        if init is not None:
            with _noting("called worker_init_fn"):
                init(fork.worker_index, fork.num_workers)
        log.keep_root()
        self.allocator = Allocator(arena, fork.arena_bytes)
        self._readers = ReaderThreads(affordable_threads(fork.num_threads))
        self._pipelines: dict[int, Pipeline] = {}
        self._runners: dict[int, Callable[[Variant], Runner]] = {}
        # By number: the number of the pipeline that it is a variant of.
        self._variants: dict[int, tuple[int, Variant]] = {}
        for number, pipeline in enumerate(pipelines):
            self._add(number, pipeline)

    def load(self, message: Load, descriptor: int) -> None:
        """Adds a pipeline, and closes its file. If it cannot be read, that is the error of all its calls."""
        try:
            with _reading(descriptor):
                (pipeline,), _, classes = read_pipelines(descriptor, message.file)
                apply_variables(message.variables, self._imports)
                self._classes.define(dict(zip(message.classes, classes, strict=True)))
                self._add(message.number, pipeline)
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001  (as above)
            failing = self._failing(error)
            self._runners[message.number] = lambda _: failing

    def vary(self, message: Vary) -> None:
        self._variants[message.number] = message.base, message.variant

    def unload(self, number: int) -> None:
        """Drops a pipeline, and closes its source if no other has it."""
        if self._variants.pop(number, None) is not None:
            return
        del self._runners[number]
        pipeline = self._pipelines.pop(number, None)
        if pipeline is not None and not any(pipeline.source is other.source for other in self._pipelines.values()):
            close_source(pipeline)

    def runner(self, number: int) -> Runner:
        base, variant = self._variants.get(number, (number, None))
        try:
            return self._runners[base](variant)
        except Exception as error:  # noqa: BLE001  (the sampler of an epoch is the user's)
            return self._failing(_noted(error, f"began epoch {variant}"))

    def close(self) -> None:
        for number in list(self._pipelines):
            self.unload(number)

    def _failing(self, error: BaseException) -> FailingRunner:
        nothing = pack(Elements([], Origins.none()), self.allocator, self._classes)
        return FailingRunner(error, nothing, self._classes)

    def _add(self, number: int, pipeline: Pipeline) -> None:
        self._pipelines[number] = pipeline
        self._runners[number] = runner_of_epochs(
            pipeline,
            self._classes,
            readers=self._readers,
            allocate=self.allocator.allocate,
            pack=functools.partial(pack, allocator=self.allocator, classes=self._classes),
        )


@contextlib.contextmanager
def _reading(descriptor: int) -> Iterator[None]:
    """Closes a file after pipelines were read from it."""
    try:
        with _noting("unpickled the pipeline"):
            yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _noting(doing: str) -> Iterator[None]:
    """Adds a note of what the worker was doing to an error of the user's code in the block."""
    try:
        yield
    except BaseException as error:
        _noted(error, doing)
        raise


def _noted(error: BaseException, doing: str) -> BaseException:
    add_note(error, f"millstream: a worker process raised this while it {doing}.")
    return error


def close_source(pipeline: Pipeline) -> None:
    """Closes a source that can be closed. Its error is logged: other pipelines, or the worker's end, must not fail."""
    close = getattr(pipeline.source, "close", None)
    if callable(close):
        try:
            close()
        except Exception as error:  # noqa: BLE001  (the user's)
            log_warning(f"close() of {type(pipeline.source).__name__} raised {type(error).__name__}: {error}")


_WAKE_BYTES = 4096


@final
class TaskQueue:
    """Receives tasks, has their records read in advance, and returns the tasks in order."""

    def __init__(
        self,
        channel: Channel,
        pipelines: WorkerPipelines,
        record_begun: Callable[[int], None],
    ) -> None:
        self._channel = channel
        self._pipelines = pipelines
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

    def next(self, release: Callable[[int], None]) -> tuple[Task, AdvanceRead | None] | None:
        """Returns the next task, and its records if they were read in advance. Waits until these are there.

        Returns None when the parent has closed the channel.

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
                    self._pipelines.load(message, file)
                    continue
                if isinstance(message, Vary):
                    self._pipelines.vary(message)
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
                self._pipelines.unload(task.number)
                continue
            if isinstance(task.request, bytes) or task.num_reads == 1 or len(self._reading) >= task.num_reads:
                return
            self._unread.popleft()
            self._record_begun(task.call)
            runner = self._pipelines.runner(task.pipeline)
            self._reading.append((task, runner.read(task.request, self._wake_up)))

    def _wake_up(self) -> None:
        # If the pipe is full, it wakes the worker already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")
