"""Loaders in one call: `load` builds common ones, and `surviving_keys` filters their records in advance."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from millstream import samplers, sources
from millstream.core.checks import as_integer, as_options, named_arguments
from millstream.core.descriptions import described
from millstream.core.randomness import SEED_LIMIT, Purpose, derive_seed
from millstream.loader.data_loader import LOAD_BY_NAME, LOAD_REPLACEMENTS, LOAD_SPELLINGS, DataLoader
from millstream.loader.pipeline.pipeline import MAX_ERRORS, Operations, check_list, check_operations
from millstream.loader.threads.options import ReadOptions
from millstream.samplers import IndexSampler, Sampler, SequentialSampler
from millstream.sharding import NoSharding, ShardOptions
from millstream.sources import DataSource
from millstream.sources.source_checks import check_no_columns, check_readable, check_source, opened
from millstream.transforms import Batch, Filter, Map, MapWithIndex

if TYPE_CHECKING:
    from millstream.loader.cluster.options import RayWorkers


@named_arguments(LOAD_REPLACEMENTS, LOAD_BY_NAME, LOAD_SPELLINGS)
def load(
    source: DataSource[Any] | str | os.PathLike[str] | Mapping[str, DataSource[Any] | str | os.PathLike[str]],
    *,
    weights: Mapping[str, Any] | Sequence[Any] | NDArray[Any] | None = None,
    stop: str = "first_exhausted",
    batches_of: int | None = None,
    num_epochs: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    shard_options: ShardOptions | None = None,
    transformations: Operations = (),
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    drop_remainder: bool = False,
    pad_remainder: bool = False,
    batch_fn: Callable[[list[Any]], Any] | None = None,
    worker_count: int | Literal["auto"] | None = 0,
    worker_buffer_size: int = 1,
    read_options: ReadOptions | None = None,
    stall_timeout: float = 600.0,
    enable_profiling: bool = False,
    debug: bool = False,
    workers: "RayWorkers | None" = None,
    on_error: str = "raise",
    max_errors: int | None = MAX_ERRORS,
    worker_init_fn: Callable[[int, int], object] | None = None,
) -> DataLoader:
    """Returns a `DataLoader` over a source with an `IndexSampler` and, at the end, a `Batch`.

    With weights of several sources, it is a mixture of them, with an `IndexSampler` for each.

    Args:
        source: the source of the records, or the path, glob or URL of files of a format that the name or the first
            bytes tell, such as `"data/*.parquet"`; or a mapping from names to sources or paths, the components of a
            mixture.
        weights: the proportions of the components' records, by name or in order; for one source, an array of a weight
            for each record, which are then drawn by a `WeightedSampler`; None for all records alike.
        stop: the end of a mixture, see `MixtureSampler`; one source ends by num_epochs.
        batches_of: the size of the global batch, for batches that have records of one component of a mixture each, see
            `MixtureSampler`; None to mix the records of each batch.
        num_epochs: the number of passes over the source, or over each source; None for an endless stream.
        shuffle: True to shuffle, with a new order in each epoch; needs a seed. The shuffle is global, an
            `IndexSampler`, unless the source is read in units that do not all fit into memory (`source.window_units` is
            a number, as for a `ParquetDataSource` larger than its `cache_bytes`, and for a slice or map of one): then
            it is a `HierarchicalSampler` with these windows.
        seed: the seed of the order and of all random operations, 0 … 2**64 - 1; None for a pipeline without randomness.
            The seed of component k of a mixture is a hash of seed and k.
        shard_options: the shard of each global batch to read; None for the complete batch.
        transformations: the operations to apply to each record before batching.
        batch_size: the number of elements per batch and shard, at least 1; None for no batches.
        global_batch_size: the number of elements per step over all shards, a multiple of their number, instead of
            batch_size. It decides the stream, so keep it when the number of hosts changes.
        drop_remainder: True to drop a last, short batch.
        pad_remainder: True to fill a last, short batch: batches are `PaddedBatch`es, see `Batch`.
        batch_fn: builds a batch from the list of its elements; None stacks them.
        worker_count: the number of worker processes, 0 for none; None for one per core that this process may use;
            "auto" to start, add and end workers while you train, see `DataLoader`.
        worker_buffer_size: the number of finished batches that each worker keeps ready, at least 1, see `DataLoader`.
        read_options: the threads that read ahead, in this process or in each worker; None for `ReadOptions()`.
        stall_timeout: the number of seconds, above 0, that the consumer waits for workers or threads without progress
            before it raises an error, see `DataLoader`; `math.inf` to wait forever.
        enable_profiling: True to record which thread or worker computes which batch, for the timeline of `report`.
        debug: True to run everything in this thread, and to warn of mistakes in operations.
        workers: actors of a Ray cluster, `RayWorkers(...)`, instead of worker processes; None for none.
        on_error: the reaction to a record that fails: "raise" the error, or "skip" the record, see `DataLoader`.
        max_errors: with on_error="skip", the number of records that may fail; None for any number, unless all fail.
        worker_init_fn: called in each worker with its index and the number of workers, before it computes anything, see
            `DataLoader`; not called without workers.

    Raises:
        TypeError, ValueError: as `DataLoader`.

    Examples:
        >>> loader = millstream.load(range(10), shuffle=True, seed=0, num_epochs=1, batch_size=4)
        >>> list(loader)
        [array([2, 9, 5, 4]), array([1, 3, 7, 0]), array([6, 8])]
        >>> corpora = {"web": ["a", "b", "c"], "books": ["X"]}
        >>> next(iter(millstream.load(corpora, weights={"web": 0.75, "books": 0.25}, batch_size=4)))
        array(['a', 'X', 'b', 'c'], dtype='<U1')
    """
    is_mixture = isinstance(source, Mapping) and weights is not None
    if not is_mixture:
        source = opened(source)
        check_readable(source, "data_source")  # which refuses a mapping
        check_no_columns(source)
    check_list(transformations, "transformations")
    if global_batch_size is not None:
        if batch_size is not None:
            raise ValueError(
                f"batch_size and global_batch_size exclude each other, got {batch_size} and {global_batch_size}. Pass "
                "global_batch_size, the number over all hosts."
            )
        shard = NoSharding() if shard_options is None else as_options(shard_options, "shard_options", ShardOptions)
        batch_size = shard.local_batch_size(global_batch_size)
    if batch_size is None:
        of_batches = {"batch_fn": batch_fn, "drop_remainder": drop_remainder, "pad_remainder": pad_remainder}
        _refuse(of_batches, "{} needs a batch_size, got batch_size=None. Pass both, or neither.")
    if not is_mixture:
        of_mixtures = {"batches_of": batches_of, "stop": None if stop == "first_exhausted" else stop}
        _refuse(of_mixtures, "{} must be left out without sources by name and their weights, got {!r}.")
    sampler: Sampler
    if is_mixture:
        components = cast("Mapping[str, Any]", source)
        source = sources.ConcatenatedDataSource({name: opened(component) for name, component in components.items()})
        orders = {
            name: _order(component, shuffle=shuffle, num_epochs=num_epochs, seed=_nth_seed(seed, number))
            for number, (name, component) in enumerate(source.parts.items())
        }
        sampler = samplers.MixtureSampler(orders, cast("Mapping[str, Any]", weights), stop=stop, batches_of=batches_of)
    elif weights is not None:
        sampler = _weighted(cast("DataSource[Any]", source), weights, num_epochs=num_epochs, seed=seed)
    else:
        sampler = _order(source, shuffle=shuffle, num_epochs=num_epochs, seed=seed)
    batch = [] if batch_size is None else [Batch(batch_size, drop_remainder, batch_fn, pad_remainder)]
    return DataLoader(
        data_source=cast("DataSource[Any]", source),
        sampler=sampler,
        operations=[*transformations, *batch],
        worker_count=worker_count,
        worker_buffer_size=worker_buffer_size,
        shard_options=shard_options,
        read_options=read_options,
        stall_timeout=stall_timeout,
        enable_profiling=enable_profiling,
        debug=debug,
        workers=workers,
        on_error=on_error,
        max_errors=max_errors,
        worker_init_fn=worker_init_fn,
    )


def _refuse(arguments: Mapping[str, Any], message: str) -> None:
    """Raises a ValueError about the first argument that is given, with its name and its value."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(message.format(name, value))


