"""Conversion and checks of the operations that users pass: instances of the kinds, or functions."""

import dataclasses
import reprlib
from typing import Any

from millstream.transforms.base import (
    METHODS,
    Filter,
    FlatMap,
    Map,
    RandomMap,
    Transformation,
    check_yields_nothing,
    valid_max_fan_out,
)
from millstream.transforms.batching.batch import Batch

_FUNCTION_FIELDS = {"map_function": Map, "random_map_function": RandomMap, "condition_function": Filter}
"""The fields of Grain's older operations that hold a function, each with the kind of the operation."""

_KINDS = f"{', '.join(kind.__name__ for kind in METHODS)} or {Batch.__name__}"


def as_transformation(operation: Any) -> Transformation:
    """Returns the operation for `operation`; a bare function becomes `Map(function)`."""
    if isinstance(operation, type):
        name = operation.__name__
        otherwise = "" if issubclass(operation, Transformation) else f", or Map({name}) to call it for each element"
        raise TypeError(f"An operation must be an instance, got the class {name}: write {name}(...){otherwise}.")
    if isinstance(operation, Transformation):
        if not operation.is_complete:
            _check_subclass(operation)
        return operation
    if (adopted := adopted_operation(operation)) is not None:
        return adopted
    if callable(operation):
        return Map(operation)
    raise TypeError(
        f"An operation must be an instance of millstream's {_KINDS}, or a function of one element, "
        f"got {reprlib.repr(operation)} of type {type(operation).__module__}.{type(operation).__qualname__}."
    )


def adopted_operation(operation: Any) -> Transformation | None:
    """Returns an operation of another library as one of this library; None if its class does not look like one.

    It is recognised without an import: a class with exactly one of the methods `map`, `random_map`, `map_with_index`,
    `filter` and `flat_map`, or with the fields of Grain's Batch or of its older operations. What it holds is compared
    when a state is restored, as for a subclass of this library's kinds.

    Raises:
        TypeError: its class has several of the methods.
    """
    if isinstance(operation, Transformation | type):
        return None
    methods = {kind: name for kind, name in METHODS.items() if callable(getattr(type(operation), name, None))}
    if len(methods) > 1:
        first, *_ = methods.values()
        raise TypeError(
            f"An operation must be of exactly one kind ({_KINDS}), but {type(operation).__name__} has "
            f"{' and '.join(methods.values())}: pass the function itself, such as operation.{first}."
        )
    held = _held_by(operation)
    if held.keys() >= {"batch_size", "drop_remainder", "batch_fn"} and not methods:
        return Batch(held["batch_size"], held["drop_remainder"], held["batch_fn"])
    for field, kind in _FUNCTION_FIELDS.items():
        if field in held:
            older: Transformation = kind(held[field])
            return older
    for kind, name in methods.items():
        limit = {"max_fan_out": operation.max_fan_out} if hasattr(operation, "max_fan_out") else {}
        adopted: Transformation = kind(getattr(operation, name), **(limit if kind is FlatMap else {}))
        vars(adopted).update(
            adopted_class=f"{type(operation).__module__}.{type(operation).__qualname__}", settings=held
        )
        return adopted
    return None


def _held_by(operation: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(operation):
        fields = [field.name for field in dataclasses.fields(operation) if hasattr(operation, field.name)]
        return {name: getattr(operation, name) for name in fields} | getattr(operation, "__dict__", {})
    return dict(getattr(operation, "__dict__", {}))


def _check_subclass(operation: Transformation) -> None:
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
