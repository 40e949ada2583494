"""The actors of one loader, seen from the trainer. Only this module and `options` call Ray.

Guarantees:
    * The pipeline is stored in the object store once, and transferred to each node once.
    * Calls go to ready actors. Actors that the cluster has no room for yet delay nothing.
    * An answer that arrived before its actor's death was noticed counts. The pool reports deaths and starts
      replacements. The engine decides what happens to the lost calls.
    * A cluster that cannot be reached for LOST_SECONDS, or that has lost the trainer's node, is an error.
    * `stop()` takes at most CLOSE_SECONDS, and leaves no actor. Any thread may call it. Ray itself ends actors without
      references, and those of a trainer that has ended.
    * Only time that the consumer spends waiting counts as a stall, as in a pool of worker processes.
"""

import contextlib
import itertools
import os
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, final

from millstream.errors import WorkerDiedError
from millstream.loader.cluster.actor import Actor, Answer, CallFailed, Died, Event, PipelineActor, PipelineFailed
from millstream.loader.cluster.options import RayWorkers, connect, is_our_connection
from millstream.loader.pipeline.pipeline import Pipeline, Variant
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions, buffer_budget, flight_budget
from millstream.loader.threads.waiting import StallClock
from millstream.loader.transport.pipeline_file import pickle_pipelines
from millstream.loader.workers.pools import first_free
from millstream.loader.workers.process_settings import ProcessSettings, Trainer
from millstream.loader.workers.worker_imports import code_digests

CLOSE_SECONDS = 2.0
"""The time to wait for the cluster to confirm that the actors have ended."""

LOST_SECONDS = 30.0
"""A cluster that cannot be reached for this long is lost, although its actors may still answer. After 60 s, Ray ends
the trainer's process, and no state could be saved."""

CHECK_SECONDS = 1.0
"""The interval between two checks of the cluster."""

CONNECT_SECONDS = 1.0
"""The time to wait for a connection to the cluster during a check."""

NODE_CHECKS = 5
"""After each such number of consecutive checks without an answer, the state of the trainer's node is requested."""

GET_SECONDS = 30.0
"""The timeout for fetching an object that Ray reports as ready."""

STACK_SHARE = 0.9
"""A call that takes this share of the stall timeout writes its stacks to the actor's log."""


