"""Operations: their base class, the kinds that users subclass or construct from a function, and calls of the functions.

Each kind takes two type parameters, its input and its output: `class Decode(Map[bytes, Image])`. They are
optional and serve type checkers only. At run time `Map[bytes, Image]` is `Map` itself, so they change no checkpoint and
no pickle.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, SupportsIndex, overload

import numpy as np

from millstream.core.checks import as_flag, as_integer, is_scalar, named_arguments
from millstream.core.descriptions import described, function_name
from millstream.core.signals import cannot_wait

if TYPE_CHECKING:
    from typing import Generic

    from typing_extensions import TypeVar  # That of `typing` has no defaults before Python 3.13.

    In = TypeVar("In", bound=Any, default=Any)
    Out = TypeVar("Out", default=Any)
    Function = TypeVar("Function", bound=Callable[..., Any])
else:
    from typing import TypeVar

    In, Out, Function = TypeVar("In"), TypeVar("Out"), TypeVar("Function")

    class Generic:
        """A base class whose subscript is the subclass itself."""

        def __class_getitem__(cls, types: object) -> type:
            return cls


BEFORE = "before "
"""The beginning of the path of an operation that the library inserts."""


class Transformation:
    """An operation of a pipeline: a Map, RandomMap, MapWithIndex, Filter, FlatMap or Batch. Subclass one of these.

    Attributes:
        keeps_count: True if the number of outputs depends only on the number of inputs.
        is_complete: True if the class needs no method from users, as Batch and OnlyFor.
        gathers: True if an output is built from several elements. Operations before it work element by element.
        is_between: True if the library inserts it between the user's operations, whose numbers do not count it.
        regroups: True if it groups elements as they arrive, whatever their positions are (see `grouping`).
        makes_batches: True if its outputs are batches: stacked elements.
        has_one_shape: False if the shapes of outputs depend on the elements, so that the shards of a step may differ.
        num_random: the number of functions in it that draw random numbers.

    Examples:
        >>> operations: list[millstream.transforms.Transformation] = [millstream.Map(len), millstream.Batch(2)]
        >>> list(millstream.load(["a", "bc"], num_epochs=1, transformations=operations))
        [array([1, 2])]
    """

    keeps_count: ClassVar[bool] = True
    is_complete: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    is_between: ClassVar[bool] = False
    regroups: ClassVar[bool] = False
    makes_batches: ClassVar[bool] = False
    has_one_shape: ClassVar[bool] = True
    num_random: ClassVar[int] = 0


def numbers_of(operations: Sequence[Transformation]) -> tuple[int, ...]:
    own = [not operation.is_between for operation in operations]
    return tuple(itertools.accumulate(own, initial=0))[: len(own)]


def paths_of(operations: Sequence[Transformation]) -> tuple[str, ...]:
    """Returns the path of each operation in the user's list; of an inserted one, the path that it precedes."""
    numbered = zip(numbers_of(operations), operations, strict=True)
    return tuple(f"{BEFORE * operation.is_between}operations[{number}]" for number, operation in numbered)


def _only_of_kinds(constructor: Callable[..., None]) -> Callable[..., None]:
    """Returns a constructor that subclasses do not inherit: they run the constructor of their other bases."""

    @functools.wraps(constructor)
    def construct(self: "_Operation[Any]", *args: Any, **kwargs: Any) -> None:
        if type(self) in METHODS:
            constructor(self, *args, **kwargs)
            return
        further = super(_Operation, self).__init__
        if (args or kwargs) and getattr(further, "__objclass__", None) is object:
            name = type(self).__name__
            raise TypeError(f"{name} takes no arguments: write {name}.__init__, or decorate {name} with @dataclass.")
        further(*args, **kwargs)

    return construct


class _Operation(Transformation, Generic[Function]):
    """Base of the five kinds: the given function replaces the method of the kind.

    The function is an attribute of the instance, under the method's name. `operation.map` is therefore the user's own
    function, without a call in between, and an instance pickles if its function does.
    """

    @overload
    def __init__(self, function: Function) -> None: ...
    @overload
    def __init__(self) -> None: ...
    @_only_of_kinds
    @named_arguments()
    def __init__(self, function: Function | None = None) -> None:
        name, method = type(self).__name__, METHODS[type(self)]
        if not callable(function):
            raise TypeError(
                f"{name} needs a function, got {function!r}: write {name}(function), "
                f"or subclass {name} and override {method}."
            )
        if name != "FlatMap":
            check_yields_nothing(name, function)
        setattr(self, method, function)

    def __repr__(self) -> str:
        if type(self) not in METHODS:
            return super().__repr__()
        function = getattr(self, METHODS[type(self)])
        # An operation of another library is described itself, not its method.
        named = described(function.__self__) if hasattr(self, "adopted_class") else function_name(function)
        return f"{type(self).__name__}({named})"


