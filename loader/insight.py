"""Views of a running pipeline: profile, summary, metrics, trace, preview and report.

A loader and its iterators share one `Insight`. It imports the modules that compute a view when one is requested.

Guarantees:
    * A pipeline is described once, by the thread that requests a view first. From then on, any thread may take a
      snapshot, and that runs no user code.
"""

import dataclasses
import itertools
import os
import weakref
from typing import TYPE_CHECKING, Any

from millstream.core.checks import as_integer
from millstream.loader.measuring import CONSUMER, LOADER, NEXT, Front, Profiler
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.state_of_plan import epoch_of
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from millstream.loader.inspectable import Measured
    from millstream.loader.measuring import Event
    from millstream.loader.pipeline.elements import FailedRecord
    from millstream.loader.reporting.joined_snapshots import Streams
    from millstream.loader.reporting.preview import Preview
    from millstream.loader.reporting.snapshot import LoaderSnapshot, Measurements
    from millstream.loader.scheduling.status import PipelineStatus
    from millstream.loader.snapshot_of_loader import ComponentCounter
    from millstream.loader.tracing import Trace


def serve_if_requested(pipeline: Any) -> None:
    """Lets other processes query the views of a pipeline, `pipeline.insight`, if the environment asks for it."""
    if os.environ.get("MILLSTREAM_TOP") == "1" or os.environ.get("MILLSTREAM_METRICS_PORT"):
        from millstream.loader.monitoring.served_pipelines import serve_by_environment  # noqa: PLC0415  (lazy)

        serve_by_environment(pipeline.insight)


