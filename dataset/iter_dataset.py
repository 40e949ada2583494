"""A pipeline written as a method chain and read sequentially."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, SupportsIndex, TypeVar, Unpack, overload

from millstream import grain_kinds
from millstream.core.checks import (
    as_flag,
    as_integer,
    as_integer_or_none,
    as_options,
    has_fields,
    named_arguments,
)
from millstream.core.randomness import as_seed
from millstream.dataset.arguments import (
    OF_STREAMS,
    as_operation,
    as_workers,
    depth_above,
    only_parent,
    raise_missing,
)
from millstream.dataset.chain_rendering import html_of, sketch_of, text_of
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.iterators.foreign_iterators import checked_iterable, counted
from millstream.dataset.joins.limits import Cache, Skip, Take
from millstream.dataset.joins.mixing import Mix
from millstream.dataset.joins.turns import Repeat, Turns, Zip
from millstream.dataset.opening import first_element_of, opened
from millstream.dataset.options import DatasetOptions, OptionArguments
from millstream.dataset.stream_steps import (
    Ahead,
    FromIterable,
    Operate,
    Seeded,
    StreamStep,
    WithOptions,
    as_stream,
    as_streams,
    step_of,
    steps_of,
)
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.views import visualized
from millstream.samplers.mixtures.components import named_components
from millstream.samplers.mixtures.mixing import FIRST_EXHAUSTED, Mixing
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, RandomMap, Transformation
from millstream.transforms.given import as_transformation
from millstream.transforms.regrouping import Rebatch, WindowShuffle

if TYPE_CHECKING:
    import numpy as np

T_co = TypeVar("T_co", covariant=True)
Out = TypeVar("Out")


class IterDataset(grain_kinds.IterDataset, Generic[T_co]):
    """A stream of elements that is read in order, and resumed anywhere. `iter(dataset)` is a `DatasetIterator`.

    It is immutable: each method returns a new dataset, and reads nothing. Its elements are a pure function of the
    chain. Threads and worker processes (`mp_prefetch`) affect speed, never content: batches, packed rows, random draws
    and states are the same for any number of them.

    `MapDataset.to_iter_dataset()` returns one. For your own, such as a network stream, subclass it, pass the dataset
    that it draws from, or several in a list, or nothing, to `super().__init__`, and define `__iter__`. It returns a
    `DatasetIterator`, or any iterator. (An iterator without `get_state` is resumed by drawing from its beginning.)
    Operations after it in a chain still run in threads and workers; the iterator itself runs in the consumer's thread.

    Args:
        parents: the dataset that this one draws from, or a sequence of several.

    Examples:
        >>> dataset = millstream.MapDataset.range(8).shuffle(seed=0).to_iter_dataset().map(lambda x: x * 10).batch(4)
        >>> iterator = iter(dataset)
        >>> next(iterator)
        array([20, 40, 50, 60])
        >>> state = iterator.get_state()
        >>> next(iterator)
        array([ 0, 70, 30, 10])
        >>> iterator.set_state(state)
        >>> next(iterator)
        array([ 0, 70, 30, 10])
    """

    _parents: tuple[Any, ...] = ()
    _step: Any = None
    """The step that it holds, a `StreamStep`; None for a user's class that iterates by itself."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wraps the `__iter__` of a subclass, so that it returns a `DatasetIterator`."""
        super().__init_subclass__(**kwargs)
        own = vars(cls).get("__iter__")
        if own is not None:
            cls.__iter__ = _always_dataset_iterators(own)  # type: ignore[method-assign]  # of the same signature

    def __init__(self, parents: Any = ()) -> None:
        self._parents = tuple(parents) if isinstance(parents, tuple | Sequence) else (parents,)
        self._depth = depth_above(self._parents)

    if not TYPE_CHECKING:
        # Type checkers would take any attribute for an existing one.
        def __getattr__(self, name: str) -> NoReturn:
            raise_missing(self, name, OF_STREAMS)

    @property
    def parents(self) -> tuple[Any, ...]:
        """The datasets that this one draws from."""
        return self._parents

    @property
    def _parent(self) -> Any:
        """The single dataset that this one draws from; AttributeError if there are none, or several."""
        return only_parent(self)

    def __iter__(self) -> DatasetIterator[T_co]:
        """Returns a new iterator at the beginning of the stream."""
        if self._step is None:
            raise NotImplementedError(f"{type(self).__name__} must define __iter__.")
        step: StreamStep = self._step
        return self._begun_by(sys._getframe(1), lambda: opened(step))  # noqa: SLF001  (as `warnings` does)

    def __getitem__(self, key: Any) -> NoReturn:
        """Raises ValueError, because a stream is read in order."""
        raise ValueError(
            f"A stream is read in order, and has no [{key}]. Slice or index the MapDataset, before to_iter_dataset(), "
            "or write .take(n) or .skip(n)."
        )

    @staticmethod
    def source(iterable: Iterable[Out] | Callable[[], Iterator[Out]]) -> "IterDataset[Out]":
        """Returns the elements of any iterable, in its order: a Hugging Face stream, a generator function, a list.

        The iterable runs in the consumer's thread, and the operations after it in threads and workers. If it, or its
        iterator, has `state_dict` and `load_state_dict`, these are saved and restored, as deep copies. Otherwise the
        stream is resumed by drawing the elements before the position again.

        Args:
            iterable: the iterable. Each `iter(iterable)` must begin again with the same elements. One that has states
                itself is copied (`copy.deepcopy`) for each iterator. Or a function without arguments that returns a new
                iterator, such as a generator function, without parentheses.

        Raises:
            TypeError: it is not an iterable, or it is an iterator, which can be read only once.

        Examples:
            >>> dataset = millstream.IterDataset.source(["a", "b", "c"]).map(str.upper).batch(2)
            >>> list(dataset)
            [array(['A', 'B'], dtype='<U1'), array(['C'], dtype='<U1')]
            >>> def squares():
            ...     for number in range(4):
            ...         yield number * number
            >>> list(millstream.IterDataset.source(squares))
            [0, 1, 4, 9]
        """
        return made(FromIterable((), checked_iterable(iterable)))

    @staticmethod
    def mix(
        datasets: "Sequence[IterDataset[Out]] | Mapping[str, IterDataset[Out]]",
        weights: "Sequence[Any] | Mapping[str, Any] | None" = None,
        *,
        stop: str = FIRST_EXHAUSTED,
    ) -> "IterDataset[Out]":
        """Returns the elements of several datasets, in exact proportions.

        The proportions are those of a `MixtureSampler`: each prefix is less than one element away from them, or up to
        1.7 elements if weights have many digits.

        With a mapping, a state contains positions by name. If it is restored into another mixture that stops at the
        first end, datasets with the same names resume, new ones start at their beginning, and removed ones are dropped.

        Args:
            datasets: a list, or a mapping from names; at least one.
            weights: numbers from 0 on, in a list or by name; None for equal weights. Decimals are used exactly as
                written.
            stop: the end of the mixture. "first_exhausted": when a dataset that is due has no more elements.
                "all_exhausted": when each dataset has ended; one that ends earlier begins again. "drop_exhausted": when
                each dataset has ended; one that ends earlier is skipped from then on.

        Raises:
            TypeError, ValueError: there are no datasets, or the weights do not fit them.

        Examples:
            >>> numbers = millstream.MapDataset.range(6).to_iter_dataset()
            >>> letters = millstream.MapDataset.source(["a", "b"]).to_iter_dataset()
            >>> datasets = {"numbers": numbers, "letters": letters}
            >>> list(millstream.IterDataset.mix(datasets, {"numbers": 0.75, "letters": 0.25}))
            [0, 1, 2, 'a', 3, 4, 5, 'b']
        """
        names, components = named_components(datasets, "datasets")
        streams = [as_stream(one, f"datasets[{name!r}]") for name, one in zip(names, components, strict=True)]
        mixing = Mixing.of(names, weights, stop)
        return made(Mix(steps_of(streams), mixing, isinstance(datasets, Mapping)), *streams)

    def reweighted(self, position: SupportsIndex, weights: "Sequence[Any] | Mapping[str, Any]") -> "IterDataset[T_co]":
        """Returns a mixture that has other weights from a position on, and is the same before.

        Each dataset continues with the element after its last one. A state that was saved at the position or before it
        can be resumed with either.

        Args:
            position: the number of elements of the mixture before these weights, from 0 on. Weights that an earlier
                call set for it or for later ones are replaced.
            weights: as for `mix`.

        Raises:
            TypeError: this dataset is not a mixture: call it directly after `mix`.
            ValueError: the weights are not valid.

        Examples:
            >>> mixture = millstream.IterDataset.mix([millstream.IterDataset.source(one) for one in ("abc", "xyz")])
            >>> list(mixture.reweighted(4, [1, 0]))
            ['a', 'x', 'b', 'y', 'c']
        """
        step = step_of(self)
        if not isinstance(step, Mix):
            raise TypeError(f"reweighted needs a mixture, got {step.text}: call it directly after mix(...).")
        mixing = step.mixing.reweighted(position, weights)  # type: ignore[arg-type]  # as an index
        return made(dataclasses.replace(step, mixing=mixing), *self.parents)

    @staticmethod
    def interleave(datasets: Any, cycle_length: SupportsIndex) -> "IterDataset[Any]":
        """Returns one element of each of `cycle_length` datasets, one after another.

        Once one of them has ended, the next dataset replaces it from its next turn on.

        Args:
            datasets: a list of datasets, or a `MapDataset` whose elements are datasets, each opened when its turn
                comes.
            cycle_length: the number of datasets that are open at a time, at least 1.

        Raises:
            TypeError, ValueError: an argument is of the wrong kind or out of range.

        Examples:
            >>> streams = [millstream.IterDataset.source(text) for text in ("aaa", "b", "cc")]
            >>> list(millstream.IterDataset.interleave(streams, cycle_length=2))
            ['a', 'b', 'a', 'a', 'c', 'c']
        """
        number = as_integer(cycle_length, "cycle_length", minimum=1)
        if isinstance(datasets, grain_kinds.MapDataset):
            return made(Turns(steps_of([datasets]), datasets, number), datasets)
        if isinstance(datasets, str | bytes) or not isinstance(datasets, Sequence):
            raise TypeError(f"datasets must be a list or a MapDataset of datasets, got {type(datasets).__name__}.")
        streams = as_streams(datasets, "datasets")
        steps = steps_of(streams)
        return made(Turns(steps, steps, number), *streams)

    def concatenate(self, *datasets: "IterDataset[Out]") -> "IterDataset[T_co | Out]":
        """Returns the elements of this dataset, and then those of others.

        Args:
            datasets: the datasets that follow, in order.

        Raises:
            TypeError: one is not a dataset.

        Examples:
            >>> first = millstream.IterDataset.source(["a", "b"])
            >>> list(first.concatenate(millstream.IterDataset.source(["c"])))
            ['a', 'b', 'c']
        """
        return IterDataset.interleave([self, *datasets], cycle_length=1)

    def zip(self, *datasets: "IterDataset[Any]", strict: bool = True) -> "IterDataset[tuple[Any, ...]]":
        """Returns tuples of the elements of this dataset and others.

        Args:
            datasets: the other datasets.
            strict: True to raise an error if one ends before the others; False to end with the shortest.

        Raises:
            TypeError: one is not a dataset. While reading, a ValueError if their lengths differ.

        Examples:
            >>> numbers = millstream.MapDataset.range(2).to_iter_dataset()
            >>> list(numbers.zip(numbers.map(str)))
            [(0, '0'), (1, '1')]
        """
        streams = as_streams([self, *datasets], "datasets")
        return made(Zip(steps_of(streams), as_flag(strict, "strict")), *streams)

    def take(self, count: SupportsIndex) -> "IterDataset[T_co]":
        """Returns the first elements.

        Args:
            count: the largest number of elements, at least 1.

        Examples:
            >>> list(millstream.IterDataset.source("abcde").take(2))
            ['a', 'b']
        """
        return made(Take(steps_of([self]), as_integer(count, "count", minimum=1)), self)

    def skip(self, count: SupportsIndex) -> "IterDataset[T_co]":
        """Returns the elements after the first `count`, which are computed and dropped once, at the beginning.

        Before `to_iter_dataset`, `dataset[count:]` computes nothing.

        Args:
            count: the number of elements that are dropped, from 0 on.

        Examples:
            >>> list(millstream.IterDataset.source("abcde").skip(3))
            ['d', 'e']
        """
        return made(Skip(steps_of([self]), as_integer(count, "count", minimum=0)), self)

    def repeat(self, num_epochs: SupportsIndex | None = None) -> "IterDataset[T_co]":
        """Returns the elements several times: the same ones, with the same draws, each time.

        `MapDataset.repeat` shuffles and draws differently in each epoch.

        Args:
            num_epochs: the number of times, at least 1; None for an endless stream.

        Examples:
            >>> list(millstream.IterDataset.source("ab").repeat(2))
            ['a', 'b', 'a', 'b']
        """
        return made(Repeat(steps_of([self]), as_integer_or_none(num_epochs, "num_epochs")), self)

    def cache(self) -> "IterDataset[T_co]":
        """Returns the same elements, kept in memory once they are computed, for a `repeat` after it.

        Examples:
            >>> list(millstream.IterDataset.source("ab").map(str.upper).cache().repeat(2))
            ['A', 'B', 'A', 'B']
        """
        return made(Cache(steps_of([self])), self)

    def rebatch(self, batch_size: SupportsIndex, *, drop_remainder: bool = False) -> "IterDataset[T_co]":
        """Returns batches of one size, rebuilt from batches of any size; see `Rebatch`.

        Args:
            batch_size: the number of rows of each batch, at least 1.
            drop_remainder: True to drop the last rows if they do not fill a batch.

        Examples:
            >>> batches = millstream.IterDataset.source([np.array([1, 2, 3]), np.array([4]), np.array([5, 6])])
            >>> list(batches.rebatch(2))
            [array([1, 2]), array([3, 4]), array([5, 6])]
        """
        return _operated(self, Rebatch(batch_size, drop_remainder))

    def window_shuffle(self, window_size: SupportsIndex, seed: SupportsIndex | None = None) -> "IterDataset[T_co]":
        """Returns the elements shuffled within windows of `window_size` in a row; see `WindowShuffle`.

        Args:
            window_size: the number of elements per window, at least 1. All of them are in memory.
            seed: 0 … 2**64 - 1; None for one derived from the nearest `seed` before.

        Examples:
            >>> list(millstream.MapDataset.range(8).to_iter_dataset().window_shuffle(4, seed=0))
            [2, 0, 3, 1, 4, 6, 5, 7]
        """
        return _operated(self, WindowShuffle(window_size, seed))

    def options(self, **options: "Unpack[OptionArguments]") -> "IterDataset[T_co]":
        """Returns the same elements, with options for the whole chain up to here, such as the treatment of errors.

        Args:
            options: `on_error`, `max_errors`, `filter_warn_threshold_ratio`, `filter_raise_threshold_ratio`; see
                `DatasetOptions`. Those of the last call for a chain take precedence.

        Raises:
            TypeError, ValueError: an option is unknown, of the wrong kind or out of range.

        Examples:
            >>> dataset = millstream.MapDataset.source(["1", "x", "3"]).to_iter_dataset().map(int)
            >>> list(dataset.options(on_error="skip"))
            [1, 3]
        """
        return made(WithOptions(steps_of([self]), DatasetOptions(**options)), self)

    def apply(self, transformations: Any) -> "IterDataset[Any]":
        """Returns the elements after one operation, or after several in a list.

        Args:
            transformations: instances of `Map`, `RandomMap`, `Filter`, `FlatMap`, `Batch`, `FirstFitPack` and all the
                other operations of a `DataLoader`; a function is a `Map`.

        Raises:
            TypeError: one is neither an operation nor a function.

        Examples:
            >>> dataset = millstream.MapDataset.range(4).to_iter_dataset()
            >>> list(dataset.apply([lambda number: number * 10, millstream.Batch(2)]))
            [array([ 0, 10]), array([20, 30])]
        """
        dataset: IterDataset[Any] = self
        for operation in transformations if isinstance(transformations, Sequence) else [transformations]:
            dataset = _operated(dataset, as_transformation(operation))
        return dataset

    @overload
    def map(self, transform: "Map[T_co, Out] | Callable[[T_co], Out]") -> "IterDataset[Out]": ...
    @overload
    def map(
        self, transform: "Callable[[list[T_co]], Sequence[Out]]", *, batched: Literal[True]
    ) -> "IterDataset[Out]": ...
    def map(self, transform: Any, *, batched: bool = False) -> "IterDataset[Any]":
        """Returns the results of a function of each element, as `MapDataset.map` does. None is an element, too.

        Args:
            transform: the function of an element, or an instance of `Map`.
            batched: True if the function gets a list of elements, and returns as many results; see `Map`.

        Raises:
            TypeError: it is neither a function nor a `Map`.

        Examples:
            >>> list(millstream.MapDataset.range(3).to_iter_dataset().map(lambda number: number * 10))
            [0, 10, 20]
        """
        return _operated(self, as_operation(transform, Map, batched=batched))

    def map_with_index(self, transform: "MapWithIndex[T_co, Out] | Callable[[int, T_co], Out]") -> "IterDataset[Out]":
        """Returns the results of a function of each element's index and the element.

        The index is the position in the `MapDataset`, or the number in a stream, that the element comes from. The index
        of a batch is that of its first element.

        Args:
            transform: the function of an index and an element, or an instance of `MapWithIndex`.

        Raises:
            TypeError: it is neither a function nor a `MapWithIndex`.

        Examples:
            >>> dataset = millstream.MapDataset.source(["a", "b", "c"]).to_iter_dataset()
            >>> list(dataset.filter(lambda letter: letter != "b").map_with_index(lambda index, letter: (index, letter)))
            [(0, 'a'), (2, 'c')]
        """
        return _operated(self, as_operation(transform, MapWithIndex))

    def random_map(
        self,
        transform: "RandomMap[T_co, Out] | Callable[[T_co, np.random.Generator], Out]",
        *,
        seed: SupportsIndex | None = None,
    ) -> "IterDataset[Out]":
        """Returns the results of a function of each element and a `numpy.random.Generator`.

        The random numbers depend on the seed, on the element's index, and on the number of random operations before it
        with the same seed; not on threads, workers and resumes.

        Args:
            transform: the function of an element and a generator, or an instance of `RandomMap`.
            seed: 0 … 2**64 - 1; None for that of the nearest `seed` before.

        Raises:
            ValueError: there is no seed.

        Examples:
            >>> dataset = millstream.MapDataset.range(3).to_iter_dataset()
            >>> [int(number) for number in dataset.random_map(lambda number, rng: number + rng.integers(100), seed=0)]
            [3, 98, 64]
        """
        return _operated(self, as_operation(transform, RandomMap), seed)

    def filter(self, transform: "Filter[T_co] | Callable[[T_co], object]") -> "IterDataset[T_co]":
        """Keeps the elements for which a function returns true.

        Args:
            transform: the function of an element, or an instance of `Filter`.

        Raises:
            TypeError: it is neither a function nor a `Filter`.

        Examples:
            >>> list(millstream.MapDataset.range(6).to_iter_dataset().filter(lambda number: number % 2 == 0))
            [0, 2, 4]
        """
        return _operated(self, as_operation(transform, Filter))

    def flat_map(
        self,
        transform: "FlatMap[T_co, Out] | Callable[[T_co], Iterable[Out]]",
        max_fan_out: SupportsIndex | None = None,
    ) -> "IterDataset[Out]":
        """Returns the children that a function splits each element into, without the empty positions of a MapDataset.

        Args:
            transform: the function of an element, or an instance of `FlatMap`.
            max_fan_out: the maximum number of children per element, at least 1; None for a `FlatMap`, which has its
                own.

        Raises:
            TypeError: it is neither a function with max_fan_out nor a `FlatMap` without.
            ValueError: max_fan_out is below 1.

        Examples:
            >>> texts = millstream.MapDataset.source(["a b", "c"]).to_iter_dataset()
            >>> list(texts.flat_map(str.split, max_fan_out=2))
            ['a', 'b', 'c']
        """
        return _operated(self, as_operation(transform, FlatMap, max_fan_out=max_fan_out))

    @overload
    def batch(
        self, batch_size: SupportsIndex, *, drop_remainder: bool = ..., batch_fn: None = ..., pad_remainder: bool = ...
    ) -> "IterDataset[Any]": ...
    @overload
    def batch(
        self, batch_size: SupportsIndex, *, drop_remainder: bool = ..., batch_fn: "Callable[[list[T_co]], Out]"
    ) -> "IterDataset[Out]": ...
    @named_arguments()
    def batch(
        self,
        batch_size: SupportsIndex,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[list[Any]], Any] | None = None,
        pad_remainder: bool = False,
    ) -> "IterDataset[Any]":
        """Returns batches of consecutive elements.

        Args:
            batch_size: the number of elements per batch, at least 1.
            drop_remainder: True to drop a last, incomplete batch. Its records are not errors, see `Batch`.
            batch_fn: the function that builds a batch from the list of its elements; None stacks them leaf by leaf.
            pad_remainder: True to fill a last, short batch: batches are `PaddedBatch`es, see `Batch`.

        Examples:
            >>> dataset = millstream.MapDataset.range(5).to_iter_dataset()
            >>> list(dataset.batch(2)), list(dataset.batch(2, drop_remainder=True, batch_fn=sum))
            ([array([0, 1]), array([2, 3]), array([4])], [1, 5])
        """
        operation = Batch(batch_size, drop_remainder, batch_fn, pad_remainder)  # type: ignore[arg-type]  # as an index
        return _operated(self, operation)

    def seed(self, seed: SupportsIndex) -> "IterDataset[T_co]":
        """Returns the same elements, with a seed for the random operations after it.

        Args:
            seed: 0 … 2**64 - 1.

        Examples:
            >>> dataset = millstream.MapDataset.range(3).to_iter_dataset().seed(0)
            >>> [int(number) for number in dataset.random_map(lambda number, rng: number + rng.integers(100))]
            [3, 98, 64]
        """
        return made(Seeded(steps_of([self]), as_seed(seed)), self)

    def mp_prefetch(
        self,
        options: MultiprocessingOptions | SupportsIndex | Literal["auto"] | None = None,
        worker_init_fn: Callable[[int, int], object] | None = None,
        sequential_slice: bool = False,
    ) -> "IterDataset[T_co]":
        """Returns the same elements, prefetched by worker processes, which run all operations before this one.

        Operations after it run in the consumer's thread, or in threads of a `prefetch` that follows them. Elements and
        states do not depend on the process that computes them: a state of a chain fits the same operations with
        `mp_prefetch` at any other position, with any number of workers.

        Args:
            options: the number of workers and of elements that each keeps ready, or only the number of workers; None
                for one per core, 0 for none; "auto" to begin in this process, and to start, add and end workers while
                you train, as `docs/tuning.md` explains.
            worker_init_fn: called once in each worker process, replacements of dead ones included, before it computes
                anything: `worker_init_fn(index, count)` with the worker's index, 0 … count - 1. It must be picklable.
                No element may depend on the index.
            sequential_slice: accepted for compatibility with Grain, without effect, because there is only one order.

        Raises:
            TypeError, ValueError: options have the wrong type or are out of range.

        Examples:
            >>> dataset = millstream.MapDataset.range(4).to_iter_dataset().map(lambda number: number * 10)
            >>> list(dataset.mp_prefetch(1))
            [0, 10, 20, 30]
        """
        del sequential_slice
        workers = as_workers(options)
        if worker_init_fn is not None:
            workers = dataclasses.replace(workers, worker_init_fn=worker_init_fn)
        return made(Ahead(steps_of([self]), workers, is_boundary=True), self)

    def prefetch(self, options: MultiprocessingOptions | ReadOptions | None = None) -> "IterDataset[T_co]":
        """Returns the same elements, prefetched by threads for `ReadOptions`, or by processes like `mp_prefetch`.

        Args:
            options: `ReadOptions`, the threads of this process, or `MultiprocessingOptions`, as for `mp_prefetch`; None
                for one worker process per core.

        Raises:
            TypeError: it is a number: write `mp_prefetch(n)` for n processes.
            ValueError: options are out of range.

        Examples:
            >>> dataset = millstream.MapDataset.range(4).to_iter_dataset().map(lambda number: number * 10)
            >>> list(dataset.prefetch(millstream.ReadOptions(num_threads=2, prefetch_buffer_size=8)))
            [0, 10, 20, 30]
        """
        if has_fields(options, ReadOptions):
            return made(Ahead(steps_of([self]), reading=as_options(options, "options", ReadOptions)), self)
        if isinstance(options, SupportsIndex):
            raise TypeError(
                f"prefetch must be given ReadOptions for threads, got {options}. Write .mp_prefetch({options}) for "
                "worker processes, or .prefetch(ReadOptions(prefetch_buffer_size=...)) for elements in advance."
            )
        return self.mp_prefetch(options)  # type: ignore[arg-type]  # not ReadOptions

    @property
    def iterates_itself(self) -> bool:
        """True if its class, a user's, has its own `__iter__`."""
        return self._step is None or type(self).__iter__ is not IterDataset.__iter__

    def _begun_by(self, caller: FrameType, begin: Callable[[], DatasetIterator[Any]]) -> DatasetIterator[T_co]:
        """Returns a new iterator, which code in another frame asks for, and shows a diagram if it is set."""
        text, html = (functools.partial(self._rendered, one, first_element_of) for one in (text_of, html_of))
        return visualized(caller, begin, text, html)

    def _rendered(self, render: Callable[[str, Any], str], first: Callable[[Any], Any] | None = None) -> str:
        return render("IterDataset", sketch_of(step_of(self), first))

    def __repr__(self) -> str:
        return self._rendered(text_of)

    def _repr_html_(self) -> str:
        return self._rendered(html_of)

    def _made_as(self, stream: "IterDataset[Any]") -> None:
        """Constructs a dataset of a subclass that is the result of a method under another name."""
        vars(self).update(vars(stream))


def made(step: StreamStep, *parents: Any) -> IterDataset[Any]:
    dataset: IterDataset[Any] = IterDataset(parents)
    dataset._step = step  # noqa: SLF001
    return dataset


def _always_dataset_iterators(own: Callable[[Any], Any]) -> Callable[[Any], DatasetIterator[Any]]:
    """Returns an `__iter__` that returns the iterator of `own`, wrapped if it has no states."""

    def begun(dataset: Any) -> DatasetIterator[Any]:
        iterator = own(dataset)
        if isinstance(iterator, DatasetIterator):
            return iterator
        return counted(dataset, lambda: own(dataset), iter(iterator))

    @functools.wraps(own)
    def begin(self: Any) -> DatasetIterator[Any]:
        found: DatasetIterator[Any] = self._begun_by(sys._getframe(1), lambda: begun(self))  # noqa: SLF001  (as above)
        return found

    return begin


def _operated(
    parent: IterDataset[Any], operation: Transformation, seed: SupportsIndex | None = None
) -> IterDataset[Any]:
    return made(Operate.after(step_of(parent), operation, seed), parent)
