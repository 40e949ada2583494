"""The views that loaders and their iterators have in common, and the measurements behind them."""

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from millstream.loader.insight import Insight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from millstream.loader.pipeline.elements import FailedRecord
    from millstream.loader.reporting.preview import Preview
    from millstream.loader.reporting.summary import Summary
    from millstream.loader.scheduling.status import ExecutorStatus
    from millstream.loader.tracing import Trace


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
        from millstream.loader.reporting.summary import Summary  # noqa: PLC0415  (lazy: only views need it)

        return Summary(self.insight.snapshot())

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
            from millstream.loader.reporting.metrics import compared_hosts  # noqa: PLC0415  (lazy, as above)

            metrics |= compared_hosts(metrics)
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
        decode: "Callable[[list[int]], str] | None" = None,
        classes: "Sequence[str] | None" = None,
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
        """Returns arguments of `Insight.preview` for pipelines that are not like those that the user wrote."""
        return {}

    def report(self, path: "str | Path") -> "Path":
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
        from millstream.loader.reporting.report import write_report  # noqa: PLC0415  (lazy, as above)

        insight = self.insight
        return write_report(path, insight.profiler.recorder, insight.events(), insight.snapshot)


@dataclasses.dataclass
class Consumer:
    """The position of an iterator that the trainer calls instead of the one below, for instance that of device_put.

    Attributes:
        asked_at: the time since which the trainer is inside `next`; None while it computes.
    """

    step: int
    epoch: int | None
    asked_at: float | None = None


class Measured:
    """An iterator that measures the trainer's waits, unless a consumer around it does so.

    Any thread may call its methods.

    Attributes:
        consumer: the consumer that measures its own waits; None if this iterator measures those of the trainer.
        asked_at: the time since which the trainer waits inside `next`; None while it does not.
    """

    consumer: Consumer | None = None
    asked_at: float | None = None

    @property
    def lifecycle(self) -> str:
        """The word for its state: idle iterators prefetch nothing."""
        raise NotImplementedError

    def let_measure(self, consumer: Consumer) -> None:
        """Lets a consumer, which the trainer calls instead, measure the trainer's waits from now on."""
        self.consumer = consumer

    def delivered_position(self) -> tuple[int, int | None]:
        """Returns step and epoch as the trainer knows them."""
        shown: Any = self.consumer or self
        return shown.step, shown.epoch

    def waits_for(self) -> float | None:
        """Returns the seconds that the trainer has been inside `next`; None if it is not."""
        asked_at = (self.consumer or self).asked_at
        return None if asked_at is None else max(0.0, time.perf_counter() - asked_at)

    def count_delivered(self) -> None:
        """Counts the outputs delivered since the last time."""
        raise NotImplementedError

    def undelivered_errors(self) -> "list[FailedRecord]":
        """Returns the failed records that were delivered and not counted yet."""
        return []

    def num_at_hand(self) -> int:
        """Returns the number of outputs that `next` can return immediately."""
        return 0

    def executor_status(self) -> "ExecutorStatus | None":
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
    from millstream.loader.reporting.metrics import exposition  # noqa: PLC0415  (lazy: only views need it)

    named: Mapping[str | None, Inspectable] = (
        {str(name): loader for name, loader in loaders.items()} if isinstance(loaders, Mapping) else {None: loaders}
    )
    for loader in named.values():
        if not isinstance(loader, Inspectable):
            raise TypeError(
                f"loaders must be loaders or their iterators, got {type(loader).__name__}. Write "
                'prometheus_text(loader), or prometheus_text({"train": loader}).'
            )
    return exposition({name: loader.insight.snapshot() for name, loader in named.items()})