class Insight:
    """Computes the views of one pipeline from its plan and its measurements.

    Attributes:
        iterators: those that exist, by their ids, the newest last.
        streams: the result of `draws_from`, as a function.
        is_closed: True once the pipeline is closed.
    """

    is_closed = False

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
        self.num_cores = num_cores
        self._structures: Mapping[str, tuple[str, ...]] = {}
        # The measurements between which rates are computed. They move on once more batches are timed.
        self._window: tuple[Measurements | None, Measurements | None] = None, None
        self._counter: ComponentCounter | None = None
        self._epoch_counters: weakref.WeakKeyDictionary[Measured, ComponentCounter] = weakref.WeakKeyDictionary()
        self._description: LoaderSnapshot | None = None
        self.iterators: weakref.WeakValueDictionary[int, Measured] = weakref.WeakValueDictionary()
        self.streams: Callable[[], Sequence[tuple[str, Insight]]] = tuple

    def snapshot(self) -> "LoaderSnapshot":
        """Returns the measurements so far, with those of the iterators below."""
        own, below = self._own_snapshot(), self._below()
        if not below:
            return own
        from millstream.loader.reporting.joined_snapshots import joined  # noqa: PLC0415  (lazy: only chains need it)

        _, first = below[0]
        return dataclasses.replace(joined(own, below), source=first.source, order=first.order)

    def _own_snapshot(self) -> "LoaderSnapshot":
        from millstream.loader.reporting.snapshot import Location  # noqa: PLC0415  (lazy, as above)

        if self._description is None:
            from millstream.loader.snapshot_of_loader import description_of  # noqa: PLC0415  (lazy: for views only)

            self._description = description_of(self._plan, self._workers, self._reading, self._front, self.num_cores)
        measured, seconds = self._measured()
        stages = tuple(
            dataclasses.replace(stage, seconds=seconds[stage.label], structure=self._structures.get(stage.label))
            for stage in self._description.stages
        )
        if not self._workers.num_workers:
            # Quick calls run in the trainer's thread, although it has others.
            stages = tuple(
                dataclasses.replace(stage, location=Location.TRAINER)
                if self.profiler.is_run_by_consumer(stage.label)
                else stage
                for stage in stages
            )
        return dataclasses.replace(self._description, measured=measured, stages=stages)

    def draws_from(self) -> "Sequence[tuple[str, Insight]]":
        """Returns the views of the iterators below this one, each with a prefix for the labels of its stages."""
        return self.streams()

    def _below(self) -> "Streams":
        return [(prefix, insight.snapshot()) for prefix, insight in self.draws_from()]

    def everything_below(self) -> "Iterator[Insight]":
        for _, insight in self.draws_from():
            yield insight
            yield from insight.everything_below()

    def events(self) -> "list[Event]":
        """Returns the latest deaths and stalls of workers, also those below, in order."""
        found = [event for one in (self, *self.everything_below()) for event in one.profiler.events.copy()]
        return sorted(found, key=lambda event: event.at)

    def status(self) -> "PipelineStatus":
        """Returns the current status of the iterators, for monitoring. Any thread may call it."""
        from millstream.loader.scheduling.status import PipelineStatus  # noqa: PLC0415  (lazy: only monitoring needs it)

        own = self.living_iterators()
        waits = [seconds for iterator in own if (seconds := iterator.waits_for()) is not None]
        below = [iterator for insight in self.everything_below() for iterator in insight.living_iterators()]
        loads = [load for iterator in (*own, *below) if (load := iterator.executor_status()) is not None]
        return PipelineStatus(
            lifecycle=own[-1].lifecycle if own else "idle",
            waits_for=max(waits, default=None),
            at_hand=sum(iterator.num_at_hand() for iterator in own),
            loads=tuple(loads),
        )

    def profile(self) -> dict[str, float]:
        stages, trainer = self.snapshot().stages, self.profiler.read()
        return {stage.label: stage.seconds for stage in stages} | {label: trainer[label] for label in (NEXT, CONSUMER)}

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
        found, stages = traced(insight._plan.pipeline), insight.snapshot().stages
        insight._structures = {stage.label: found[stage.label] for stage in stages if stage.label in found}
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
        source: Any = None,
    ) -> "Preview":
        """Returns a rendering of the first outputs of the pipeline, or of an equivalent one.

        With `is_batched`, the source builds batches, so that the pipeline needs no operation for them. `source` is one
        with names of classes; None for the pipeline's own.
        """
        from millstream.loader.reporting.preview import Preview  # noqa: PLC0415  (lazy, as above)

        count, rows = as_integer(num_batches, "num_batches", 1), as_integer(rows, "rows", 1)
        batches, are_batches, known = self._first_outputs(count, pipeline)
        known = classes if classes is not None else known if source is None else getattr(source, "classes", ())
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

    def living_iterators(self) -> "list[Measured]":
        """Returns the iterators that still exist, the newest last."""
        references = self.iterators.valuerefs()
        return [iterator for reference in references if (iterator := reference()) is not None]

    def _measured(self) -> "tuple[Measurements, Mapping[str, float]]":
        """Returns the current measurements, and the seconds of the stages. Any thread may call it."""
        from millstream.loader.reporting.snapshot import Measurements  # noqa: PLC0415  (lazy, as above)
        from millstream.loader.snapshot_of_loader import ComponentCounter  # noqa: PLC0415

        plan, profiler, living = self._plan, self.profiler, self.living_iterators()
        for iterator in living:
            iterator.count_delivered()
        seconds = profiler.read()
        beginning = profiler.last_position or (0, epoch_of(plan, plan.beginning))
        step, epoch = living[-1].delivered_position() if living else beginning
        self._counter = self._counter or ComponentCounter(plan)
        if living:
            self._counter = self._epoch_counters.get(living[-1], self._counter)
        measured = Measurements(
            batches=profiler.outputs,
            timed_batches=profiler.timed_outputs,
            first_seconds=profiler.first_seconds,
            wait_seconds=max(0.0, seconds[NEXT] - profiler.first_seconds),
            trainer_seconds=seconds[CONSUMER],
            batch_bytes=profiler.output_bytes,
            core_seconds=profiler.core_seconds or None,
            delay_seconds=profiler.delay_seconds,
            deaths=profiler.deaths,
            stalls=profiler.stalls,
            waits=tuple(profiler.waits.copy()),
            records=profiler.records if plan.one_to_one else None,
            errors=self._num_errors(),
            step=step,
            epoch=epoch,
            components=self._counter.before(step),
        )
        return measured, seconds

    def begin_epoch(self, iterator: "Measured", plan: Plan) -> None:
        """Adds the iterator of an epoch, which counts components in its own order, after those counted so far."""
        from millstream.loader.snapshot_of_loader import ComponentCounter  # noqa: PLC0415  (lazy, as above)

        self._epoch_counters[iterator] = ComponentCounter(plan, self._measured()[0].components)
        self.iterators[id(iterator)] = iterator

    def errors(self) -> "dict[int, str]":
        """Returns the latest failed records that were delivered: the error as text, by record key."""
        if self._plan.errors is None:
            return {}
        return self._plan.errors.texts(self._undelivered_errors())

    def _num_errors(self) -> int:
        log = self._plan.errors
        if log is None:
            return 0
        keys = {failure.record_key for failure in self._undelivered_errors()}
        return log.count + sum(not log.knows(key, log.count) for key in keys)

    def _undelivered_errors(self) -> "list[FailedRecord]":
        return [failure for iterator in self.living_iterators() for failure in iterator.undelivered_errors()]

    def _check_random_access(self, verb: str) -> None:
        if self._front.is_fed:
            raise NotImplementedError(
                f"Cannot {verb} operations after a stream that is read in order. Do so with the datasets that it draws "
                "from."
            )
        if reason := self._plan.reads_in_order_only:
            raise TypeError(f"Cannot {verb}: {reason}")
