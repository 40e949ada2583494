"""Grain's older names: operations by the names of their functions, and records with metadata."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from millstream.record import RecordMetadata
from millstream.transforms import Filter, Map, RandomMap

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class Record(Generic[T]):
    """A record with its position. Operations get the data alone.

    Attributes:
        metadata: the position, the key and the randomness.
        data: the record.

    Examples:
        >>> millstream.python.Record(millstream.RecordMetadata(index=0, record_key=3), "text").data
        'text'
    """

    metadata: RecordMetadata
    data: T


def MapOperation(map_function: Callable[[Any], Any]) -> "Map[Any, Any]":  # noqa: N802  (Grain's name)
    """Returns `Map(map_function)`."""
    return Map(map_function)


def RandomMapOperation(random_map_function: Callable[..., Any]) -> "RandomMap[Any, Any]":  # noqa: N802  (as above)
    """Returns `RandomMap(random_map_function)`."""
    return RandomMap(random_map_function)


def FilterOperation(condition_function: Callable[[Any], object]) -> "Filter[Any]":  # noqa: N802  (as above)
    """Returns `Filter(condition_function)`."""
    return Filter(condition_function)
