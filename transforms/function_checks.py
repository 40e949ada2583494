"""Checks of the functions that operations are constructed from, of their arguments and their results."""

import inspect
import itertools
from typing import Any

from millstream.checks import as_integer
from millstream.descriptions import function_name


def valid_max_fan_out(name: str, max_fan_out: object) -> int:
    """Returns `max_fan_out` as an int. Errors name the operation."""
    if max_fan_out is None:
        raise TypeError(f"{name} needs max_fan_out, an integer: the maximum number of children per element.")
    return as_integer(max_fan_out, f"{name}'s max_fan_out", minimum=1)


def check_yields_nothing(name: str, function: object) -> None:
    """Refuses a function whose results are generators or coroutines."""
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
    """Returns the children of an element under a FlatMap.

    Raises:
        ValueError: there are more than the limit.
    """
    # One more than allowed is enough to detect an error; a generator may be endless.
    children = list(itertools.islice(flat_map.flat_map(element), limit + 1))
    if len(children) > limit:
        raise ValueError(
            f"flat_map must return at most max_fan_out = {limit} elements, got more. Set max_fan_out to the maximum "
            "number of elements that one element can be split into."
        )
    return children
