"""Datasets below other datasets, and their iterators.

All datasets of one combination share one set of threads, which prefetches each as far as it is drawn from.
"""

from typing import Any

from millstream.dataset.chain import iterates_itself, iterator_of
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.iterators.fed_iterator import with_states
from millstream.dataset.iterators.running import Shared
from millstream.dataset.map_dataset import MapDataset
from millstream.dataset.stream_nodes import Ahead


def as_stream(dataset: Any, what: str) -> IterDataset[Any]:
    """Returns a dataset as one that is read in order.

    Raises:
        TypeError: it is not a dataset; the error calls it `what`.
    """
    if isinstance(dataset, MapDataset):
        return dataset.to_iter_dataset()
    if not isinstance(dataset, IterDataset):
        raise TypeError(f"{what} must be an IterDataset or a MapDataset, got {type(dataset).__name__}.")
    return dataset


def opened_below(dataset: IterDataset[Any], shared: Shared | None = None) -> DatasetIterator[Any]:
    """Returns a new iterator of a dataset.

    Args:
        dataset: the dataset to iterate over.
        shared: the threads and workers of all datasets below one combination; None for its own.
    """
    return with_states(dataset) if iterates_itself(dataset) else iterator_of(dataset, shared)


def reads_in_threads(dataset: IterDataset[Any]) -> bool:
    """Returns True if a dataset runs only in this process, in threads of the library or its own.

    Worker processes and user-defined iterators must not be started before their turn.
    """
    if iterates_itself(dataset) or (isinstance(dataset, Ahead) and dataset.workers.num_workers):
        return False
    return all(reads_in_threads(parent) for parent in dataset.parents if isinstance(parent, IterDataset))
