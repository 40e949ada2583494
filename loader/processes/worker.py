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
    * A call is recorded when it, or its read, begins. If the worker dies, the parent knows the calls to blame.
    * A worker does not outlive the fork server, which does not outlive the parent: the kernel kills it in any state.
"""

import contextlib
import faulthandler
import functools
import os
import signal
import socket

from millstream.loader.pipeline.plan import Plan
from millstream.loader.processes.channel import Channel
from millstream.loader.processes.crash_log import record_call
from millstream.loader.processes.messages import Fork, PipelineFailed, Ready, Result
from millstream.loader.processes.task_queue import TaskQueue
from millstream.loader.threads.memory_budget import affordable_threads
from millstream.loader.threads.profiler import Profiler
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.transport.arena import Allocator
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.payload import Payload, pack, pack_failure
from millstream.loader.transport.pipeline_file import read_pipelines
from millstream.loader.workers.call_runner import MAX_EPOCHS, CallRunner, leave_if_forked


def work(channel_descriptor: int, arena: int, crash_log: int, pipeline: int, fork: Fork) -> None:
    """Runs calls until the channel closes."""
    faulthandler.enable(crash_log)
    faulthandler.register(signal.SIGUSR1, crash_log)
    with contextlib.closing(Channel(socket.socket(fileno=channel_descriptor), blocking=True)) as channel:
        answer_calls(channel, arena, crash_log, pipeline, fork)


def answer_calls(channel: Channel, arena: int, crash_log: int, pipeline: int, fork: Fork) -> None:
    """Reads the pipelines and runs calls until the parent closes the channel."""
    owner = os.getpid()
    try:
        pipelines, classes = read_pipelines(pipeline, fork.pipeline)
        for one in pipelines:
            if one.worker_init_fn is not None:
                one.worker_init_fn(fork.worker_index, fork.num_workers)
        allocator = Allocator(arena, fork.arena_bytes)
        readers = ReaderThreads(affordable_threads(fork.num_threads))
        profilers = [Profiler(one.labels, measures_costs=one.measures_costs) for one in pipelines]

        @functools.lru_cache(maxsize=len(pipelines) + MAX_EPOCHS)
        def runner_of(number: int, epoch: int | None) -> CallRunner[Payload]:
            whole, profiler = pipelines[number], profilers[number]
            plan = Plan(whole if epoch is None else whole.of_epoch(epoch), profiler.timed)
            return CallRunner(
                plan,
                profiler,
                classes,
                readers=readers,
                allocate=allocator.allocate,
                pack=lambda run: pack(run, allocator, classes),
            )

        for number in range(len(pipelines)):
            runner_of(number, None)
        leave_if_forked(owner)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  (unpickling user classes may raise anything, and so may limits)
        leave_if_forked(owner, status=1)
        channel.send(PipelineFailed(pack_failure(error, ClassTable())))
        return
    finally:
        os.close(pipeline)
    channel.send(Ready(owner))
    with contextlib.closing(TaskQueue(channel, runner_of, functools.partial(record_call, crash_log))) as tasks:
        while (ready := tasks.next(allocator.take_back)) is not None:
            task, reading = ready
            runner = runner_of(task.pipeline, task.epoch)
            channel.send(Result(task.call, tuple(runner.make(task.request, reading))))
            del task, ready, reading
    for source in {id(pipeline.source): pipeline.source for pipeline in pipelines}.values():
        close = getattr(source, "close", None)
        if callable(close):
            close()
