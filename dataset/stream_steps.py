"""The steps of streams: a leaf to read, operations, seeds, options, their execution, and joins of streams."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, SupportsIndex, TypeAlias, final

from millstream import grain_kinds
from millstream.core.checks import as_options
from millstream.core.descriptions import described, function_name
from millstream.core.randomness import Purpose, derive_seed
from millstream.dataset.arguments import count_random_maps, longest_count, nearest_seed, seed_for
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.iterators.foreign_iterators import description_of_stream, iterator_of_iterable, with_states
from millstream.dataset.iterators.inputs import Input, JoinedInput
from millstream.dataset.iterators.running import FixedChain, Running, Shared
from millstream.dataset.node_source import node_of
from millstream.dataset.nodes.source_node import HANDED, copied_with
from millstream.dataset.options import DatasetOptions
from millstream.dataset.step import Step, folded
from millstream.loader.checkpoints.fingerprint import slots_of
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.transforms import OnlyFor, Pack, RandomMap, Transformation, WithComponent
from millstream.transforms.grouping import GroupingOperation
from millstream.transforms.of_chains import SeededRandomMap

NO_THREADS = ReadOptions(num_threads=0, prefetch_buffer_size=0)
NO_WORKERS = MultiprocessingOptions()


@dataclasses.dataclass(frozen=True, eq=False)
class StreamStep(Step):
    """A step of a stream. By default, it yields the elements of the step before it."""

    above: tuple[Any, ...]
    is_leaf = False
    """True if the operations of a chain begin after it; False if it belongs to the chain of the step before it."""

    @functools.cached_property
    def reads_in_threads(self) -> bool:
        """True if it runs only in this process, in threads of the library or its own.

        Worker processes and user-defined iterators must not be started before their turn.
        """
        return all(parent.reads_in_threads for parent in self.above if isinstance(parent, StreamStep))

    def without_threads(self, above: Sequence[Step]) -> Step:
        """Returns the step with the same elements, computed in this thread, after steps of which this is true."""
        return dataclasses.replace(self, above=tuple(above))


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Read(StreamStep):
    """The elements of a node in order: the leaf of a straight chain.

    Attributes:
        source: the `MapDataset` with the node, which a loader reads like any source.
        reading: the threads.
        allow_nones: True to yield None for missing elements; False to skip them.
    """

    source: Any
    reading: ReadOptions
    allow_nones: bool = False
    is_leaf = True
    text = ".to_iter_dataset()"

    @classmethod
    def of(cls, source: Any, reading: ReadOptions | None, *, allow_nones: bool) -> StreamStep:
        """Returns the step that reads a MapDataset, with the options of a user's dataset that draws from it."""
        options = ReadOptions() if reading is None else as_options(reading, "read_options", ReadOptions)
        step = cls((step_of(source),), source, options, allow_nones)
        handed = vars(source).get(HANDED)
        return step if handed is None else WithOptions((step,), handed)

    def without_threads(self, above: Sequence[Step]) -> Step:
        return dataclasses.replace(self, above=tuple(above), reading=NO_THREADS)


OpenBelow: TypeAlias = Callable[[Any], Input]
"""Opens a step with the threads, workers and options of the chain that draws from it."""


