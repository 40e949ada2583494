"""Views of a running pipeline: profile, summary, metrics, trace, preview and report.

A loader and its iterators share one `Insight`. It imports the modules that compute a view when one is requested.
"""

import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING, Any

from millstream.checks import as_integer
from millstream.loader.measuring.front import LOADER, Front
from millstream.loader.measuring.profiler import CONSUMER, HAND_OVER, NEXT, Profiler
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.state_of_plan import epoch_of
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from millstream.loader.iterator import DataLoaderIterator
    from millstream.loader.reporting.preview import Preview
    from millstream.loader.reporting.snapshot import LoaderSnapshot, Measurements
    from millstream.loader.snapshot_of_loader import ComponentCounter
    from millstream.loader.tracing import Trace


class Insight:
    """Computes the views of one pipeline from its plan and its measurements."""

    def __init__(
        self,
        plan: Plan,
        profiler: Profiler,
        workers: MultiprocessingOptions,
        reading: ReadOptions,
        *,
        front: Front = LOADER,
        num_cores: int | None = None,
    ) -> None:
        self._plan = plan
        self.profiler = profiler
        self._workers = workers
        self._reading = reading
        self._front = front
        self._num_cores = num_cores
        self._structures: Mapping[str, tuple[str, ...]] = {}
        # The measurements between which rates are computed. They move on once more batches are timed.
        self._window: tuple[Measurements | None, Measurements | None] = None, None
        self._counter: ComponentCounter | None = None
        self.iterators: weakref.WeakValueDictionary[int, DataLoaderIterator] = weakref.WeakValueDictionary()

    def snapshot(self) -> "LoaderSnapshot":
        from millstream.loader.snapshot_of_loader import snapshot_of  # noqa: PLC0415  (lazy: only views need it)

        return snapshot_of(
            self._plan,
            *self._measured(),
            workers=self._workers,
            reading=self._reading,
            structures=self._structures,
            front=self._front,
            num_cores=self._num_cores,
        )

    def updated(self, snapshot: "LoaderSnapshot") -> "LoaderSnapshot":
        """Returns an earlier snapshot with current measurements. It is safe in any thread, and runs no user code."""
        measured, seconds = self._measured()
        stages = tuple(dataclasses.replace(stage, seconds=seconds[stage.label]) for stage in snapshot.stages)
        return dataclasses.replace(snapshot, measured=measured, stages=stages)

    def profile(self) -> dict[str, float]:
        return {stage: seconds for stage, seconds in self.profiler.read().items() if stage in self._labels}

    def metrics(self) -> dict[str, float]:
        """Returns the measurements by name: totals, and rates since the previous call."""
        from millstream.loader.reporting.metrics import metrics_of  # noqa: PLC0415  (lazy, as above)

        snapshot, (_, newer) = self.snapshot(), self._window
        if newer is None or snapshot.measured.timed_batches > newer.timed_batches:
            self._window = newer, snapshot.measured
        return metrics_of(snapshot, self._window[0])

    def trace(self, pipeline: Pipeline | None = None) -> "Trace":
        """Returns the structure of each stage's results, found by computing one output.

        It is that of `pipeline` if one is given: an equivalent pipeline with the user's operations one by one.
        """
        from millstream.loader.tracing import Trace, traced  # noqa: PLC0415  (lazy, as above)

        self._check_random_access("trace")
        insight = self
        if pipeline is not None:
            profiler = Profiler(pipeline.labels)
            insight = Insight(Plan(pipeline), profiler, self._workers, self._reading, front=self._front)
        structures, labels = traced(insight._plan.pipeline), insight._labels
        insight._structures = {label: leaves for label, leaves in structures.items() if label in labels}
        return Trace(insight._structures, insight.snapshot())

    def preview(
        self,
        num_batches: int,
        *,
        rows: int,
        decode: "Callable[[list[int]], str] | None",
        classes: "Sequence[str] | None",
        is_batched: bool = False,
        pipeline: Pipeline | None = None,
    ) -> "Preview":
        """Returns a rendering of the first outputs of the pipeline, or of an equivalent one.

        With `is_batched`, the source builds batches, so that the pipeline needs no operation for them.
        """
        from millstream.loader.reporting.preview import Preview  # noqa: PLC0415  (lazy, as above)

        count, rows = as_integer(num_batches, "num_batches", 1), as_integer(rows, "rows", 1)
        batches, are_batches, known = self._first_outputs(count, pipeline)
        known = known if classes is None else classes
        # A user's source may have an attribute of that name with another meaning.
        names = known if isinstance(known, list | tuple) and all(isinstance(name, str) for name in known) else ()
        return Preview(batches, is_batched=is_batched or are_batches, rows=rows, decode=decode, classes=names)

    def _first_outputs(self, count: int, pipeline: Pipeline | None) -> tuple[list[Any], bool, Any]:
        """Returns the first outputs, True if operations make batches of them, and the classes of the source, if any."""
        from millstream.loader.tracing import first_outputs  # noqa: PLC0415  (lazy, as above)

        self._check_random_access("preview")
        pipeline = pipeline or self._plan.pipeline
        batches = list(itertools.islice(first_outputs(pipeline), count))
        are_batches = any(operation.makes_batches for operation in pipeline.operations)
        return batches, are_batches, getattr(pipeline.source, "classes", ())

    def count_delivered(self) -> None:
        """Adds the batches that iterators have delivered since the last time. Any thread may call it."""
        for iterator in self.living_iterators():
            iterator.count_delivered()

    def living_iterators(self) -> "list[DataLoaderIterator]":
        """Returns the iterators that still exist, the newest last."""
        references = self.iterators.valuerefs()
        return [iterator for reference in references if (iterator := reference()) is not None]

    def _measured(self) -> "tuple[Measurements, Mapping[str, float]]":
        """Returns the current measurements, and the seconds of the stages. Any thread may call it."""
        from millstream.loader.reporting.snapshot import Measurements  # noqa: PLC0415  (lazy, as above)
        from millstream.loader.snapshot_of_loader import ComponentCounter  # noqa: PLC0415

        self.count_delivered()
        plan, profiler = self._plan, self.profiler
        seconds = profiler.read()
        step, epoch = self._delivered_position()
        self._counter = self._counter or ComponentCounter(plan)
        measured = Measurements(
            batches=profiler.outputs,
            timed_batches=profiler.timed_outputs,
            first_seconds=profiler.first_seconds,
            wait_seconds=max(0.0, seconds[NEXT] - profiler.first_seconds),
            trainer_seconds=seconds[CONSUMER],
            batch_bytes=profiler.output_bytes,
            core_seconds=profiler.core_seconds or None,
            deaths=profiler.deaths,
            stalls=profiler.stalls,
            waits=tuple(profiler.waits.copy()),
            records=profiler.outputs * plan.partition.block if plan.one_to_one else None,
            errors=0 if plan.errors is None else len(plan.errors.texts),
            step=step,
            epoch=epoch,
            components=self._counter.before(step),
        )
        return measured, seconds

    def _delivered_position(self) -> tuple[int, int | None]:
        living = self.living_iterators()
        return living[-1].delivered_position() if living else (0, epoch_of(self._plan, self._plan.beginning))

    @property
    def _labels(self) -> set[str]:
        """The labels of the stages, without the steps that a chain inserts between the user's operations."""
        operations = zip(self._plan.pipeline.labels, self._plan.pipeline.operations, strict=True)
        own = (label for label, operation in operations if not operation.is_between)
        return {"keys", "read", HAND_OVER, NEXT, CONSUMER, *own}

    def _check_random_access(self, verb: str) -> None:
        if self._front.is_fed:
            raise NotImplementedError(
                f"Cannot {verb} operations after a stream that is read in order. Do so with the datasets that it draws "
                "from."
            )
        if reason := self._plan.reads_in_order_only:
            raise TypeError(f"Cannot {verb}: {reason}")