@final
class ActorPool:
    """Actors that have one pipeline.

    Attributes:
        workers: the actors that are not known to be dead.
        without_actors: the wait while no actor is ready.
        cluster: the address of the cluster.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        ray_workers: RayWorkers,
        workers: MultiprocessingOptions,
        reading: ReadOptions,
        import_path: Sequence[str],
        *,
        settings: ProcessSettings,
    ) -> None:
        import ray  # noqa: PLC0415

        self._ray: Any = ray
        self._owner = os.getpid()
        self._stopped = False
        pickled, buffers, self.classes = pickle_pipelines([pipeline], workers.worker_init_fn, "workers")
        connect(ray_workers.address)
        context = ray.get_runtime_context()
        self.cluster = context.gcs_address
        self._job, self._node = context.get_job_id(), context.get_node_id()
        # Ray sends an actor its calls one after another.
        self.max_reads = 1
        self.max_bytes = buffer_budget(reading.max_buffer_bytes)
        self.settings = settings
        self.flight_bytes = min(self.max_bytes, flight_budget(reading.max_buffer_bytes))
        self._import_path = tuple(import_path)
        self._stall_timeout = workers.stall_timeout
        self._options: dict[str, Any] = {
            "num_threads": reading.num_threads,
            "stack_seconds": STACK_SHARE * workers.stall_timeout,
            "num_workers": workers.num_workers,
            "trainer": Trainer(os.getpid(), settings, code_digests()),
        }
        self._pipeline = ray.put((pickle.PickleBuffer(pickled), [pickle.PickleBuffer(buffer) for buffer in buffers]))
        self._actor_class = ray.remote(**ray_workers.actor_options)(PipelineActor)
        here = next((node for node in ray.nodes() if node["NodeID"] == self._node), None)
        self._raylet = (here["NodeManagerAddress"], here["NodeManagerPort"]) if here else None
        self._numbers = itertools.count()
        self.call_numbers: Iterator[int] = itertools.count()
        # The reference of each answer that is awaited, with its call; None for the report that an actor is ready.
        self._awaited: dict[Any, tuple[Actor, int | None]] = {}
        self.workers: list[Actor] = []
        self._unreachable_since: float | None = None
        self._last_check = 0.0
        self._silent_checks = 0
        self.without_actors = StallClock(workers.stall_timeout)
        for _ in range(workers.num_workers):
            self._start()

    @property
    def is_ours(self) -> bool:
        return self._owner == os.getpid()

    @property
    def is_usable(self) -> bool:
        return self.is_ours and not self._stopped and self._is_connected

    def submit(self, actor: Actor, call: int, message: tuple[int, int, int] | bytes, variant: Variant) -> None:
        actor.record_call(call)
        self._awaited[actor.handle.make.remote(message, variant)] = actor, call

    def replace(self, actor: Actor) -> None:
        self._kill(actor)
        if actor in self.workers:
            self.workers.remove(actor)
        for reference in [reference for reference, (other, _) in self._awaited.items() if other is actor]:
            del self._awaited[reference]
        self._start()

    def wait(self, seconds: float) -> Iterator[tuple[Actor, Event]]:
        """Waits up to `seconds` for an event, then yields all events that have arrived.

        Raises:
            ValueError: the pool was stopped.
            WorkerDiedError: the cluster is lost.
        """
        self._check_running()
        begin = time.monotonic()
        references = list(self._awaited)
        ready, _ = self._ray.wait(
            references, num_returns=1 if seconds > 0 else len(references), timeout=max(0.0, seconds)
        )
        waited = min(seconds, time.monotonic() - begin)
        for actor in self.workers:
            actor.clock.passed(waited)
        if all(actor.pid is None for actor in self.workers):
            self.without_actors.passed(waited)
        else:
            self.without_actors.restart()
        self._check_running()
        if time.monotonic() - self._last_check >= CHECK_SECONDS:
            self._check_cluster(has_answers=bool(ready))
            self._last_check = time.monotonic()
        yield from self._events(ready)

    def stop(self) -> None:
        self._stopped = True
        if not self.is_ours or not self._is_connected:
            return
        ends = []
        for actor in list(self.workers):
            self._kill(actor)
            # Fails once the cluster has recorded the end of the actor.
            ends.append(actor.handle.ready.remote())
        if ends and self._unreachable_since is None:
            self._ray.wait(ends, num_returns=len(ends), timeout=CLOSE_SECONDS, fetch_local=False)
        self._awaited.clear()
        self.workers.clear()

    @property
    def _is_connected(self) -> bool:
        """True if this process still has the connection with which the actors were started."""
        return bool(self._ray.is_initialized()) and self._ray.get_runtime_context().get_job_id() == self._job

    def _check_running(self) -> None:
        if self._stopped:
            raise ValueError("The actors have stopped because the iterator was closed, possibly by another thread.")
        if not self._is_connected:
            raise WorkerDiedError(
                f"This process is no longer connected to the Ray cluster {self.cluster}: ray.shutdown() was called. "
                "The next call of next() connects again."
            )

    def _start(self) -> None:
        index = first_free(actor.index for actor in self.workers)
        handle = self._actor_class.remote(self._pipeline, self._import_path, index=index, **self._options)
        actor = Actor(next(self._numbers), index, self._stall_timeout, handle)
        self.workers.append(actor)
        self._awaited[actor.handle.ready.remote()] = actor, None
        if self._stopped:
            # Stopped by another thread, which did not see this actor.
            self._kill(actor)

    def _kill(self, actor: Actor) -> None:
        # It may be dead already.
        with contextlib.suppress(ValueError, self._ray.exceptions.RayError):
            self._ray.kill(actor.handle, no_restart=True)

    def _events(self, ready: Sequence[Any]) -> Iterator[tuple[Actor, Event]]:
        """Yields deaths last."""
        dead: dict[Actor, Died] = {}
        for reference in ready:
            if reference not in self._awaited:
                continue  # Its actor has just been replaced.
            actor, call = self._awaited[reference]
            event = self._event(reference, call)
            if isinstance(event, Died):
                dead.setdefault(actor, event)
                continue
            del self._awaited[reference]
            actor.clock.restart()
            if call is not None:
                actor.record_result(call)
                actor.runs_suspect = False
            if isinstance(event, int):
                actor.pid = event
            elif event is not None:
                yield actor, event
        for actor, event in dead.items():
            if actor in self.workers:
                yield actor, event

    def _event(self, reference: Any, call: int | None) -> Event | int | None:
        """Returns the event of a reference, or the process ID of an actor that has become ready."""
        errors = self._ray.exceptions
        try:
            value = self._ray.get(reference, timeout=GET_SECONDS)
        except errors.RayActorError as error:
            if getattr(error, "_actor_init_failed", False):
                raise WorkerDiedError(f"A Ray actor cannot be started: {error}") from error
            is_certain = isinstance(error, errors.ActorDiedError) and not getattr(error, "preempted", False)
            # Ray reports the death of a node only in the text.
            return Died(str(error), is_its_own=is_certain and "its node has died" not in str(error))
        except (errors.ObjectLostError, errors.GetTimeoutError, errors.RayTaskError, errors.RaySystemError) as error:
            if call is None:
                raise
            # For instance, outputs that do not fit into the object store.
            cause = getattr(error, "cause", None)
            is_lost = isinstance(error, (errors.ObjectLostError, errors.GetTimeoutError))
            return CallFailed(call, cause if isinstance(cause, Exception) else error, is_lost=is_lost)
        if call is not None:
            return Answer(call, value)
        pid, failure = value
        return int(pid) if failure is None else PipelineFailed(failure)

    def _check_cluster(self, *, has_answers: bool) -> None:
        host, _, port = self.cluster.rpartition(":")
        self._silent_checks = 0 if has_answers else self._silent_checks + 1
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
            with contextlib.suppress(OSError):  # It is busy, or no descriptor is left.
                try:
                    socket.create_connection(self._raylet, CONNECT_SECONDS).close()
                except ConnectionRefusedError:
                    # Ray would notice this some seconds later, and end this process silently.
                    self._lose_cluster("has lost its raylet, the process of Ray on this machine")
        is_due = self._silent_checks > 0 and self._silent_checks % NODE_CHECKS == 0
        if is_due and not any(node["NodeID"] == self._node and node["Alive"] for node in self._ray.nodes()):
            self._lose_cluster("counts this machine's node as dead")

    def _lose_cluster(self, what: str) -> None:
        self._stopped = True
        advice = "Ray ends this process soon, unless ray.shutdown() is called before."
        if is_our_connection(self._job):
            self._ray.shutdown()
            advice = "The next call of next() connects to a cluster again."
        raise WorkerDiedError(
            f"The Ray cluster {self.cluster} {what}, and with it the actors that make the batches. {advice} "
            "States of iterators can still be taken."
        )