def _weighted(source: DataSource[Any], weights: Any, *, num_epochs: int | None, seed: int | None) -> Sampler:
    """Returns the order that draws the records of one source by weights."""
    is_list = isinstance(source, list | tuple)
    are_sources = is_list and all(hasattr(source[number], "fingerprint") for number in range(len(source)))
    if isinstance(weights, Mapping) or are_sources or (is_list and seed is None):
        raise TypeError(
            f"source must be a mapping from names to sources to mix them, got {type(source).__name__}. Write "
            "load({'web': web, 'books': books}, weights=...). Weights of the records of one source need a seed."
        )
    if seed is None:
        raise ValueError("seed must be given with weights of records, which are drawn in a shuffled order, got None.")
    sampler = samplers.WeightedSampler(weights, num_epochs=num_epochs, seed=seed)
    if sampler.num_source_records != len(source):
        raise ValueError(
            f"weights must have one number for each of the {len(source)} records, got {sampler.num_source_records}. To "
            "mix several sources, pass a mapping from names to sources."
        )
    return sampler


def _order(source: Any, *, shuffle: bool, num_epochs: int | None, seed: int | None) -> Sampler:
    """Returns the order of a source: shuffled in windows if it is read in units that do not all fit into memory."""
    window_units = getattr(source, "window_units", None)
    if shuffle and seed is not None and window_units is not None and len(source):
        sampler = samplers.HierarchicalSampler(
            source.unit_sizes,
            window_units=window_units,
            num_epochs=num_epochs,
            seed=seed,
            unit_numbers=getattr(source, "unit_numbers", None),
        )
        if sampler.num_records == len(source):
            return sampler
    return IndexSampler(len(source), shuffle=shuffle, num_epochs=num_epochs, seed=seed)