class Leaf(StreamStep):
    """Elements that are drawn in the consumer's thread."""

    is_leaf = True

    @abc.abstractmethod
    def opened(self, open_below: OpenBelow) -> DatasetIterator[Any] | Input:
        """Returns a new iterator, or the input of one."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class FromIterable(Leaf):
    """The elements of an iterable, or of the iterators that a function returns, in their order."""

    iterable: Iterable[Any] | Callable[[], Iterator[Any]]
    reads_in_threads = False

    @property
    def _name(self) -> str:
        is_function = not hasattr(self.iterable, "__iter__")
        return function_name(self.iterable) if is_function else type(self.iterable).__name__

    @functools.cached_property
    def _description(self) -> dict[str, dict[str, str]]:
        return description_of_stream("IterDataset.source", {"iterable": self.iterable})

    def opened(self, open_below: OpenBelow) -> DatasetIterator[Any] | Input:
        del open_below
        return iterator_of_iterable(self.iterable, self._name, lambda: self._description)

    @property
    def text(self) -> str:
        return f"stream({self._name})"


@final
@dataclasses.dataclass(frozen=True, eq=False)
class OwnStream(Leaf):
    """The elements of a user's subclass of IterDataset, which iterates by itself."""

    dataset: Any
    reads_in_threads = False

    def opened(self, open_below: OpenBelow) -> DatasetIterator[Any]:
        del open_below
        return with_states(self.dataset)

    @property
    def text(self) -> str:
        return type(self.dataset).__name__

    def without_threads(self, above: Sequence[Step]) -> Step:
        return OwnStream(tuple(above), _in_this_thread(self.dataset))


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Foreign(StreamStep):
    """A parent of a user's dataset that is no dataset. Nothing is known of it."""

    value: Any
    is_leaf = True

    @property
    def text(self) -> str:
        return described(self.value)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Operate(StreamStep):
    """The elements after an operation, which has a seed if it is random."""

    operation: Transformation

    @classmethod
    def after(cls, parent: Step, operation: Transformation, seed: SupportsIndex | None = None) -> Self:
        """Returns the step after another one. Seeds that the operation lacks derive from the steps before it."""
        if isinstance(operation, OnlyFor | Pack | WithComponent):
            raise TypeError(
                f"{described(operation)} belongs to a DataLoader with a MixtureSampler or a PackingSampler, whose "
                "positions determine the component or row of an element. Positions of a chain do not."
            )
        if isinstance(operation, RandomMap):
            chosen = seed_for("random_map", parent, seed)
            operation = SeededRandomMap(operation, chosen, count_random_maps(parent, chosen))
        elif isinstance(operation, GroupingOperation):
            operation = _seeded_group(operation, parent)
        return cls((parent,), operation)

    @property
    def drawing_seed(self) -> int | None:  # type: ignore[override]  # a constant of each step
        return self.operation.seed if isinstance(self.operation, SeededRandomMap) else None

    @functools.cached_property
    def makes_batches(self) -> bool:
        (parent,) = self.above
        return bool(self.operation.makes_batches or parent.makes_batches)

    @property
    def text(self) -> str:
        return f".apply({described(self.operation)})"


def _seeded_group(operation: GroupingOperation, parent: Step) -> GroupingOperation:
    """Returns a grouping operation after a step. If it shuffles, it has its own seed or a derived one."""
    chosen = None if operation.seed is not None else nearest_seed(parent)
    number = longest_count(parent, lambda one: isinstance(getattr(one, "operation", None), GroupingOperation))
    return operation.seeded(0 if chosen is None else derive_seed(chosen, Purpose.GROUPING, number))


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Seeded(StreamStep):
    """The same elements, with a seed for the operations after it."""

    seed: int

    @property
    def given_seed(self) -> int:  # type: ignore[override]  # a constant of each step
        return self.seed

    @property
    def text(self) -> str:
        return f".seed({self.seed})"


@final
@dataclasses.dataclass(frozen=True, eq=False)
class WithOptions(StreamStep):
    """The same elements, with options for the chain up to here, and for the streams below its joins."""

    options: DatasetOptions

    @property
    def text(self) -> str:
        given = [f"{name}={getattr(self.options, name)!r}" for name in self.options.given]
        return f".options({', '.join(given)})"


