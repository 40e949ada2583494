"""The DataLoader: a source, an order and operations. It starts no thread or process until it is iterated over."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, final

from millstream import grain_kinds
from millstream.core.checks import as_flag, as_integer, as_options, named_arguments
from millstream.core.closing import Closing
from millstream.loader import reporting
from millstream.loader.checkpoints.fingerprint import Origin, snapshot_of
from millstream.loader.checkpoints.state import (
    Run,
    count_outputs,
    declared_by,
    fingerprint_of_pipeline,
    state_at,
    stream_of,
)
from millstream.loader.execution import Execution
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.lineage import Lineage, RunLineage
from millstream.loader.measuring import ACTORS, DEBUGGED, LOADER, Profiler, Recorder
from millstream.loader.pipeline.pipeline import (
    MAX_ERRORS,
    Operations,
    Pipeline,
    Tolerance,
    check_kind,
    check_operations,
)
from millstream.loader.pipeline.stages import Instrument
from millstream.loader.run_changes import Beginning, RepeatedPasses
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions, available_cores
from millstream.loader.views import Insight, Inspectable, visualized
from millstream.samplers import Sampler
from millstream.sharding import ShardOptions
from millstream.sources import DataSource
from millstream.sources.base import fixed_source
from millstream.sources.source_checks import check_readable
from millstream.transforms import Transformation

if TYPE_CHECKING:
    from millstream.loader.cluster.options import RayWorkers


_LOAD = "use millstream.load(source, {}), or DataLoader(..., {})."

DATA_LOADER_BY_NAME = (
    "Pass its arguments by name, DataLoader(data_source=..., sampler=..., operations=[...]), "
    "or use millstream.load(source, shuffle=True, seed=0, batch_size=...)."
)

LOAD_BY_NAME = "Pass all arguments but the source by name, as in load(source, batch_size=64)."

_EVERYWHERE = {
    "prefetch_factor": "use worker_buffer_size for workers, or read_options for threads.",
    "prefetch": "batches are prefetched anyway; read_options sets how many records.",
    "num_threads": "use read_options=ReadOptions(num_threads=...).",
    "timeout": "use stall_timeout.",
    "pin_memory": "use millstream.device_put(iter(loader)), which moves batches to the device in advance.",
    "persistent_workers": "remove it: workers are kept for the next pass anyway.",
    "multiprocessing_context": "remove it: workers never inherit the state of this process.",
    "generator": "use seed, of the IndexSampler or of millstream.load.",
}

DATA_LOADER_REPLACEMENTS = MappingProxyType(
    {
        **_EVERYWHERE,
        "dataset": "use data_source.",
        "batch_size": _LOAD.format("batch_size=...", "operations=[..., Batch(...)]"),
        "global_batch_size": _LOAD.format(
            "global_batch_size=...", "operations=[..., Batch(shard_options.local_batch_size(...))]"
        ),
        "batch_sampler": _LOAD.format("batch_size=...", "operations=[..., Batch(...)]"),
        "drop_last": _LOAD.format("drop_remainder=True", "operations=[..., Batch(..., drop_remainder=True)]"),
        "drop_remainder": _LOAD.format("drop_remainder=True", "operations=[..., Batch(..., drop_remainder=True)]"),
        "collate_fn": _LOAD.format("batch_fn=...", "operations=[..., Batch(..., batch_fn=...)]"),
        "batch_fn": _LOAD.format("batch_fn=...", "operations=[..., Batch(..., batch_fn=...)]"),
        "shuffle": _LOAD.format("shuffle=True, seed=0", "sampler=IndexSampler(..., shuffle=True, seed=0)"),
        "seed": _LOAD.format("seed=0", "sampler=IndexSampler(..., seed=0)"),
        "num_epochs": _LOAD.format("num_epochs=...", "sampler=IndexSampler(..., num_epochs=...)"),
        "transform": "use operations=[...].",
        "transforms": "use operations=[...].",
    }
)

_OPTIONS_OF_WORKERS = {"num_workers": "worker_count", "per_worker_buffer_size": "worker_buffer_size"}

DATA_LOADER_SPELLINGS = MappingProxyType(
    {**_OPTIONS_OF_WORKERS, "source": "data_source", "transformations": "operations"}
)
"""The arguments of a `DataLoader` by their names in `load` and in `MultiprocessingOptions`."""

LOAD_SPELLINGS = MappingProxyType({**_OPTIONS_OF_WORKERS, "data_source": "source", "operations": "transformations"})
"""The arguments of `load` by their names in a `DataLoader` and in `MultiprocessingOptions`."""

LOAD_REPLACEMENTS = MappingProxyType(
    {
        **_EVERYWHERE,
        "dataset": "pass the source first, without a name: load(source, ...).",
        "sampler": "use DataLoader(data_source=..., sampler=..., operations=[...]).",
        "transform": "use transformations=[...].",
        "transforms": "use transformations=[...].",
        "drop_last": "use drop_remainder.",
        "collate_fn": "use batch_fn.",
        "epochs": "use num_epochs.",
        "repeat": "use num_epochs.",
    }
)


@final
class DataLoader(Inspectable, Lineage, Closing, grain_kinds.DataLoader):
    """An iterable over the batches of a pipeline: the same batches every time, on any machine.

    The stream is a pure function of source, sampler, operations and global batch size. Workers, threads, buffers and
    the number of hosts affect its speed, never its content. `millstream.load` builds common loaders in one call.

    Args:
        data_source: anything with `len` and `source[key]`; `source.__getitems__(keys)` is used if it exists.
        sampler: the order of the records: an `IndexSampler`, or anything with `sampler[position]`.
        operations: the operations to apply to each record, in order; a bare function is a `Map`. Operations after a
            `Batch` get batches.
        worker_count: the number of worker processes, 0 for none; None for one per core that this process may use;
            "auto" to begin in this process, and to start, add and end workers while you train, as `docs/tuning.md`
            explains. With a number above 0, operations never run in this process.
        worker_buffer_size: the number of finished batches that each worker keeps ready, at least 1. Quick ones count as
            one together, up to 10 ms of work, 1 MB and 2048 records.
        shard_options: the shard of each global batch to read; None for the sampler's, by default the complete batch.
        read_options: the threads that read ahead, in this process or in each worker; None for `ReadOptions()`.
        on_error: the reaction to a record that fails, with an Exception of the source or of an operation before the
            first Batch or packer: "raise" it, or "skip" the record. If no operation before the first Batch drops,
            splits or packs, the next key that works replaces it, in key order: batches stay full, and len and seek
            hold. Otherwise, the record is dropped, as by a Filter. `errors` lists the records.
        max_errors: with on_error="skip", the number of records that may fail in this process before the error of the
            next one is raised; None for any number, unless all records fail.
        workers: actors of a Ray cluster, `RayWorkers(...)`, instead of worker processes; None for none.
        stall_timeout: the number of seconds, above 0, that the consumer waits for a worker that is busy with one batch,
            or for threads that read ahead and finish nothing, before it raises an error; `math.inf` to wait forever.
            A call in the consumer's own thread, as with `num_threads=0`, cannot be interrupted. The log names it after
            30 seconds, or earlier with a shorter timeout.
        enable_profiling: True to record which thread or worker computes which batch, for the timeline of `report`; and
            to name the stages on the timelines of `jax.profiler`. `profile()` and `summary()` do not need it.
        debug: True to run everything in this thread, regardless of `worker_count`, `workers` and `read_options`, so
            that breakpoints in operations work; and to warn of operations that are not pure, that draw from global
            generators, that modify or return the source's memory, whose elements cannot be pickled, or whose results
            for the first batch differ in a worker process. The batches are the same; they take more than twice the
            time.
        worker_init_fn: called once in each worker process or actor, replacements of dead ones included, before it
            computes anything: `worker_init_fn(index, count)` with the worker's index, 0 … count - 1. It must be
            picklable, and no element may depend on the index. It sets what your program has set in its own process and
            workers lack, such as plugins of libraries. It is not called without workers. None for nothing.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or two contradict each other.

    Examples:
        >>> loader = millstream.DataLoader(
        ...     data_source=range(1000),
        ...     sampler=millstream.IndexSampler(1000, shuffle=True, seed=0, num_epochs=1),
        ...     operations=[lambda number: number / 1000, millstream.Batch(4)],
        ... )
        >>> len(loader), next(iter(loader))
        (250, array([0.102, 0.742, 0.861, 0.882]))
    """

    _execution: Execution
    _profiler: Profiler

    @named_arguments(DATA_LOADER_REPLACEMENTS, DATA_LOADER_BY_NAME, DATA_LOADER_SPELLINGS)
    def __init__(
        self,
        *,
        data_source: DataSource[Any],
        sampler: Sampler,
        operations: Operations = (),
        worker_count: int | Literal["auto"] | None = 0,
        worker_buffer_size: int = 1,
        shard_options: ShardOptions | None = None,
        read_options: ReadOptions | None = None,
        stall_timeout: float = 600.0,
        enable_profiling: bool = False,
        debug: bool = False,
        workers: "RayWorkers | None" = None,
        on_error: str = "raise",
        max_errors: int | None = MAX_ERRORS,
        worker_init_fn: Callable[[int, int], object] | None = None,
    ) -> None:
        check_readable(data_source, "data_source")
        tolerance = Tolerance.of(on_error, max_errors)
        self._origin = Origin({"source": data_source}, sampler, check_operations(operations))
        copies: Any = snapshot_of([sampler, *self._origin.operations])
        pipeline = Pipeline.of(data_source, copies[0], copies[1:], shard_options, tolerance)
        fixed, self._check_source = fixed_source(data_source)
        self._pipeline = dataclasses.replace(pipeline, source=fixed)
        if read_options is not None:
            read_options = as_options(read_options, "read_options", ReadOptions)
        self._is_debugging = as_flag(debug, "debug")
        self._read_options = ReadOptions(num_threads=0) if self._is_debugging else read_options or ReadOptions()
        num_workers, chooses_workers = _checked_count(worker_count)
        if self._is_debugging:
            num_workers, chooses_workers = 0, False
        buffer_size = as_integer(worker_buffer_size, "worker_buffer_size", 1)
        self._workers = MultiprocessingOptions(
            num_workers,
            buffer_size,
            stall_timeout=stall_timeout,
            worker_init_fn=worker_init_fn,
            chooses_workers=chooses_workers,
        )
        self._records_timeline = as_flag(enable_profiling, "enable_profiling")
        self._ray_workers = workers
        if workers is not None:
            from millstream.loader.cluster.options import RayWorkers  # noqa: PLC0415  (lazy: only clusters need it)

            check_kind(workers, "workers", RayWorkers)
            if num_workers or chooses_workers:
                raise ValueError(
                    f"worker_count must be 0 with workers={workers}, which uses actors instead of processes, got "
                    f"{worker_count}. Remove one of them."
                )
        if self._is_debugging:
            self._ray_workers = None
        self._begin()
        # Before any operation runs: an operation that counts its calls is described as it was built.
        self._declared = declared_by(self._pipeline)
        self._stream = stream_of(self._plan, fingerprint_of_pipeline(self._pipeline, self._declared))

    @property
    def data_source(self) -> DataSource[Any]:
        """The source of the records, as passed."""
        source: DataSource[Any] = self._origin.sources["source"]
        return source

    @property
    def sampler(self) -> Sampler:
        """The sampler, as passed."""
        sampler: Sampler = self._origin.sampler
        return sampler

    @property
    def operations(self) -> tuple[Transformation, ...]:
        """The operations, in order; functions have become Maps."""
        return self._origin.operations

    @property
    def shard_options(self) -> ShardOptions:
        """The shard that this loader reads."""
        return self._pipeline.shard

    @property
    def read_options(self) -> ReadOptions:
        """The threads that read ahead."""
        return self._read_options

    @property
    def multiprocessing_options(self) -> MultiprocessingOptions:
        """The worker processes, 0 if their number is chosen at run time; with actors, buffer size and stall timeout."""
        return self._workers

    @property
    def workers(self) -> "RayWorkers | None":
        """The actors used instead of worker processes; None if there are none, and in debug mode."""
        return self._ray_workers

    @property
    def lineage(self) -> RunLineage:
        """The records of the steps, as the methods of this loader return them."""
        return RunLineage(self._pipeline, self._plan, Run.beginning(self._plan.partition.global_block))

    @property
    def errors(self) -> dict[int, str]:
        """The records that failed in this process, of all passes and epochs: the error as text, by record key.

        It has those that the batches so far would contain, and not those that were only prefetched. The last 10,000 are
        kept, or `max_errors` of them if that is more; `metrics()["loader/errors"]` is the number of all. It is empty
        with on_error="raise".
        """
        return self._execution.insight.errors()

    def __iter__(self) -> DataLoaderIterator:
        """Returns a new iterator at the beginning of the stream."""
        make = functools.partial(DataLoaderIterator, self)
        caller = sys._getframe(1)  # noqa: SLF001
        return visualized(caller, make, lambda: repr(self._traced()), lambda: self._traced()._repr_html_())

    def _traced(self) -> "DataLoader":
        with contextlib.suppress(Exception):  # The first batch raises it again.
            self.trace()
        return self

    def _beginning(self) -> Beginning:
        self._execution.check_open()
        self._check_unchanged()
        return Beginning(self._execution, self._stream, self._passes, self._declared)

    def _check_unchanged(self) -> None:
        self._origin.check_unchanged()
        self._check_source()

    def _create_initial_state(self) -> bytes:
        # Grain's name, for programs that write DataLoaderIterator(loader, loader._create_initial_state()).
        self._execution.check_open()
        return state_at(self._plan.beginning, 0, self._plan, self._stream).encode()

    def epochs(self, num_epochs: int, *, start: int = 0) -> Iterator[tuple[int, DataLoaderIterator]]:
        """Yields the number of each epoch, and an iterator over its batches: a loop over epochs, as in PyTorch.

        Each epoch has its own order, random draws and last batch, which is short unless the `Batch` drops it. Epoch 0
        has the order of `iter(loader)`. The iterator of an epoch is closed when the next one begins. Its workers then
        serve the next epoch, and end after the last one.

        The sampler decides the order of each epoch. `IndexSampler`, `HierarchicalSampler` and `PackingSampler` shuffle
        again. In an epoch of a `MixtureSampler`, each component begins its own epoch of that number, and `stop` decides
        the end; the positions of its changes of weights are counted over all epochs. A sampler of your own needs a
        method `of_epoch(number)` that returns a sampler with a `len`.

        To resume, save the number of the epoch with the state of its iterator. Then begin with that epoch, and pass
        the state to its iterator.

        Args:
            num_epochs: the number of epochs of the run, at least 1; the sampler's own `num_epochs` is ignored.
            start: the number of the first epoch, 0 … num_epochs.

        Raises:
            TypeError: the sampler, or that of a component, has no `of_epoch`.
            ValueError: a number is out of range, or the loader is closed.

        Examples:
            >>> loader = millstream.load(range(6), shuffle=True, seed=0, batch_size=4)
            >>> for epoch, batches in loader.epochs(2):
            ...     print(epoch, *batches)
            0 [2 4 5 3] [0 1]
            1 [1 5 2 0] [3 4]
        """
        num_epochs, start = as_integer(num_epochs, "num_epochs", 1), as_integer(start, "start", 0)
        if start > num_epochs:
            raise ValueError(f"start must be at most num_epochs, which is {num_epochs}, got {start}.")
        if not callable(getattr(self.sampler, "of_epoch", None)):
            raise TypeError(
                f"epochs(n) needs a sampler with of_epoch(number), got {type(self.sampler).__name__}. Give it that "
                "method, which returns the sampler of one epoch, with a len. Or keep one iterator, "
                "batches = iter(loader), and end each epoch after a number of steps: "
                "for batch in itertools.islice(batches, steps): ..."
            )
        # An error of the first epoch's order is one of this call.
        self._execution.check_open()
        first = self._pipeline.of_epoch(min(start, num_epochs - 1))
        if first.order.length is None:
            raise ValueError(
                f"of_epoch({start}) of {type(self.sampler).__name__} must return a sampler that ends, got an endless "
                "one. Give it a len."
            )
        if first.order.length != self._pipeline.order.length:
            first.check_ends()
        return self._each_epoch(range(start, num_epochs), first)

    def _each_epoch(self, numbers: Iterable[int], pipeline: Pipeline) -> Iterator[tuple[int, DataLoaderIterator]]:
        try:
            for number in numbers:
                self._execution.check_open()
                checked, pipeline = pipeline.order.length, self._pipeline.of_epoch(number)
                if pipeline.order.length != checked:
                    pipeline.check_ends()
                self._check_unchanged()
                execution = self._execution.of_epoch(pipeline, self._instrument(pipeline))
                stream = stream_of(execution.plan, fingerprint_of_pipeline(pipeline, self._declared))
                with (
                    contextlib.closing(execution),
                    contextlib.closing(DataLoaderIterator.of(execution, stream)) as batches,
                ):
                    # Registered here, too, so that closing this loader closes the iterator.
                    self._execution.insight.begin_epoch(batches, execution.plan)
                    try:
                        yield number, batches
                    finally:
                        batches.close_epoch()
        finally:
            self._execution.stop_idle_workers()

    def close(self) -> None:
        """Ends the worker processes and threads of this loader, idle or busy, within seconds. Idempotent.

        Its iterators are closed, too: their `next` raises ValueError, but their states can still be taken. Iterating
        over the loader again raises ValueError. Without `close`, idle workers end after a minute, or with the loader.
        """
        self._execution.close()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the arguments and the description of the stream. Processes, threads and iterators are not pickled."""
        unpickled = {"_execution", "_passes", "_plan", "_profiler"}
        return {name: value for name, value in vars(self).items() if name not in unpickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @property
    def insight(self) -> Insight:
        """The views of the pipeline, shared with its iterators."""
        return self._execution.insight

    def serve_top(self) -> None:
        """Lets `millstream top`, run by the same user, monitor this loader: rates, waits, workers, stacks.

        A thread answers on a socket, and no other user, until the loader is closed or collected.
        `MILLSTREAM_TOP=1` in the environment does this for every pipeline that is iterated over. Linux only.

        Raises:
            ValueError: the loader is closed.
            OSError: there can be no socket; the error has the reason.
        """
        from millstream.loader.monitoring import serve  # noqa: PLC0415  (lazy: off by default)

        self._execution.check_open()
        serve(self.insight)

    def __repr__(self) -> str:
        return reporting.summary.render_text(self.insight.snapshot())

    def _repr_html_(self) -> str:
        return reporting.summary.render_loader(self.insight.snapshot())

    def __len__(self) -> int:
        """Returns the number of batches that this shard yields.

        Raises:
            TypeError: it is not known: the sampler is endless, or the pipeline is not 1:1.
        """
        return count_outputs(self._plan, "DataLoader")

    def __bool__(self) -> bool:
        """Returns True, even if its length is 0 or not known."""
        return True

    def _begin(self) -> None:
        """Creates the parts that are not pickled."""
        self._profiler = Profiler(self._pipeline.labels, Recorder() if self._records_timeline else None)
        self._passes = RepeatedPasses(self._pipeline)
        workers = self._workers
        if self._ray_workers is not None:
            workers = dataclasses.replace(workers, num_workers=self._ray_workers.num_workers)
        self._execution = Execution(
            self._pipeline,
            workers,
            self._read_options,
            profiler=self._profiler,
            instrument=self._instrument(self._pipeline),
            ray_workers=self._ray_workers,
            frontend=DEBUGGED if self._is_debugging else ACTORS if self._ray_workers is not None else LOADER,
        )
        self._plan = self._execution.plan

    def _instrument(self, pipeline: Pipeline) -> Instrument:
        timed = self._profiler.timed
        if not self._is_debugging:
            return timed
        from millstream.loader.debugging import DebugChecks  # noqa: PLC0415  (lazy: off by default)

        checks = DebugChecks(pipeline, self._workers.worker_init_fn)
        return lambda label, function: timed(label, checks.watch(label, function))


def _checked_count(worker_count: int | str | None) -> tuple[int, bool]:
    """Returns a number of workers, and True if it is chosen at run time instead."""
    if isinstance(worker_count, str):
        if worker_count != "auto":
            raise ValueError(f'worker_count must be a number, None or "auto", got {worker_count!r}.')
        return 0, True
    return (available_cores() if worker_count is None else as_integer(worker_count, "worker_count", 0)), False
