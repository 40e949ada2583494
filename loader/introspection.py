"""What every loader can show of itself. What makes it is imported when somebody looks."""

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING

from millstream.checks import as_integer
from millstream.closing import Closing
from millstream.loader.execution import Execution
from millstream.loader.pipeline.plan import Plan
from millstream.loader.profile import Profile
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.profiler import Profiler

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from millstream.loader.reporting.preview import Preview
    from millstream.loader.reporting.snapshot import LoaderFacts
    from millstream.loader.reporting.summary import Summary
    from millstream.loader.threads.recorder import Recorder
    from millstream.loader.tracing import Trace


class ShownLoader(Closing, abc.ABC):
    """A loader that says what it is, where its time goes, and what would make it faster."""

    _execution: Execution
    _plan: Plan
    _profiler: Profiler
    _workers: MultiprocessingOptions
    _read_options: ReadOptions
    _recorder: "Recorder | None"
    _structures: Mapping[str, tuple[str, ...]]

    def profile(self) -> Profile:
        """Returns where the time of this loader's iterators has gone so far: a dict of seconds by stage.

        Printed, it is a table. It is always on, and costs less than a microsecond for each stage of a batch.

        `keys`, `read` and one stage for each operation (`operations[0], Map(decode)`) are what the pipeline itself
        takes, added up over all threads and worker processes, waits included. `hand-over` is pickling and unpickling
        between processes. `next` is the consumer's thread inside `next`: waiting, or working where there are no threads
        and workers. `consumer` is the same thread between two calls of `next`. If `consumer` is much more than `next`,
        a faster loader would not make training faster.
        """
        return Profile(self._profiler.read())

    def summary(self) -> "Summary":
        """Returns a table of where the time goes, and advice in sentences: printed, a page to read.

        It is made of what `profile()` knows, over all iterators of this loader so far. `summary().advice` has the
        sentences by themselves.
        """
        from millstream.loader.reporting.summary import Summary  # noqa: PLC0415  (for those who look)

        return Summary(self._facts())

    def metrics(self) -> dict[str, float]:
        """Returns what was measured so far, over all iterators of this loader, by stable names.

        For the dashboards of W&B, TensorBoard and the like:
        `loader/batches`, `loader/wait_seconds`, `loader/first_wait_seconds` (for the first batch of each pass, not
        in the former), `loader/trainer_seconds`, `loader/wait_share` (0 … 1), `loader/batch_bytes`, `loader/workers`,
        `loader/worker_deaths`, `loader/worker_stalls`, and the seconds of each stage: `loader/seconds/keys`,
        `loader/seconds/read`, `loader/seconds/operation_0`, …, `loader/seconds/hand_over`.
        """
        from millstream.loader.reporting.metrics import metrics_of  # noqa: PLC0415  (for those who look)

        return metrics_of(self._facts())

    def trace(self) -> "Trace":
        """Returns the types, shapes and dtypes of what flows between the operations, found by making one batch.

        The batch is the first of the stream, made in this thread: the operations run as for training. From then on, the
        picture of the loader shows them, too.

        Raises:
            TypeError: the source is a stream, whose first records training would then lack.
            Exception: what the pipeline raises, with notes of where.
        """
        from millstream.loader.tracing import Trace, traced  # noqa: PLC0415  (for those who look)

        self._check_random_access("trace")
        self._structures = traced(self._plan.pipeline)
        return Trace(self._structures, self._facts())

    def preview(
        self, num_batches: int = 1, *, rows: int = 8, decode: "Callable[[list[int]], str] | None" = None
    ) -> "Preview":
        """Returns the first batches of the stream as a picture for notebooks: what the model will see.

        Images are shown as images, rows of integers as tokens, packed rows coloured by their `…_segment_ids`, all else
        as text. The batches are made in this thread; `preview(…).save("preview.html")` writes a page for a browser.

        Args:
            num_batches: how many, at least 1.
            rows: how many elements of each batch are shown at most, at least 1.
            decode: makes a text of a list of tokens, such as `tokenizer.decode`; None shows the numbers.

        Raises:
            TypeError, ValueError: a number is not one, or too small; or the source is a stream, whose first records
                training would then lack.
            Exception: what the pipeline raises, with notes of where.
        """
        from itertools import islice  # noqa: PLC0415

        from millstream.loader.reporting.preview import Preview  # noqa: PLC0415  (for those who look)
        from millstream.loader.tracing import first_outputs, makes_batches  # noqa: PLC0415

        count, rows = as_integer(num_batches, "num_batches", 1), as_integer(rows, "rows", 1)
        pipeline = self._plan.pipeline
        self._check_random_access("preview")
        batches = list(islice(first_outputs(pipeline), count))
        return Preview(batches, is_batched=makes_batches(pipeline), rows=rows, decode=decode)

    def _check_random_access(self, what: str) -> None:
        if reason := self._plan.reads_in_order_only:
            raise TypeError(f"Cannot {what}: {reason}")

    def report(self, path: "str | Path") -> "Path":
        """Writes a report on this loader, and returns where: a page that needs nothing else, or a trace.

        The page, `*.html`, has the picture and the advice, deaths and stalls of workers and, where the loader was built
        with `enable_profiling=True`, a timeline of the last seconds (who worked on which batch, when the trainer
        waited) and the memory of the processes. Its last pieces of work are also written as `*.json`, the trace
        events of Chrome, which https://ui.perfetto.dev opens; the page has a link to them.

        Args:
            path: the file to write, with the suffix .html or .json.

        Raises:
            ValueError: the path has another suffix, or a trace is asked for that was not recorded.
            OSError: the file cannot be written.
        """
        from pathlib import Path  # noqa: PLC0415  (for those who look)

        path, recorder = Path(path), self._recorder
        if path.suffix not in (".html", ".json"):
            raise ValueError(f"A report is written to a file with the suffix .html or .json, got {str(path)!r}.")
        if path.suffix == ".json" and recorder is None:
            raise ValueError("There is no trace to write: build the loader with enable_profiling=True.")
        # Copies: other threads may add to these.
        spans = [] if recorder is None else list(recorder.spans.copy())
        memory = [] if recorder is None else list(recorder.memory.copy())
        events = list(self._profiler.events.copy())
        if path.suffix == ".json":
            from millstream.loader.reporting.chrome_trace import chrome_trace  # noqa: PLC0415

            text = chrome_trace(spans, memory, events)
        else:
            from millstream.loader.reporting.report import report_page  # noqa: PLC0415

            text = report_page(self._facts(), spans, memory, events, is_recorded=recorder is not None)
        path.write_text(text, encoding="utf-8")
        return path

    def serve_top(self) -> None:
        """Lets this user's `millstream top` look at this loader while it runs: rates, waits, workers, stacks.

        A thread answers over a private socket, which no other user can open, until the loader is closed or gone.
        `MILLSTREAM_TOP=1` in the environment does this for every pipeline that is iterated over. Linux only.

        Raises:
            ValueError: the loader is closed.
            OSError: there can be no private socket; the error says why.
        """
        from millstream.loader.serving import serve  # noqa: PLC0415  (for those who look)

        if self._execution.is_closed:
            raise ValueError("This DataLoader is closed: build a new one.")
        serve(self._execution)

    def __repr__(self) -> str:
        from millstream.loader.reporting.text_rendering import text_picture  # noqa: PLC0415  (for those who look)

        return text_picture(self._facts())

    def _repr_html_(self) -> str:
        from millstream.loader.reporting.html_rendering import loader_picture  # noqa: PLC0415  (for those who look)

        return loader_picture(self._facts())

    @property
    def _worker_options(self) -> MultiprocessingOptions:
        """What holds for the workers, wherever they run."""
        return self._workers

    def _facts(self) -> "LoaderFacts":
        return self._execution.facts(self._structures)


