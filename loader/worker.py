"""The life of a worker process: take a call, make its outputs, send them, again.

            ┌──────────┐  pipeline read   ┌─────────┐  Make   ┌────────┐
    fork ──▶│ STARTING ├─────── Ready ───▶│ WAITING ├────────▶│ MAKING │
            └────┬─────┘                  └────┬────┘◀────────┴───┬────┘
                 │ Broken                      │        Made      │ the process dies: the parent sees the end of
                 ▼                             ▼ end of channel   ▼ the channel and gives the call to another
               exit                     source.close(), exit

Guarantees:
    * What a call makes is pickled before anything of it is announced: a worker never says Made and then fails.
    * Calls are made one after the other, in the order they come, and each is noted when it begins: so it is known which
      one a dead worker died in, if any.
    * A process that user code has forked never answers in the worker's name: it ends when the user's code returns.
    * It does not outlive the zygote, which does not outlive the parent: the kernel kills it, whatever it is doing.
"""

import contextlib
import faulthandler
import os
import queue
import signal
import socket
import sys
import time
from typing import final

from millstream.loader.arena import Allocator
from millstream.loader.channel import Channel
from millstream.loader.class_table import ClassTable
from millstream.loader.crew import Crew, SlicedPreparation
from millstream.loader.elements import Elements
from millstream.loader.last_words import note_call
from millstream.loader.memory_budget import affordable_threads
from millstream.loader.messages import Broken, Fork, Made, Make, MakeGroup, Ready
from millstream.loader.pipeline_file import read_pipeline
from millstream.loader.plan import Plan
from millstream.loader.requests import Group, Request, Units
from millstream.loader.stage_clock import HAND_OVER
from millstream.loader.transport import pack, pack_failure, unpicklable_parts


def work(channel_descriptor: int, arena: int, last_words: int, pipeline: int, fork: Fork) -> None:
    """Lives the life of a worker, from its birth in the zygote to the end of its channel."""
    faulthandler.enable(last_words)
    faulthandler.register(signal.SIGUSR1, last_words)
    with contextlib.closing(Channel(socket.socket(fileno=channel_descriptor), blocking=True)) as channel:
        answer_calls(channel, arena, last_words, pipeline, fork)


def answer_calls(channel: Channel, arena: int, last_words: int, pipeline: int, fork: Fork) -> None:
    """Reads the pipeline and makes what is asked for, until the parent hangs up."""
    owner = os.getpid()
    try:
        plan, classes = read_pipeline(pipeline, fork.pipeline)
        leave_if_forked(owner)
        allocator = Allocator(arena, fork.arena_bytes)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  (user classes do anything when unpickled, limits forbid anything)
        leave_if_forked(owner, status=1)
        channel.send(Broken(pack_failure(error, ClassTable())))
        return
    finally:
        os.close(pipeline)
    maker = Maker(plan, classes, allocator, fork.num_threads)
    channel.send(Ready())
    while channel.is_open:
        for message in channel.receive():
            note_call(last_words, message.call)
            channel.send(maker.make(message))
            del message
    close = getattr(plan.source, "close", None)
    if callable(close):
        close()


@final
class Maker:
    """Makes the outputs of calls in this process."""

    def __init__(self, plan: Plan, classes: ClassTable, allocator: Allocator, num_threads: int) -> None:
        self._plan = plan
        self._classes = classes
        self._allocator = allocator
        self._crew = Crew(affordable_threads(num_threads))
        self._process = os.getpid()

    def make(self, message: Make) -> Made:
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
            parcel = pack(run, self._allocator, self._classes)
        except Exception as error:  # noqa: BLE001  (user objects may do anything when pickled)
            run = without_unpicklable(run, error)
            parcel = pack(run, self._allocator, self._classes)
        failure = None if run.error is None else pack_failure(run.error, self._classes)
        end = time.perf_counter()
        clock = self._plan.clock
        clock.add(HAND_OVER, end - begin)
        return Made(message.call, parcel, failure, end - start, clock.take())

    def _perform(self, call: Make) -> Elements:
        request: Request
        if isinstance(call, MakeGroup):
            request = Group(call.phase, self._classes.loads(call.elements))
        else:
            request = Units(call.start, call.stop)
        in_one = self._crew.size == 0 or self._plan.batched_source
        return self._plan.make(request, self._allocator.allocate, None if in_one else self._prepare_in_slices)

    def _prepare_in_slices(self, start: int, stop: int) -> Elements:
        prepared: queue.SimpleQueue[tuple[Elements, float]] = queue.SimpleQueue()
        SlicedPreparation(self._plan, Units(start, stop), self._crew, prepared.put).begin()
        return prepared.get()[0]


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
            key, position = run.origins.record_key[row], run.origins.position[row]
            refusal.add_note(f"millstream: at record key {key} (position {position}).")
            return Elements(run.values[:row], run.origins.take(slice(row)), refusal)
    return Elements.failed(error)
