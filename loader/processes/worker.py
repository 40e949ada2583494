"""The life of a worker process: take a call, make its outputs, send them, again.

            ┌──────────┐  pipeline read   ┌─────────┐  Task   ┌────────┐
    fork ──▶│ STARTING ├─────── Ready ───▶│ WAITING ├────────▶│ MAKING │
            └────┬─────┘                  └────┬────┘◀────────┴───┬────┘
                 │ Failed                      │       Result     │ the process dies: the parent sees the end of
                 ▼                             ▼ end of channel   ▼ the channel and gives the call to another
               exit                     source.close(), exit

Guarantees:
    * Calls are made one after the other, in the order they come. Where the parent asks for it, the records of the next
      ones are read meanwhile, in threads (see `task_queue`).
    * Each call is noted when it, or its read, begins: so it is known in which ones a dead worker may have died.
    * It does not outlive the fork server, which does not outlive the parent: the kernel kills it, whatever it is doing.
"""

import contextlib
import faulthandler
import functools
import os
import signal
import socket

from millstream.loader.pipeline.plan import Plan
from millstream.loader.processes.channel import Channel
from millstream.loader.processes.crash_log import note_call
from millstream.loader.processes.messages import Fork, PipelineFailed, Ready, Result
from millstream.loader.processes.task_queue import TaskQueue
from millstream.loader.threads.memory_budget import affordable_threads
from millstream.loader.threads.profiler import Profiler
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.transport.arena import Allocator
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.payload import pack, pack_failure
from millstream.loader.transport.pipeline_file import read_pipelines
from millstream.loader.workers.call_runner import CallRunner, leave_if_forked


def work(channel_descriptor: int, arena: int, crash_log: int, pipeline: int, fork: Fork) -> None:
    """Serves calls until the channel closes."""
    faulthandler.enable(crash_log)
    faulthandler.register(signal.SIGUSR1, crash_log)
    with contextlib.closing(Channel(socket.socket(fileno=channel_descriptor), blocking=True)) as channel:
        answer_calls(channel, arena, crash_log, pipeline, fork)


def answer_calls(channel: Channel, arena: int, crash_log: int, pipeline: int, fork: Fork) -> None:
    """Reads the pipelines and makes what is asked for, until the parent hangs up."""
    owner = os.getpid()
    try:
        pipelines, classes = read_pipelines(pipeline, fork.pipeline)
        profilers = [Profiler(one.labels) for one in pipelines]
        plans = [Plan(one, own.timed) for one, own in zip(pipelines, profilers, strict=True)]
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
    readers = ReaderThreads(affordable_threads(fork.num_threads))
    makers = [
        CallRunner(
            plan,
            profiler,
            classes,
            readers=readers,
            allocate=allocator.allocate,
            pack=lambda run: pack(run, allocator, classes),
        )
        for plan, profiler in zip(plans, profilers, strict=True)
    ]
    channel.send(Ready(owner))
    with contextlib.closing(TaskQueue(channel, makers, functools.partial(note_call, crash_log))) as tasks:
        while (ready := tasks.next(allocator.take_back)) is not None:
            task, reading = ready
            channel.send(Result(task.call, *makers[task.pipeline].make(task.request, reading)))
            del task, ready, reading
    for source in {id(one.source): one.source for one in pipelines}.values():
        close = getattr(source, "close", None)
        if callable(close):
            close()
