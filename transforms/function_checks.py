"""Calls of the functions that operations are constructed from, with checks of their arguments and results."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from millstream.core.checks import as_integer
from millstream.core.descriptions import function_name
from millstream.core.signals import cannot_wait


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
    # One more than allowed is enough to detect an error; a generator may be endless.
    children = list(itertools.islice(flat_map.flat_map(element), limit + 1))
    if len(children) > limit:
        raise ValueError(
            f"flat_map must return at most max_fan_out = {limit} elements, got more. Set max_fan_out to the maximum "
            "number of elements that one element can be split into."
        )
    return children


MapBatch = Callable[[list[Any]], Any]
"""A function from a list of elements to as many results."""


class WholeCallError(Exception):
    """Elements fail together, with `error`, but none of them fails alone."""

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