def _nth_seed(seed: int | None, number: int) -> int | None:
    """Returns the seed of a component: components with the same seed would draw the same numbers."""
    if seed is None or not 0 <= as_integer(seed, "seed", maximum=None) < SEED_LIMIT:
        return seed  # The sampler raises the error.
    return derive_seed(seed, Purpose.COMPONENT, number)


KEYS_PER_BATCH = 256


@named_arguments()
def surviving_keys(
    data_source: DataSource[Any],
    operations: Operations,
    worker_count: int | None = 0,
    read_options: ReadOptions | None = None,
    worker_init_fn: Callable[[int, int], object] | None = None,
) -> NDArray[np.int64]:
    """Returns the keys of the records that a pipeline's Filters keep, an int64 array of shape (kept,), ascending.

    Run it once, save the keys beside the data, and pass them to an `IndexSampler`. The remaining pipeline is 1:1: all
    hosts yield the same number of batches, a checkpoint resumes on another number of hosts, `len(loader)` is known, and
    `seek` costs nothing.

    Args:
        data_source: the records. Each is read once, in the source's order.
        operations: the pipeline up to the last Filter: Maps, Filters and functions.
        worker_count: the number of worker processes, 0 for none; None for one per core that this process may use.
        read_options: the threads that read ahead; None for `ReadOptions()`.
        worker_init_fn: called in each worker with its index and the number of workers, see `DataLoader`.

    Raises:
        TypeError: an operation is of another kind. An element of a FlatMap or Batch is not one record, and the input
            of a RandomMap or MapWithIndex depends on the position in training.
        Exception: an error of an operation or the source, with notes of where it occurred.

    Examples:
        >>> texts = ["a", "long", "b", "longer"]
        >>> keys = millstream.surviving_keys(texts, [millstream.Filter(lambda text: len(text) > 3)])
        >>> sampler = millstream.IndexSampler(len(keys), shuffle=True, seed=0, num_epochs=1, keys=keys)
        >>> list(millstream.DataLoader(data_source=texts, sampler=sampler))
        ['long', 'longer']
    """
    check_source(data_source, "data_source")
    checked = check_operations(operations)
    for number, operation in enumerate(checked):
        if not isinstance(operation, (Map, Filter)):
            raise TypeError(
                f"operations must be Maps and Filters, got {described(operation)} as operations[{number}]: an element "
                "of a FlatMap or Batch is not one record, and the input of a RandomMap or MapWithIndex depends on the "
                "position in training. Remove it here, and place it after the Filters in training."
            )
    # In one epoch of the source's order, the index is the record key.
    keys = [*checked, MapWithIndex(_index), Batch(KEYS_PER_BATCH)]
    loader = DataLoader(
        data_source=data_source,
        sampler=SequentialSampler(len(data_source)),
        operations=keys,
        worker_count=worker_count,
        shard_options=NoSharding(),
        read_options=read_options,
        worker_init_fn=worker_init_fn,
    )
    with iter(loader) as batches:
        return np.concatenate([np.empty(0, dtype=np.int64), *batches])


def _index(index: int, element: Any) -> int:
    del element
    return index
