"""Workers, and the engines whose calls they run: that of a loader, or all engines of a chain with joins.

    engine of a stream below a join ──────┐
    engine of another one ────────────────┼─▶ one set of workers
    engine of the operations after them ──┘

Whichever engine waits for a call, those of all begin and finish.

Guarantees:
    * A crew has one set of workers at a time. An engine whose workers were replaced is orphaned, and is used no more.
    * Workers that an error or an interrupt may have left in any state end: the iterator whose elements the trainer gets
      closes the crew.
    * A crew that was ended starts no workers. Another thread may end it at any time, also while they start.
"""

import time
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

from millstream.loader.engine.engine import Budget, Engine
from millstream.loader.engine.places import Here
from millstream.loader.engine.worker_choice import WorkerChoice
from millstream.loader.measuring import ExecutorStatus, Profiler
from millstream.loader.pipeline.calls import Outputs
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.recycled_memory import RecycledMemory

if TYPE_CHECKING:
    from millstream.loader.engine.workers import Workers
    from millstream.loader.workers.pools import WarmPools

TakeWorkers: TypeAlias = Callable[[Any, list[None], Here], "Workers[Any]"]
"""Takes workers, given the owner, the requests and the thread of the consumer, see `Workers`."""


class HasPipeline(Protocol):
    """An `Execution`."""

    pipeline: Pipeline


class Crew:
    """The workers of one or several engines, from the first call on until they are paused or closed.

    Args:
        requests: those of the engine whose outputs the trainer gets; None for a list that it is to use.

    Attributes:
        requests: this list.
        current: the workers that run; None if there are none.
        choice: the number of workers that is chosen at run time; None if it is given.
    """

    choice: WorkerChoice | None = None

    def __init__(self, requests: list[None] | None = None) -> None:
        self._executions: weakref.WeakValueDictionary[Hashable, HasPipeline] = weakref.WeakValueDictionary()
        self._take: TakeWorkers | None = None
        self._stall_timeout = 0.0
        self._pools: WarmPools[Any] | None = None
        self._is_ended = False
        self.requests: list[None] = [] if requests is None else requests
        self.current: Workers[Any] | None = None

    def register(self, name: Hashable, execution: HasPipeline) -> None:
        """Adds an execution whose pipeline workers start with. They get those of later ones on demand."""
        self._executions[name] = execution

    def pipelines(self) -> dict[Hashable, Pipeline]:
        """Returns the pipelines of the executions that are in use, by name."""
        return {name: execution.pipeline for name, execution in self._executions.items()}

    def staff(self, take: TakeWorkers, stall_timeout: float, pools: "WarmPools[Any] | None" = None) -> None:
        """Sets where workers come from.

        `pools` are those of workers that any engine starts; None if the one that is fed by all others does.
        """
        self._take, self._stall_timeout, self._pools = take, stall_timeout, pools

    def start(self) -> "Workers[Any]":
        """Returns the workers, which start now if there are none."""
        if self.current is None and not self._is_ended:
            if self._take is None:
                raise AssertionError("no workers were requested")
            here = Here(RecycledMemory().allocate, self._stall_timeout)
            self.current = self._take(self, self.requests, here)
            self._check_end()
        return self._present

    @property
    def workers(self) -> "Workers[Any]":
        """The workers for an engine that others draw from."""
        return self._present if self._pools is None else self.start()

    @property
    def _present(self) -> "Workers[Any]":
        if (current := self.current) is None:
            raise ValueError(
                "The worker processes have stopped because the iterator was closed, possibly by another thread."
            )
        return current

    def proceed(self) -> None:
        """Accepts what the workers have finished, and begins what follows, without waiting."""
        if (workers := self.current) is None:
            return
        try:
            workers.accept()
            workers.issue()
        except BaseException as error:
            if not self.gives_up(error):
                self.close()
                raise

    def begin_request(self) -> Any:
        """Begins a request of the trainer. Returns a value for `end_request`, if it is measured."""
        return None

    def end_request(self, request: Any, num_outputs: int) -> None:
        """Ends a request of the trainer, which got outputs. The number of workers may change."""

    @property
    def as_auto(self) -> Any:
        """This crew if it chooses its number of workers; otherwise None."""
        return None

    def gives_up(self, error: BaseException) -> bool:  # noqa: ARG002  (for a crew that needs no workers)
        """Returns True if the engines go on without workers after an error."""
        return False

    def pause(self) -> None:
        """Leaves the workers to the next iterator. The engines are replaced by others at their positions."""
        workers, self.current = self.current, None
        if workers is not None:
            workers.pause()

    def close(self) -> None:
        """Ends the workers. Idempotent, also after an interrupt, and thread-safe."""
        if (workers := self.current) is not None:
            workers.close()
            self.current = None

    def end(self) -> None:
        """Ends the workers, also idle ones, now and in future, because the iterator is closed."""
        self._is_ended = True
        self.close()
        if self._pools is not None:
            self._pools.stop_idle()

    def _check_end(self) -> None:
        """Ends workers that another thread, which has closed the iterator, did not see."""
        if self._is_ended:
            self.end()

    def status(self) -> ExecutorStatus | None:
        """Returns a snapshot of the work in progress; None without workers. Thread-safe, as for an engine."""
        return None if (current := self.current) is None else current.status(ExecutorStatus(0, 0))


