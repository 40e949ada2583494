"""The DataLoader: what to read, in which order, and what to do with it. It starts nothing until iterated."""

import functools
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.loader.arguments import (
    Operations,
    check_ends,
    check_kind,
    check_list,
    check_operations,
    check_padding,
    check_randomness,
    check_sampler,
    check_source,
    operation_name,
    resolve_shard,
    tell_of_bound_checkpoints,
)
from millstream.loader.executors import Executor, InlineExecutor, ThreadExecutor
from millstream.loader.fingerprint import describe, describe_keys, describe_source
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.options import MultiprocessingOptions, ReadOptions, as_count, available_cores
from millstream.loader.plan import Plan
from millstream.loader.schedule import Cursor
from millstream.loader.state import Fingerprint
from millstream.samplers import IndexSampler, Sampler
from millstream.sharding import ShardOptions
from millstream.sources import DataSource
from millstream.transforms import Batch, Transformation

if TYPE_CHECKING:
    from millstream.loader.pool import WarmPools


@final
class DataLoader:
    """An iterable over the batches of a pipeline: the same batches every time, on any machine.

    The stream is a pure function of source, sampler, operations and global batch size. Workers, threads, buffers and
    the number of hosts decide how fast it comes, and never what comes.

    Args:
        data_source: anything with `len` and `source[key]`; `source.__getitems__(keys)` is used where it exists.
        sampler: which record at which position: an `IndexSampler`, or anything with `sampler[position]`.
        operations: what to do with each record, in order; a bare function is a `Map`. Operations behind a `Batch` see
            batches.
        worker_count: how many worker processes, 0 for none; None for as many as this process may use cores.
        worker_buffer_size: how many finished batches each worker keeps ready.
        shard_options: which part of every global batch to read; by default the sampler's, which is all of it.
        read_options: the threads that read ahead, in this process or in each worker.
        stall_timeout: seconds that the consumer waits while a worker is busy with one batch, before this is an error.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or two do not fit together.
    """

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
    ) -> None:
        check_source(data_source)
        self._source = data_source
        self._given_sampler = sampler
        self._sampler = check_sampler(sampler, data_source)
        self._operations = check_operations(operations)
        self._shard = resolve_shard(shard_options, sampler)
        if read_options is not None:
            check_kind(read_options, "read_options", ReadOptions)
        self._read_options = read_options or ReadOptions()
        num_workers = available_cores() if worker_count is None else as_count(worker_count, "worker_count", 0)
        buffer_size = as_count(worker_buffer_size, "worker_buffer_size", 1)
        self._workers = MultiprocessingOptions(num_workers, buffer_size, stall_timeout)
        check_randomness(self._operations, self._sampler)
        check_padding(self._operations, self._shard)
        check_ends(self._operations, self._sampler, self._shard)
        tell_of_bound_checkpoints(self._operations, self._shard)
        self._compile()

    @property
    def shard_options(self) -> ShardOptions:
        """The shard that this loader reads."""
        return self._shard

    @property
    def read_options(self) -> ReadOptions:
        """The threads that read ahead."""
        return self._read_options

    @property
    def multiprocessing_options(self) -> MultiprocessingOptions:
        """The worker processes."""
        return self._workers

    def __iter__(self) -> DataLoaderIterator:
        """Returns a new iterator at the beginning of the stream."""
        # Described before any of the user's operations has run: one that counts its calls is what it was built as.
        fingerprint = self._fingerprint
        return DataLoaderIterator(self._plan, lambda: fingerprint, self._make_executor, self._stop_idle_workers)

    def __len__(self) -> int:
        """Returns the number of batches that this shard yields.

        Raises:
            TypeError: it is not known: the sampler is endless, or a Filter or FlatMap decides while reading.
        """
        num_units = self._plan.num_units
        if not self._plan.one_to_one:
            raise TypeError("This DataLoader has no len(): its Filter or FlatMap decides while reading.")
        if num_units is None:
            raise TypeError("This DataLoader has no len(): its sampler is endless. Give the sampler num_epochs.")
        return num_units

    def record_keys(self, step: int) -> NDArray[np.int64]:
        """Returns the keys of the records in this shard's batch number `step`, in order, without reading them.

        Args:
            step: counted from 0; the first batch is number 0.

        Returns:
            An int64 array of shape `(records,)`.

        Raises:
            IndexError: there is no such batch.
            TypeError: the pipeline has a Filter or FlatMap, which decides while reading.
        """
        if not self._plan.one_to_one:
            raise TypeError(
                "record_keys(step) is known for 1:1 pipelines only: a Filter or FlatMap decides while reading."
            )
        step = operator.index(step)
        if not 0 <= step < self._plan.unit_limit:
            raise IndexError(f"step must be between 0 and {self._plan.unit_limit - 1}, the last batch, got {step}.")
        keys = self._plan.locate(step, step + 1).record_key
        is_tail = step == self._plan.deal.whole_units
        return keys[: self._plan.tail_records].copy() if is_tail else keys.copy()

    def profile(self) -> dict[str, float]:
        """Returns where the time of this loader's iterators has gone so far, in seconds, by stage.

        `keys`, `read` and one stage for each operation (`operations[0], Map(decode)`) are what the pipeline itself
        takes, in all threads and worker processes together, waits included. `hand-over` is the pickling and unpickling
        between processes. `next` is the consumer's thread inside `next`: waiting, or working where nobody else does.
        `consumer` is the same thread between two calls of `next`. If `consumer` is much more than `next`, a faster
        loader would not make training faster.
        """
        return self._plan.clock.read()

    def __repr__(self) -> str:
        operations = ", ".join(operation_name(operation) for operation in self._operations)
        return (
            f"DataLoader(data_source={describe_source(self._source)}, sampler={self._given_sampler!r}, "
            f"operations=[{operations}], shard {self._shard.shard_index} of {self._shard.shard_count}, "
            f"worker_count={self._workers.num_workers}, read_threads={self._read_options.num_threads})"
        )

    @property
    def _plan(self) -> Plan:
        """The compiled pipeline: another one in a forked process.

        Its locks come along as they are, held perhaps by threads that do not.
        """
        if self._process != os.getpid():
            self._compile()
        return self._compiled

    def _compile(self) -> None:
        names = [operation_name(operation) for operation in self._operations]
        self._compiled = Plan(self._source, self._sampler, self._operations, names, self._shard)
        self._process = os.getpid()

    def _make_executor(self, place: Cursor) -> Executor:
        if self._workers.num_workers:
            from millstream.loader.pool_executor import PoolExecutor  # noqa: PLC0415  (cloudpickle takes its time)

            return PoolExecutor(self._plan, place, self._pools, self._workers, self._read_options)
        if not self._read_options.reads_ahead:
            return InlineExecutor(self._plan, place)
        return ThreadExecutor(self._plan, place, self._read_options)

    @functools.cached_property
    def _pools(self) -> "WarmPools":
        """The worker processes that no iterator uses; they end with the loader."""
        from millstream.loader.pool import WarmPools  # noqa: PLC0415  (cloudpickle takes its time)

        return WarmPools()

    def _stop_idle_workers(self) -> None:
        if self._workers.num_workers:
            self._pools.stop_idle()

    @functools.cached_property
    def _fingerprint(self) -> Fingerprint:
        """Which stream this is, in words. Made once: the words must not follow what user code does later."""
        return Fingerprint(
            sampler=_describe_sampler(self._given_sampler),
            source=describe_source(self._source),
            operations=describe_operations(self._operations),
        )


