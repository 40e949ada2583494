"""Conversion and checks of the operations that users pass: instances of the kinds, or functions."""

import reprlib
from typing import Any

from millstream.transforms.base import METHODS, FlatMap, Map
from millstream.transforms.batch import Batch
from millstream.transforms.function_checks import check_yields_nothing, valid_max_fan_out
from millstream.transforms.transformation import Transformation

_KINDS = f"{', '.join(kind.__name__ for kind in METHODS)} or {Batch.__name__}"


def as_transformation(operation: Any) -> Transformation:
    """Returns the operation for `operation`; a bare function becomes `Map(function)`.

    Raises:
        TypeError: a class instead of an instance, a subclass that overrides nothing or is of two kinds, a `FlatMap`
            whose `max_fan_out` is not an integer, or a value that is neither an operation nor a function.
        ValueError: `max_fan_out` is below 1.
    """
    if isinstance(operation, type):
        name = operation.__name__
        otherwise = "" if issubclass(operation, Transformation) else f", or Map({name}) to call it for each element"
        raise TypeError(f"An operation must be an instance, got the class {name}: write {name}(...){otherwise}.")
    if isinstance(operation, Transformation):
        if not operation.is_complete:
            _check_subclass(operation)
        return operation
    if callable(operation):
        return Map(operation)
    raise TypeError(
        f"An operation must be an instance of millstream's {_KINDS}, or a function of one element, "
        f"got {reprlib.repr(operation)} of type {type(operation).__module__}.{type(operation).__qualname__}."
    )


def _check_subclass(operation: Transformation) -> None:
    """Raises an error unless the operation is of one kind and has the method of that kind."""
    name = type(operation).__name__
    kinds = [kind for kind in METHODS if isinstance(operation, kind)]
    if len(kinds) != 1:
        got = " and ".join(kind.__name__ for kind in kinds) + ": split it" if kinds else "none of them"
        raise TypeError(f"An operation must be of exactly one kind ({_KINDS}), but {name} is {got}.")
    kind = kinds[0]
    method = METHODS[kind]
    is_overridden = getattr(getattr(operation, method), "__func__", None) is not getattr(kind, method)
    if isinstance(operation, Map) and operation.is_batched:
        if is_overridden:
            raise TypeError(f"A subclass of Map must override map or map_batch, but {name} overrides both.")
        method, is_overridden = "map_batch", True
    if not is_overridden:
        raise TypeError(f"A subclass of {kind.__name__} must override {method}, but {name} does not.")
    if kind is not FlatMap:
        check_yields_nothing(name, getattr(operation, method))
    if isinstance(operation, FlatMap) and (limit := getattr(operation, "max_fan_out", None)) is not None:
        valid_max_fan_out(name, limit)
