"""What the iterator of a chain shows of itself: as a loader does, without the steps that are there for its own sake."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from millstream.dataset.dataset_iterator import DatasetIterator
from millstream.loader.execution import Execution
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.profile import Profile
from millstream.loader.threads.front import CHAIN, Front
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.profiler import Profiler

if TYPE_CHECKING:
    from millstream.loader.reporting.summary import Summary
    from millstream.loader.tracing import Trace


class ShownIterator(DatasetIterator[Any]):
    """An iterator that says where its time goes, and what would make it faster."""

    _execution: Execution
    _inner: DataLoaderIterator

    @property
    def step(self) -> int:
        """The number of elements yielded since the beginning of the stream."""
        return self._inner.step

    @property
    def epoch(self) -> int | None:
        """The epoch that the next element begins in, from 0; None if the elements have no epochs."""
        return self._inner.epoch

    @property
    def stall_timeout(self) -> float:
        """The number of seconds after which a wait for one element is an error."""
        return self._inner.stall_timeout

    def measured_outside(self) -> Callable[[], Profiler]:
        """Has the caller measure the consumer's waits from now on; returns what gives the profiler for that."""
        self._inner.measured_outside()
        return lambda: self._execution.profiler

    def interrupt(self) -> None:
        """Ends all work ahead and keeps the position. Another thread that waits in `next` gets a ValueError."""
        self._inner.interrupt()

    def batches_after(self, step: int) -> int:
        """Returns the number of elements after the first `step` ones; TypeError if it is not known."""
        return self._inner.batches_after(step)

    def profile(self) -> Profile:
        """Returns where the time of this iterator has gone so far: a dict of seconds by stage; printed, a table."""
        shown, seconds = shown_labels(self._execution.pipeline), self._execution.profiler.read()
        return Profile({label: spent for label, spent in seconds.items() if label in shown})

    def summary(self) -> "Summary":
        """Returns a table of where the time has gone so far, and advice in sentences: printed, a page to read."""
        from millstream.loader.reporting.summary import Summary  # noqa: PLC0415  (for those who look)

        return Summary(self._execution.facts())

    def metrics(self) -> dict[str, float]:
        """Returns the measurements so far by stable names, as `DataLoader.metrics` does."""
        from millstream.loader.reporting.metrics import metrics_of  # noqa: PLC0415  (for those who look)

        return metrics_of(self._execution.facts())


def traced_chain(
    pipeline: Pipeline, options: tuple[MultiprocessingOptions, ReadOptions], front: Front = CHAIN
) -> "Trace":
    """Returns what flows between the operations of a pipeline, found by making one element."""
    from millstream.loader.snapshot_of_loader import facts_of  # noqa: PLC0415  (for those who look)
    from millstream.loader.tracing import Trace, traced  # noqa: PLC0415

    structures, shown = traced(pipeline), shown_labels(pipeline)
    facts = facts_of(Plan(pipeline), Profiler(pipeline.labels), *options, structures, front=front)
    return Trace({label: lines for label, lines in structures.items() if label in shown}, facts)


def shown_names(pipeline: Pipeline) -> list[str]:
    """Returns the names of the operations, in order."""
    return [
        name for name, operation in zip(pipeline.names, pipeline.operations, strict=True) if not operation.is_between
    ]


def shown_labels(pipeline: Pipeline) -> set[str]:
    """Returns the labels of the parts of the work, without steps that the chain puts between the operations."""
    operations = zip(pipeline.labels, pipeline.operations, strict=True)
    return {*Profiler(()).read(), *(label for label, operation in operations if not operation.is_between)}
