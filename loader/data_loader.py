"""The DataLoader: what to read, in which order, and what to do with it. It starts nothing until iterated."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from millstream import grain_kinds
from millstream.checks import as_flag, as_integer, named_arguments
from millstream.closing import Closing
from millstream.loader.checkpoints.state import Stream
from millstream.loader.execution import Execution
from millstream.loader.foreign_arguments import DATA_LOADER_HABITS, DATA_LOADER_NEEDS_NAMES
from millstream.loader.insight import Insight
from millstream.loader.inspectable import Inspectable
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.pipeline.arguments import Operations, check_kind
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.progress import count_outputs
from millstream.loader.pipeline.stages import Watch
from millstream.loader.pipeline.tolerance import MAX_ERRORS, Tolerance
from millstream.loader.repeated_passes import RepeatedPasses
from millstream.loader.state_of_plan import stream_of
from millstream.loader.threads.front import ACTORS, DEBUGGED, LOADER
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions, available_cores
from millstream.loader.threads.profiler import Profiler
from millstream.loader.threads.thread_settings import ThreadSettings, in_fresh_thread
from millstream.samplers import Sampler
from millstream.samplers.base import vectorised
from millstream.samplers.epochs import EpochSampler
from millstream.samplers.occurrences import Occurrences, checked_keys, checked_stop
from millstream.sharding import ShardOptions
from millstream.sources import DataSource
from millstream.transforms import Transformation

if TYPE_CHECKING:
    from millstream.loader.cluster.options import RayWorkers


@final
class DataLoader(Inspectable, Closing, grain_kinds.DataLoader):
    """An iterable over the batches of a pipeline: the same batches every time, on any machine.

    The stream is a pure function of source, sampler, operations and global batch size. Workers, threads, buffers and
    the number of hosts decide how fast it comes, never what comes. `millstream.load` is the short way to make one.

    Args:
        data_source: anything with `len` and `source[key]`; `source.__getitems__(keys)` is used where it exists.
        sampler: which record at which position: an `IndexSampler`, or anything with `sampler[position]`.
        operations: what to do with each record, in order; a bare function is a `Map`. Operations after a `Batch` see
            batches.
        worker_count: how many worker processes, 0 for none; None for one for each core that this process may use.
        worker_buffer_size: how many finished batches each worker keeps ready, at least 1.
        shard_options: which part of every global batch to read; None for the sampler's, which is by default all of it.
        read_options: the threads that read ahead, in this process or in each worker; None for `ReadOptions()`.
        on_error: what to do with a record that fails, with an Exception of the source or of an operation before the
            first Batch or packer: "raise" it, or "skip" the record. If nothing drops, splits or packs before the first
            Batch, the next key that works takes its place, in key order: batches stay full, and len and seek hold.
            Elsewhere, the record is dropped, as by a Filter. `errors` lists the records.
        max_errors: with on_error="skip", how many records may fail in this process before the error of the next one is
            raised; None for any number but all of them.
        workers: actors of a Ray cluster, `RayWorkers(...)`, instead of worker processes; None for none.
        stall_timeout: how many seconds, above 0, the consumer waits for a worker that is busy with one batch, or for
            threads that read ahead and finish nothing, before that is an error; `math.inf` for however long that takes.
            A call that the consumer's own thread makes, as with `num_threads=0`, cannot be ended.
        enable_profiling: whether to keep who worked on which batch in the last seconds, for the timeline of `report`.
            What `profile()` and `summary()` say is always known.
        debug: whether to make everything in this thread, without workers and threads whatever `worker_count`,
            `workers` and `read_options` say, so that a debugger stops in operations; and to warn of operations that are
            not pure, that draw from global generators, that change or give out the source's memory, or whose elements
            cannot be pickled. The batches are the same; they take more than twice the time.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or two do not fit together.

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

    @named_arguments(DATA_LOADER_HABITS, DATA_LOADER_NEEDS_NAMES)
    def __init__(
        self,
        *,
        data_source: DataSource[Any],
        sampler: Sampler,
        operations: Operations = (),
        worker_count: int | None = 0,
        worker_buffer_size: int = 1,
        shard_options: ShardOptions | None = None,
        read_options: ReadOptions | None = None,
        stall_timeout: float = 600.0,
        enable_profiling: bool = False,
        debug: bool = False,
        workers: "RayWorkers | None" = None,
        on_error: str = "raise",
        max_errors: int | None = MAX_ERRORS,
    ) -> None:
        tolerance = Tolerance.of(on_error, max_errors)
        self._pipeline = Pipeline.of(data_source, sampler, operations, shard_options, tolerance)
        if read_options is not None:
            check_kind(read_options, "read_options", ReadOptions)
        self._is_debugging = as_flag(debug, "debug")
        self._read_options = ReadOptions(num_threads=0) if self._is_debugging else read_options or ReadOptions()
        num_workers = available_cores() if worker_count is None else as_integer(worker_count, "worker_count", 0)
        num_workers = 0 if self._is_debugging else num_workers
        buffer_size = as_integer(worker_buffer_size, "worker_buffer_size", 1)
        self._workers = MultiprocessingOptions(num_workers, buffer_size, stall_timeout)
        self._records_timeline = as_flag(enable_profiling, "enable_profiling")
        self._ray_workers = workers
        if workers is not None:
            from millstream.loader.cluster.options import RayWorkers  # noqa: PLC0415  (for those who have a cluster)

            check_kind(workers, "workers", RayWorkers)
            if num_workers:
                raise ValueError(
                    f"worker_count is the number of worker processes, got {num_workers}, but workers={workers} asks "
                    "for actors instead: leave worker_count out."
                )
        if self._is_debugging:
            self._ray_workers = None
        self._begin()
        # Before any of the operations runs: one that counts its calls is what it was built as.
        _ = self._stream

    @property
    def data_source(self) -> DataSource[Any]:
        """Where the records come from, as it was given."""
        return self._pipeline.source

    @property
    def sampler(self) -> Sampler:
        """The order of the records, as it was given."""
        return self._pipeline.sampler

    @property
    def operations(self) -> tuple[Transformation, ...]:
        """What is done with each record, in order; functions have become Maps."""
        return self._pipeline.operations

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
        """The worker processes; with actors instead, how much each keeps ready, and when it stalls."""
        return self._workers

    @property
    def workers(self) -> "RayWorkers | None":
        """The actors that work instead of worker processes; None without, and in debug mode."""
        return self._ray_workers

    @property
    def errors(self) -> dict[int, str]:
        """The records that failed, of all passes in this process: the error as text, by record key.

        Records that were read ahead are included. It is empty with on_error="raise".
        """
        return {} if self._plan.errors is None else dict(self._plan.errors.texts)

    def __iter__(self) -> DataLoaderIterator:
        """Returns a new iterator at the beginning of the stream."""
        iterator = self._execution.begin(self._stream, self._passes)
        # After the execution knows it: another thread may close the loader.
        if self._closed:
            iterator.close()
            raise ValueError("This DataLoader is closed: build a new one.")
        return iterator

    def epochs(self, num_epochs: int, *, start: int = 0) -> Iterator[tuple[int, DataLoaderIterator]]:
        """Yields the number of each epoch, and an iterator over its batches: a loop over epochs, as in PyTorch.

        Each epoch has an order and random draws of its own, and a last batch of its own, which is short unless the
        `Batch` drops it. Epoch 0 is the order of `iter(loader)`. The iterator of an epoch is closed when the next one
        begins; worker processes are started for each epoch.

        To resume, save the number of the epoch with the state of its iterator: begin with that epoch, and move the
        iterator to the state.

        Args:
            num_epochs: how many epochs the run has, at least 1; the sampler's own `num_epochs` does not count.
            start: the number of the epoch to begin with, 0 … num_epochs.

        Raises:
            TypeError: the sampler has no epochs: it is not an `IndexSampler`, `HierarchicalSampler` or
                `PackingSampler`.
            ValueError: a number is out of range, or the loader is closed.

        Examples:
            >>> loader = millstream.load(range(6), shuffle=True, seed=0, batch_size=4)
            >>> for epoch, batches in loader.epochs(2):
            ...     print(epoch, *batches)
            0 [2 4 5 3] [0 1]
            1 [1 0 5 2] [4 3]
        """
        num_epochs, start = as_integer(num_epochs, "num_epochs", 1), as_integer(start, "start", 0)
        if start > num_epochs:
            raise ValueError(f"start must be at most num_epochs, which is {num_epochs}, got {start}.")
        sampler = self.sampler
        if not isinstance(sampler, EpochSampler):
            raise TypeError(
                "epochs(n) needs an IndexSampler, HierarchicalSampler or PackingSampler, got "
                f"{type(sampler).__name__}, whose order is not divided into epochs of the loader. Keep one iterator, "
                "batches = iter(loader), and end each epoch after a number of steps: "
                "for batch in itertools.islice(batches, steps): ..."
            )
        if self._closed:
            raise ValueError("This DataLoader is closed: build a new one.")
        return self._each_epoch(sampler, range(start, num_epochs))

    def _each_epoch(self, sampler: EpochSampler, numbers: Iterable[int]) -> Iterator[tuple[int, DataLoaderIterator]]:
        for number in numbers:
            order = sampler.of_epoch(number)
            pipeline = dataclasses.replace(self._pipeline, sampler=order, order=vectorised(order))
            state = {name: value for name, value in self.__getstate__().items() if name != "_stream"}
            loader = DataLoader.__new__(DataLoader)
            vars(loader).update(state | {"_pipeline": pipeline})
            loader._begin(self)  # noqa: SLF001  (of this class)
            with loader, iter(loader) as batches:
                # Who closes this loader closes them, too.
                self._execution.insight.iterators[id(batches)] = batches
                yield number, batches

    def close(self) -> None:
        """Ends the worker processes and threads of this loader, idle or at work, within seconds. Idempotent.

        Its iterators are closed, too: their `next` is a ValueError, but their states can still be taken. So is
        iterating over the loader again. Without this, idle workers leave after a minute, and with the loader.
        """
        self._closed = True
        for iterator in self._execution.insight.living_iterators():
            iterator.close_with_loader()
        self._execution.close()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what makes the loader another one's equal: processes, threads and iterators stay here."""
        own = {"_closed", "_execution", "_passes", "_plan", "_profiler"}
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @property
    def insight(self) -> Insight:
        """The views of the pipeline, shared with its iterators."""
        return self._execution.insight

    def serve_top(self) -> None:
        """Lets `millstream top`, run by the same user, monitor this loader: rates, waits, workers, stacks.

        A thread answers over a private socket, which no other user can open, until the loader is closed or collected.
        `MILLSTREAM_TOP=1` in the environment does this for every pipeline that is iterated over. Linux only.

        Raises:
            ValueError: the loader is closed.
            OSError: there can be no private socket; the error has the reason.
        """
        from millstream.loader.monitoring.served_pipelines import serve  # noqa: PLC0415  (lazy: off by default)

        if self._closed:
            raise ValueError("This DataLoader is closed: build a new one.")
        serve(self._execution)

    def __repr__(self) -> str:
        from millstream.loader.reporting.text_rendering import render_text  # noqa: PLC0415  (lazy: only people need it)

        return render_text(self.insight.snapshot())

    def _repr_html_(self) -> str:
        from millstream.loader.reporting.html_rendering import render_loader  # noqa: PLC0415  (lazy: for notebooks)

        return render_loader(self.insight.snapshot())

    def __len__(self) -> int:
        """Returns the number of batches that this shard yields.

        Raises:
            TypeError: it is not known: the sampler is endless, or an operation decides while reading.
        """
        return count_outputs(self._plan, "DataLoader")

    def __bool__(self) -> bool:
        """Returns True: a loader is one even where its length is 0 or not known."""
        return True

    def record_keys(self, step: int) -> NDArray[np.int64]:
        """Returns the keys of the records in this shard's batch number `step`, in order, without reading them.

        Of a mixture, `data_source.locate(keys)` says which source each is from; of packed rows, they are the documents
        in them, one row after the other.

        Args:
            step: counted from 0; the first batch is number 0.

        Returns:
            An int64 array of shape `(records,)`.

        Raises:
            IndexError: there is no such batch.
            TypeError: an operation decides while reading: a Filter or FlatMap, or one that groups as elements come.

        Examples:
            >>> loader = millstream.load(["a", "b", "c", "d"], shuffle=True, seed=0, batch_size=2)
            >>> loader.record_keys(0), next(iter(loader))
            (array([3, 1]), array(['d', 'b'], dtype='<U1'))
        """
        if not self._plan.one_to_one:
            raise TypeError(
                f"record_keys(step) is known for 1:1 pipelines only: {self._plan.deciding}, decides while reading."
            )
        step, shard = as_integer(step, "step"), self._plan.shards[0]
        if not shard.block_limit:
            raise IndexError(f"step {step} does not exist: this DataLoader yields no batch.")
        if not 0 <= step < shard.block_limit:
            raise IndexError(f"step must be between 0 and {shard.block_limit - 1}, the last batch, got {step}.")
        # A sampler of the user's must not see the settings of this thread alone: its keys would be others.
        locate = functools.partial(self._plan.locate, step, step + 1)
        origins = locate() if ThreadSettings().are_neutral() else in_fresh_thread(locate)
        if step == shard.partition.whole_blocks:
            is_used = origins.position < shard.partition.tail.start + shard.tail_records
            return origins.record_key[is_used]
        return origins.record_key.copy()

    def steps_of(self, keys: Any, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Returns the steps whose global batches contain records, a row for each key: int64, shape (keys, occurrences).

        The order is run backwards, so nothing is read and no step is enumerated. Shards play no role. Rows are
        ascending, and padded with -1 where other keys come more often. Of packed rows, keys are those of documents.

        Args:
            keys: record keys, shape (m,). A key that never comes has a row of -1.
            start: the first step that counts.
            stop: the step before which to look; None for the end of the order.

        Raises:
            TypeError: an operation decides while reading, or the order of the sampler is not known backwards.
            ValueError: the order is endless, and stop is None.

        Examples:
            >>> loader = millstream.load(range(6), shuffle=True, seed=0, batch_size=2)
            >>> loader.steps_of([0, 5], stop=6)
            array([[2, 3],
                   [1, 4]])
        """
        if not self._plan.one_to_one:
            raise TypeError(
                f"steps_of(keys) is known for 1:1 pipelines only: {self._plan.deciding}, decides while reading. Keep "
                "the keys with the elements (meta_features of a packer), or filter ahead (millstream.surviving_keys)."
            )
        sampler, partition = self._plan.pipeline.order, self._plan.partition
        if not hasattr(sampler, "occurrences"):
            raise TypeError(
                f"The steps of records are not known: {type(self._sampler).__name__} has no positions_of(keys)."
            )
        asked, size = checked_keys(keys), partition.global_block
        start = as_integer(start, "start", minimum=0)
        last = None if stop is None else as_integer(stop, "stop", minimum=0) * size
        found = sampler.occurrences(asked, checked_stop(last, partition.length))
        is_late = (found.positions >= start * size) & self._plan.shards[0].are_delivered(found.positions)
        return Occurrences(found.rows[is_late], found.positions[is_late] // size).table(len(asked))

    @functools.cached_property
    def _stream(self) -> Stream:
        """The description of the stream, made at construction. A pickled loader takes it along."""
        return stream_of(self._plan)

    def _begin(self, whole: "DataLoader | None" = None) -> None:
        """Makes what is of this process, and does not go to another with a pickled loader.

        Args:
            whole: the loader that this one is an epoch of, and whose measurements it adds to; None for its own.
        """
        self._closed = False
        self._profiler = self._new_profiler() if whole is None else whole._profiler  # noqa: SLF001  (of this class)
        self._passes = RepeatedPasses(self._pipeline)
        self._execution = Execution(
            self._pipeline,
            self._worker_options,
            self._read_options,
            profiler=self._profiler,
            watch=self._watch(),
            ray_workers=self._ray_workers,
            front=DEBUGGED if self._is_debugging else ACTORS if self._ray_workers is not None else LOADER,
        )
        self._plan = self._execution.plan
        if whole is not None:
            self._plan.errors = whole._plan.errors  # noqa: SLF001  (of this class)

    @property
    def _worker_options(self) -> MultiprocessingOptions:
        """What holds for the workers, wherever they run."""
        if self._ray_workers is None:
            return self._workers
        return dataclasses.replace(self._workers, num_workers=self._ray_workers.num_workers)

    def _new_profiler(self) -> Profiler:
        if not self._records_timeline:
            return Profiler(self._pipeline.labels)
        from millstream.loader.threads.recorder import Recorder  # noqa: PLC0415  (lazy: off by default)

        return Profiler(self._pipeline.labels, Recorder())

    def _watch(self) -> Watch:
        """Returns what looks at each part of the work."""
        timed = self._profiler.timed
        if not self._is_debugging:
            return timed
        from millstream.loader.debugging import DebugChecks  # noqa: PLC0415  (for those who ask for it)

        checks = DebugChecks(self._pipeline)
        return lambda label, function: timed(label, checks.watch(label, function))
