"""Workers, and the engines whose calls they run: that of a loader, or all engines of a chain with joins.

    engine of a stream below a join ──────┐
    engine of another one ────────────────┼─▶ one set of workers
    engine of the operations after them ──┘

Each engine draws elements, if it is fed, and waits for its own calls. Whichever waits, the calls of all begin.

Guarantees:
    * A crew has one set of workers at a time. An engine whose workers were replaced is orphaned, and is used no more.
    * Workers that an error or an interrupt may have left in any state end.
    * A crew that was ended starts no workers. Another thread may end it at any time, also while they start.
"""

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeAlias, final

from millstream.core.signals import interrupts
from millstream.loader.engine.engine import Budget, Engine
from millstream.loader.engine.places import Here
from millstream.loader.engine.workers import Workers
from millstream.loader.measuring import ExecutorStatus, Profiler
from millstream.loader.pipeline.calls import Outputs
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.workers.pools import WarmPools

TakeWorkers: TypeAlias = Callable[[Any, list[None], Here], Workers[Any]]
"""Takes workers, given the owner, the requests and the thread of the consumer, see `Workers`."""


@final
class Crew:
    """The workers of one or several engines, from the first call on until they are paused or closed.

    Args:
        requests: those of the engine whose outputs the trainer gets; None for a list that it is to use.

    Attributes:
        requests: this list.
        current: the workers that run; None if there are none.
    """

    def __init__(self, requests: list[None] | None = None) -> None:
        self._pipelines: dict[Hashable, Pipeline] | None = {}
        self._take: TakeWorkers | None = None
        self._stall_timeout = 0.0
        self._pools: WarmPools[Any] | None = None
        self._is_ended = False
        self.requests: list[None] = [] if requests is None else requests
        self.current: Workers[Any] | None = None

    def register(self, name: Hashable, pipeline: Pipeline) -> None:
        """Adds a pipeline that the workers start with. They get those of iterators that are opened later on demand."""
        if self._pipelines is not None:
            self._pipelines.setdefault(name, pipeline)

    def take_pipelines(self) -> dict[Hashable, Pipeline]:
        """Returns all pipelines that were registered, by name. Later ones are not."""
        pipelines, self._pipelines = self._pipelines or {}, None
        return pipelines

    def staff(self, take: TakeWorkers, stall_timeout: float, pools: WarmPools[Any] | None = None) -> None:
        """Sets where workers come from.

        `pools` are those of workers that any engine starts; None if the one that is fed by all others does.
        """
        self._take, self._stall_timeout, self._pools = take, stall_timeout, pools

    def start(self) -> Workers[Any]:
        """Returns the workers, which start now if there are none."""
        if self.current is None and not self._is_ended:
            if self._take is None:
                raise AssertionError("no workers were requested")
            here = Here(RecycledMemory().allocate, self._stall_timeout)
            self.current = self._take(self, self.requests, here)
            self._check_end()
        return self._present

    @property
    def workers(self) -> Workers[Any]:
        """The workers for an engine that others draw from."""
        return self._present if self._pools is None else self.start()

    @property
    def _present(self) -> Workers[Any]:
        if (current := self.current) is None:
            raise ValueError(
                "The worker processes have stopped because the iterator was closed, possibly by another thread."
            )
        return current

    @property
    def has_last(self) -> bool:
        """True if one engine is fed by all others."""
        return self.current is not None and self.current.substreams.have_last

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Ends the workers if an error may have left them in any state. An engine that is fed handles most errors."""
        try:
            yield
        except BaseException as error:
            if interrupts(error) or not self.has_last:
                self.close()
            raise

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
    place: Workers[Any]
    _crew: Crew

    @property
    def is_orphaned(self) -> bool:
        return self._crew.current is not self.place

    @property
    def runs_user_code_here(self) -> bool:
        return self.substream.is_fed

    def call_here(self) -> None:
        """Returns None: what runs here begins like the other calls."""


@final
class WorkerSlots(_InCrew):
    """The calls that workers accept, within bytes, of the stream whose outputs the trainer gets.

    Args:
        name: the name of the pipeline.
    """

    def __init__(self, engine: Engine, crew: Crew, name: Hashable = None) -> None:
        self._crew = crew
        self.place = place = crew.start()
        super().__init__(engine, place.admitted(engine, name, is_last=True))

    def issue(self) -> None:
        self.place.issue()
        if self._feed is not None:
            while self.place.may_draw(self.substream):
                # Iterators that are drawn from use the same workers meanwhile.
                if (call := self.substream.take(0, self._feed)) is not None:
                    self.place.submit(call)

    def wait(self) -> None:
        start = time.perf_counter()
        self.place.wait()
        self.place.reads.waited(time.perf_counter() - start)

    def end(self, outputs: Outputs) -> None:  # noqa: ARG002
        self.place.reads.delivered(time.perf_counter())

    def pause(self) -> None:
        self._crew.pause()

    def close(self, deadline: float | None) -> None:  # noqa: ARG002  (it waits for nothing)
        self._crew.close()


@final
class Joined(_InCrew):
    """The calls of a stream that others draw from, in proportion to what they draw. If it is fed, one at a time."""

    def __init__(self, engine: Engine, crew: Crew, name: Hashable, profiler: Profiler) -> None:
        self._crew = crew
        with crew.guarded():
            self.place = place = crew.workers
            super().__init__(engine, place.admitted(engine, name, profiler))

    def accept(self) -> None:
        """Leaves what has finished to the next wait."""
        self.place.check_process()

    def start(self) -> None:
        with self._crew.guarded():
            self.place.check_process()
            self.place.issue(self.substream)

    def wait(self) -> None:
        with self._crew.guarded():
            self.place.issue(self.substream)
            schedule = self.substream.schedule
            if self._feed is not None and schedule.backlog == 0 and schedule.next_stage == 0:
                if (call := self.substream.take(0, self._feed)) is not None:
                    self.place.submit(call)
            elif self.substream.in_flight or not self.place.has_room:
                self.place.wait()

    def end(self, outputs: Outputs) -> None:
        with self._crew.guarded():
            if not self._crew.has_last:
                # Nobody else accepts what has finished, and begins what follows.
                self.place.accept()
                self.place.issue()
            self.place.substreams.record_drawn(self.substream, len(outputs.values) - outputs.first)

    def close(self, deadline: float | None) -> None:  # noqa: ARG002  (it waits for nothing)
        """Drops all work. The workers stay."""
        self.place.substreams.remove(self.substream)