class Map(_Operation[Callable[[In], Out]], Generic[In, Out]):
    """Replaces each element by a function of it.

    Subclass it and override `map`, or write `Map(function)`. Several threads and processes share one instance, so keep
    no mutable state in `self`. Return a new object from each call: a batch is stacked after all its elements are ready,
    and if they were one reused buffer, all rows would equal the last one.

    A *batched* map gets many elements in one call, as a list, and returns one result per element. That is faster for
    tokenizers, for instance. Override `map_batch` instead of `map`, or write `Map(function, batched=True)`. The number
    of elements per call varies, so a result must depend on its own element alone.

    Args:
        function: the function to call with each element. A subclass has a method `map(element)` instead.
        batched: True if the function gets a list of elements, and returns a list, tuple or array of as many results.

    Raises:
        TypeError: the function is not callable.

    Examples:
        >>> class Scale(millstream.Map):
        ...     def __init__(self, factor):
        ...         self.factor = factor
        ...
        ...     def map(self, element):
        ...         return element * self.factor
        >>> list(millstream.load([1, 2, 3], num_epochs=1, transformations=[Scale(10), lambda element: element + 1]))
        [11, 21, 31]
        >>> lengths = millstream.Map(lambda texts: [len(text) for text in texts], batched=True)
        >>> list(millstream.load(["a", "bcd"], num_epochs=1, transformations=[lengths]))
        [1, 3]
    """

    @overload
    def __init__(self, function: Callable[[In], Out]) -> None: ...
    @overload
    def __init__(self, function: Callable[[list[In]], Sequence[Out]], *, batched: Literal[True]) -> None: ...
    @overload
    def __init__(self) -> None: ...
    @_only_of_kinds
    @named_arguments()
    def __init__(self, function: Callable[[Any], Any] | None = None, *, batched: bool = False) -> None:
        super().__init__(function)  # type: ignore[arg-type]  # which refuses None
        if as_flag(batched, "batched"):
            # A plain value tells the two apart in a state, because functions are not compared strictly.
            vars(self).update(map_batch=vars(self).pop("map"), _is_batched=True)

    @property
    def is_batched(self) -> bool:
        """True if one call gets many elements."""
        return getattr(self.map_batch, "__func__", None) is not Map.map_batch

    def map(self, element: In, /) -> Out:
        """Returns the result for an element.

        Args:
            element: the output of the operations before; after a `Batch`, a batch.
        """
        if not self.is_batched:
            raise _not_overridden(self, element)
        (result,) = checked_results(self.map_batch, [element])
        made: Out = result
        return made

    def map_batch(self, elements: list[In], /) -> Sequence[Out]:
        """Returns one result per element, in order. Override it instead of `map`.

        Args:
            elements: outputs of the operations before.
        """
        raise _not_overridden(self, elements)

    def __repr__(self) -> str:
        if type(self) is not Map or not self.is_batched:
            return super().__repr__()
        return f"Map({function_name(self.map_batch)}, batched=True)"


class RandomMap(_Operation[Callable[[In, "np.random.Generator"], Out]], Generic[In, Out]):
    """Replaces each element by a random function of it.

    Subclass it and override `random_map`, or write `RandomMap(function)`. Draw random numbers from the given generator
    only. It depends only on the seed, the epoch, the position and the operation, so the batches are the same with any
    number of workers and after any resume.

    Args:
        function: the function to call with each element and a generator. A subclass has a method
            `random_map(element, rng)` instead.

    Raises:
        TypeError: the function is not callable.

    Examples:
        >>> class Jitter(millstream.RandomMap):
        ...     def random_map(self, element, rng):
        ...         return element + round(rng.normal(0, 0.1), 3)
        >>> list(millstream.load([1.0, 2.0], num_epochs=1, seed=0, transformations=[Jitter()]))
        [1.016, 1.926]
    """

    num_random = 1

    def random_map(self, element: In, rng: "np.random.Generator", /) -> Out:
        """Returns the result for an element, with random numbers from `rng`.

        Args:
            element: the output of the operations before; after a `Batch`, a batch.
            rng: a new generator for this operation and position. Do not keep it after the call.
        """
        raise _not_overridden(self, element, rng)


