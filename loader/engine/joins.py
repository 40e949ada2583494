"""Workers that several pipelines share: those of the datasets below a combination, and the one that draws from them."""

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, final

from millstream.core.signals import interrupts
from millstream.loader.engine.engine import Engine, Executor
from millstream.loader.engine.substreams import Substream
from millstream.loader.measuring import Profiler
from millstream.loader.pipeline.calls import Outputs, Position
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan

if TYPE_CHECKING:
    from millstream.loader.engine.budget import WorkerSlots
    from millstream.loader.scheduling.feed import Feed


@final
class SharedWorkers:
    """The pipelines that a set of workers starts with, and the engine that runs their calls."""

    def __init__(self) -> None:
        self._pipelines: dict[Hashable, Pipeline] | None = {}
        self._leader: weakref.ref[Engine] | None = None
        self._start_leader: weakref.WeakMethod[Callable[[], None]] | None = None

    def register(self, name: Hashable, pipeline: Pipeline) -> None:
        """Adds a pipeline that the workers start with. They get those of iterators that are opened later on demand."""
        if self._pipelines is not None:
            self._pipelines.setdefault(name, pipeline)

    def take_pipelines(self, name: Hashable, first: Pipeline) -> dict[Hashable, Pipeline]:
        """Returns all pipelines that were registered, by name, after that of the leader."""
        others, self._pipelines = self._pipelines or {}, None
        return {name: first, **others}

    def start_on_demand(self, start_leader: Callable[[], None]) -> None:
        """Sets a method that starts the leader. A leader that draws all elements needs none. It is not kept alive."""
        self._start_leader = weakref.WeakMethod(start_leader)

    def lead(self, leader: Engine) -> None:
        """Makes an engine the leader, which runs the calls from now on."""
        self._leader = weakref.ref(leader)

    @property
    def has_led(self) -> bool:
        return self._leader is not None

    def fail(self, error: BaseException) -> None:
        """Ends the leader if an error may have left it in any state. One that draws elements handles most errors."""
        leader = self.current_leader
        if leader is not None and (self._start_leader is not None or interrupts(error)):
            leader.close()

    @property
    def reference(self) -> weakref.ref[Engine] | None:
        """A reference to the leader."""
        return self._leader

    @property
    def current_leader(self) -> Engine | None:
        leader = None if self._leader is None else self._leader()
        return None if leader is None or leader.is_orphaned else leader

    @property
    def slots(self) -> "WorkerSlots":
        """The budget of the consumer's pipeline, which begins all calls. Its engine is started on demand."""
        start = None if self._start_leader is None else self._start_leader()
        if self.current_leader is None and start is not None:
            start()
        leader = self.current_leader
        if leader is None or leader.slots is None:
            raise AssertionError("the leader draws all elements")
        return leader.slots


@final
class SubstreamExecutor(Executor):
    """Runs a pass over one of the other pipelines. The engine of the consumer's pipeline runs its calls."""

    def __init__(
        self,
        plan: Plan,
        position: Position,
        *,
        profiler: Profiler,
        shared_workers: SharedWorkers,
        name: Hashable,
        feed: "Feed | None",
    ) -> None:
        super().__init__(plan, position, feed)
        self._substream = Substream.in_workers(plan, self._schedule, profiler, is_fed=feed is not None)
        self._name = name
        self._shared_workers = shared_workers
        self._admitted_by: weakref.ref[Engine] | None = None

    @property
    def is_orphaned(self) -> bool:
        if self._admitted_by is None:
            return False
        leader = self._admitted_by()
        return leader is None or leader is not self._shared_workers.current_leader

    @property
    def runs_user_code_here(self) -> bool:
        return self._substream.is_fed

    def start(self) -> None:
        try:
            self._admit()
        except BaseException as error:
            self._shared_workers.fail(error)
            raise

    def next_outputs(self) -> Outputs | None:
        schedule, shared = self._schedule, self._shared_workers
        try:
            self._admit()
            while (outputs := schedule.pop()) is None:
                if schedule.exhausted:
                    return None
                shared.slots.work_for(self._substream)
            shared.slots.work_ahead()
            shared.slots.substreams.record_drawn(self._substream, len(outputs.values) - outputs.first)
        except BaseException as error:
            shared.fail(error)
            raise
        return outputs

    def close(self, deadline: float | None = None) -> None:  # noqa: ARG002  (it waits for nothing)
        """Drops all work. The workers stay."""
        leader = None if self._admitted_by is None else self._admitted_by()
        if leader is not None and leader.slots is not None:
            leader.slots.substreams.remove(self._substream)

    def _admit(self) -> None:
        slots = self._shared_workers.slots
        if self._admitted_by is None:
            slots.place.admit(self._substream, self._name)
            self._admitted_by = self._shared_workers.reference
