"""Filtering in advance: finds the keys of the records that Filters keep, so that training reads only these."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import named_arguments
from millstream.core.descriptions import described
from millstream.loader.data_loader import DataLoader
from millstream.loader.pipeline.pipeline import Operations, check_operations
from millstream.loader.threads.options import ReadOptions
from millstream.samplers import SequentialSampler
from millstream.sharding import NoSharding
from millstream.sources import DataSource
from millstream.sources.source_checks import check_source
from millstream.transforms import Batch, Filter, Map, MapWithIndex

KEYS_PER_BATCH = 256


@named_arguments()
def surviving_keys(
    data_source: DataSource[Any],
    operations: Operations,
    worker_count: int | None = 0,
    read_options: ReadOptions | None = None,
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

    Raises:
        TypeError: an operation is of another kind. An element of a FlatMap or Batch is not one record, and the input
            of a RandomMap or MapWithIndex depends on the position in training.
        Exception: an error of an operation or the source, with notes of where it occurred.

    Examples:
        >>> texts = ["a", "long", "b", "longer"]
        >>> keys = millstream.surviving_keys(texts, [millstream.FilterTransform(lambda text: len(text) > 3)])
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
    )
    with iter(loader) as batches:
        return np.concatenate([np.empty(0, dtype=np.int64), *batches])


def _index(index: int, element: Any) -> int:
    del element
    return index
