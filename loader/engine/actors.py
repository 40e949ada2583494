"""Ray actors as a place, and the reactions to their deaths and stalls.

Guarantees, in addition to those of all workers:
    * A call with which an actor has died runs next in an actor without other calls, so that another death can be
      attributed to it.
    * A call is hardly to blame for the death of a node. It is given up only after several.
"""

import functools
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, final

import numpy as np

from millstream.core.warn import log_warning
from millstream.errors import WorkerDiedError, WorkerStalledError
from millstream.loader.cluster.actor import Actor, Answer, CallFailed, Died, Event, Packed, PipelineFailed
from millstream.loader.cluster.actor_pool import ActorPool
from millstream.loader.cluster.options import RayWorkers
from millstream.loader.engine.places import Here
from millstream.loader.engine.workers import Workers
from millstream.loader.measuring import HAND_OVER
from millstream.loader.pipeline.calls import Blocks, Call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.transport.payload import copied, from_columns, unpack_failure
from millstream.loader.transport.pickling import ClassTable

if TYPE_CHECKING:
    from millstream.loader.pipeline.pipeline import Variant

GUILT_OF_LOST = 0.25
"""The blame of a call for the death of its actor's node, or for the loss of its outputs."""

FIRST_TRACK = 1
"""The number of the first actor in a recording."""

MAX_CAUSE_LENGTH = 600
"""Ray's explanations are cut to this length."""


@final
class Actors(Workers[Actor]):
    """Runs calls in Ray actors."""

    _pool: ActorPool
    _are_local = False
    _noun = "Ray actor"

    def __init__(
        self, owner: Any, requests: list[None], here: Here, *, ray_workers: RayWorkers, **options: Any
    ) -> None:
        super().__init__(owner, requests, here, **options)
        self._unpack = self._profiler.timed(HAND_OVER, unpack)
        self._ray_workers = ray_workers
        self._variant: Variant = None

    def _load(self, name: Hashable, plan: Plan) -> int:
        del name
        # Actors run one pipeline.
        self._variant = plan.pipeline.variant
        return 0

    def submit_lost(self) -> bool:
        while self._assignments.lost and (actor := self.free_worker()) is not None:
            if (lost := self._assignments.next_lost()) is None:
                break
            number, call = lost
            if self._assignments.is_suspect(number):
                # The others finish first, until this actor has no other call.
                if actor.calls:
                    self._assignments.lose([number])
                    return False
                actor.runs_suspect = True
            self._send(actor, number, call)
        return True

    def _send(self, worker: Actor, number: int, call: Call) -> None:
        if (message := self._message_of(number, call)) is not None:
            self._pool.submit(worker, number, message, self._variant)

    def _receive(self, seconds: float) -> None:
        for actor, event in self._pool.wait(seconds):
            self._take(actor, event)

    def _take(self, actor: Actor, event: Event) -> None:
        if isinstance(event, Answer):
            self._deaths_at_start.record_life(actor.number)
            self._take_answer(actor, event)
        elif isinstance(event, PipelineFailed):
            error = unpack_failure(event.failure, self._pool.classes)
            error.add_note(
                "millstream: a Ray actor raised this while it unpickled the pipeline. Modules must be available on "
                "each node: installed, or provided by ray.init(runtime_env={'working_dir': ...})."
            )
            raise error
        elif isinstance(event, CallFailed):
            self._take_failure(event)
        else:
            self._take_death(actor, event)

    def _take_answer(self, actor: Actor, answer: Answer) -> None:
        made, call = answer.result, self._assignments.call(answer.call)
        request = None if call is None else call.first_request
        blocks = request if isinstance(request, Blocks) else None
        # Clocks of other machines differ, so assume that it has just ended. Process IDs may occur on several machines.
        begun, name = time.perf_counter() - made.seconds, f"Ray actor {actor.pid}"
        self._profiler.called(FIRST_TRACK + actor.number, begun, made.seconds, blocks, made.stages, actor=name)
        if call is not None:
            self._complete(answer.call, call, made, functools.partial(self._unpack, made.packed, self._pool.classes))

    def _take_failure(self, event: CallFailed) -> None:
        """Sends calls with lost outputs again. For outputs that Ray cannot send, the consumer gets the error."""
        if event.is_lost:
            self._blame(event.call, GUILT_OF_LOST, "were lost on their way from a Ray actor", str(event.error))
        elif not self._assignments.split(event.call):
            event.error.add_note(
                f"millstream: while Ray took the outputs of an actor, from {self._assignments.describe(event.call)}."
            )
            self._assignments.complete(event.call, Elements.failed(event.error))

    def _take_death(self, actor: Actor, died: Died) -> None:
        cause = " ".join(died.cause.split())[:MAX_CAUSE_LENGTH]
        self._profiler.died(f"Ray actor {actor.pid or 'that was starting'} died. {cause}")
        if actor.pid is None:
            self._deaths_at_start.record_death(actor.number, f"Ray actors die while they start. The last one: {cause}")
        self._assignments.lose(actor.calls[1:])
        if actor.calls:
            guilt = 1.0 if died.is_its_own else GUILT_OF_LOST
            self._blame(actor.calls[0], guilt, "killed Ray actors", cause)
        log_warning(f"Ray actor {actor.pid or '(starting)'} died. Starting a replacement. {cause}")
        self._pool.replace(actor)
        self.submit_lost()

    def _blame(self, number: int, guilt: float, what: str, cause: str) -> None:
        self._assignments.blame(
            number,
            lambda deaths, records: WorkerDiedError(
                f"The outputs from {records} {what}, {deaths} times. The last time: {cause}"
            ),
            guilt,
        )

    def _check_stalls(self) -> None:
        super()._check_stalls()
        clock = self._pool.without_actors
        wanted = dict(self._ray_workers.resources_per_worker)
        if clock.is_over:
            raise WorkerStalledError(
                f"No Ray actor has started in {clock.waited:.1f} s (stall_timeout). Each of "
                f"{self._options.num_workers} asks the cluster {self._pool.cluster} for {wanted}. "
                "`ray status` shows what it has."
            )
        if clock.is_due():
            log_warning(
                f"no Ray actor has started for {clock.waited:.1f} s. Each asks the cluster {self._pool.cluster} for "
                f"{wanted}, which it may have no room for. {self._options.stall_limit}"
            )

    def _explain_stall(self, worker: Actor) -> str:  # noqa: ARG002  (processes differ)
        return "Its stacks are in its log, which Ray also prints here, unless log_to_driver=False."


def unpack(packed: Packed, classes: ClassTable) -> Elements:
    """Returns outputs that an actor has packed. Arrays are copied, because Ray's memory is read-only and bounded.

    Raises:
        Exception: a class of the user raises when unpickled.
    """
    body, buffers = packed
    return from_columns(*classes.loads(body, [copied(np.frombuffer(buffer, np.uint8)) for buffer in buffers]))