def load(
    source: DataSource[Any],
    *,
    num_epochs: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    shard_options: ShardOptions | None = None,
    transformations: Operations = (),
    batch_size: int | None = None,
    drop_remainder: bool = False,
    worker_count: int | None = 0,
    read_options: ReadOptions | None = None,
) -> DataLoader:
    """Returns a `DataLoader` over a source with an `IndexSampler` and, at the end, a `Batch`: the short way.

    Args:
        source: where records come from.
        num_epochs: how often to go through the source; None for ever.
        shuffle: whether to shuffle, anew in each epoch; needs a seed.
        seed: of the order and of all random operations, 0 … 2**64 - 1.
        shard_options: which part of every global batch to read.
        transformations: what to do with each record, before the batch is made.
        batch_size: elements in a batch, per shard; None for no batches.
        drop_remainder: whether a last, short batch is left out.
        worker_count: how many worker processes, 0 for none.
        read_options: the threads that read ahead.

    Raises:
        TypeError, ValueError: as `DataLoader`.
    """
    check_source(source)
    check_list(transformations, "transformations")
    sampler = IndexSampler(len(source), shuffle=shuffle, num_epochs=num_epochs, seed=seed)
    batch = [] if batch_size is None else [Batch(batch_size, drop_remainder)]
    return DataLoader(
        data_source=source,
        sampler=sampler,
        operations=[*transformations, *batch],
        worker_count=worker_count,
        shard_options=shard_options,
        read_options=read_options,
    )


def describe_operations(operations: Sequence[Transformation]) -> tuple[str, ...]:
    """Returns the operations in words, for a fingerprint.

    The size of the first Batch is left out: a state compares the global batch, which is that size times the shards.
    """
    first = next((i for i, operation in enumerate(operations) if isinstance(operation, Batch)), None)
    return tuple(
        f"Batch(drop_remainder={operation.drop_remainder}, batch_fn={describe(operation.batch_fn)}, "
        f"pad_remainder={operation.pad_remainder})"
        if i == first and isinstance(operation, Batch)
        else describe(operation)
        for i, operation in enumerate(operations)
    )


def _describe_sampler(sampler: Sampler) -> tuple[tuple[str, str], ...]:
    if isinstance(sampler, IndexSampler):
        words = [(name, describe(getattr(sampler, name))) for name in ("num_records", "shuffle", "seed")]
        return (*words, *([] if sampler.keys is None else [("keys", describe_keys(sampler.keys))]))
    return (("sampler", describe(sampler)),)