def options_of(step: Step, outer: DatasetOptions) -> DatasetOptions:
    """Returns the options of a step below others that have the options `outer`.

    They combine those of all steps up to one with several parents. The last step takes precedence.
    """
    options = outer
    while True:
        if isinstance(step, WithOptions):
            options = options.merge(step.options)
        parents = step.parents
        if len(parents) != 1:
            return options
        (step,) = parents


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Ahead(StreamStep):
    """The same elements, prefetched by processes or threads.

    Attributes:
        workers: the processes.
        reading: the threads; None for those of the leaf.
        is_boundary: True if the operations before it run in worker processes, or here if there are none.
    """

    workers: MultiprocessingOptions = NO_WORKERS
    reading: ReadOptions | None = None
    is_boundary: bool = False

    @functools.cached_property
    def reads_in_threads(self) -> bool:
        (parent,) = self.above
        return bool(not self.workers.num_workers and parent.reads_in_threads)

    def without_threads(self, above: Sequence[Step]) -> Step:
        return above[0]

    @property
    def text(self) -> str:
        if self.reading is not None:
            return f".prefetch({self.reading})"
        return ".mp_prefetch({})".format(
            '"auto"' if self.workers.chooses_workers else f"num_workers={self.workers.num_workers}"
        )


class Join(Leaf):
    """Elements drawn from other streams, which share one set of threads or workers."""

    @abc.abstractmethod
    def opened(self, open_below: OpenBelow) -> JoinedInput: ...

    def followed_by(
        self,
        chain: FixedChain,  # noqa: ARG002  (for subclasses with a faster way)
        running: Running,  # noqa: ARG002
        reading: ReadOptions | None,  # noqa: ARG002
        draw: Callable[[Shared], JoinedInput],  # noqa: ARG002
    ) -> DatasetIterator[Any] | None:
        """Returns an iterator of the operations of a chain after this join; None to draw its elements.

        Without `reading`, the threads are those that the streams below request. `draw` opens the join.
        """
        return None


def without_threads(step: Step) -> Any:
    """Returns a step with the same elements, which are computed in this thread."""
    return folded(step, lambda one, above: one.without_threads(above) if isinstance(one, StreamStep) else one)


def _in_this_thread(dataset: Any) -> Any:
    """Returns a dataset with the same elements, which are computed in this thread if it is a stream."""
    if isinstance(dataset, grain_kinds.MapDataset):
        return dataset
    if dataset.iterates_itself:
        return with_held(dataset, _in_this_thread)
    return copied_with(dataset, {"_step": without_threads(dataset._step)})  # noqa: SLF001  (as below)


def with_held(dataset: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a copy of a user's dataset with the results of a function of each dataset in its attributes."""
    held = slots_of(dataset) | vars(dataset)
    return copied_with(dataset, {name: _changed(value, change) for name, value in held.items()})


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, grain_kinds.MapDataset | grain_kinds.IterDataset):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_changed(member, change) for member in value)
    if type(value) is dict:
        return {name: _changed(member, change) for name, member in value.items()}
    return value


def step_of(dataset: Any) -> Any:
    """Returns the step of a stream, or the node of a MapDataset."""
    known: dict[int, Step] = {}

    def found(value: Any) -> Any:
        if isinstance(value, grain_kinds.MapDataset):
            return node_of(value)
        if not isinstance(value, grain_kinds.IterDataset):
            return Foreign((), value)
        stream: Any = value
        if not stream.iterates_itself:
            return stream._step  # noqa: SLF001  (as every stream of the library has)
        if id(stream) not in known:
            known[id(stream)] = OwnStream(tuple(map(found, stream.parents)), stream)
        return known[id(stream)]

    return found(dataset)


def steps_of(datasets: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(map(step_of, datasets))


def as_stream(dataset: Any, what: str) -> Any:
    """Returns a dataset as one that is read in order. Refuses anything else, which the error calls `what`."""
    if isinstance(dataset, grain_kinds.MapDataset):
        return dataset.to_iter_dataset()  # type: ignore[attr-defined]  # of every MapDataset
    if not isinstance(dataset, grain_kinds.IterDataset):
        raise TypeError(f"{what} must be an IterDataset or a MapDataset, got {type(dataset).__name__}.")
    return dataset


def as_streams(datasets: Sequence[Any], what: str) -> list[Any]:
    return [as_stream(dataset, f"{what}[{number}]") for number, dataset in enumerate(datasets)]
