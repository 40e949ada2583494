"""The actors of one loader, as the trainer sees them: with `connection`, what speaks to Ray.

Guarantees:
    * The pipeline goes into the object store once, and from there to each node once.
    * Calls go to actors that are ready; others, which the cluster has no room for yet, keep nobody waiting.
    * Every answer counts that was there before its actor's end was noticed. The pool reports ends and starts
      replacements; what is done about lost calls is the executor's.
    * A cluster that cannot be reached for LOST_SECONDS, or that has lost the trainer's node, is an error.
    * `stop()` takes at most CLOSE_SECONDS, and no actor is left then. Any thread may call it. Ray itself ends actors
      that nobody refers to any more, and those of a trainer that is gone.
    * A stall is time that the consumer has waited, a look at a time, as in a pool of worker processes.
"""

import contextlib
import itertools
import logging
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, final

from millstream.errors import WorkerDiedError
from millstream.loader.cluster.actor import PipelineActor
from millstream.loader.cluster.actors import Actor, Answer, CallFailed, Died, Event, PipelineFailed
from millstream.loader.cluster.connection import connect, is_our_connection
from millstream.loader.cluster.object_memory import ObjectMemory
from millstream.loader.cluster.options import RayWorkers
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.threads.memory_budget import buffer_budget
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.transport.pipeline_file import pickle_pipelines

CLOSE_SECONDS = 2.0
"""How long stopping waits for the cluster to say that the actors have ended."""

LOST_SECONDS = 30.0
"""A cluster that cannot be reached for this long is lost, though its actors may still answer: after 60 s, Ray ends the
trainer's process, and nobody could save a state."""

LOOK_SECONDS = 1.0
"""How long to wait between two looks for whether the cluster is there."""

CONNECT_SECONDS = 1.0
"""How long to wait for the cluster to accept a connection, in a look for whether it is there."""

NODE_LOOKS = 5
"""Each time after this many looks without an answer, the cluster is asked whether the trainer's node is still in it."""

GET_SECONDS = 30.0
"""How long to wait for what Ray says is here."""

STORE_SHARE = 0.5
"""The part of its node's object store that the consumer's arrays may hold."""

STACK_SHARE = 0.9
"""A call that takes this part of the stall timeout writes its stacks into the actor's log."""

logger = logging.getLogger("millstream")


