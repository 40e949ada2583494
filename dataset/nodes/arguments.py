"""Checks of the arguments of a MapDataset's methods, so that mistakes raise immediately."""

import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex, TypeVar

import numpy as np

from millstream.dataset.nodes.node import ENDLESS, Positions
from millstream.descriptions import described
from millstream.sources.base import RecordKeys
from millstream.transforms import Map, Transformation
from millstream.transforms.given import adopted_operation, as_transformation

Operation = TypeVar("Operation", bound=Transformation)

MAX_DEPTH = 100
"""The maximum number of datasets from a chain's end to its sources: each takes several frames of Python's stack."""


def depth_above(parents: Iterable[Any]) -> int:
    """Returns the number of datasets from a new one with these parents to its farthest source."""
    depth = 1 + max((getattr(parent, "_depth", 0) for parent in parents), default=0)
    if depth > MAX_DEPTH:
        raise ValueError(
            f"A chain must have at most {MAX_DEPTH} datasets from its end to its sources, got {depth}. Mix or "
            "concatenate all datasets in one call, and join functions into one map."
        )
    return depth


def as_operation(given: Any, kind: type[Operation]) -> Operation:
    """Returns an operation of a kind: `given` itself, or a new one for a function."""
    given = adopted_operation(given) or given
    if isinstance(given, Transformation) or (isinstance(given, type) and issubclass(given, Transformation)):
        operation = as_transformation(given)
        if not isinstance(operation, kind):
            raise TypeError(f"Expected a {kind.__name__} or a function, got {given!r}. Use .apply({given!r}).")
        return operation
    return kind(given)  # type: ignore[call-arg]  # each kind has a constructor for a function


def as_map(given: Any, *, batched: bool) -> "Map[Any, Any]":
    """Returns a Map: `given` itself, or a new one for a function of an element or of a list of elements."""
    if not batched:
        return as_operation(given, Map)
    if isinstance(given, Transformation) or adopted_operation(given) is not None:
        raise TypeError(f"batched=True needs a function, got {described(given)}: a Map says itself if it is batched.")
    return Map(given, batched=batched)


def as_position(position: SupportsIndex) -> int:
    """Returns a position as an int. Refuses anything else."""
    try:
        index = operator.index(position)
    except TypeError:
        raise TypeError(f"A position must be an integer, got {position!r} of type {type(position).__name__}.") from None
    if index < 0:
        raise IndexError(
            f"Positions count from 0, and never from the end, got {index}. Use len(dataset) - 1 for the last one."
        )
    if index > ENDLESS:
        raise IndexError(f"Positions must be below 2**63, got {index}.")
    return index


def as_positions(positions: RecordKeys) -> Positions:
    """Returns positions as an int64 array of shape (n,). Refuses anything else."""
    array = np.asarray(positions)
    if array.ndim != 1:
        raise ValueError(f"Positions must be one-dimensional, got the shape {array.shape}.")
    if array.dtype == np.int64 and (not array.size or array.min() >= 0):
        return array
    return np.fromiter(map(as_position, positions), np.int64)
