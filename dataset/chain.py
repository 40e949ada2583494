"""Compilation of a straight chain to the pipeline that a loader runs."""

import dataclasses
from typing import Any, Self, final

from millstream.dataset.chain_iterator import ReadIterator
from millstream.dataset.dataset_iterator import DatasetIterator
from millstream.dataset.fed_iterator import FedIterator, with_states
from millstream.dataset.iter_dataset import WARM, IterDataset
from millstream.dataset.map_dataset import node_of
from millstream.dataset.options import DatasetOptions, in_force
from millstream.dataset.running import Running, Shared, WarmWorkers
from millstream.dataset.stream_nodes import Ahead, Combined, Operated, ReadIterDataset, Seeded
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.transforms import Transformation

NO_THREADS = ReadOptions(num_threads=0, prefetch_buffer_size=0)


@final
@dataclasses.dataclass(frozen=True)
class Chain:
    """Operations after a leaf that run together.

    Attributes:
        leaf: the source of the elements: a `ReadIterDataset`, or any dataset with its own iterator.
        operations: the operations to apply, in order.
        workers: the worker processes to run them in.
        reading: the threads to run them in, in this process or in each worker; None for those of the leaf.
        is_ahead: True if the chain requests processes or threads, even if their number is 0.
    """

    leaf: IterDataset[Any]
    operations: tuple[Transformation, ...]
    workers: MultiprocessingOptions
    reading: ReadOptions | None
    is_ahead: bool

    @classmethod
    def of(cls, dataset: IterDataset[Any]) -> Self:
        """Returns the chain that ends with a dataset. A chain before an `mp_prefetch`, if any, is its leaf."""
        operations: list[Transformation] = []
        workers, reading, is_ahead, is_placed, node = MultiprocessingOptions(), None, False, False, dataset
        while True:
            if node is not dataset and iterates_itself(node):
                break
            if isinstance(node, Operated):
                operations.append(node.operation)
            elif isinstance(node, Ahead):
                if operations and node.is_place and not is_placed:
                    # Operations after workers run here, on the results of the workers. Without workers, they do the
                    # same, because a state must not depend on the number of workers.
                    break
                is_placed = is_placed or node.is_place
                if not workers.num_workers:
                    workers = node.workers
                reading, is_ahead = reading or node.reading, True
            elif not isinstance(node, Seeded):
                break
            node = node.parents[0]
        return cls(node, tuple(reversed(operations)), workers, reading, is_ahead)


def iterator_of(dataset: IterDataset[Any], shared: Shared | None = None) -> DatasetIterator[Any]:
    """Returns a new iterator of a dataset.

    Args:
        dataset: the end of the chain.
        shared: the threads and workers to share with others, if it is below a combination of datasets.
    """
    with in_force(dataset) as options:
        return _opened(dataset, options, shared)


def _opened(dataset: IterDataset[Any], options: DatasetOptions, shared: Shared | None) -> DatasetIterator[Any]:
    chain = Chain.of(dataset)
    shared_workers = None if shared is None else shared.shared_workers
    workers = chain.workers if shared_workers is None else MultiprocessingOptions()
    threads = None if shared is None else shared.threads
    running = Running(
        workers,
        NO_THREADS,
        warm_workers_of(dataset),
        options.filter_limits,
        shared_workers,
        id(dataset),
        threads,
        tolerance=options.tolerance,
    )
    leaf = chain.leaf
    if isinstance(leaf, ReadIterDataset) and (leaf is dataset or not iterates_itself(leaf)):
        reading = chain.reading or leaf.reading
        return ReadIterator(leaf, chain.operations, dataclasses.replace(running, reading=reading))
    # Even without an operation, so that a state does not depend on the number of workers.
    is_followed = bool(chain.operations) or chain.is_ahead
    running = dataclasses.replace(running, reading=chain.reading or NO_THREADS)
    if isinstance(leaf, Combined) and not iterates_itself(leaf):
        if not is_followed:
            return leaf._drawn(shared or Shared())  # noqa: SLF001  (not for users)
        if options.tolerance is None:
            following = leaf._followed_by(chain.operations, running, chosen=bool(chain.reading))  # noqa: SLF001
            if following is not None:
                return following
        stream = leaf._drawn(shared or Shared())  # noqa: SLF001  (not for users)
    elif isinstance(leaf, Ahead) and not iterates_itself(leaf):
        stream = iterator_of(leaf, shared)
    else:
        stream = with_states(leaf)
    if not is_followed:
        return stream
    return FedIterator(stream, chain.operations, running, _epoch_length(leaf))


def warm_workers_of(dataset: IterDataset[Any]) -> WarmWorkers:
    """Returns the idle workers of a dataset's earlier iterators."""
    warm: WarmWorkers = vars(dataset).setdefault(WARM, WarmWorkers())
    return warm


def _epoch_length(leaf: IterDataset[Any]) -> int | None:
    """Returns the number of positions per epoch if a leaf is a straight chain."""
    while isinstance(leaf, Ahead | Operated | Seeded) and not iterates_itself(leaf):
        leaf = leaf.parents[0]
    if not isinstance(leaf, ReadIterDataset) or iterates_itself(leaf):
        return None
    return node_of(leaf.map_dataset).epoch_length


def iterates_itself(dataset: IterDataset[Any]) -> bool:
    """Returns True if a dataset is not compiled, because its class or a base class has its own `__iter__`."""
    own = type(dataset).__iter__
    return not any(own is kind.__iter__ for kind in (Ahead, Combined, Operated, ReadIterDataset, Seeded))