@final
class ActorPool:
    """Actors that have one pipeline.

    Args:
        pipeline: what they get.
        ray_workers: how many, and where.
        workers: when a call stalls.
        reading: how many threads each may read with.
        import_path: the trainer's.

    Attributes:
        call_numbers: gives each call a number.
        classes: those that crossed by value with the pipeline.
        memory: where outputs arrive.
        seconds_without_actors: how long the consumer has waited while no actor was ready.
        cluster: its address.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        ray_workers: RayWorkers,
        workers: MultiprocessingOptions,
        reading: ReadOptions,
        import_path: Sequence[str],
    ) -> None:
        import ray  # noqa: PLC0415

        self._owner = os.getpid()
        self._stopped = False
        pickled, buffers, self.classes = pickle_pipelines([pipeline], "workers")
        connect(ray_workers.address)
        context = ray.get_runtime_context()
        self.cluster = context.gcs_address
        self._job, self._node = context.get_job_id(), context.get_node_id()
        # Ray hands an actor its calls one after another.
        self.max_reads = 1
        self.max_bytes = buffer_budget(reading.max_buffer_bytes)
        self._settings = tuple(import_path), reading.num_threads, STACK_SHARE * workers.stall_timeout
        self._pipeline = ray.put((pickle.PickleBuffer(pickled), [pickle.PickleBuffer(buffer) for buffer in buffers]))
        self._actor_class = ray.remote(**ray_workers.actor_options)(PipelineActor)
        here = next((node for node in ray.nodes() if node["NodeID"] == self._node), None)
        store: dict[str, float] = here["Resources"] if here else {}
        self.memory = ObjectMemory(int(STORE_SHARE * store.get("object_store_memory", 0)))
        self._raylet = (here["NodeManagerAddress"], here["NodeManagerPort"]) if here else None
        self._numbers = itertools.count()
        self.call_numbers: Iterator[int] = itertools.count()
        # What is waited for: the call that it is the answer to, or None where an actor says that it is ready.
        self._awaited: dict[Any, tuple[Actor, int | None]] = {}
        self._actors: list[Actor] = []
        self._unreachable_since: float | None = None
        self._last_look = 0.0
        self._looks = 0
        self.seconds_without_actors = 0.0
        for _ in range(workers.num_workers):
            self._start()

    @property
    def workers(self) -> list[Actor]:
        """The actors, dead ones not counted."""
        return self._actors

    @property
    def is_ours(self) -> bool:
        """Whether this process has made it: a forked one has only a copy, which it must not use."""
        return self._owner == os.getpid()

    @property
    def is_usable(self) -> bool:
        """Whether another iterator may use it: it is this process's, has not been stopped, and has its cluster."""
        return self.is_ours and not self._stopped and self._is_connected

    def give(self, actor: Actor, call: int, message: tuple[int, int, int] | bytes) -> None:
        """Sends a call."""
        if not actor.calls:
            actor.waited = 0.0
        actor.calls.append(call)
        self._awaited[actor.handle.make.remote(message)] = actor, call

    def replace(self, actor: Actor) -> None:
        """Starts an actor to replace a dead one, or one to be killed."""
        self._kill(actor)
        if actor in self._actors:
            self._actors.remove(actor)
        for reference in [reference for reference, (other, _) in self._awaited.items() if other is actor]:
            del self._awaited[reference]
        self._start()

    def wait(self, seconds: float) -> Iterator[tuple[Actor, Event]]:
        """Yields what has happened, having waited for something to happen for at most this many seconds.

        Raises:
            ValueError: the pool is stopped.
            WorkerDiedError: the cluster is lost.
        """
        import ray  # noqa: PLC0415

        self._check_running()
        begin = time.monotonic()
        references = list(self._awaited)
        ready, _ = ray.wait(references, num_returns=1 if seconds > 0 else len(references), timeout=max(0.0, seconds))
        waited = min(seconds, time.monotonic() - begin)
        for actor in self._actors:
            actor.waited += waited
        is_waiting_for_actors = all(actor.pid is None for actor in self._actors)
        self.seconds_without_actors = self.seconds_without_actors + waited if is_waiting_for_actors else 0.0
        self._check_running()
        if time.monotonic() - self._last_look >= LOOK_SECONDS:
            self._look_for_cluster(has_answers=bool(ready))
            self._last_look = time.monotonic()
        yield from self._events(ready)

    def stop(self) -> None:
        """Ends all actors. Idempotent: what an interrupt leaves is done by the next call, or by the pool's end."""
        self._stopped = True
        if not self.is_ours or not self._is_connected:
            return
        import ray  # noqa: PLC0415

        ends = []
        for actor in list(self._actors):
            self._kill(actor)
            # Answered by an error when the cluster has taken note of the actor's end.
            ends.append(actor.handle.ready.remote())
        if ends and self._unreachable_since is None:
            ray.wait(ends, num_returns=len(ends), timeout=CLOSE_SECONDS, fetch_local=False)
        self._awaited.clear()
        self._actors.clear()

    @property
    def _is_connected(self) -> bool:
        """Whether this process still has the connection with which the actors were made."""
        ray = sys.modules["ray"]
        return bool(ray.is_initialized()) and ray.get_runtime_context().get_job_id() == self._job

    def _check_running(self) -> None:
        if self._stopped:
            raise ValueError("The actors are stopped: the iterator was closed, perhaps by another thread.")
        if not self._is_connected:
            raise WorkerDiedError(
                f"This process is no longer connected to the Ray cluster {self.cluster}: ray.shutdown() was called. "
                "The next call of next() connects again."
            )

    def _start(self) -> None:
        actor = Actor(next(self._numbers), self._actor_class.remote(self._pipeline, *self._settings))
        self._actors.append(actor)
        self._awaited[actor.handle.ready.remote()] = actor, None
        if self._stopped:
            # By another thread, which did not see this actor.
            self._kill(actor)

    def _kill(self, actor: Actor) -> None:
        import ray  # noqa: PLC0415

        # What is dead already need not be killed.
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(actor.handle, no_restart=True)

    def _events(self, ready: Sequence[Any]) -> Iterator[tuple[Actor, Event]]:
        """Yields what references bring that are ready, ends of actors last."""
        dead: dict[Actor, Died] = {}
        for reference in ready:
            if reference not in self._awaited:
                continue  # Of an actor that was replaced a moment ago.
            actor, call = self._awaited[reference]
            event = self._event(reference, call)
            if isinstance(event, Died):
                dead.setdefault(actor, event)
                continue
            del self._awaited[reference]
            actor.waited, actor.warned = 0.0, False
            if call is not None:
                actor.calls.remove(call)
                actor.makes_suspect = False
            if isinstance(event, int):
                actor.pid = event
            elif event is not None:
                yield actor, event
        for actor, event in dead.items():
            if actor in self._actors:
                yield actor, event

    def _event(self, reference: Any, call: int | None) -> Event | int | None:
        """Returns what a reference brings; the process number of an actor that has become ready."""
        import ray  # noqa: PLC0415

        errors = ray.exceptions
        try:
            value = ray.get(reference, timeout=GET_SECONDS)
        except errors.RayActorError as error:
            if getattr(error, "_actor_init_failed", False):
                raise WorkerDiedError(f"A Ray actor cannot be started: {error}") from error
            is_certain = isinstance(error, errors.ActorDiedError) and not getattr(error, "preempted", False)
            # Ray says so in its text alone.
            return Died(str(error), is_its_own=is_certain and "its node has died" not in str(error))
        except (errors.ObjectLostError, errors.GetTimeoutError, errors.RayTaskError, errors.RaySystemError) as error:
            if call is None:
                raise
            # The outputs may not fit into the object store, for instance.
            cause = getattr(error, "cause", None)
            is_lost = isinstance(error, (errors.ObjectLostError, errors.GetTimeoutError))
            return CallFailed(call, cause if isinstance(cause, Exception) else error, is_lost=is_lost)
        if call is not None:
            return Answer(call, value)
        pid, failure = value
        return int(pid) if failure is None else PipelineFailed(failure)

    def _look_for_cluster(self, *, has_answers: bool) -> None:
        """Raises a WorkerDiedError if the cluster is lost."""
        host, _, port = self.cluster.rpartition(":")
        self._looks = 0 if has_answers else self._looks + 1
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            now = time.monotonic()
            self._unreachable_since = self._unreachable_since or now
            if now - self._unreachable_since >= LOST_SECONDS:
                self._lose_cluster(f"cannot be reached for {now - self._unreachable_since:.0f} s ({error})")
            return
        self._unreachable_since = None
        if self._raylet is not None:
            with contextlib.suppress(OSError):  # It is busy, or there is no descriptor.
                try:
                    socket.create_connection(self._raylet, CONNECT_SECONDS).close()
                except ConnectionRefusedError:
                    # Ray notices it some seconds later, and then ends this process without a word.
                    self._lose_cluster("has lost its raylet, the process of Ray on this machine")
        if self._looks and self._looks % NODE_LOOKS == 0:
            import ray  # noqa: PLC0415

            if not any(node["NodeID"] == self._node and node["Alive"] for node in ray.nodes()):
                self._lose_cluster("counts this machine's node as dead")

    def _lose_cluster(self, what: str) -> None:
        self._stopped = True
        advice = "Ray ends this process soon, unless ray.shutdown() is called before."
        if is_our_connection(self._job):
            import ray  # noqa: PLC0415

            ray.shutdown()
            advice = "The next call of next() looks for a cluster."
        raise WorkerDiedError(
            f"The Ray cluster {self.cluster} {what}, and with it the actors that make the batches. {advice} "
            "States of iterators can still be taken."
        )
