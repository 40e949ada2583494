"""Workers shared by several pipelines: the consumer's, and those that its feed draws from."""

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, final

from millstream.core.signals import interrupts
from millstream.loader.measuring import Profiler
from millstream.loader.pipeline.calls import Outputs, Position
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.executor import Executor
from millstream.loader.workers.substreams import Substream

if TYPE_CHECKING:
    from millstream.loader.scheduling.feed import Feed
    from millstream.loader.workers.workers_executor import WorkersExecutor


@final
class SharedWorkers:
    """The pipelines that a set of workers starts with, and the executor that dispatches their calls."""

    def __init__(self) -> None:
        self._pipelines: dict[Hashable, Pipeline] | None = {}
        self._leader: weakref.ref[WorkersExecutor[Any]] | None = None
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

    def lead(self, leader: "WorkersExecutor[Any]") -> None:
        """Makes an executor the leader, which dispatches the calls from now on."""
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
    def current_leader(self) -> "WorkersExecutor[Any] | None":
        leader = None if self._leader is None else self._leader()
        return None if leader is None or leader.is_orphaned else leader

    @property
    def leader(self) -> "WorkersExecutor[Any]":
        """The executor of the consumer's pipeline, which dispatches all calls. It is started on demand."""
        start = None if self._start_leader is None else self._start_leader()
        if self.current_leader is None and start is not None:
            start()
        leader = self.current_leader
        if leader is None:
            raise AssertionError("the leader draws all elements")
        return leader


@final
class SubstreamExecutor(Executor):
    """Runs a pass over one of the other pipelines. The leader dispatches its calls."""

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
        self._substream = Substream(plan, self._schedule, profiler, is_fed=feed is not None)
        self._name = name
        self._shared_workers = shared_workers
        self._admitted_by: weakref.ref[WorkersExecutor[Any]] | None = None

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
            self.begin_request()
        except BaseException as error:
            self._shared_workers.fail(error)
            raise

    def next_outputs(self) -> Outputs | None:
        try:
            outputs = super().next_outputs()
            if outputs is not None:
                count = len(outputs.values) - outputs.first
                self._shared_workers.leader.substreams.record_drawn(self._substream, count)
        except BaseException as error:
            self._shared_workers.fail(error)
            raise
        return outputs

    def close(self, deadline: float | None = None) -> None:  # noqa: ARG002  (it waits for nothing)
        """Drops all work. The workers stay."""
        leader = None if self._admitted_by is None else self._admitted_by()
        if leader is not None:
            leader.substreams.remove(self._substream)

    def begin_request(self) -> None:
        leader = self._shared_workers.leader
        if self._admitted_by is None:
            leader.admit(self._substream, self._name)
            self._admitted_by = weakref.ref(leader)

    def advance(self) -> None:
        self._shared_workers.leader.work_for(self._substream)

    def end_request(self) -> None:
        self._shared_workers.leader.work_ahead()