class MapWithIndex(_Operation[Callable[[int, In], Out]], Generic[In, Out]):
    """Replaces each element by a function of its index and itself.

    Subclass it and override `map_with_index`, or write `MapWithIndex(function)`. The index of a record is its position,
    counted over all epochs.

    Args:
        function: the function to call with the index and each element. A subclass has a method
            `map_with_index(index, element)` instead.

    Raises:
        TypeError: the function is not callable.

    Examples:
        >>> number = millstream.MapWithIndex(lambda index, element: (index, element))
        >>> list(millstream.load(["a", "b"], num_epochs=1, transformations=[number]))
        [(0, 'a'), (1, 'b')]
    """

    def map_with_index(self, index: int, element: In, /) -> Out:
        """Returns the result for the element at an index.

        Args:
            index: the position of the record, from 0, continued across epochs. The index of a batch is that of its
                first element.
            element: the output of the operations before; after a `Batch`, a batch.
        """
        raise _not_overridden(self, index, element)


class Filter(_Operation[Callable[[In], object]], Generic[In]):
    """Keeps the elements for which a function returns a true value.

    Subclass it and override `filter`, or write `Filter(function)`.

    Args:
        function: the function to call with each element. A subclass has a method `filter(element)` instead.

    Raises:
        TypeError: the function is not callable.

    Examples:
        >>> is_long = millstream.Filter(lambda text: len(text) > 3)
        >>> list(millstream.load(["a", "long", "b", "longer"], num_epochs=1, transformations=[is_long]))
        ['long', 'longer']
    """

    keeps_count = False

    def filter(self, element: In, /) -> bool:
        """Returns True if the element is kept.

        Args:
            element: the output of the operations before; after a `Batch`, a batch.
        """
        raise _not_overridden(self, element)


class FlatMap(_Operation[Callable[[In], Iterable[Out]]], Generic[In, Out]):
    """Splits each element into zero or more elements, its children.

    Subclass it and override `flat_map`, or write `FlatMap(function, max_fan_out)`. Child j of the element with index i
    gets the index i * max_fan_out + j, however the other elements are split.

    Args:
        function: the function to call with each element. A subclass has a method `flat_map(element)` instead.

    Attributes:
        max_fan_out: the maximum number of children per element, at least 1; more are a ValueError. A subclass may omit
            it unless it splits a `MapDataset`, whose positions depend on it. The limit is then 2**20.

    Raises:
        TypeError, ValueError: the function is not callable, or max_fan_out is not an integer of at least 1.

    Examples:
        >>> words = millstream.FlatMap(str.split, max_fan_out=8)
        >>> list(millstream.load(["a b", "", "c"], num_epochs=1, transformations=[words]))
        ['a', 'b', 'c']
    """

    keeps_count = False
    max_fan_out: int

    @overload
    def __init__(self, function: Callable[[In], Iterable[Out]], max_fan_out: SupportsIndex) -> None: ...
    @overload
    def __init__(self) -> None: ...
    @_only_of_kinds
    @named_arguments()
    def __init__(
        self, function: Callable[[In], Iterable[Out]] | None = None, max_fan_out: SupportsIndex | None = None
    ) -> None:
        super().__init__(function)  # type: ignore[arg-type]  # which refuses None
        self.max_fan_out = valid_max_fan_out("FlatMap", max_fan_out)

    def flat_map(self, element: In, /) -> Iterable[Out]:
        """Returns the children of an element in order, at most `max_fan_out`.

        Args:
            element: the output of the operations before; after a `Batch`, a batch.
        """
        raise _not_overridden(self, element)

    def __repr__(self) -> str:
        if type(self) is not FlatMap:
            return super().__repr__()
        return f"FlatMap({function_name(self.flat_map)}, max_fan_out={self.max_fan_out})"


