"""Views of a running pipeline: profile, summary, metrics, trace, preview, report, and diagrams of new iterators.

A loader and its iterators share one `Insight`. It imports the modules that compute a view when one is requested.

Guarantees:
    * A pipeline is described once, by the thread that requests a view first. From then on, any thread may take a
      snapshot, and that runs no user code.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from millstream.configuration import config
from millstream.core.checks import as_integer
from millstream.loader import reporting
from millstream.loader.checkpoints.state import epoch_of
from millstream.loader.measuring import (
    CONSUMER,
    LOADER,
    NEXT,
    Event,
    ExecutorStatus,
    Frontend,
    PipelineStatus,
    Profiler,
    Waiter,
)
from millstream.loader.pipeline.elements import FailedRecord
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions

if TYPE_CHECKING:
    from millstream.loader.engine.worker_choice import WorkerChoice
    from millstream.loader.reporting.preview import Preview, Trace
    from millstream.loader.reporting.snapshot import ComponentCounter, LoaderSnapshot, Measurements, Streams
    from millstream.loader.reporting.summary import Summary


def serve_if_requested(pipeline: Any) -> None:
    """Lets other processes query the views of a pipeline, `pipeline.insight`, if the environment asks for it."""
    if os.environ.get("MILLSTREAM_TOP") == "1" or os.environ.get("MILLSTREAM_METRICS_PORT"):
        from millstream.loader.monitoring import serve_by_environment  # noqa: PLC0415  (lazy)

        serve_by_environment(pipeline.insight)


class Insight:
    """Computes the views of one pipeline from its plan and its measurements.

    Attributes:
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
        frontend: Frontend = LOADER,
        num_cores: int | None = None,
        choice: "WorkerChoice | None" = None,
    ) -> None:
        self._plan = plan
        self.profiler = profiler
        self._workers = workers
        self._reading = reading
        self._frontend = frontend
        self.num_cores = num_cores
        self._choice = choice
        self._structures: Mapping[str, tuple[str, ...]] = {}
        # The measurements between which rates are computed. They move on once more batches are timed.
        self._window: tuple[Measurements | None, Measurements | None] = None, None
        self._counter: ComponentCounter | None = None
        self._epoch_counters: weakref.WeakKeyDictionary[Measured, ComponentCounter] = weakref.WeakKeyDictionary()
        # The plans of iterators whose weights were set at run time.
        self._changed_plans: weakref.WeakKeyDictionary[Measured, Plan] = weakref.WeakKeyDictionary()
        # By the number of workers, and the options of threads.
        self._descriptions: dict[tuple[int, ReadOptions], LoaderSnapshot] = {}
        self._iterators: weakref.WeakValueDictionary[int, Measured] = weakref.WeakValueDictionary()
        self.streams: Callable[[], Sequence[tuple[str, Insight]]] = tuple

    def snapshot(self) -> "LoaderSnapshot":
        """Returns the measurements so far, with those of the iterators below."""
        outermost, below = self._outermost_snapshot(), self._below()
        if not below:
            return outermost
        _, first = below[0]
        return dataclasses.replace(reporting.snapshot.joined(outermost, below), source=first.source, order=first.order)

    def _outermost_snapshot(self) -> "LoaderSnapshot":
        choice = self._choice
        workers = self._workers if choice is None else self._workers.of_number(choice.num_workers)
        more_reads = None if choice is None or workers.num_workers else choice.reading
        reading = more_reads or self._reading
        if (description := self._descriptions.get((workers.num_workers, reading))) is None:
            description = reporting.snapshot.description_of(
                self._plan, workers, reading, self._frontend, self.num_cores
            )
            self._descriptions[workers.num_workers, reading] = description
        if (living := self.living_iterators()) and (plan := self._changed_plans.get(living[-1])) is not None:
            description = dataclasses.replace(description, order=reporting.snapshot.order_of(plan.pipeline))
        measured, seconds = self._measured()
        stages = tuple(
            dataclasses.replace(stage, seconds=seconds[stage.label], structure=self._structures.get(stage.label))
            for stage in description.stages
        )
        if not workers.num_workers:
            # Quick calls run in the trainer's thread, although it has others.
            stages = tuple(
                dataclasses.replace(stage, location=reporting.snapshot.StageLocation.TRAINER)
                if self.profiler.is_run_by_consumer(stage.label)
                else stage
                for stage in stages
            )
        text = "" if choice is None else choice.text
        return dataclasses.replace(description, measured=measured, stages=stages, choice=text)

    def draws_from(self) -> "Sequence[tuple[str, Insight]]":
        """Returns the views of the iterators below this one, each with a prefix for the labels of its stages."""
        return self.streams()

    def _below(self) -> "Streams":
        return [(prefix, insight.snapshot()) for prefix, insight in self.draws_from()]

    def everything_below(self) -> "Iterator[Insight]":
        for _, insight in self.draws_from():
            yield insight
            yield from insight.everything_below()

    def events(self) -> list[Event]:
        """Returns the latest deaths and stalls of workers, also those below, in order."""
        found = [event for one in (self, *self.everything_below()) for event in one.profiler.events.copy()]
        return sorted(found, key=lambda event: event.at)

    def status(self) -> PipelineStatus:
        """Returns the current status of the iterators, for monitoring. Any thread may call it."""
        iterators = self.living_iterators()
        waits = [seconds for iterator in iterators if (seconds := iterator.waits_for()) is not None]
        below = [iterator for insight in self.everything_below() for iterator in insight.living_iterators()]
        loads = [load for iterator in (*iterators, *below) if (load := iterator.executor_status()) is not None]
        return PipelineStatus(
            lifecycle=iterators[-1].lifecycle if iterators else "idle",
            waits_for=max(waits, default=None),
            num_ready=sum(iterator.num_ready() for iterator in iterators),
            loads=tuple(loads),
        )

    def profile(self) -> dict[str, float]:
        stages, trainer = self.snapshot().stages, self.profiler.read()
        return {stage.label: stage.seconds for stage in stages} | {label: trainer[label] for label in (NEXT, CONSUMER)}

    def metrics(self) -> dict[str, float]:
        """Returns the measurements by name: totals, and rates since the previous call."""
        snapshot, (_, newer) = self.snapshot(), self._window
        if newer is None or snapshot.measured.timed_batches > newer.timed_batches:
            self._window = newer, snapshot.measured
        return reporting.summary.metrics_of(snapshot, self._window[0])

    def trace(self, pipeline: Pipeline | None = None) -> "Trace":
        """Returns the structure of each stage's results, found by computing one output.

        It is that of `pipeline` if one is given: an equivalent pipeline with the user's operations one by one.
        """
        self._check_random_access("trace")
        insight = self
        if pipeline is not None:
            profiler = Profiler(pipeline.labels)
            insight = Insight(Plan(pipeline), profiler, self._workers, self._reading, frontend=self._frontend)
        found, stages = reporting.preview.traced(insight._plan.pipeline), insight.snapshot().stages
        insight._structures = {stage.label: found[stage.label] for stage in stages if stage.label in found}
        return reporting.preview.Trace(insight._structures, insight.snapshot())

    def preview(
        self,
        num_batches: int,
        *,
        rows: int,
        decode: Callable[[list[int]], str] | None,
        classes: Sequence[str] | None,
        is_batched: bool = False,
        pipeline: Pipeline | None = None,
        source: Any = None,
    ) -> "Preview":
        """Returns a rendering of the first outputs of the pipeline, or of an equivalent one.

        With `is_batched`, the source builds batches, so that the pipeline needs no operation for them. `source` is one
        with names of classes; None for the pipeline's own.
        """
        count, rows = as_integer(num_batches, "num_batches", 1), as_integer(rows, "rows", 1)
        if classes is not None and not _are_names(classes):
            raise TypeError(f"classes must be a list of names, in the order of their numbers, got {classes!r:.80}.")
        batches, are_batches, known = self._first_outputs(count, pipeline)
        known = classes if classes is not None else known if source is None else getattr(source, "classes", ())
        # A user's source may have an attribute of that name with another meaning.
        names = known if _are_names(known) else ()
        return reporting.preview.Preview(
            batches, is_batched=is_batched or are_batches, rows=rows, decode=decode, classes=names
        )

    def _first_outputs(self, count: int, pipeline: Pipeline | None) -> tuple[list[Any], bool, Any]:
        """Returns the first outputs, True if operations make batches of them, and the classes of the source, if any."""
        self._check_random_access("preview")
        pipeline = pipeline or self._plan.pipeline
        batches = list(itertools.islice(reporting.preview.first_outputs(pipeline), count))
        are_batches = any(operation.makes_batches for operation in pipeline.operations)
        return batches, are_batches, getattr(pipeline.source, "classes", ())

    def add(self, iterator: "Measured") -> None:
        """Adds a new iterator."""
        self._iterators[id(iterator)] = iterator

    def living_iterators(self) -> "list[Measured]":
        """Returns the iterators that still exist, the newest last."""
        references = self._iterators.valuerefs()
        return [iterator for reference in references if (iterator := reference()) is not None]

    def _measured(self) -> "tuple[Measurements, Mapping[str, float]]":
        """Returns the current measurements, and the seconds of the stages. Any thread may call it."""
        plan, profiler, living = self._plan, self.profiler, self.living_iterators()
        for iterator in living:
            iterator.count_delivered()
        seconds = profiler.read()
        beginning = profiler.last_position or (0, epoch_of(plan, plan.beginning))
        step, epoch = living[-1].delivered_position() if living else beginning
        self._counter = self._counter or reporting.snapshot.ComponentCounter(plan)
        if living:
            self._counter = self._epoch_counters.get(living[-1], self._counter)
        measured = reporting.snapshot.Measurements(
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
            reader=profiler.reader,
            waits=tuple(profiler.waits.copy()),
            records=profiler.records if plan.one_to_one else None,
            errors=self._num_errors(),
            step=step,
            epoch=epoch,
            components=self._counter.before(step, living[-1].spans_before(step) if living else None),
        )
        return measured, seconds

    def begin_epoch(self, iterator: "Measured", plan: Plan) -> None:
        """Adds the iterator of an epoch, which counts components in its own order, after those counted so far."""
        self._epoch_counters[iterator] = reporting.snapshot.ComponentCounter(plan, self._measured()[0].components)
        self.add(iterator)

    def change_plan(self, iterator: "Measured", plan: Plan) -> None:
        """Shows the order of an iterator as that of another plan from now on, and counts its components in it."""
        self._changed_plans[iterator] = plan
        before = self._epoch_counters.get(iterator)
        self._epoch_counters[iterator] = reporting.snapshot.ComponentCounter(
            plan, () if before is None else before.earlier
        )

    def errors(self) -> dict[int, str]:
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

    def _undelivered_errors(self) -> list[FailedRecord]:
        return [failure for iterator in self.living_iterators() for failure in iterator.undelivered_errors()]

    def _check_random_access(self, verb: str) -> None:
        if self._frontend.is_fed:
            raise NotImplementedError(
                f"Cannot {verb} operations after a stream that is read in order. Do so with the datasets that it draws "
                "from."
            )
        if reason := self._plan.reads_in_order_only:
            raise TypeError(f"Cannot {verb}: {reason}")


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


