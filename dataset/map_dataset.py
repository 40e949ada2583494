"""A dataset that is read at random, and the methods that make longer chains of it."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    overload,
)

from millstream import grain_kinds
from millstream.checks import as_flag, as_integer_or_none
from millstream.dataset.chain_picture import content_marks_of, extent_of, fingerprint_of, picture_of, sketch_of, text_of
from millstream.dataset.nodes.arguments import as_map, as_operation, depth_above
from millstream.dataset.nodes.batch_node import Batched
from millstream.dataset.nodes.blocks import Blocks
from millstream.dataset.nodes.element_nodes import Filtered, Mapped, MappedAtRandom, MappedWithIndex, Split
from millstream.dataset.nodes.index_nodes import Repeat, Seed, Shuffle, Slice
from millstream.dataset.nodes.joining_nodes import Concatenated, Mixed, Selected
from millstream.dataset.nodes.node import ENDLESS, Node
from millstream.dataset.nodes.seeds import count_random_maps, count_shuffles, nearest_seed
from millstream.dataset.nodes.source_node import Own, Source
from millstream.randomness import as_seed
from millstream.samplers.mixture_checks import named_parts
from millstream.samplers.weights import checked_weights
from millstream.seed_hashing import derive_seed
from millstream.sources import DataSource
from millstream.sources.base import RecordKeys
from millstream.sources.source_checks import check_range, check_readable
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, RandomMap, Transformation
from millstream.transforms.given import as_transformation

if TYPE_CHECKING:
    import numpy as np

if TYPE_CHECKING:
    from millstream.dataset.dataset_iterator import DatasetIterator
    from millstream.dataset.iter_dataset import IterDataset
    from millstream.loader.threads.options import ReadOptions

T = TypeVar("T")
Out = TypeVar("Out")
Parameters = ParamSpec("Parameters")
Operation = TypeVar("Operation", bound=Transformation)
Rows: TypeAlias = slice
"""The class of slices, under a name that no method has."""


class MapDataset(grain_kinds.MapDataset, Generic[T]):
    """A lazy, immutable dataset that is read at random: `len(dataset)` and `dataset[position]`.

    Each method returns a new dataset and reads nothing. `len(dataset)` is the length of one epoch, and positions run on
    over all epochs: `epoch, offset = divmod(position, len(dataset))`. So there is an element at every position from 0
    on, in another order in each epoch where the dataset is shuffled. An element that is None is absent: a filter has
    dropped it, or a map has returned None.

    A MapDataset is a source: a `DataLoader` takes it as its `data_source`, and reads whole blocks of it at once.

    Subclass it to say how elements are found: call `super().__init__(parents)`, read `self._parent[position]`, and
    override `__len__` and `__getitem__`, for any position from 0 on. Everything else is inherited, and such a dataset
    may stand anywhere in a chain. It is read one element after the other, in several threads at once, and sent to
    worker processes by pickle.

    Args:
        parents: the datasets that it takes its elements from: one, several in a sequence, or none.

    Examples:
        >>> dataset = millstream.MapDataset.source(["a", "b", "c", "d"]).shuffle(seed=0).map(str.upper)
        >>> len(dataset), dataset[0], list(dataset)
        (4, 'D', ['D', 'B', 'A', 'C'])
        >>> list(dataset.repeat(2).batch(4))
        [array(['D', 'B', 'A', 'C'], dtype='<U1'), array(['B', 'A', 'D', 'C'], dtype='<U1')]
    """

    takes_key_arrays = True
    _parents: "tuple[MapDataset[Any], ...]" = ()
    _node: Node | None = None
    _blocks: Blocks | None = None

    def __init__(self, parents: "MapDataset[Any] | Sequence[MapDataset[Any]]" = ()) -> None:
        if isinstance(parents, MapDataset) or not isinstance(parents, Sequence):
            parents = (parents,)
        for parent in parents:
            _check_dataset(parent, "A parent")
        self._parents = tuple(parents)
        self._depth = depth_above(parents)

    @property
    def parents(self) -> "tuple[MapDataset[Any], ...]":
        """The datasets that this one takes its elements from."""
        return self._parents

    @property
    def _parent(self) -> "MapDataset[Any]":
        """The only parent."""
        if len(self._parents) != 1:
            raise AttributeError(f"{type(self).__name__} has {len(self._parents)} parents, not one: see `parents`.")
        return self._parents[0]

    @staticmethod
    def source(source: DataSource[Out]) -> "MapDataset[Out]":
        """Returns the records of a source, in their order.

        Args:
            source: whatever a `DataLoader` takes: a list, a file format's data source, a Hugging Face dataset, anything
                with `len(source)` and `source[key]`. Its `__getitems__` is used if it is there. Another MapDataset is
                one too: its first epoch. It may be empty.

        Raises:
            TypeError: it is not a source; the error says what to write instead.

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
            start: the first integer; with no stop, it is the end, and the first is 0.
            stop: the end, which is left out; None where start is the end.
            step: the difference of neighbours; negative counts down.

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
        """Returns datasets end to end. Epoch e of it is epoch e of each of them.

        Args:
            datasets: the parts in their order: at least one, each with an end.

        Raises:
            ValueError: there are none, or one has no end.

        Examples:
            >>> first, second = millstream.MapDataset.range(3), millstream.MapDataset.range(10, 12)
            >>> list(millstream.MapDataset.concatenate([first, second]))
            [0, 1, 2, 10, 11]
        """
        nodes = _nodes(datasets, "datasets")
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
    ) -> "MapDataset[Out]":
        """Returns the elements of datasets in turn, in the proportions of weights.

        Nothing is drawn: any number of elements from the start is less than one or two away from the proportions. It
        is the order of `MixtureSampler`. It ends where a dataset whose turn it is has no more elements; `.repeat()`
        the parts to avoid that. After the end, as in `mix(...).repeat(2)`, it continues: each part runs on into its
        own next epoch.

        Args:
            datasets: a list, or a mapping by name; at least one.
            weights: numbers, one for each dataset, or a mapping by the same names; equal ones if None. Decimals are
                taken as they are written.

        Raises:
            TypeError, ValueError: there are no datasets, one is empty, or the weights do not match them.

        Examples:
            >>> numbers, letters = millstream.MapDataset.range(6), millstream.MapDataset.source(["a", "b"])
            >>> parts = {"numbers": numbers, "letters": letters}
            >>> list(millstream.MapDataset.mix(parts, {"numbers": 0.75, "letters": 0.25}))
            [0, 1, 2, 'a', 3, 4, 5, 'b']
        """
        names, parts = named_parts(datasets, "datasets")
        nodes = _nodes(parts, "datasets")
        for name, node in zip(names, nodes, strict=True):
            if not node.length:
                raise ValueError(f"Dataset {name!r} is empty: leave it out of the mixture.")
        whole = checked_weights([1] * len(names) if weights is None else weights, names)
        return dataset_of(Mixed(nodes, whole, names), *parts)

    @staticmethod
    def select_from_datasets(datasets: "Sequence[MapDataset[Out]]", selection_map: Any) -> "MapDataset[Out]":
        """Returns the elements that a selection map picks from datasets.

        Args:
            datasets: what is picked from, at least one.
            selection_map: `selection_map[position]` is a pair: the number of a dataset and a position in it;
                `len(selection_map)` is the length. A list, a tuple or an array of shape (n, 2) holds the pairs of each
                epoch. Anything else is asked for positions after its length, too.

        Raises:
            TypeError, ValueError: there are no datasets, or a pair in a list picks what is not there.

        Examples:
            >>> numbers, letters = millstream.MapDataset.range(6), millstream.MapDataset.source(["a", "b"])
            >>> list(millstream.MapDataset.select_from_datasets([numbers, letters], [(0, 5), (1, 0), (0, 2)]))
            [5, 'a', 2]
        """
        nodes = _nodes(datasets, "datasets")
        if not hasattr(selection_map, "__len__") or not hasattr(selection_map, "__getitem__"):
            raise TypeError(
                "selection_map must have len(selection_map) and selection_map[position] -> (number of a dataset, "
                f"position in it), got {selection_map!r}."
            )
        selected = Selected(nodes, selection_map)
        selected.check()
        return dataset_of(selected, *datasets)

    @overload
    def map(self, transform: "Map[T, Out] | Callable[[T], Out]") -> "MapDataset[Out]": ...
    @overload
    def map(self, transform: "Callable[[list[T]], Sequence[Out]]", *, batched: Literal[True]) -> "MapDataset[Out]": ...
    def map(self, transform: Any, *, batched: bool = False) -> "MapDataset[Any]":
        """Returns the dataset with each element as `transform` makes it; where it makes None, there is no element.

        Args:
            transform: a function of an element, or a `Map`.
            batched: True if the function gets a list of elements, and returns as many results, see `Map`.

        Raises:
            TypeError: it is neither a function nor a `Map`.

        Examples:
            >>> list(millstream.MapDataset.range(3).map(lambda number: number * 10))
            [0, 10, 20]
        """
        return self._with(Mapped(node_of(self), as_map(transform, batched=batched)))

    def map_with_index(self, transform: "MapWithIndex[T, Out] | Callable[[int, T], Out]") -> "MapDataset[Out]":
        """Returns the dataset with each element as `transform(position, element)` makes it.

        The position is that in this dataset, counted over all epochs.

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
        """Returns the dataset with each element as `transform(element, rng)` makes it.

        What is drawn depends on the seed, the epoch, the position and on how many random maps above draw from the same
        seed. It is what a `RandomMap` of a `DataLoader` with this seed draws at the same position.

        Args:
            transform: a function of an element and a generator, or a `RandomMap`. It draws from the generator that it
                is given, and does not keep it.
            seed: 0 … 2**64 - 1; None for that of the nearest `.seed(...)` above.

        Raises:
            ValueError: there is no seed, or it is out of range.

        Examples:
            >>> dataset = millstream.MapDataset.range(3).seed(0)
            >>> drawn = dataset.random_map(lambda number, rng: number + rng.integers(100))
            >>> [int(number) for number in drawn.repeat(2)]  # each epoch draws anew
            [3, 98, 64, 19, 19, 51]
        """
        operation = as_operation(transform, RandomMap)
        node = node_of(self)
        chosen = self._inherited_seed("random_map") if seed is None else as_seed(seed)
        return self._with(MappedAtRandom(node, operation, chosen, count_random_maps(node, chosen)))

    def filter(self, transform: "Filter[T] | Callable[[T], object]") -> "MapDataset[T]":
        """Returns the dataset without the elements for which `transform` is false: these positions hold None.

        The length stays: which elements are left is found when they are read.

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

        Element i has the positions from `i * max_fan_out` on; those for which there is no child hold None.

        Args:
            transform: a `FlatMap`, or a function of an element.
            max_fan_out: the most children that one element may have, at least 1; None for a `FlatMap`, which knows it.

        Raises:
            TypeError: it is neither a function nor a `FlatMap`, or a function without max_fan_out.
            ValueError: max_fan_out is below 1.

        Examples:
            >>> words = millstream.MapDataset.source(["a b", "c"]).flat_map(str.split, max_fan_out=2)
            >>> len(words), words[3], list(words)
            (4, None, ['a', 'b', 'c'])
        """
        if not isinstance(transform, (FlatMap, type)):
            transform = FlatMap(transform, max_fan_out)  # type: ignore[arg-type]  # which refuses None
        return self._with(Split(node_of(self), as_operation(transform, FlatMap)))

    @overload
    def batch(self, batch_size: int, *, drop_remainder: bool = ..., batch_fn: None = ...) -> "MapDataset[Any]": ...
    @overload
    def batch(
        self, batch_size: int, *, drop_remainder: bool = ..., batch_fn: "Callable[[list[T]], Out]"
    ) -> "MapDataset[Out]": ...
    def batch(
        self,
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[list[Any]], Any] | None = None,
    ) -> "MapDataset[Any]":
        """Returns batches of `batch_size` elements in a row.

        No batch holds elements of two epochs: the last one of each is short. After `.repeat(n)`, there is one epoch.

        Args:
            batch_size: how many elements make a batch, at least 1.
            drop_remainder: whether a short batch is left out.
            batch_fn: makes the batch from the list of its elements. None stacks them: each leaf of the structure
                becomes one array with a new axis in front.

        Raises:
            ValueError: elements may be absent, after a filter or flat_map.

        Examples:
            >>> list(millstream.MapDataset.range(5).batch(2))
            [array([0, 1]), array([2, 3]), array([4])]
            >>> list(millstream.MapDataset.range(5).batch(2, drop_remainder=True, batch_fn=sum))
            [1, 5]
        """
        return self._batched(Batch(batch_size, drop_remainder, batch_fn))

    def _batched(self, operation: Batch) -> "MapDataset[Any]":
        node = node_of(self)
        if node.is_sparse:
            raise ValueError(
                "Elements of this dataset may be absent, after a filter or flat_map, and batches by position would "
                "have holes: write .to_iter_dataset().batch(...), which batches those that are there."
            )
        return self._with(Batched(node, operation))

    def shuffle(self, seed: SupportsIndex | None = None) -> "MapDataset[T]":
        """Returns the elements in a globally shuffled order, a new one each epoch.

        It is the order of `IndexSampler(len(dataset), shuffle=True, seed=seed)`.

        Args:
            seed: 0 … 2**64 - 1; None for that of the nearest `.seed(...)` above.

        Raises:
            ValueError: there is no seed, or it is out of range.

        Examples:
            >>> list(millstream.MapDataset.range(5).shuffle(seed=0).repeat(2))  # each epoch has its own order
            [2, 4, 1, 3, 0, 0, 4, 2, 3, 1]
        """
        node = node_of(self)
        if seed is not None:
            return self._with(Shuffle(node, as_seed(seed)))
        inherited = self._inherited_seed("shuffle")
        number = count_shuffles(node, inherited)
        return self._with(Shuffle(node, derive_seed(inherited, number) if number else inherited, inherited))

    def slice(self, rows: Rows) -> "MapDataset[T]":
        """Returns the elements of each epoch that a slice picks; `dataset[a:b:c]` is the same.

        Its epoch e comes from epoch e of this dataset. So `dataset.shuffle(seed=0)[:n].repeat()` has other records in
        each epoch. For a fixed subset, slice before the shuffle, or write `.repeat(reseed_each_epoch=False)`.

        Args:
            rows: `slice(start, stop, step)`, as for a list of the elements of an epoch.

        Raises:
            TypeError: it is not a slice.
            ValueError: its step is 0, or negative where the dataset has no end.

        Examples:
            >>> dataset = millstream.MapDataset.range(10)
            >>> list(dataset.slice(slice(2, 8, 3))), list(dataset[-2:])
            ([2, 5], [8, 9])
        """
        if not isinstance(rows, slice):
            raise TypeError(f"slice takes a slice, such as slice(0, 10), got {rows!r}.")
        node = node_of(self)
        picked = range(node.length)[rows]
        if node.length == ENDLESS and picked and picked.step < 0:
            raise ValueError("A dataset without end cannot be read backwards: slice it before .repeat().")
        return self._with(Slice(node, picked))

    def repeat(self, num_epochs: SupportsIndex | None = None, *, reseed_each_epoch: bool = True) -> "MapDataset[T]":
        """Returns several epochs as one.

        Args:
            num_epochs: how many, at least 1; None for no end: its `len` is then `sys.maxsize`.
            reseed_each_epoch: whether each epoch has its own shuffles and draws. False repeats the first one exactly.

        Raises:
            ValueError: it is endless already.

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

    def seed(self, seed: SupportsIndex) -> "MapDataset[T]":
        """Returns the same dataset; random operations after it that have no seed of their own draw from this one.

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
            TypeError: one is neither an operation nor a function, or groups elements as they come: that is for
                `to_iter_dataset().apply(...)`.
            ValueError: a `Batch` where elements may be absent, or a `RandomMap` without a seed before it.

        Examples:
            >>> list(millstream.MapDataset.range(4).apply([lambda number: number * 10, millstream.Batch(2)]))
            [array([ 0, 10]), array([20, 30])]
        """
        given = transformations if isinstance(transformations, Sequence) else [transformations]
        dataset: MapDataset[Any] = self
        for operation in map(as_transformation, given):
            dataset = dataset._applied(operation)
        return dataset

    def _applied(self, operation: Transformation) -> "MapDataset[Any]":
        match operation:
            case Map():
                return self.map(operation)
            case RandomMap():
                return self.random_map(operation)
            case MapWithIndex():
                return self.map_with_index(operation)
            case Filter():
                return self.filter(operation)
            case FlatMap():
                return self.flat_map(operation)
            case Batch():
                return self._batched(operation)
        raise TypeError(
            f"{operation!r} groups elements as they come, or belongs to a sampler, and a MapDataset is read by "
            "position: write .to_iter_dataset().apply(...)."
        )

    def pipe(
        self,
        function: "Callable[Concatenate[MapDataset[T], Parameters], Out]",
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Out:
        """Returns `function(dataset, *args, **kwargs)`, so that functions of datasets read in the order of a chain.

        Args:
            function: a function of a dataset.
            *args: what it takes after the dataset.
            **kwargs: what it takes by name.

        Examples:
            >>> def scaled(dataset, factor):
            ...     return dataset.map(lambda number: number * factor)
            >>> list(millstream.MapDataset.range(3).pipe(scaled, factor=10))
            [0, 10, 20]
        """
        return function(self, *args, **kwargs)

    def to_iter_dataset(
        self, read_options: "ReadOptions | None" = None, *, allow_nones: bool = False
    ) -> "IterDataset[T]":
        """Returns the stream of the elements of an epoch, without those that are absent.

        Args:
            read_options: the threads that read ahead; None for `ReadOptions()`.
            allow_nones: whether None comes where an element is absent.

        Examples:
            >>> dataset = millstream.MapDataset.range(4).filter(lambda number: number % 2 == 0)
            >>> list(dataset.to_iter_dataset()), list(dataset.to_iter_dataset(allow_nones=True))
            ([0, 2], [0, None, 2, None])
        """
        from millstream.dataset.stream_nodes import ReadIterDataset  # noqa: PLC0415  (which needs this class)

        return ReadIterDataset(self, read_options, as_flag(allow_nones, "allow_nones"))

    def __iter__(self) -> "DatasetIterator[T]":
        """Returns an iterator over one epoch, without the elements that are absent."""
        return self.to_iter_dataset()._begun_by(sys._getframe(1))  # noqa: SLF001  (as `warnings` does)

    def __len__(self) -> int:
        """Returns the length of one epoch; `sys.maxsize` where there is no end."""
        if self._node is None:
            raise NotImplementedError(f"{type(self).__name__} must override __len__.")
        return self._node.length

    @overload
    def __getitem__(self, position: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, position: Rows) -> "MapDataset[T]": ...
    def __getitem__(self, position: SupportsIndex | Rows) -> "T | MapDataset[T]":
        """Returns the element at a position of any epoch, None where one is absent; of a slice, a dataset.

        Raises:
            IndexError: the position is negative, 2**63 or more, or the dataset is empty.
        """
        if isinstance(position, slice):
            return self.slice(position)
        element: T = self._read.at(position)
        return element

    def __getitems__(self, positions: RecordKeys) -> Sequence[T]:
        """Returns the elements at positions, in their order, None where one is absent.

        Each source is read in one call.

        Raises:
            IndexError: a position is negative, 2**63 or more, or the dataset is empty.
        """
        return self._read.block(positions)

    def fingerprint(self) -> str:
        """Returns what decides the elements, in a line of words: sources, operations, seeds, but not num_epochs."""
        return fingerprint_of(node_of(self))

    def content_marks(self) -> dict[str, str]:
        """Returns marks of the code and the objects of the chain: a checkpoint warns of those that differ."""
        return content_marks_of(node_of(self))

    def __repr__(self) -> str:
        return text_of(self._title, sketch_of(node_of(self)))

    def _repr_html_(self) -> str:
        return picture_of(self._title, sketch_of(node_of(self)))

    @property
    def _title(self) -> str:
        return f"{type(self).__name__} {extent_of(node_of(self))}"

    @property
    def _read(self) -> Blocks:
        if self._blocks is None:
            self._blocks = Blocks(node_of(self))
        return self._blocks

    def _with(self, node: Node) -> "MapDataset[Any]":
        return dataset_of(node, self)

    def _inherited_seed(self, method: str) -> int:
        seed = nearest_seed(node_of(self))
        if seed is None:
            raise ValueError(
                f"{method} needs a seed, and there is none above it: write .{method}(..., seed=0), or .seed(0) before "
                "it."
            )
        return seed


def node_of(dataset: MapDataset[Any]) -> Node:
    """Returns what reads a dataset."""
    if dataset._node is None or type(dataset).__getitem__ is not MapDataset.__getitem__:  # noqa: SLF001
        if type(dataset).__getitem__ is MapDataset.__getitem__:
            raise NotImplementedError(f"{type(dataset).__name__} must override __getitem__.")
        return Own(dataset, tuple(map(node_of, dataset.parents)))
    return dataset._node  # noqa: SLF001


def dataset_of(node: Node, *parents: MapDataset[Any]) -> MapDataset[Any]:
    """Returns the dataset that a node reads."""
    dataset = MapDataset[Any](parents)
    dataset._node = node  # noqa: SLF001
    return dataset


def _check_dataset(value: object, name: str) -> None:
    if not isinstance(value, MapDataset):
        raise TypeError(
            f"{name} must be a MapDataset, got {type(value).__name__}: write MapDataset.source(...) around a source."
        )


def _nodes(datasets: Any, name: str) -> tuple[Node, ...]:
    if isinstance(datasets, MapDataset) or not isinstance(datasets, Sequence):
        raise TypeError(f"{name} must be a list of MapDatasets, got {type(datasets).__name__}.")
    if not datasets:
        raise ValueError(f"{name} must have at least one dataset, got none.")
    for number, dataset in enumerate(datasets):
        _check_dataset(dataset, f"{name}[{number}]")
    return tuple(map(node_of, datasets))
