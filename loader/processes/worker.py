"""The life of a worker process: take a call, make its outputs, send them, again.

            ┌──────────┐  pipeline read   ┌─────────┐  Task   ┌────────┐
    fork ──▶│ STARTING ├─────── Ready ───▶│ WAITING ├────────▶│ MAKING │
            └────┬─────┘                  └────┬────┘◀────────┴───┬────┘
                 │ Failed                      │       Result     │ the process dies: the parent sees the end of
                 ▼                             ▼ end of channel   ▼ the channel and gives the call to another
               exit                     source.close(), exit

Guarantees:
    * What a call makes is pickled before anything of it is announced: a worker never sends a Result and then fails.
    * Calls are made one after the other, in the order they come, and each is noted when it begins: so it is known which
      one a dead worker died in, if any.
    * A process that user code has forked never answers in the worker's name: it ends when the user's code returns.
    * It does not outlive the fork server, which does not outlive the parent: the kernel kills it, whatever it is doing.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
from typing import final

from millstream.loader.pipeline.elements import Elements, describe_origin
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.requests import Blocks, Request
from millstream.loader.processes.channel import Channel
from millstream.loader.processes.crash_log import note_call
from millstream.loader.processes.messages import Fork, PipelineFailed, Ready, Result, Task
from millstream.loader.threads.memory_budget import affordable_threads
from millstream.loader.threads.profiler import HAND_OVER, Profiler
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.threads.sliced_reading import SlicedReading
from millstream.loader.transport.arena import Allocator
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.payload import pack, pack_failure, unpicklable_parts
from millstream.loader.transport.pipeline_file import read_pipeline


def work(channel_descriptor: int, arena: int, crash_log: int, pipeline: int, fork: Fork) -> None:
    """Serves calls until the channel closes."""
    faulthandler.enable(crash_log)
    faulthandler.register(signal.SIGUSR1, crash_log)
    with contextlib.closing(Channel(socket.socket(fileno=channel_descriptor), blocking=True)) as channel:
        answer_calls(channel, arena, crash_log, pipeline, fork)


def answer_calls(channel: Channel, arena: int, crash_log: int, pipeline: int, fork: Fork) -> None:
    """Reads the pipeline and makes what is asked for, until the parent hangs up."""
    owner = os.getpid()
    try:
        read, classes = read_pipeline(pipeline, fork.pipeline)
        profiler = Profiler(read.labels)
        plan = Plan(read, profiler.timed)
        leave_if_forked(owner)
        allocator = Allocator(arena, fork.arena_bytes)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  (user classes do anything when unpickled, limits forbid anything)
        leave_if_forked(owner, status=1)
        channel.send(PipelineFailed(pack_failure(error, ClassTable())))
        return
    finally:
        os.close(pipeline)
    maker = Maker(plan, profiler, classes, allocator, fork.num_threads)
    channel.send(Ready())
    while channel.is_open:
        for message in channel.receive():
            note_call(crash_log, message.call)
            channel.send(maker.make(message))
            del message
    close = getattr(read.source, "close", None)
    if callable(close):
        close()


@final
class Maker:
    """Makes the outputs of calls in this process."""

    def __init__(
        self, plan: Plan, profiler: Profiler, classes: ClassTable, allocator: Allocator, num_threads: int
    ) -> None:
        self._plan = plan
        self._profiler = profiler
        self._classes = classes
        self._allocator = allocator
        self._readers = ReaderThreads(affordable_threads(num_threads))
        self._process = os.getpid()

    def make(self, message: Task) -> Result:
        """Returns the answer to a call."""
        for offset in message.released:
            self._allocator.take_back(offset)
        start = time.perf_counter()
        try:
            run = self._perform(message)
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001  (whatever it is, the consumer gets it at its turn)
            run = Elements.failed(error)
        leave_if_forked(self._process, status=int(run.error is not None))
        if isinstance(run.error, SystemExit):
            # Caught in a read thread: to leave is to leave, whichever thread runs the user's code.
            raise run.error
        if run.error is not None:
            explain_debugger(run.error)
        begin = time.perf_counter()
        try:
            payload = pack(run, self._allocator, self._classes)
        except Exception as error:  # noqa: BLE001  (user objects may do anything when pickled)
            run = without_unpicklable(run, error)
            payload = pack(run, self._allocator, self._classes)
        failure = None if run.error is None else pack_failure(run.error, self._classes)
        end = time.perf_counter()
        self._profiler.add(HAND_OVER, end - begin)
        return Result(message.call, payload, failure, end - start, self._profiler.take(), start)

    def _perform(self, task: Task) -> Elements:
        request: Request = (
            self._classes.loads(task.request) if isinstance(task.request, bytes) else Blocks(*task.request)
        )
        in_one = self._readers.size == 0 or self._plan.batched_source
        prepare_blocks = None if in_one else SlicedReading(self._plan, self._readers).prepare_blocks
        return self._plan.make(request, self._allocator.allocate, prepare_blocks)


def leave_if_forked(owner: int, status: int = 0) -> None:
    """Ends a process that user code has forked, and that returned from it: the worker alone answers its parent."""
    if os.getpid() != owner:
        os._exit(status)


def explain_debugger(error: BaseException) -> None:
    """Adds to the error of a debugger that found no terminal how a pipeline can be debugged."""
    debugger = sys.modules.get("bdb")
    if debugger is not None and isinstance(error, debugger.BdbQuit):
        error.add_note(
            "millstream: a worker process has no terminal for a debugger. To debug, use worker_count=0 and "
            "read_options=ReadOptions(num_threads=0)."
        )


def without_unpicklable(run: Elements, error: BaseException) -> Elements:
    """Returns a run up to its first element that cannot be pickled, and an error that names what in it cannot."""
    for row, value in enumerate(run.values):
        if parts := unpicklable_parts(value):
            refusal = TypeError(
                f"The pipeline's output cannot be sent from a worker process, since not all of it can be pickled: "
                f"{'; '.join(parts)}. "
                "Make it an array, a number or a string in an operation, or use worker_count=0."
            )
            refusal.add_note(f"millstream: at {describe_origin(run.origins, row)}.")
            return Elements(run.values[:row], run.origins.take(slice(row)), refusal)
    return Elements.failed(error)
