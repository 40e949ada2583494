"""Workers shared by several pipelines: the consumer's, and those that its feed draws from."""

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, final

from millstream.loader.pipeline.executor import Executor
from millstream.loader.pipeline.outputs import Outputs, Position
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.profiler import Profiler
from millstream.loader.workers.substreams import Substream

if TYPE_CHECKING:
    from millstream.loader.pipeline.feed import Feed
    from millstream.loader.workers.workers_executor import WorkersExecutor


@final
class SharedWorkers:
    """The pipelines of a set of workers, and the executor that dispatches their calls.

    A pipeline has the same number in each set that is created for the same iterator, so the workers of one serve the
    next.
    """

    def __init__(self) -> None:
        self._pipelines: dict[Hashable, Pipeline] = {}
        self._numbers: dict[Hashable, int] = {}
        self._leader: weakref.ref[WorkersExecutor[Any]] | None = None

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines that each worker has."""
        return tuple(self._pipelines.values())

    def register(self, name: Hashable, pipeline: Pipeline) -> int:
        """Returns the number of a pipeline, which is new or has been registered under the same name."""
        self._pipelines.setdefault(name, pipeline)
        return self._numbers.setdefault(name, len(self._numbers))

    def lead(self, leader: "WorkersExecutor[Any]") -> None:
        """Makes an executor the leader, which dispatches the calls from now on."""
        self._leader = weakref.ref(leader)

    @property
    def has_led(self) -> bool:
        """True if there has been a leader."""
        return self._leader is not None

    @property
    def leader(self) -> "WorkersExecutor[Any]":
        """The executor of the consumer's pipeline, which dispatches all calls."""
        leader = None if self._leader is None else self._leader()
        if leader is None:
            raise AssertionError("the leader draws all elements")
        return leader


@final
class SubstreamExecutor(Executor):
    """Runs a pass over one of the other pipelines. The leader dispatches its calls.

    Args:
        plan: the plan of the pipeline.
        position: the position of the first output.
        profiler: sums up measured times.
        shared_workers: the workers of the calls.
        pipeline: the pipeline's number there.
        feed: the source of the elements of stage 0; None if they are read.
    """

    def __init__(
        self,
        plan: Plan,
        position: Position,
        *,
        profiler: Profiler,
        shared_workers: SharedWorkers,
        pipeline: int,
        feed: "Feed | None",
    ) -> None:
        super().__init__(plan, position, feed)
        self._substream = Substream(plan, self._schedule, profiler, pipeline, is_fed=feed is not None)
        self._shared_workers = shared_workers
        self._admitted_by: weakref.ref[WorkersExecutor[Any]] | None = None

    def next_outputs(self) -> Outputs | None:
        """Returns the next outputs in order, or None at the end."""
        outputs = super().next_outputs()
        if outputs is not None:
            self._shared_workers.leader.substreams.record_drawn(self._substream, len(outputs.values) - outputs.first)
        return outputs

    def close(self) -> None:
        """Drops all work. The workers stay."""
        leader = None if self._admitted_by is None else self._admitted_by()
        if leader is not None:
            leader.substreams.remove(self._substream)

    def _begin(self) -> None:
        leader = self._shared_workers.leader
        if self._admitted_by is None:
            self._admitted_by = weakref.ref(leader)
            leader.substreams.add(self._substream)
        elif self._admitted_by() is not leader:
            raise AssertionError("a change of the leader begins with a new position")

    def _advance(self) -> None:
        self._shared_workers.leader.work_for(self._substream)

    def _end(self) -> None:
        self._shared_workers.leader.work_ahead()
