"""The operations that users subclass, or make from a function."""

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

from millstream.transforms.batch import Batch

if TYPE_CHECKING:
    import numpy as np


class _Operation:
    """What the five kinds share: the function they were given stands in the place of their method.

    The function is an attribute of the instance, under the method's name. So `operation.map` is the user's own
    function, with no call in between, and an instance pickles if its function does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if type(self) in _METHODS:
            self._hold(*args, **kwargs)
        else:
            # A user's subclass. It may have further bases: their constructors run as if this one were not here.
            super().__init__(*args, **kwargs)

    def _hold(self, function: Any = None) -> None:
        name, method = type(self).__name__, _METHODS[type(self)]
        if not callable(function):
            raise TypeError(
                f"{name} needs a function, got {function!r}: write {name}(function), "
                f"or subclass {name} and override {method}."
            )
        setattr(self, method, function)

    def __repr__(self) -> str:
        if type(self) not in _METHODS:
            return super().__repr__()
        return f"{type(self).__name__}({_function_text(getattr(self, _METHODS[type(self)]))})"


class Map(_Operation):
    """Turns each element into another one.

    Subclass it and override `map`, or write `Map(function)`. One instance serves several threads and processes: keep
    what changes in local variables.
    """

    def map(self, element: Any, /) -> Any:
        """Returns what `element` becomes."""
        raise _not_overridden(self, element)


class RandomMap(_Operation):
    """Turns each element into another one, at random.

    Subclass it and override `random_map`, or write `RandomMap(function)`. Draw from the generator given and from
    nothing else: it depends on the seed, the epoch, the position and the operation only, so that the same batches
    come again with any number of workers and after any resume.
    """

    def random_map(self, element: Any, rng: "np.random.Generator", /) -> Any:
        """Returns what `element` becomes, drawing from `rng`; the generator is not to be kept beyond the call."""
        raise _not_overridden(self, element, rng)


class MapWithIndex(_Operation):
    """Turns each element, with its index, into another one.

    Subclass it and override `map_with_index`, or write `MapWithIndex(function)`.
    """

    def map_with_index(self, index: int, element: Any, /) -> Any:
        """Returns what `element` at `index` becomes."""
        raise _not_overridden(self, index, element)


class Filter(_Operation):
    """Keeps some elements and drops the others.

    Subclass it and override `filter`, or write `Filter(function)`.
    """

    def filter(self, element: Any, /) -> bool:
        """Returns whether `element` stays."""
        raise _not_overridden(self, element)


class FlatMap(_Operation):
    """Splits each element into several, none being allowed.

    Subclass it, set `max_fan_out` and override `flat_map`, or write `FlatMap(function, max_fan_out)`. Child j of an
    element with index i gets the index i * max_fan_out + j, whatever the other elements split into.

    Attributes:
        max_fan_out: the most children that one element may have, at least 1; the loader raises ValueError on more.
    """

    max_fan_out: int

    def flat_map(self, element: Any, /) -> Sequence[Any]:
        """Returns the children of `element` in order, at most `max_fan_out` of them."""
        raise _not_overridden(self, element)

    def _hold(self, function: Any = None, max_fan_out: Any = None) -> None:
        super()._hold(function)
        self.max_fan_out = _valid_max_fan_out("FlatMap", max_fan_out)

    def __repr__(self) -> str:
        if type(self) is not FlatMap:
            return super().__repr__()
        return f"FlatMap({_function_text(self.flat_map)}, max_fan_out={self.max_fan_out})"


Transformation: TypeAlias = Map | RandomMap | MapWithIndex | Filter | FlatMap | Batch
"""One operation of a pipeline."""

_METHODS: dict[type[_Operation], str] = {
    Map: "map",
    RandomMap: "random_map",
    MapWithIndex: "map_with_index",
    Filter: "filter",
    FlatMap: "flat_map",
}

_KINDS = "Map, RandomMap, MapWithIndex, Filter, FlatMap or Batch"


def as_transformation(operation: Any) -> Transformation:
    """Returns the operation that `operation` means: a bare function becomes `Map(function)`.

    Raises:
        TypeError: for a class instead of an instance, a subclass that overrides nothing or is of two kinds, a
            `FlatMap` without a whole number as `max_fan_out`, and whatever is neither operation nor function.
        ValueError: for a `max_fan_out` below 1.
    """
    if isinstance(operation, type):
        name = operation.__name__
        otherwise = "" if issubclass(operation, Transformation) else f", or Map({name}) to call it with each element"
        raise TypeError(f"An operation must be an instance, got the class {name}: write {name}(...){otherwise}.")
    if isinstance(operation, Transformation):
        if not isinstance(operation, Batch):
            _check_subclass(operation)
        return operation
    if callable(operation):
        return Map(operation)
    raise TypeError(
        f"An operation must be an instance of millstream's {_KINDS}, or a function of one element, "
        f"got {operation!r} of type {type(operation).__module__}.{type(operation).__qualname__}."
    )


def _check_subclass(operation: _Operation) -> None:
    """Raises unless the operation is of one kind and says what that kind needs."""
    name = type(operation).__name__
    kinds = [kind for kind in _METHODS if isinstance(operation, kind)]
    if len(kinds) != 1:
        got = " and ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"An operation must be of exactly one kind, {name} is {got}: split it.")
    kind = kinds[0]
    method = _METHODS[kind]
    if getattr(getattr(operation, method), "__func__", None) is getattr(kind, method):
        raise TypeError(f"A subclass of {kind.__name__} must override {method}, {name} does not.")
    if isinstance(operation, FlatMap):
        _valid_max_fan_out(name, getattr(operation, "max_fan_out", None))


def _valid_max_fan_out(name: str, max_fan_out: Any) -> int:
    """Returns `max_fan_out` as an int, or raises in the name of the operation that it is of."""
    if isinstance(max_fan_out, bool) or not isinstance(max_fan_out, SupportsIndex):
        raise TypeError(
            f"{name} must say as max_fan_out (int) how many children an element may have at most, got {max_fan_out!r}."
        )
    value = operator.index(max_fan_out)
    if value < 1:
        raise ValueError(f"{name}'s max_fan_out must be at least 1, got {value}.")
    return value


def _not_overridden(operation: _Operation, *_: Any) -> NotImplementedError:
    """Returns the error of a method that the user's subclass should have overridden."""
    kind = next(kind for kind in _METHODS if isinstance(operation, kind))
    return NotImplementedError(f"{type(operation).__name__} must override {_METHODS[kind]}.")


def _function_text(function: Any) -> str:
    """Returns the name of a function as its author wrote it, free of addresses where it has a name."""
    if isinstance(function, functools.partial):
        arguments = [repr(value) for value in function.args]
        arguments += [f"{key}={value!r}" for key, value in function.keywords.items()]
        return f"partial({', '.join([_function_text(function.func), *arguments])})"
    return str(getattr(function, "__name__", None) or repr(function))
