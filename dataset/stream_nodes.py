"""The steps of a straight chain: a leaf to read, operations, seeds, and their execution."""

import abc
from typing import Any, SupportsIndex

from millstream.core.checks import as_options
from millstream.core.descriptions import described
from millstream.core.randomness import OF_GROUPS, derive_seed
from millstream.dataset.arguments import count_random_maps, longest_count, nearest_seed, seed_for
from millstream.dataset.fixed_chain import FixedChain
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.iterators.recovering_iterator import RecoveringIterator
from millstream.dataset.iterators.running import Running, Shared
from millstream.dataset.map_dataset import MapDataset
from millstream.dataset.node_source import node_of
from millstream.dataset.nodes.element_nodes import Batched
from millstream.dataset.options import options_of
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.transforms import OnlyFor, Pack, RandomMap, Transformation
from millstream.transforms.grouping import GroupingOperation
from millstream.transforms.of_chains import SeededRandomMap


class Compiled(IterDataset[Any]):
    """A step of a straight chain, which is compiled as a whole."""

    def __iter__(self) -> DatasetIterator[Any]:
        from millstream.dataset.chain import iterator_of  # noqa: PLC0415  (which needs the classes below)

        return iterator_of(self)


class Operated(Compiled):
    """The elements after an operation, which has a seed if it is random."""

    def __init__(self, parent: IterDataset[Any], operation: Transformation, seed: SupportsIndex | None = None) -> None:
        super().__init__(parent)
        if isinstance(operation, OnlyFor | Pack):
            raise TypeError(
                f"{described(operation)} belongs to a DataLoader with a MixtureSampler or a PackingSampler, whose "
                "positions determine the component or row of an element. Positions of a chain do not."
            )
        if isinstance(operation, RandomMap):
            chosen = seed_for("random_map", parent, seed)
            operation = SeededRandomMap(operation, chosen, count_random_maps(parent, chosen))
        elif isinstance(operation, GroupingOperation):
            operation = _seeded_group(operation, parent)
        self.operation = operation

    def _line(self) -> str:
        return f".apply({described(self.operation)})"


class Seeded(Compiled):
    """The same elements, with a seed for the operations after it."""

    def __init__(self, parent: IterDataset[Any], seed: int) -> None:
        super().__init__(parent)
        self.given_seed = seed

    def _line(self) -> str:
        return f".seed({self.given_seed})"


class Ahead(Compiled):
    """The same elements, prefetched by processes or threads.

    Attributes:
        reading: the threads; None for those of the leaf.
        is_boundary: True if the operations before it run in worker processes, or here if there are none.
    """

    def __init__(
        self,
        parent: IterDataset[Any],
        workers: MultiprocessingOptions,
        reading: ReadOptions | None,
        *,
        is_boundary: bool = False,
    ) -> None:
        super().__init__(parent)
        self.workers = workers
        self.reading = reading
        self.is_boundary = is_boundary

    def _without_threads(self) -> IterDataset[Any]:
        parent: IterDataset[Any] = self._parent
        return parent._without_threads()  # noqa: SLF001  (of the same classes)

    def _line(self) -> str:
        if self.reading is not None:
            return f".prefetch({self.reading})"
        return f".mp_prefetch(num_workers={self.workers.num_workers})"


class ReadIterDataset(Compiled):
    """The elements of a `MapDataset` in order: the leaf of a straight chain.

    With `allow_nones`, missing elements are None; otherwise they are skipped.
    """

    def __init__(self, map_dataset: Any, read_options: ReadOptions | None = None, allow_nones: bool = False) -> None:
        super().__init__(map_dataset)
        if read_options is not None:
            read_options = as_options(read_options, "read_options", ReadOptions)
        self.map_dataset = map_dataset
        self.reading = read_options or ReadOptions()
        self.allow_nones = allow_nones

    def _without_threads(self) -> IterDataset[Any]:
        return ReadIterDataset(self.map_dataset, ReadOptions(num_threads=0), self.allow_nones)

    def _line(self) -> str:
        return ".to_iter_dataset()"


class Combined(IterDataset[Any]):
    """A dataset that draws from one or more other datasets, which share one set of threads or workers."""

    def __iter__(self) -> DatasetIterator[Any]:
        return self.drawn(Shared(options=options_of(self)))

    def drawn(self, shared: Shared) -> RecoveringIterator[Any]:
        """Returns an iterator that draws in the consumer's thread."""
        iterator = self._drawn(shared)
        iterator.name, iterator.dataset = self._line(), self
        return iterator

    @abc.abstractmethod
    def _drawn(self, shared: Shared) -> RecoveringIterator[Any]:
        """Returns the iterator of `drawn`, without its name."""

    def followed_by(
        self,
        chain: FixedChain,  # noqa: ARG002  (for subclasses with a faster way)
        running: Running,  # noqa: ARG002
        reading: ReadOptions | None,  # noqa: ARG002
    ) -> DatasetIterator[Any] | None:
        """Returns an iterator of the operations of a chain after this dataset; None to draw its elements with `drawn`.

        Without `reading`, the threads are those that the datasets below request.
        """
        return None

    @property
    def makes_batches(self) -> bool:
        """True if its elements are batches, as far as the operations above it tell."""
        return _makes_batches(self)


def _makes_batches(dataset: Any) -> bool:
    if isinstance(dataset, MapDataset):
        return any(isinstance(node, Batched) for node in node_of(dataset).line())
    if isinstance(dataset, Operated) and dataset.operation.makes_batches:
        return True
    return bool(dataset.parents) and all(map(_makes_batches, dataset.parents))


def _seeded_group(operation: GroupingOperation, parent: Any) -> GroupingOperation:
    """Returns a grouping operation after a dataset. If it shuffles, it has its own seed or a derived one."""
    chosen = None if operation.seed is not None else nearest_seed(parent)
    number = longest_count(parent, lambda one: isinstance(getattr(one, "operation", None), GroupingOperation))
    return operation.seeded(0 if chosen is None else derive_seed(chosen, OF_GROUPS - number))
