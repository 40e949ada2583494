"""Workers that several pipelines share: those of the datasets below a combination, and the one that draws from them."""

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import final

from millstream.core.signals import interrupts
from millstream.loader.engine.engine import Budget, Engine
from millstream.loader.engine.substreams import Substream
from millstream.loader.engine.workers import WorkerSlots
from millstream.loader.measuring import Profiler
from millstream.loader.pipeline.calls import Outputs
from millstream.loader.pipeline.pipeline import Pipeline


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

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Ends the leader if an error may have left it in any state. One that draws elements handles most errors."""
        try:
            yield
        except BaseException as error:
            leader = self.current_leader
            if leader is not None and (self._start_leader is not None or interrupts(error)):
                leader.close()
            raise

    @property
    def current_leader(self) -> Engine | None:
        leader = None if self._leader is None else self._leader()
        return None if leader is None or leader.is_orphaned else leader

    @property
    def leader(self) -> Engine:
        """The engine of the consumer's pipeline, which runs all calls. It is started on demand."""
        start = None if self._start_leader is None else self._start_leader()
        if self.current_leader is None and start is not None:
            start()
        leader = self.current_leader
        if leader is None:
            raise AssertionError("the leader draws all elements")
        return leader


@final
class Joined(Budget):
    """The calls of a pass over one of the other pipelines, which the engine of the consumer's pipeline begins."""

    runs_ahead = True

    def __init__(self, engine: Engine, *, shared: SharedWorkers, name: Hashable, profiler: Profiler) -> None:
        substream = Substream.in_workers(engine.plan, engine.schedule, profiler, is_fed=engine.is_fed)
        super().__init__(engine, substream)
        self._shared = shared
        self._name = name
        self._admitted_by: weakref.ref[Engine] | None = None

    @property
    def is_orphaned(self) -> bool:
        if self._admitted_by is None:
            return False
        leader = self._admitted_by()
        return leader is None or leader is not self._shared.current_leader

    @property
    def runs_user_code_here(self) -> bool:
        return self.substream.is_fed

    def call_here(self) -> None:
        """Returns None: the consumer's engine has all calls."""

    def accept(self) -> None:
        with self._shared.guarded():
            leader = self._shared.leader
            if self._admitted_by is None:
                slots_of(leader).place.admit(self.substream, self._name)
                self._admitted_by = weakref.ref(leader)

    def start(self) -> None:
        self.accept()

    def wait(self) -> None:
        with self._shared.guarded():
            slots_of(self._shared.leader).work_for(self.substream)

    def end(self, outputs: Outputs) -> None:
        with self._shared.guarded():
            slots = slots_of(self._shared.leader)
            slots.work_ahead()
            slots.substreams.record_drawn(self.substream, len(outputs.values) - outputs.first)

    def close(self, deadline: float | None) -> None:  # noqa: ARG002  (it waits for nothing)
        """Drops all work. The workers stay."""
        leader = None if self._admitted_by is None else self._admitted_by()
        if leader is not None:
            slots_of(leader).substreams.remove(self.substream)


def slots_of(leader: Engine) -> WorkerSlots:
    if not isinstance(leader.budget, WorkerSlots):
        raise AssertionError("a leader has workers")  # noqa: TRY004
    return leader.budget