class _InCrew(Budget):
    """The calls of one stream in the workers of a crew. User code runs in workers only."""

    runs_ahead = True
    place: "Workers[Any]"
    _crew: Crew
    _is_fed: bool

    @property
    def is_orphaned(self) -> bool:
        return self._crew.current is not self.place

    @property
    def in_flight(self) -> int:
        return self.substream.in_flight

    @property
    def runs_user_code_here(self) -> bool:
        return self._is_fed

    def call_here(self) -> None:
        """Returns None: what runs here begins like the other calls."""

    def issue(self) -> None:
        self.place.issue(self.substream)

    def drain(self) -> None:
        self.place.substreams.retire(self.substream)


@final
class WorkerSlots(_InCrew):
    """The calls that workers accept, within bytes, of the stream whose outputs the trainer gets.

    Args:
        name: the name of the pipeline.
    """

    def __init__(self, engine: Engine, crew: Crew, name: Hashable = None) -> None:
        self._crew, self._is_fed = crew, engine.feed is not None
        self.place = place = crew.start()
        super().__init__(engine, place.admitted(engine, name, is_last=True))

    def wait(self) -> None:
        start = time.perf_counter()
        self.place.wait()
        self.place.reads.waited += time.perf_counter() - start

    def end(self, outputs: Outputs) -> None:  # noqa: ARG002
        self.place.reads.delivered(time.perf_counter(), self.place.num_workers)

    def pause(self) -> None:
        self._crew.pause()

    def close(self, deadline: float | None) -> None:  # noqa: ARG002  (it waits for nothing)
        self._crew.close()


@final
class Joined(_InCrew):
    """The calls of a stream that others draw from, in proportion to what they draw."""

    def __init__(self, engine: Engine, crew: Crew, name: Hashable, profiler: Profiler) -> None:
        self._crew, self._is_fed = crew, engine.feed is not None
        self.place = place = crew.workers
        super().__init__(engine, place.admitted(engine, name, profiler))

    def accept(self) -> None:
        """Leaves what has finished to the iterator whose elements the trainer gets, and to the next wait."""
        self.place.check_process()

    def wait(self) -> None:
        if self.substream.in_flight or self.place.free_worker() is None:
            self.place.wait()

    def end(self, outputs: Outputs) -> None:
        self.place.substreams.record_drawn(self.substream, len(outputs.values) - outputs.first)

    def close(self, deadline: float | None) -> None:  # noqa: ARG002  (it waits for nothing)
        """Drops all work. The workers stay."""
        self.place.substreams.remove(self.substream)