class Inspectable:
    """A loader or iterator with views of its pipeline."""

    @property
    def insight(self) -> Insight:
        """The views of the pipeline, shared by a loader and its iterators."""
        raise NotImplementedError

    def profile(self) -> dict[str, float]:
        """Returns the seconds that each stage has taken so far. Printed as a table, they are in `summary()`.

        It covers all iterators of a loader. It is always on, and costs less than a microsecond per stage of a batch.

        `keys`, `read` and one stage per operation (`operations[0], Map(decode)`) are the pipeline itself, summed over
        all threads and worker processes, waits included. `hand-over` is pickling and unpickling between processes.
        `next` is the time of the training loop inside `next`: waiting, or computing if there are no threads and
        workers. `consumer` is its time between two calls of `next`. If `consumer` is much more than `next`, a faster
        loader would not speed up training.
        """
        return self.insight.profile()

    def summary(self) -> "Summary":
        """Returns a table of the time that each stage takes, and advice. Printed, it is a page of text.

        It is computed from the same measurements as `profile()`. `summary().advice` has the pieces of advice.
        """
        return reporting.summary.Summary(self.insight.snapshot())

    def metrics(self, *, all_hosts: bool = False) -> dict[str, float]:
        """Returns the measurements so far by stable names, for the dashboards of W&B, TensorBoard and the like.

        Totals over all iterators of a loader: `loader/batches`, `loader/records` (of 1:1 pipelines),
        `loader/errors` (records skipped by `on_error="skip"`), `loader/wait_seconds`, `loader/first_wait_seconds` (of
        the first batch of each pass, not in the former), `loader/trainer_seconds`, `loader/wait_share_total` (0 … 1),
        `loader/worker_deaths`, `loader/worker_stalls`, and the seconds of each stage: `loader/seconds/keys`,
        `loader/seconds/read`, `loader/seconds/operation_0`, …, `loader/seconds/hand_over`.

        Of the batches fetched and used up since the previous call of `metrics()`:
        `loader/wait_share` (0 … 1), `loader/batches_per_second` and, of 1:1 pipelines,
        `loader/records_per_second`. Of the last 1,000 waits:
        `loader/wait_seconds_p50` and `loader/wait_seconds_p99`. Of the newest iterator: `loader/step`, `loader/epoch`
        if the order has epochs, and, for each component of a mixture in a 1:1 pipeline, its records in all global
        batches before that step, `loader/component_records/web`. With `epochs(n)`, those of the epochs that this loader
        has run before are added. If the mixture is one of packed rows, these are rows,
        and `loader/component_tokens/web` are their tokens. Also `loader/workers` and `loader/batch_bytes`.

        Args:
            all_hosts: True adds a comparison of all JAX processes, which must all call this: `loader/slowest_host`, the
                index of the process with the largest `loader/wait_share`, its `loader/slowest_host_wait_share` and
                `loader/slowest_host_batches_per_second`, and the sums `loader/all_hosts_errors` and
                `loader/all_hosts_worker_deaths`.
        """
        metrics = self.insight.metrics()
        if all_hosts:
            metrics |= reporting.summary.compared_hosts(metrics)
        return metrics

    def trace(self) -> "Trace":
        """Returns the types, shapes and dtypes of the elements between the operations, found by computing one batch.

        This thread computes the first batch of the stream with the same operations as training. The position of an
        iterator does not change. From then on, renderings of the loader contain the result.

        Raises:
            TypeError: the source is a stream, whose first records training would then lack.
            Exception: an error of the pipeline, with notes of where it occurred.
        """
        return self.insight.trace()

    def preview(
        self,
        num_batches: int = 1,
        *,
        rows: int = 8,
        decode: Callable[[list[int]], str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> "Preview":
        """Returns the first batches of the stream, rendered for notebooks: the input of the model.

        Images with labels are rendered as a grid, rows of integers as tokens, packed rows coloured by their
        `…_segment_ids`, and everything else as text in a table. This thread computes the batches.
        `preview(…).save("preview.html")` writes a page.

        Args:
            num_batches: the number of batches, at least 1.
            rows: the largest number of elements to render of each batch, at least 1.
            decode: turns a list of tokens into text, such as `tokenizer.decode`; None renders the numbers.
            classes: the names of the classes, a list in the order of their numbers. They are rendered in place of the
                integer `label` of an element, or of its only integer. None for the source's `classes`, if it has some,
                as an `ImageFolderDataSource` does.

        Raises:
            TypeError, ValueError: a number is not an integer or too small; or the source is a stream, whose first
                records training would then lack.
            Exception: an error of the pipeline, with notes of where it occurred.
        """
        options = self._preview_options()
        return self.insight.preview(num_batches, rows=rows, decode=decode, classes=classes, **options)

    def _preview_options(self) -> dict[str, Any]:
        """Returns arguments of `Insight.preview` for a pipeline that differs from the one that the user wrote."""
        return {}

    def report(self, path: str | Path) -> Path:
        """Writes a report, a self-contained page or a trace, and returns its path.

        The page, `*.html`, contains advice, a rendering of the pipeline, and the deaths and stalls of workers. If the
        loader was built with `enable_profiling=True`, it also has a timeline of the last seconds (which thread or
        worker computed which batch, and the waits of the trainer) and the memory of the processes. The same recording
        is written as `*.json` in Chrome's trace event format, which https://ui.perfetto.dev opens; the page links it.

        Args:
            path: the file to write, with the suffix .html or .json.

        Raises:
            ValueError: the path has another suffix, or there is no recording for a trace.
            OSError: the file cannot be written.
        """
        insight = self.insight
        return reporting.report.write_report(path, insight.profiler.recorder, insight.events(), insight.snapshot)


@dataclasses.dataclass
class Consumer(Waiter):
    """The position of an iterator that the trainer calls instead of the one below, for instance that of device_put."""

    step: int
    epoch: int | None


class Measured(Waiter):
    """An iterator that measures the trainer's waits, unless a consumer around it does so.

    Any thread may call its methods.

    Attributes:
        consumer: the consumer that measures its own waits; None if this iterator measures those of the trainer.
    """

    consumer: Consumer | None = None

    @property
    def lifecycle(self) -> str:
        """The word for its state: idle iterators prefetch nothing."""
        raise NotImplementedError

    def close_with_loader(self, deadline: float | None = None) -> None:
        """Closes an iterator of a loader that is closed, with the deadline of `Engine.close`. The default is none."""

    def call_at_end(self, function: Callable[[], object]) -> None:
        """Calls a function when the stream has ended, and when the iterator is closed."""
        raise NotImplementedError

    def let_measure(self, consumer: Consumer) -> None:
        """Lets a consumer, which the trainer calls instead, measure the trainer's waits from now on."""
        self.consumer = consumer

    def delivered_position(self) -> tuple[int, int | None]:
        """Returns step and epoch as the trainer knows them."""
        shown: Any = self.consumer or self
        return shown.step, shown.epoch

    def spans_before(self, step: int) -> list[tuple[int, int]] | None:
        """Returns the positions of the batches before a step, as ranges; None for all positions before it."""
        del step
        return None

    def waits_for(self) -> float | None:
        """Returns the seconds that the trainer has been inside `next`; None if it is not."""
        asked_at = (self.consumer or self).asked_at
        return None if asked_at is None else max(0.0, time.perf_counter() - asked_at)

    def count_delivered(self) -> None:
        """Counts the outputs delivered since the last time."""
        raise NotImplementedError

    def undelivered_errors(self) -> list[FailedRecord]:
        """Returns the failed records that were delivered and not counted yet."""
        return []

    def num_ready(self) -> int:
        """Returns the number of outputs that `next` can return immediately."""
        return 0

    def executor_status(self) -> ExecutorStatus | None:
        """Returns a snapshot of the work in progress; None if there is none, or it is not available now."""
        return None

    def worker_stacks(self) -> dict[int, str]:
        """Returns the stacks of worker processes, by process."""
        return {}


def prometheus_text(loaders: Inspectable | Mapping[str, Inspectable]) -> str:
    """Returns the measurements of loaders so far in the text format of Prometheus.

    Serve it as `text/plain; version=0.0.4; charset=utf-8`. The format is
    https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format

    Args:
        loaders: one loader or iterator; or several by name, `{"train": loader, "eval": other}`: then each sample has
            its name as the label `loader`.

    Raises:
        TypeError: a value is not a loader or iterator.

    Examples:
        >>> loader = millstream.load(range(8), batch_size=4)
        >>> print(millstream.prometheus_text(loader).splitlines()[2])
        millstream_batches_total 0.0
    """
    named: Mapping[str | None, Inspectable] = (
        {str(name): loader for name, loader in loaders.items()} if isinstance(loaders, Mapping) else {None: loaders}
    )
    for loader in named.values():
        if not isinstance(loader, Inspectable):
            raise TypeError(
                f"loaders must be loaders or their iterators, got {type(loader).__name__}. Write "
                'prometheus_text(loader), or prometheus_text({"train": loader}).'
            )
    return reporting.summary.exposition({name: loader.insight.snapshot() for name, loader in named.items()})


IteratorT = TypeVar("IteratorT")

_is_opening = contextvars.ContextVar("millstream_is_opening", default=False)
_numbers = itertools.count()


def visualized(
    caller: FrameType, make: Callable[[], IteratorT], text: Callable[[], str], html: Callable[[], str]
) -> IteratorT:
    """Returns a new iterator, and shows a diagram of its pipeline if the settings ask for one.

    Iterators that the library opens for itself, such as those below another one, have none.
    """
    folder = config.py_dataset_visualization_output_dir
    if folder is None or _is_opening.get() or caller.f_globals.get("__name__", "").split(".")[0] == "millstream":
        return make()
    with _opening():
        iterator = make()
        if folder:
            _write(Path(folder), html())
        else:
            print(text())  # noqa: T201  (the setting asks for it)
    return iterator


@contextlib.contextmanager
def _opening() -> Iterator[None]:
    token = _is_opening.set(True)
    try:
        yield
    finally:
        _is_opening.reset(token)


def _write(folder: Path, html: str) -> None:
    """Writes a page into a folder that other processes may share."""
    from millstream.core.html_fragments import document  # noqa: PLC0415  (lazy: off by default)

    folder.mkdir(parents=True, exist_ok=True)
    while True:
        path = folder / f"pipeline-{os.getpid()}-{next(_numbers)}.html"
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as page:
            page.write(document("Pipeline", html))
            return
