"""A dataset with random access, and the methods that extend it to longer chains."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, SupportsIndex, TypeAlias, TypeVar, overload

from millstream import grain_kinds
from millstream.core.checks import as_flag, as_integer, as_integer_or_none, named_arguments
from millstream.core.randomness import Purpose, as_seed, derive_seed
from millstream.dataset.arguments import (
    OF_MAP_DATASETS,
    as_map_dataset,
    as_operation,
    count_random_maps,
    depth_above,
    longest_count,
    nearest_seed,
    nodes_of,
    only_parent,
    raise_missing,
    rows_of,
    seed_for,
    warn_of_replacement,
    warn_of_uneven_shards,
)
from millstream.dataset.chain import is_unchanged
from millstream.dataset.chain_rendering import extent_of, html_of, sketch_of, text_of
from millstream.dataset.iter_dataset import IterDataset, made
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.node_source import NodeSource, node_of, positions_within
from millstream.dataset.nodes.element_nodes import (
    Batched,
    Filtered,
    Mapped,
    MappedAtRandom,
    MappedWithIndex,
    Split,
)
from millstream.dataset.nodes.index_nodes import Repeat, Seed, Shard, Shuffle, Slice, Taken, WindowShuffle
from millstream.dataset.nodes.joining_nodes import Concatenated, Mixed, Selected, Zipped
from millstream.dataset.nodes.node import ENDLESS, Node
from millstream.dataset.nodes.source_node import HANDED, Source, copied_with
from millstream.dataset.stream_steps import Read, step_of
from millstream.loader.threads.options import ReadOptions
from millstream.samplers.mixtures.components import named_components
from millstream.samplers.mixtures.mixing import FIRST_EXHAUSTED, Mixing
from millstream.sources import DataSource
from millstream.sources.source_checks import check_range, check_readable
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, RandomMap, Transformation
from millstream.transforms.base import METHODS
from millstream.transforms.given import as_transformation

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
Out = TypeVar("Out")
Operation = TypeVar("Operation", bound=Transformation)
Rows: TypeAlias = slice
"""The class of slices, under a name that no method has."""


class MapDataset(NodeSource, grain_kinds.MapDataset, Generic[T]):
    """A lazy, immutable dataset with random access: `len(dataset)` and `dataset[position]`.

    Each method returns a new dataset and reads nothing. `len(dataset)` is the length of one epoch, and positions
    continue across epochs: `epoch, offset = divmod(position, len(dataset))`. Every position from 0 therefore has an
    element, in a different order in each epoch if the dataset is shuffled. An element that is None is missing: a filter
    has dropped it, or a map has returned None.

    A MapDataset is a source: a `DataLoader` accepts it as its `data_source`, and reads a block of it in one call. In
    epoch e, the record key k is that of `dataset[e * len(dataset) + k]`. No element may be missing then.

    Subclass it to define your own elements: call `super().__init__(parents)`, read `self._parent[position]`, and
    override `__len__` and `__getitem__`, for any position from 0. Everything else is inherited, and such a dataset may
    appear anywhere in a chain. It is read one element at a time, in several threads concurrently, and sent to worker
    processes by pickle.

    Args:
        parents: the datasets that it takes its elements from: one, several in a sequence, or none.

    Examples:
        >>> dataset = millstream.MapDataset.source(["a", "b", "c", "d"]).shuffle(seed=0).map(str.upper)
        >>> len(dataset), dataset[0], list(dataset)
        (4, 'D', ['D', 'B', 'A', 'C'])
        >>> list(dataset.repeat(2).batch(4))
        [array(['D', 'B', 'A', 'C'], dtype='<U1'), array(['B', 'A', 'D', 'C'], dtype='<U1')]
    """

    _parents: "tuple[MapDataset[Any], ...]" = ()

    def __init__(self, parents: "MapDataset[Any] | Sequence[MapDataset[Any]]" = ()) -> None:
        # A tuple is recognised without a call of Python, as below: an interleave makes thousands of datasets.
        if isinstance(parents, MapDataset) or not isinstance(parents, tuple | Sequence):
            parents = (parents,)
        for parent in parents:
            as_map_dataset(parent, "A parent")
        self._parents = tuple(parents)
        self._depth = depth_above(parents)

    if not TYPE_CHECKING:
        # Type checkers would take any attribute for an existing one.
        def __getattr__(self, name: str) -> Any:
            if name in ("classes", "locate") and (own := self._of_source(name)) is not None:
                return own
            return raise_missing(self, name, OF_MAP_DATASETS)

    @property
    def parents(self) -> "tuple[MapDataset[Any], ...]":
        """The datasets that this one takes its elements from."""
        return self._parents

    @property
    def _parent(self) -> "MapDataset[Any]":
        """The single parent; AttributeError if there are none, or several."""
        parent: MapDataset[Any] = only_parent(self)
        return parent

    @staticmethod
    def source(source: DataSource[Out]) -> "MapDataset[Out]":
        """Returns the records of a source, in order.

        Args:
            source: any source that a `DataLoader` accepts: a list, a file format's data source, a Hugging Face dataset,
                or an object with `len(source)` and `source[key]`. Its `__getitems__` is used if it exists. Another
                MapDataset is a source too: its first epoch. It may be empty.

        Raises:
            TypeError: it is not a source; the error names an alternative.

        Examples:
            >>> list(millstream.MapDataset.source(["a", "b", "c"]))
            ['a', 'b', 'c']
        """
        check_readable(source, "source")
        return dataset_of(Source(source))

    @staticmethod
    def range(start: SupportsIndex, stop: SupportsIndex | None = None, step: SupportsIndex = 1) -> "MapDataset[int]":
        """Returns the integers of `range(start, stop, step)`, as Python ints; `range(stop)` begins at 0.

        Args:
            start: the first integer. Without a stop, it is the end, and the first integer is 0.
            stop: the end, exclusive; None if start is the end.
            step: the difference of neighbours; negative to count down.

        Raises:
            ValueError: the step is 0, or the range has 2**63 integers or more.

        Examples:
            >>> list(millstream.MapDataset.range(3)), list(millstream.MapDataset.range(4, 10, 2))
            ([0, 1, 2], [4, 6, 8])
        """
        numbers = range(0, start, 1) if stop is None else range(start, stop, step)
        check_range(numbers)
        return dataset_of(Source(numbers))

    @staticmethod
    def concatenate(datasets: "Sequence[MapDataset[Out]]") -> "MapDataset[Out]":
        """Returns the concatenation of datasets. Each epoch consists of that epoch of each dataset.

        Args:
            datasets: the datasets in order: at least one, none of them endless.

        Raises:
            ValueError: there are none, or one is endless.

        Examples:
            >>> first, second = millstream.MapDataset.range(3), millstream.MapDataset.range(10, 12)
            >>> list(millstream.MapDataset.concatenate([first, second]))
            [0, 1, 2, 10, 11]
        """
        nodes = nodes_of(datasets)
        for number, node in enumerate(nodes):
            if node.length == ENDLESS:
                raise ValueError(f"datasets[{number}] has no end, so nothing can come after it: .repeat() the result.")
        if sum(node.length for node in nodes) > ENDLESS:
            raise ValueError("The datasets have 2**63 elements or more together.")
        return dataset_of(Concatenated(nodes), *datasets)

    @staticmethod
    def mix(
        datasets: "Sequence[MapDataset[Out]] | Mapping[str, MapDataset[Out]]",
        weights: Sequence[float] | Mapping[str, float] | None = None,
        *,
        stop: str = FIRST_EXHAUSTED,
    ) -> "MapDataset[Out]":
        """Returns the interleaved elements of datasets, in the proportions of weights.

        The order is not random: among any number of first elements, each dataset has its share, with an error below one
        or two elements. It is the order of `MixtureSampler`. Beyond the end, as in `mix(...).repeat(2)`, each dataset
        continues in its own next epoch.

        Args:
            datasets: a list, or a mapping by name; at least one.
            weights: numbers, one per dataset, or a mapping by the same names; equal weights if None. Decimals are used
                exactly as written.
            stop: the end of the mixture. "first_exhausted": when a dataset whose turn it is has no more elements.
                "all_exhausted": when each dataset has ended; one that ends earlier continues in its next epoch.
                "drop_exhausted": when each dataset has ended; one that ends earlier is skipped from then on.

        Raises:
            TypeError, ValueError: there are no datasets, one is empty, or the weights do not match them.

        Examples:
            >>> numbers, letters = millstream.MapDataset.range(6), millstream.MapDataset.source(["a", "b"])
            >>> datasets = {"numbers": numbers, "letters": letters}
            >>> list(millstream.MapDataset.mix(datasets, {"numbers": 0.75, "letters": 0.25}))
            [0, 1, 2, 'a', 3, 4, 5, 'b']
        """
        names, components = named_components(datasets, "datasets")
        nodes = nodes_of(components)
        for name, node in zip(names, nodes, strict=True):
            if not node.length:
                raise ValueError(f"Dataset {name!r} is empty: leave it out of the mixture.")
        return dataset_of(Mixed(nodes, Mixing.of(names, weights, stop)), *components)

    def reweighted(self, position: SupportsIndex, weights: Sequence[float] | Mapping[str, float]) -> "MapDataset[T]":
        """Returns a mixture that has other weights from a position on, and is the same before.

        Each dataset continues with the element after its last one. Weights that an earlier call set for this position
        or for later ones are replaced.

        Args:
            position: the first position with these weights, from 0 on.
            weights: as for `mix`.

        Raises:
            TypeError: this dataset is not a mixture: call it directly after `mix`.
            ValueError: the weights are not valid, or the mixture ends before the position.

        Examples:
            >>> parts = [millstream.MapDataset.source(list(one)) for one in ("abc", "xyz")]
            >>> mixture = millstream.MapDataset.mix(parts)
            >>> list(mixture.reweighted(4, [1, 0]))
            ['a', 'x', 'b', 'y', 'c']
        """
        node = node_of(self)
        if not isinstance(node, Mixed):
            raise TypeError(f"reweighted needs a mixture, got {node.text}: call it directly after mix(...).")
        mixed = dataclasses.replace(node, mixing=node.mixing.reweighted(position, weights))  # type: ignore[arg-type]
        # Of which the length is known only if no change is beyond the end.
        _ = mixed.length
        return dataset_of(mixed, *self._parents)

    @staticmethod
    def select_from_datasets(datasets: "Sequence[MapDataset[Out]]", selection_map: Any) -> "MapDataset[Out]":
        """Returns the elements of datasets that a selection map picks.

        Args:
            datasets: the datasets to pick from, at least one.
            selection_map: `selection_map[position]` is a pair: the number of a dataset and a position in it;
                `len(selection_map)` is the length. A list, a tuple or an array of shape (n, 2) contains the pairs of
                every epoch. Other maps are also called with positions beyond their length.

        Raises:
            TypeError, ValueError: there are no datasets, or the map has no length or no pairs of integers.
            IndexError: a pair in a list is not a dataset and a position in it.

        Examples:
            >>> numbers, letters = millstream.MapDataset.range(6), millstream.MapDataset.source(["a", "b"])
            >>> list(millstream.MapDataset.select_from_datasets([numbers, letters], [(0, 5), (1, 0), (0, 2)]))
            [5, 'a', 2]
        """
        nodes = nodes_of(datasets)
        if not hasattr(selection_map, "__len__") or not hasattr(selection_map, "__getitem__"):
            raise TypeError(
                "selection_map must have len(selection_map) and selection_map[position] -> (number of a dataset, "
                f"position in it), got {selection_map!r}."
            )
        return dataset_of(Selected(nodes, selection_map), *datasets)

    @overload
    def map(self, transform: "Map[T, Out] | Callable[[T], Out]") -> "MapDataset[Out]": ...
    @overload
    def map(self, transform: "Callable[[list[T]], Sequence[Out]]", *, batched: Literal[True]) -> "MapDataset[Out]": ...
    def map(self, transform: Any, *, batched: bool = False) -> "MapDataset[Any]":
        """Returns the results of a function of each element. If it returns None, the element is missing.

        Args:
            transform: a function of an element, or a `Map`.
            batched: True if the function gets a list of elements, and returns as many results; see `Map`.

        Raises:
            TypeError: it is neither a function nor a `Map`.

        Examples:
            >>> list(millstream.MapDataset.range(3).map(lambda number: number * 10))
            [0, 10, 20]
        """
        return self._with(Mapped(node_of(self), as_operation(transform, Map, batched=batched)))

    def map_with_index(self, transform: "MapWithIndex[T, Out] | Callable[[int, T], Out]") -> "MapDataset[Out]":
        """Returns the results of `transform(position, element)` for each element.

        The position is that in this dataset, continued across epochs.

        Args:
            transform: a function of a position and an element, or a `MapWithIndex`.

        Raises:
            TypeError: it is neither a function nor a `MapWithIndex`.

        Examples:
            >>> letters = millstream.MapDataset.source(["a", "b"])
            >>> list(letters.map_with_index(lambda position, letter: (position, letter)))
            [(0, 'a'), (1, 'b')]
        """
        return self._with(MappedWithIndex(node_of(self), as_operation(transform, MapWithIndex)))

    def random_map(
        self,
        transform: "RandomMap[T, Out] | Callable[[T, np.random.Generator], Out]",
        *,
        seed: SupportsIndex | None = None,
    ) -> "MapDataset[Out]":
        """Returns the results of `transform(element, rng)` for each element.

        The random numbers depend on the seed, the epoch, the position and the number of random maps before it that draw
        from the same seed. A `RandomMap` of a `DataLoader` with this seed draws the same at the same position.

        Args:
            transform: a function of an element and a generator, or a `RandomMap`. It draws only from the given
                generator, and does not keep it.
            seed: 0 … 2**64 - 1; None for that of the nearest `.seed(...)` before it.

        Raises:
            ValueError: there is no seed, or it is out of range.

        Examples:
            >>> dataset = millstream.MapDataset.range(3).seed(0)
            >>> drawn = dataset.random_map(lambda number, rng: number + rng.integers(100))
            >>> [int(number) for number in drawn.repeat(2)]  # each epoch draws different numbers
            [3, 98, 64, 19, 19, 51]
        """
        node, operation = node_of(self), as_operation(transform, RandomMap)
        chosen = seed_for("random_map", node, seed)
        return self._with(MappedAtRandom(node, operation, chosen, count_random_maps(node, chosen)))

    def filter(self, transform: "Filter[T] | Callable[[T], object]") -> "MapDataset[T]":
        """Returns the dataset without the elements for which `transform` is false: their positions contain None.

        The length does not change, because elements are filtered when they are read.

        Args:
            transform: a function of an element, or a `Filter`.

        Raises:
            TypeError: it is neither a function nor a `Filter`.

        Examples:
            >>> dataset = millstream.MapDataset.range(6).filter(lambda number: number % 2 == 0)
            >>> len(dataset), dataset[1], list(dataset)
            (6, None, [0, 2, 4])
        """
        return self._with(Filtered(node_of(self), as_operation(transform, Filter)))

    def flat_map(
        self, transform: "FlatMap[T, Out] | Callable[[T], Iterable[Out]]", max_fan_out: SupportsIndex | None = None
    ) -> "MapDataset[Out]":
        """Returns the children that `transform` splits elements into.

        Element i has the positions from `i * max_fan_out`; positions without a child contain None.

        Args:
            transform: a `FlatMap`, or a function of an element.
            max_fan_out: the maximum number of children per element, at least 1; None for a `FlatMap`, which has its
                own.

        Raises:
            TypeError: it is neither a function with max_fan_out nor a `FlatMap` without.
            ValueError: max_fan_out is below 1.

        Examples:
            >>> words = millstream.MapDataset.source(["a b", "c"]).flat_map(str.split, max_fan_out=2)
            >>> len(words), words[3], list(words)
            (4, None, ['a', 'b', 'c'])
        """
        return self._with(Split(node_of(self), as_operation(transform, FlatMap, max_fan_out=max_fan_out)))

    @overload
    def batch(
        self, batch_size: SupportsIndex, *, drop_remainder: bool = ..., batch_fn: None = ..., pad_remainder: bool = ...
    ) -> "MapDataset[Any]": ...
    @overload
    def batch(
        self, batch_size: SupportsIndex, *, drop_remainder: bool = ..., batch_fn: "Callable[[list[T]], Out]"
    ) -> "MapDataset[Out]": ...
    @named_arguments()
    def batch(
        self,
        batch_size: SupportsIndex,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[list[Any]], Any] | None = None,
        pad_remainder: bool = False,
    ) -> "MapDataset[Any]":
        """Returns batches of `batch_size` consecutive elements.

        No batch spans two epochs; the last one of each may be shorter. `.repeat(n)` joins epochs into one.

        Args:
            batch_size: the number of elements per batch, at least 1.
            drop_remainder: True to drop a short batch.
            batch_fn: the function that builds the batch from the list of its elements. None stacks them: each leaf of
                the structure becomes one array with a new first axis.
            pad_remainder: True to fill a short batch: batches are `PaddedBatch`es, see `Batch`.

        Raises:
            ValueError: elements may be missing, after a filter or flat_map.

        Examples:
            >>> dataset = millstream.MapDataset.range(5)
            >>> list(dataset.batch(2)), list(dataset.batch(2, drop_remainder=True, batch_fn=sum))
            ([array([0, 1]), array([2, 3]), array([4])], [1, 5])
        """
        return self._batched(Batch(batch_size, drop_remainder, batch_fn, pad_remainder))  # type: ignore[arg-type]

    def _batched(self, operation: Batch) -> "MapDataset[Any]":
        node = node_of(self)
        if node.is_sparse:
            raise ValueError(
                "Elements of this dataset may be absent, after a filter or flat_map, and batches by position would "
                "have holes: write .to_iter_dataset().batch(...), which batches those that are there."
            )
        return self._with(Batched(node, operation))

    def shuffle(self, seed: SupportsIndex | None = None) -> "MapDataset[T]":
        """Returns the elements in a globally shuffled order, a different one in each epoch.

        It is the order of `IndexSampler(len(dataset), shuffle=True, seed=seed)`. Shuffle before `repeat()`: after it,
        elements are drawn with replacement, which is logged.

        Args:
            seed: 0 … 2**64 - 1; None for that of the nearest `.seed(...)` before it.

        Raises:
            ValueError: there is no seed, or it is out of range; or it follows an endless repeat of batches.

        Examples:
            >>> list(millstream.MapDataset.range(5).shuffle(seed=0).repeat(2))  # each epoch has its own order
            [2, 4, 1, 3, 0, 0, 4, 2, 3, 1]
        """
        node = node_of(self)
        warn_of_replacement(node)
        if seed is not None:
            return self._with(Shuffle(node, as_seed(seed)))
        inherited = seed_for("shuffle", node, None)
        number = longest_count(node, lambda one: isinstance(one, Shuffle) and one.inherited == inherited)
        own = derive_seed(inherited, Purpose.SHUFFLE, number) if number else inherited
        return self._with(Shuffle(node, own, inherited))

    @named_arguments({"wrap_around": "write .repeat() after the slice for further epochs of it."})
    def slice(self, rows: "Rows | Iterable[SupportsIndex]") -> "MapDataset[T]":
        """Returns the elements of each epoch that a slice selects; `dataset[a:b:c]` is the same.

        Its epoch e comes from epoch e of this dataset. `dataset.shuffle(seed=0)[:n].repeat()` therefore has different
        records in each epoch. For a fixed subset, slice before the shuffle, or use `.repeat(reseed_each_epoch=False)`.

        Args:
            rows: `slice(start, stop, step)`, as for a list of the elements of an epoch; or positions within an epoch,
                of shape (n,), integers in any order: a list, an array, a dataset.

        Raises:
            TypeError: it is neither a slice nor positions.
            ValueError: its step is 0, or a number in it is negative if the dataset is endless; or a position does not
                exist.

        Examples:
            >>> dataset = millstream.MapDataset.range(10)
            >>> list(dataset.slice(slice(2, 8, 3))), list(dataset[-2:]), list(dataset.slice([5, 0, 5]))
            ([2, 5], [8, 9], [5, 0, 5])
        """
        node = node_of(self)
        if isinstance(rows, slice):
            return self._with(Slice(node, rows_of(node, rows)))
        if not isinstance(rows, Iterable):
            raise TypeError(f"slice takes a slice, such as slice(0, 10), or a list of positions, got {rows!r}.")
        return self._with(Taken(node, positions_within(node.length, rows)))

    def repeat(self, num_epochs: SupportsIndex | None = None, *, reseed_each_epoch: bool = True) -> "MapDataset[T]":
        """Returns several epochs as one.

        Args:
            num_epochs: the number of epochs, at least 1; None for an endless dataset, whose `len` is `sys.maxsize`.
            reseed_each_epoch: True to shuffle and draw differently in each epoch, False to repeat the first one
                exactly.

        Raises:
            ValueError: it is already endless.

        Examples:
            >>> dataset = millstream.MapDataset.range(4).shuffle(seed=0)
            >>> list(dataset.repeat(2)), list(dataset.repeat(2, reseed_each_epoch=False))
            ([3, 1, 0, 2, 1, 0, 3, 2], [3, 1, 0, 2, 3, 1, 0, 2])
        """
        node = node_of(self)
        number = as_integer_or_none(num_epochs, "num_epochs")
        if node.length == ENDLESS:
            raise ValueError("This dataset is endless already: repeat it only once.")
        return self._with(Repeat(node, number, as_flag(reseed_each_epoch, "reseed_each_epoch")))

    def window_shuffle(self, window_size: SupportsIndex, seed: SupportsIndex | None = None) -> "MapDataset[T]":
        """Returns the elements shuffled within windows of `window_size` in a row, for sources read in larger units.

        Each window and epoch has its own order. The last window of an epoch may be shorter.

        Args:
            window_size: the number of elements per window, at least 1.
            seed: 0 … 2**64 - 1; None for that of the nearest `.seed(...)` before it.

        Raises:
            ValueError: there is no seed, or an argument is out of range.

        Examples:
            >>> list(millstream.MapDataset.range(8).window_shuffle(4, seed=0))
            [0, 2, 3, 1, 6, 5, 4, 7]
        """
        node = node_of(self)
        size = as_integer(window_size, "window_size", minimum=1, maximum=sys.maxsize)
        chosen = seed_for("window_shuffle", node, seed)
        number = 0 if seed is not None else longest_count(node, lambda one: isinstance(one, WindowShuffle))
        own = derive_seed(chosen, Purpose.WINDOW_SHUFFLE, number) if number else chosen
        return self._with(WindowShuffle(node, size, own))

    def shard(self, index: SupportsIndex, count: SupportsIndex) -> "MapDataset[T]":
        """Returns the share of one host: of each `count` neighbours one, which differs from group to group.

        All shards together are each epoch of this dataset. Whatever its order is, and also after a mixture, each shard
        has its share of each part, so batch i of all hosts is a part of the dataset that has its proportions. The
        choice depends on the nearest `.seed(...)` before it, if there is one.

        Args:
            index: the number of this host, 0 … count - 1.
            count: the number of hosts, at least 1.

        Raises:
            TypeError, ValueError: an argument is of the wrong kind or out of range.

        Examples:
            >>> dataset = millstream.MapDataset.range(8)
            >>> list(dataset.shard(0, 2)), list(dataset.shard(1, 2))
            ([0, 3, 4, 7], [1, 2, 5, 6])
        """
        num_shards = as_integer(count, "count", minimum=1)
        number = as_integer(index, "index", minimum=0, maximum=num_shards - 1)
        node = node_of(self)
        warn_of_uneven_shards(node.length, num_shards)
        num = longest_count(node, lambda one: isinstance(one, Shard))
        return self._with(Shard(node, number, num_shards, derive_seed(nearest_seed(node) or 0, Purpose.SHARD, num)))

    def zip(self, *datasets: "MapDataset[Any]") -> "MapDataset[tuple[Any, ...]]":
        """Returns tuples of the elements of this dataset and others at the same position, None for missing ones.

        Args:
            datasets: the other datasets, of the same length.

        Raises:
            TypeError, ValueError: one is not a MapDataset, or their lengths differ.

        Examples:
            >>> letters = millstream.MapDataset.source(["a", "b"])
            >>> list(millstream.MapDataset.range(2).zip(letters))
            [(0, 'a'), (1, 'b')]
        """
        nodes = nodes_of([self, *datasets])
        if len({node.length for node in nodes}) != 1:
            lengths = [node.length for node in nodes]
            raise ValueError(
                f"Datasets that are zipped must have equal lengths, got {lengths}: slice the longer ones, dataset[:n]."
            )
        return dataset_of(Zipped(nodes), self, *datasets)

    def seed(self, seed: SupportsIndex) -> "MapDataset[T]":
        """Returns the same dataset. Random operations after it without their own seed draw from this one.

        Args:
            seed: 0 … 2**64 - 1.

        Raises:
            ValueError: it is out of range.

        Examples:
            >>> list(millstream.MapDataset.range(5).seed(0).shuffle())
            [2, 4, 1, 3, 0]
        """
        return self._with(Seed(node_of(self), as_seed(seed)))

    def apply(
        self, transformations: "Transformation | Callable[[Any], Any] | Sequence[Transformation | Callable[[Any], Any]]"
    ) -> "MapDataset[Any]":
        """Returns the dataset after operations of `millstream.transforms`, one or several; a function is a `Map`.

        Args:
            transformations: an operation or a function, or a list of them, in order.

        Raises:
            TypeError: one is neither an operation nor a function, or groups elements as they arrive: use
                `to_iter_dataset().apply(...)` for those.
            ValueError: a `Batch` if elements may be missing, or a `RandomMap` without a seed before it.

        Examples:
            >>> list(millstream.MapDataset.range(4).apply([lambda number: number * 10, millstream.Batch(2)]))
            [array([ 0, 10]), array([20, 30])]
        """
        given = transformations if isinstance(transformations, Sequence) else [transformations]
        return functools.reduce(MapDataset._applied, map(as_transformation, given), self)

    def _applied(self, operation: Transformation) -> "MapDataset[Any]":
        for kind, method in METHODS.items():
            if isinstance(operation, kind):
                return getattr(self, method)(operation)  # type: ignore[no-any-return]  # of this class
        if isinstance(operation, Batch):
            return self._batched(operation)
        raise TypeError(
            f"{operation!r} groups elements as they come, or belongs to a sampler, and a MapDataset is read by "
            "position: write .to_iter_dataset().apply(...)."
        )

    def to_iter_dataset(self, read_options: ReadOptions | None = None, *, allow_nones: bool = False) -> IterDataset[T]:
        """Returns the stream of an epoch's elements, without missing ones.

        Args:
            read_options: the threads that prefetch; None for `ReadOptions()`.
            allow_nones: True to yield None for missing elements.

        Examples:
            >>> dataset = millstream.MapDataset.range(4).filter(lambda number: number % 2 == 0)
            >>> list(dataset.to_iter_dataset()), list(dataset.to_iter_dataset(allow_nones=True))
            ([0, 2], [0, None, 2, None])
        """
        return made(Read.of(self, read_options, allow_nones=as_flag(allow_nones, "allow_nones")), self)

    def __iter__(self) -> DatasetIterator[T]:
        """Returns an iterator over one epoch, without missing elements."""
        stream = self._stream()
        return stream._begun_by(sys._getframe(1), lambda: iter(stream))  # noqa: SLF001  (as `warnings` does)

    def _stream(self) -> IterDataset[T]:
        """Returns the stream of an epoch: that of the last pass, unless the program may have changed an object."""
        if node_of(self).is_of_user:
            return self.to_iter_dataset()
        known: IterDataset[T] | None = self._read.stream
        if known is not None and is_unchanged(step_of(known)):
            return known
        # It reads a copy, so that nothing refers to itself: a dataset is freed when it is dropped.
        stream: IterDataset[T] = copied_with(self, {"_blocks": None}).to_iter_dataset()
        self._read.stream = stream
        return stream

    @overload
    def __getitem__(self, position: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, position: Rows) -> "MapDataset[T]": ...
    def __getitem__(self, position: SupportsIndex | Rows) -> "T | MapDataset[T]":
        """Returns the element at a position of any epoch, None if it is missing; for a slice, a dataset.

        Raises:
            IndexError: the position is negative, 2**63 or more, or the dataset is empty.
        """
        if isinstance(position, slice):
            return self.slice(position)
        element: T = self._read.at(position)
        return element

    _own_reads = __getitem__
    __getitems__ = NodeSource.__getitems__  # A `__getitem__` alone is taken for the only way to read elements.

    def __repr__(self) -> str:
        return text_of(self._title, sketch_of(node_of(self)))

    def _repr_html_(self) -> str:
        return html_of(self._title, sketch_of(node_of(self)))

    @property
    def _title(self) -> str:
        return f"{type(self).__name__} {extent_of(node_of(self))}"

    def _with(self, node: Node) -> "MapDataset[Any]":
        return dataset_of(node, self)

    def _made_as(self, dataset: "MapDataset[Any]") -> None:
        """Constructs a dataset of a subclass that is the result of a method under another name."""
        vars(self).update(vars(dataset))


def dataset_of(node: Node, *parents: MapDataset[Any]) -> MapDataset[Any]:
    dataset: MapDataset[Any] = MapDataset(parents)
    dataset._node = node  # noqa: SLF001
    if len(parents) == 1 and (handed := vars(parents[0]).get(HANDED)) is not None:
        vars(dataset)[HANDED] = handed
    return dataset
