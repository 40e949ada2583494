"""One set of workers for several pipelines: that of the consumer, and those that its feed draws from."""

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, final

from millstream.loader.pipeline.executor import Executor
from millstream.loader.pipeline.outputs import Outputs, Position
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.profiler import Profiler
from millstream.loader.workers.parts import Part

if TYPE_CHECKING:
    from millstream.loader.pipeline.feed import Feed
    from millstream.loader.workers.workers_executor import WorkersExecutor


@final
class Crew:
    """Which pipelines the workers have, and who gives them their calls.

    The same pipelines have the same numbers in each crew that is made for the same iterator: workers that one has left
    serve the next.
    """

    def __init__(self) -> None:
        self._pipelines: dict[Hashable, Pipeline] = {}
        self._numbers: dict[Hashable, int] = {}
        self._leader: weakref.ref[WorkersExecutor[Any]] | None = None

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """What each worker has."""
        return tuple(self._pipelines.values())

    def enlist(self, name: Hashable, pipeline: Pipeline) -> int:
        """Returns the number of a pipeline, which is new, or the same as that which had the name before."""
        self._pipelines.setdefault(name, pipeline)
        return self._numbers.setdefault(name, len(self._numbers))

    def follow(self, leader: "WorkersExecutor[Any]") -> None:
        """Takes note of who gives the workers their calls from now on."""
        self._leader = weakref.ref(leader)

    @property
    def has_led(self) -> bool:
        """Whether anybody has given the workers their calls."""
        return self._leader is not None

    @property
    def leader(self) -> "WorkersExecutor[Any]":
        """Who does: the executor of the consumer's pipeline."""
        leader = None if self._leader is None else self._leader()
        if leader is None:
            raise AssertionError("what a crew makes is drawn by its leader")
        return leader


@final
class PartExecutor(Executor):
    """Runs a pass over one of the other pipelines: the crew's leader has its calls made.

    Args:
        plan: what makes the outputs.
        position: where the pass begins.
        profiler: adds up what they cost.
        crew: whose workers make them.
        pipeline: the pipeline's number there.
        feed: where the elements of stage 0 come from; None where they are read.
    """

    def __init__(
        self, plan: Plan, position: Position, *, profiler: Profiler, crew: Crew, pipeline: int, feed: "Feed | None"
    ) -> None:
        super().__init__(plan, position, feed)
        self._part = Part(plan, self._schedule, profiler, pipeline, is_fed=feed is not None)
        self._crew = crew
        self._admitted_by: weakref.ref[WorkersExecutor[Any]] | None = None

    def next_outputs(self) -> Outputs | None:
        """Returns the next outputs in order, None at the end."""
        outputs = super().next_outputs()
        if outputs is not None:
            self._crew.leader.parts.give(self._part, len(outputs.values) - outputs.first)
        return outputs

    def close(self) -> None:
        """Drops all work; the workers stay."""
        leader = None if self._admitted_by is None else self._admitted_by()
        if leader is not None:
            leader.parts.dismiss(self._part)

    def _begin(self) -> None:
        leader = self._crew.leader
        if self._admitted_by is None:
            self._admitted_by = weakref.ref(leader)
            leader.parts.admit(self._part)
        elif self._admitted_by() is not leader:
            raise AssertionError("whoever draws from this under another leader has moved it to a position before")

    def _advance(self) -> None:
        self._crew.leader.work_for(self._part)

    def _end(self) -> None:
        """Does nothing: the leader hands out what comes next."""
