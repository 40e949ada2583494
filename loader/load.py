"""The short way to a DataLoader."""

from collections.abc import Callable
from typing import Any

from millstream.checks import named_arguments
from millstream.loader.data_loader import DataLoader
from millstream.loader.habits import LOAD_HABITS, LOAD_NEEDS_NAMES
from millstream.loader.pipeline.arguments import Operations, check_list, check_source
from millstream.loader.threads.options import ReadOptions
from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.sources import DataSource
from millstream.transforms import Batch


@named_arguments(LOAD_HABITS, LOAD_NEEDS_NAMES)
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
    batch_fn: Callable[[list[Any]], Any] | None = None,
    worker_count: int | None = 0,
    read_options: ReadOptions | None = None,
) -> DataLoader:
    """Returns a `DataLoader` over a source with an `IndexSampler` and, at the end, a `Batch`: the short way.

    Args:
        source: where records come from.
        num_epochs: how often to go through the source; None for endlessly.
        shuffle: whether to shuffle, anew in each epoch; needs a seed.
        seed: of the order and of all random operations, 0 … 2**64 - 1.
        shard_options: which part of every global batch to read.
        transformations: what to do with each record, before the batch is made.
        batch_size: elements in a batch, per shard; None for no batches.
        drop_remainder: whether a last, short batch is left out.
        batch_fn: makes a batch from the list of its elements; None stacks them.
        worker_count: how many worker processes, 0 for none; None for one for each core that this process may use.
        read_options: the threads that read ahead.

    Raises:
        TypeError, ValueError: as `DataLoader`.
    """
    check_source(source)
    check_list(transformations, "transformations")
    if batch_fn is not None and batch_size is None:
        raise ValueError("batch_fn makes batches, but batch_size=None asks for none: give batch_size as well.")
    sampler = IndexSampler(len(source), shuffle=shuffle, num_epochs=num_epochs, seed=seed)
    batch = [] if batch_size is None else [Batch(batch_size, drop_remainder, batch_fn)]
    return DataLoader(
        data_source=source,
        sampler=sampler,
        operations=[*transformations, *batch],
        worker_count=worker_count,
        shard_options=shard_options,
        read_options=read_options,
    )
