"""The loop of a worker process: receive a call, compute its outputs, send them.

            ┌──────────┐  pipeline read   ┌─────────┐  Task   ┌─────────┐
    fork ──▶│ STARTING ├─────── Ready ───▶│ WAITING ├────────▶│ RUNNING │
            └────┬─────┘                  └────┬────┘◀────────┴───┬─────┘
                 │ PipelineFailed              │       Result     │ the process dies: the parent sees the end of
                 ▼                             ▼ end of channel   ▼ the channel, and dispatches the call again
               exit                     source.close(), exit

Guarantees:
    * Calls run one after another, in the order received. If the parent asks for it, the records of later calls are read
      meanwhile, in threads (see `task_queue`).
    * A running worker gets further pipelines and drops those that have ended, between two calls.
    * A call is recorded when it, or its read, begins. If the worker dies, the parent knows the calls to blame.
    * A worker does not outlive the fork server, which does not outlive the parent: the kernel kills it in any state.
"""

import contextlib
import faulthandler
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias, final

from millstream.core.warn import log_warning
from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.pipeline import Pipeline, Variant
from millstream.loader.processes.channel import Channel
from millstream.loader.processes.log_records import WorkerLog
from millstream.loader.processes.messages import Fork, Imported, Load, PipelineFailed, Ready, Result
from millstream.loader.processes.process_control import open_handle, worker_name
from millstream.loader.processes.process_report import record_call
from millstream.loader.processes.task_queue import TaskQueue
from millstream.loader.threads.options import affordable_threads
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.transport.arena import Allocator
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.payload import Payload, pack, pack_failure
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
        with _reading(pipeline):
            pipelines = WorkerPipelines(pipeline, arena, fork, log)
    except PipelineNotRead as failed:
        leave_if_forked(owner, status=1)
        log.send(PipelineFailed(pack_failure(failed.error, ClassTable())))
        return
    leave_if_forked(owner)
    log.send(Ready(owner))
    record_begun = functools.partial(record_call, crash_log)
    tasks = TaskQueue(channel, pipelines.runner, record_begun, pipelines.load, pipelines.unload)
    while (ready := tasks.next(pipelines.allocator.take_back)) is not None:
        task, reading = ready
        runner = pipelines.runner(task.pipeline, task.variant)
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


class PipelineNotRead(Exception):  # noqa: N818  (internal)
    """A pipeline could not be read, or begun. The user's error gets a note of what the worker was `doing`."""

    def __init__(self, error: BaseException, doing: str) -> None:
        super().__init__()
        error.add_note(f"millstream: a worker process raised this while it {doing}.")
        self.error = error


@final
class WorkerPipelines:
    """The pipelines of a worker, by their numbers, compiled to call runners."""

    def __init__(self, descriptor: int, arena: int, fork: Fork, log: WorkerLog) -> None:
        open_parent = functools.partial(open_handle, fork.trainer.pid)
        trainer, report = fork.trainer, lambda *module: log.post(Imported(*module))
        with trainer.served(worker_name(fork.number), open_parent, report) as self._imports:
            pipelines, self._classes = read_pipelines(descriptor, fork.pipeline)
        log.install()
        for pipeline in pipelines:
            if pipeline.worker_init_fn is not None:
                with _noting("called worker_init_fn"):
                    pipeline.worker_init_fn(fork.worker_index, fork.num_workers)
        log.keep_root()
        self.allocator = Allocator(arena, fork.arena_bytes)
        self._readers = ReaderThreads(affordable_threads(fork.num_threads))
        self._pipelines: dict[int, Pipeline] = {}
        self._runners: dict[int, Callable[[Variant], Runner]] = {}
        for number, pipeline in enumerate(pipelines):
            self._add(number, pipeline)

    def load(self, message: Load, descriptor: int) -> None:
        """Adds a pipeline, and closes its file. If it cannot be read, that is the error of all its calls."""
        try:
            with _reading(descriptor):
                (pipeline,), classes = read_pipelines(descriptor, message.file)
                apply_variables(message.variables, self._imports)
                self._classes.define(dict(zip(message.classes, classes, strict=True)))
                self._add(message.number, pipeline)
        except PipelineNotRead as failed:
            failing = self._failing(failed)
            self._runners[message.number] = lambda _: failing

    def unload(self, number: int) -> None:
        """Drops a pipeline, and closes its source if no other has it."""
        del self._runners[number]
        pipeline = self._pipelines.pop(number, None)
        if pipeline is not None and not any(pipeline.source is other.source for other in self._pipelines.values()):
            close_source(pipeline)

    def runner(self, number: int, variant: Variant) -> Runner:
        """Returns the call runner of a pipeline, or of a variant of it."""
        try:
            return self._runners[number](variant)
        except Exception as error:  # noqa: BLE001  (the sampler of an epoch is the user's)
            return self._failing(PipelineNotRead(error, f"began epoch {variant}"))

    def close(self) -> None:
        for number in list(self._pipelines):
            self.unload(number)

    def _failing(self, failed: PipelineNotRead) -> FailingRunner:
        nothing = pack(Elements([], Origins.none()), self.allocator, self._classes)
        return FailingRunner(failed.error, nothing, self._classes)

    def _add(self, number: int, pipeline: Pipeline) -> None:
        self._pipelines[number] = pipeline
        self._runners[number] = runner_of_epochs(
            pipeline,
            self._classes,
            readers=self._readers,
            allocate=self.allocator.allocate,
            pack=lambda run: pack(run, self.allocator, self._classes),
        )


@contextlib.contextmanager
def _reading(descriptor: int) -> Iterator[None]:
    """Closes a file after pipelines were read from it. Unpickling user classes may raise anything."""
    try:
        with _noting("unpickled the pipeline"):
            yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _noting(doing: str) -> Iterator[None]:
    """Raises any error of the user's code in the block as a PipelineNotRead, but for SystemExit."""
    try:
        yield
    except (SystemExit, PipelineNotRead):
        raise
    except BaseException as error:
        raise PipelineNotRead(error, doing) from error


def close_source(pipeline: Pipeline) -> None:
    """Closes a source that can be closed. Its error is logged: other pipelines, or the worker's end, must not fail."""
    close = getattr(pipeline.source, "close", None)
    if callable(close):
        try:
            close()
        except Exception as error:  # noqa: BLE001  (the user's)
            log_warning(f"close() of {type(pipeline.source).__name__} raised {type(error).__name__}: {error}")