METHODS: dict[type, str] = {
    Map: "map",
    RandomMap: "random_map",
    MapWithIndex: "map_with_index",
    Filter: "filter",
    FlatMap: "flat_map",
}
"""The kinds that can be constructed from a function, with the method that the function replaces."""


def _not_overridden(operation: _Operation[Any], *_: Any) -> NotImplementedError:
    kind = next(kind for kind in METHODS if isinstance(operation, kind))
    return NotImplementedError(f"{type(operation).__name__} must override {METHODS[kind]}.")


def valid_max_fan_out(name: str, max_fan_out: object) -> int:
    """Returns `max_fan_out` as an int. Errors name the operation."""
    if max_fan_out is None:
        raise TypeError(f"{name} needs max_fan_out, an integer: the maximum number of children per element.")
    # Positions of children, and indices, are products with it.
    return as_integer(max_fan_out, f"{name}'s max_fan_out", minimum=1, maximum=1 << 62)


def check_yields_nothing(name: str, function: object) -> None:
    called = (function, getattr(type(function), "__call__", None))  # noqa: B004  (the method of its class)
    if any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in called):
        raise TypeError(
            f"{name} needs a function that returns one result per element, got {function_name(function)}, which is "
            "async. Write a plain function: threads (ReadOptions) and workers run several calls concurrently."
        )
    if any(map(inspect.isgeneratorfunction, called)):
        raise TypeError(
            f"{name} needs a function that returns one result per element, got {function_name(function)}, "
            "which yields. Use FlatMap(function, max_fan_out) to split an element into several. To group elements as "
            "they arrive, use Batch, Rebatch, ConcatThenSplit or a packer."
        )


def children_of(flat_map: Any, limit: int, element: Any) -> list[Any]:
    found = flat_map.flat_map(element)
    if not hasattr(found, "__iter__") or is_scalar(found):
        raise TypeError(f"flat_map must return a list of elements, got {found!r:.80} of type {type(found).__name__}.")
    # One more than allowed is enough to detect an error; a generator may be endless.
    children = list(itertools.islice(found, limit + 1))
    if len(children) > limit:
        raise ValueError(
            f"flat_map must return at most max_fan_out = {limit} elements, got more. Set max_fan_out to the maximum "
            "number of elements that one element can be split into."
        )
    return children


MapBatch = Callable[[list[Any]], Any]
"""A function from a list of elements to as many results."""


class WholeCallError(Exception):
    """Elements fail together, with `error`, but none of them fails alone.

    An exception, because the results are an iterator, and have no other way to stop before the first one.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def results_of(operation: Any, values: Sequence[Any]) -> Iterator[Any]:
    """Returns the results of a Map, in order.

    Raises:
        WholeCallError: the Map is batched, and fails for all elements together, but for none of them alone.
    """
    if not operation.is_batched:
        return map(operation.map, values)
    return _batched_results(operation.map_batch, list(values))


def _batched_results(map_batch: MapBatch, values: list[Any]) -> Iterator[Any]:
    """Returns the results of one call. If it fails, it is repeated element by element, to find the one at fault.

    The results are then those up to the first element that fails alone, followed by its error.
    """
    try:
        return iter(checked_results(map_batch, values))
    except BaseException as error:
        if cannot_wait(error):
            raise
        return _single_results(map_batch, values, error)


def checked_results(map_batch: MapBatch, values: list[Any]) -> Sequence[Any]:
    """Returns the results of one call: a list, tuple or array with one for each element."""
    if not values:
        return []
    results = map_batch(list(values))  # The function may change its list.
    if not isinstance(results, list | tuple) and np.ndim(results if isinstance(results, np.ndarray) else 0) == 0:
        raise TypeError(
            "A batched map must return a list, a tuple or an array with one result per element, got "
            f"{type(results).__name__}."
        )
    if len(results) != len(values):
        raise ValueError(
            f"A batched map must return one result per element, got {len(results)} results for {len(values)} elements."
        )
    made: Sequence[Any] = results
    return made


def _single_results(map_batch: MapBatch, values: list[Any], error: BaseException) -> Iterator[Any]:
    made: list[Any] = []
    try:
        for value in values:
            made += checked_results(map_batch, [value])
    except BaseException as failure:
        if cannot_wait(failure):
            raise
        return itertools.chain(made, map(_raise, [failure]))
    raise WholeCallError(error) from error


def _raise(error: BaseException) -> Any:
    raise error
