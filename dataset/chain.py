"""Iterators of datasets: compilation of a straight chain to the pipeline that a loader runs.

All datasets of one combination share one set of threads, which prefetches each as far as it is drawn from.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, final

from millstream.dataset.fixed_chain import FixedChain
from millstream.dataset.iter_dataset import WARM, IterDataset
from millstream.dataset.iterators.chain_iterator import ReadIterator
from millstream.dataset.iterators.dataset_iterator import DatasetIterator, with_states
from millstream.dataset.iterators.fed_iterator import FedIterator
from millstream.dataset.iterators.running import ALONE, Running, Shared, WarmWorkers
from millstream.dataset.map_dataset import MapDataset
from millstream.dataset.node_source import node_of
from millstream.dataset.nodes.lowering import InOrder
from millstream.dataset.nodes.source_node import HANDED, copied_with
from millstream.dataset.options import DatasetOptions, options_of
from millstream.dataset.stream_nodes import Ahead, Combined, Compiled, Operated, ReadIterDataset, Seeded
from millstream.loader.checkpoints.fingerprint import slots_of
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.measuring import FED_CHAIN
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.shared_threads import joint_threads, min_buffer_bytes
from millstream.sharding import NoSharding
from millstream.transforms import Transformation

NO_THREADS = ReadOptions(num_threads=0, prefetch_buffer_size=0)
NO_WORKERS = MultiprocessingOptions()


@final
@dataclasses.dataclass(frozen=True)
class Chain:
    """Operations after a leaf that run together.

    Attributes:
        leaf: the source of the elements: a `ReadIterDataset`, or any dataset with its own iterator.
        reading: the threads to run them in, in this process or in each worker; None for those of the leaf.
        num_local: the number of operations after the last `mp_prefetch`, which run in this process.
        local_reading: the threads to run these in; None for the consumer's thread.
    """

    leaf: IterDataset[Any]
    operations: tuple[Transformation, ...]
    workers: MultiprocessingOptions
    reading: ReadOptions | None
    num_local: int
    local_reading: ReadOptions | None

    @classmethod
    def of(cls, dataset: IterDataset[Any]) -> Self:
        """Returns the chain that ends with a dataset."""
        operations: list[Transformation] = []
        workers, reading, num_local, local_reading = NO_WORKERS, None, 0, None
        has_boundary, node = False, dataset
        while node is dataset or not iterates_itself(node):
            if isinstance(node, Operated):
                operations.append(node.operation)
            elif isinstance(node, Ahead):
                if operations and node.is_boundary and not has_boundary:
                    num_local, local_reading, reading = len(operations), reading, None
                has_boundary = has_boundary or node.is_boundary
                workers = workers if workers.num_workers else node.workers
                reading = reading or node.reading
            elif not isinstance(node, Seeded):
                break
            node = node.parents[0]
        return cls(node, tuple(reversed(operations)), workers, reading, num_local, local_reading)

    @property
    def map_dataset(self) -> "MapDataset[Any] | None":
        """The dataset with random access that it reads; None if it draws from another stream."""
        return self.leaf.map_dataset if isinstance(self.leaf, ReadIterDataset) else None


def fixed_chain(dataset: IterDataset[Any], chain: Chain) -> FixedChain:
    """Returns a dataset's chain as it was when its first iterator began. ValueError if the program has changed it."""
    warm = warm_workers_of(dataset)
    if warm.fixed is None:
        read = chain.map_dataset
        warm.fixed = FixedChain(read, None if read is None else node_of(read), chain.operations)
    else:
        warm.fixed.check_unchanged()
    return warm.fixed


def iterator_of(dataset: IterDataset[Any], shared: Shared = ALONE) -> DatasetIterator[Any]:
    """Returns a new iterator of a chain that ends with a dataset, below the combination of datasets of `shared`."""
    return _opened(dataset, dataclasses.replace(shared, options=options_of(dataset, shared.options)))


def _opened(dataset: IterDataset[Any], shared: Shared) -> DatasetIterator[Any]:
    options = shared.options
    chain = Chain.of(dataset)
    fixed = fixed_chain(dataset, chain)
    leaf, operations, reading = chain.leaf, fixed.operations, chain.reading
    running = Running(
        chain.workers if shared.shared_workers is None else NO_WORKERS,
        reading or NO_THREADS,
        warm_workers_of(dataset),
        options.filter_limits,
        shared,
        None if shared.is_alone else dataset,
        tolerance=options.tolerance,
        num_local=chain.num_local,
        local_reading=chain.local_reading,
    )
    if isinstance(leaf, ReadIterDataset) and (leaf is dataset or not iterates_itself(leaf)):
        own = reading or leaf.reading
        if shared.reading is not None and not own.reads_ahead:
            own = shared.reading
        return ReadIterator(fixed, dataclasses.replace(running, reading=own), allows_none=leaf.allow_nones)
    if not isinstance(leaf, Combined) or iterates_itself(leaf):
        stream = with_states(handed_down(leaf, options))
    else:
        following = leaf.followed_by(fixed, running, reading)
        if following is not None:
            return following
        if running.workers.num_workers:
            running = dataclasses.replace(running, reading=joint_reading(leaf.parents, reading))
            stream, running = _drawn_by_workers(leaf, chain, running)
        else:
            shared = shared.combined()
            if not operations and reading is not None:
                shared = dataclasses.replace(shared, reading=reading)
            stream = leaf.drawn(shared)
    if not operations:
        # Nothing is left to prefetch, so that a state is that of the stream.
        return stream
    if len(operations) == chain.num_local:
        running = dataclasses.replace(running, workers=NO_WORKERS)
    return FedIterator(stream, fixed, running)


