"""Iterators of chains that run a loader's iterator."""

from typing import Any

from millstream.core.signals import interrupts
from millstream.dataset.iterators.dataset_iterator import CLOSED, Drawn, SavingIterator
from millstream.loader.execution import Execution
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.views import Consumer, Insight
from millstream.transforms.of_chains import AbsentElement


class EngineIterator(SavingIterator[Any]):
    """An iterator whose elements come from a loader's iterator."""

    _execution: Execution
    _inner: DataLoaderIterator
    _was_sought = False
    """True if elements may be missing before its position, because `seek` has counted positions."""

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
        return self._execution.insight

    def let_measure(self, consumer: Consumer) -> None:
        """Lets a consumer, which the trainer calls instead, measure the trainer's waits from now on."""
        self._inner.let_measure(consumer)

    def interrupt(self) -> None:
        """Ends all prefetching and keeps the position. Another thread that waits in `next` gets a ValueError."""
        self._inner.interrupt()

    def records_between(self, first: int, stop: int) -> int:
        """Returns the number of records in the elements [first, stop) of a 1:1 pipeline; 0 for any other."""
        return self._inner.records_between(first, stop)

    def rows_agree(self, step: int) -> bool | None:
        """Returns True if the element after `step` others has as many rows on all shards; None if it is not known."""
        return self._inner.rows_agree(step)

    def texts_for_hosts(self, *, is_same_shard: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the texts that must be the same on all hosts, and those that should be, see `DataLoaderIterator`."""
        return self._inner.texts_for_hosts(is_same_shard=is_same_shard)

    def batches_after(self, step: int) -> int:
        """Returns the number of elements after the first `step` ones; TypeError if it is not known."""
        return self._inner.batches_after(step)

    def __len__(self) -> int:
        return self._inner.batches_after(self._inner.step)

    def __next__(self) -> Any:
        if self._closed:
            raise ValueError(CLOSED)
        try:
            return next(self._inner)
        except AbsentElement as missing:
            self._change_plan(missing)
        return next(self._inner)

    def _draw_elements(self, count: int) -> Drawn[Any]:
        drawn = self.draw(count)
        return Drawn(list(drawn.values), drawn.error)

    def draw(self, count: int) -> Elements:
        """Returns the next elements with their origins: fewer than `count` if they end, or if an error follows."""
        runs: list[Elements] = []
        left = count
        while left:
            try:
                runs.append(self._take(left))
            except StopIteration:
                break
            except BaseException as failure:
                if interrupts(failure):
                    raise
                runs.append(Elements.failed(failure))
                break
            left -= len(runs[-1].values)
        return Elements.concatenate(runs) if runs else Elements([], Origins.none())

    def _take(self, limit: int) -> Elements:
        self._check_open()
        try:
            return self._inner.take(limit)
        except AbsentElement as missing:
            self._change_plan(missing)
        return self._inner.take(limit)

    def start_prefetch(self) -> None:
        self._check_open()
        self._inner.start_prefetch()

    def close(self) -> None:
        self._closed = True
        # Otherwise, the streams of a closed combination would be reported as pipelines of their own.
        self._execution.insight.is_closed = True
        self._inner.close()
        super().close()

    def __repr__(self) -> str:
        workers, reading = self._execution.workers, self._execution.reading
        execution = "in this thread"
        if workers.num_workers:
            execution = f"{workers.num_workers} worker{'s'[: workers.num_workers != 1]}"
        elif reading.reads_ahead:
            execution = f"up to {reading.num_threads} thread{'s'[: reading.num_threads != 1]}"
        pipeline = self._execution.pipeline
        pairs = zip(pipeline.names, pipeline.operations, strict=True)
        names = [name for name, operation in pairs if not operation.is_between]
        step, _ = self._inner.delivered_position()
        made = f": {', '.join(names)}" if names else ""
        return f"<{type(self).__name__} at step {step}, {self._inner.lifecycle}, {execution}{self._drawn_from()}{made}>"

    def _repr_html_(self) -> str:
        from millstream.loader.reporting.summary import render_loader  # noqa: PLC0415  (lazy: for notebooks)

        return render_loader(self.insight.snapshot(), iterator=repr(self))

    def _change_plan(self, missing: AbsentElement) -> None:
        """Continues, at the same position, with a plan that skips missing elements."""
        raise missing

    def _check_not_sought(self, missing: AbsentElement) -> None:
        if self._was_sought:
            raise ValueError(
                f"{missing} So seek has moved to a position with fewer elements before it than requested. Drop "
                "elements with a filter instead of a map that returns None, because seek then skips missing ones."
            ) from missing

    def _take_over(self, execution: Execution, inner: DataLoaderIterator) -> None:
        """Closes the plan before the current one, which takes over its consumer and the number of its batches."""
        if inner is self._inner:
            return
        if inner.consumer is not None:
            self._inner.let_measure(inner.consumer)
        inner.close()
        self._execution.profiler.delivered(execution.profiler.outputs, execution.profiler.records)
