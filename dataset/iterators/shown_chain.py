"""The positions, lengths and views of a loader's iterator, for iterators of chains."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.nodes.batch_node import Batched
from millstream.dataset.nodes.node import Node
from millstream.loader.execution import Execution
from millstream.loader.insight import Insight
from millstream.loader.iterator import DataLoaderIterator, MeasuringConsumer
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.transforms.of_chains import AbsentElement

if TYPE_CHECKING:
    from millstream.loader.reporting.preview import Preview
    from millstream.loader.tracing import Trace


class ShownIterator(DatasetIterator[Any]):
    """An iterator of a chain that runs a loader's iterator."""

    _execution: Execution
    _inner: DataLoaderIterator

    @property
    def step(self) -> int:
        """The number of elements yielded since the beginning of the stream."""
        return self._inner.step

    @property
    def epoch(self) -> int | None:  # type: ignore[override]  # Nobody sets it here.
        """The epoch that the next element begins in, from 0; None if the elements have no epochs."""
        return self._inner.epoch

    @property
    def stall_timeout(self) -> float:
        """The number of seconds after which a wait for one element is an error."""
        return self._inner.stall_timeout

    @property
    def insight(self) -> Insight:
        """The views of the chain's pipeline."""
        return self._execution.insight

    def let_measure(self, consumer: MeasuringConsumer) -> None:
        """Lets a consumer, which the trainer calls instead, measure the trainer's waits from now on."""
        self._inner.let_measure(consumer)

    def interrupt(self) -> None:
        """Ends all prefetching and keeps the position. Another thread that waits in `next` gets a ValueError."""
        self._inner.interrupt()

    def batches_after(self, step: int) -> int:
        """Returns the number of elements after the first `step` ones; TypeError if it is not known."""
        return self._inner.batches_after(step)

    def __len__(self) -> int:
        """Returns the number of elements left; TypeError if it is not known."""
        return self._inner.batches_after(self._inner.step)


class ReadViews(ShownIterator):
    """The trace and the preview of an iterator over a MapDataset, whose elements may be missing."""

    _node: Node
    _whole: Pipeline
    _sparse: Pipeline

    def trace(self) -> "Trace":  # noqa: D102  (as for any iterator)
        try:
            return self.insight.trace(self._whole)
        except AbsentElement:
            return self.insight.trace(self._sparse)

    def preview(  # noqa: D102  (as for any iterator)
        self,
        num_batches: int = 1,
        *,
        rows: int = 8,
        decode: Callable[[list[int]], str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> "Preview":
        *nodes, first = self._node.line()
        (source, *_) = first.sources or (None,)
        return self.insight.preview(
            num_batches,
            rows=rows,
            decode=decode,
            classes=getattr(source, "classes", None) if classes is None else classes,
            is_batched=any(isinstance(node, Batched) for node in nodes),
            pipeline=self._sparse,
        )


def shown_names(pipeline: Pipeline) -> list[str]:
    """Returns the names of the user's operations, in order."""
    return [
        name for name, operation in zip(pipeline.names, pipeline.operations, strict=True) if not operation.is_between
    ]