def _drawn_by_workers(leaf: Combined, chain: Chain, running: Running) -> tuple[DatasetIterator[Any], Running]:
    """Returns an iterator of datasets whose chains run in one set of worker processes.

    Returns:
        The iterator, and the execution of the operations after it. If some of them run in the workers, its iterator
        dispatches the calls of all; otherwise one without elements does.
    """
    from millstream.loader.workers.shared_workers import SharedWorkers  # noqa: PLC0415  (lazy: for workers)

    shared = Shared(shared_workers=(shared_workers := SharedWorkers()), options=running.shared.options)
    sharing, stream = dataclasses.replace(running, shared=shared), leaf.drawn(shared)
    if len(chain.operations) > chain.num_local:
        return stream, sharing
    nothing = InOrder(0, None)
    execution = sharing.execution("leader", Pipeline([], nothing, nothing, (), NoSharding()), FED_CHAIN)
    leader = DataLoaderIterator.of(execution)
    shared_workers.start_on_demand(leader.start_prefetch)
    stream.led_by(leader)
    return stream, running


def joint_reading(streams: Sequence[Any], reading: ReadOptions | None = None) -> ReadOptions:
    """Returns the threads for one set of workers, or one plan, which does the work of several streams.

    `reading` has those that were requested after them, if any. The smallest limit of bytes is that of all.
    """
    requested = [_requested_reading(stream) for stream in streams]
    if reading is None:
        largest = max(requested, key=lambda one: one.num_threads, default=ReadOptions())
        num_threads = joint_threads([one.num_threads for one in requested])
        reading = dataclasses.replace(largest, num_threads=num_threads)
    return dataclasses.replace(reading, max_buffer_bytes=min_buffer_bytes([reading, *requested]))


def _requested_reading(stream: Any) -> ReadOptions:
    if not isinstance(stream, IterDataset):
        # A MapDataset of datasets, which are not known yet.
        return ReadOptions()
    chain = Chain.of(stream)
    if chain.reading is not None:
        return chain.reading
    if isinstance(chain.leaf, ReadIterDataset):
        return chain.leaf.reading
    return joint_reading(chain.leaf.parents) if isinstance(chain.leaf, Combined) else NO_THREADS


def warm_workers_of(dataset: IterDataset[Any]) -> WarmWorkers:
    """Returns the idle workers of a dataset's earlier iterators."""
    warm: WarmWorkers = vars(dataset).setdefault(WARM, WarmWorkers())
    return warm


def iterates_itself(dataset: IterDataset[Any]) -> bool:
    """Returns True if a dataset is not compiled, because its class or a base class has its own `__iter__`."""
    own = type(dataset).__iter__
    return not any(own is kind.__iter__ for kind in (Combined, Compiled))


def as_stream(dataset: Any, what: str) -> IterDataset[Any]:
    """Returns a dataset as one that is read in order. Refuses anything else, which the error calls `what`."""
    if isinstance(dataset, MapDataset):
        return dataset.to_iter_dataset()
    if not isinstance(dataset, IterDataset):
        raise TypeError(f"{what} must be an IterDataset or a MapDataset, got {type(dataset).__name__}.")
    return dataset


def opened_below(dataset: IterDataset[Any], shared: Shared = ALONE) -> DatasetIterator[Any]:
    """Returns a new iterator of a dataset, with the threads and workers of its combination."""
    if iterates_itself(dataset):
        return with_states(handed_down(dataset, shared.options))
    return iterator_of(dataset, shared)


def handed_down(dataset: Any, options: DatasetOptions) -> Any:
    """Returns a dataset that opens those below it with options. A user's class may do so whenever it likes.

    It is a copy that has copies of the datasets in its attributes; the dataset itself if no option was given.
    """
    if not options.given:
        return dataset
    if isinstance(dataset, IterDataset) and iterates_itself(dataset):
        held = slots_of(dataset) | vars(dataset)
        return copied_with(dataset, {name: _handed_to(value, options) for name, value in held.items()})
    attributes: dict[str, Any] = {HANDED: options_of(dataset, options)}
    if isinstance(dataset, IterDataset):
        attributes[WARM] = warm_workers_of(dataset)
    return copied_with(dataset, attributes)


def _handed_to(value: Any, options: DatasetOptions) -> Any:
    if isinstance(value, IterDataset | MapDataset):
        return handed_down(value, options)
    if type(value) in (list, tuple):
        return type(value)(_handed_to(member, options) for member in value)
    if type(value) is dict:
        return {name: _handed_to(member, options) for name, member in value.items()}
    return value


def reads_in_threads(dataset: IterDataset[Any]) -> bool:
    """Returns True if a dataset runs only in this process, in threads of the library or its own.

    Worker processes and user-defined iterators must not be started before their turn.
    """
    if iterates_itself(dataset) or (isinstance(dataset, Ahead) and dataset.workers.num_workers):
        return False
    return all(reads_in_threads(parent) for parent in dataset.parents if isinstance(parent, IterDataset))