def prometheus_text(loaders: ShownLoader | Mapping[str, ShownLoader]) -> str:
    """Returns what was measured of loaders so far, for Prometheus to collect: a page in its text format.

    Serve it as `text/plain; version=0.0.4; charset=utf-8`. The format is
    https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format

    Args:
        loaders: one loader; or several by name, `{"train": loader, "eval": other}`: then each sample has its name as
            the label `loader`.

    Raises:
        TypeError: what was given is not a loader.

    Examples:
        >>> loader = millstream.load(range(8), batch_size=4)
        >>> print(millstream.prometheus_text(loader).splitlines()[2])
        millstream_batches_total 0.0
    """
    from millstream.loader.reporting.metrics import exposition  # noqa: PLC0415  (for those who look)

    named: Mapping[str | None, ShownLoader] = (
        {str(name): loader for name, loader in loaders.items()} if isinstance(loaders, Mapping) else {None: loaders}
    )
    for loader in named.values():
        if not isinstance(loader, ShownLoader):
            raise TypeError(
                f"prometheus_text shows loaders, got {type(loader).__name__}: write prometheus_text(loader), or "
                'prometheus_text({"train": loader}).'
            )
    return exposition({name: loader._facts() for name, loader in named.items()})  # noqa: SLF001  (of this module)
