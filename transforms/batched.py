"""Maps that get many elements per call. A failed call is repeated element by element, to find the one at fault."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from millstream.signals import cannot_wait

MapBatch = Callable[[list[Any]], Any]
"""A function from a list of elements to as many results."""


class WholeCallError(Exception):
    """Elements fail together, but none of them fails alone.

    Attributes:
        error: the original error.
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
    """Returns the results of one call, or those up to the first element that fails alone, followed by its error."""
    try:
        return iter(checked_results(map_batch, values))
    except BaseException as error:
        if cannot_wait(error):
            raise
        return _single_results(map_batch, values, error)


def checked_results(map_batch: MapBatch, values: list[Any]) -> Sequence[Any]:
    """Returns the results of one call, checked.

    Raises:
        TypeError, ValueError: they are not a list, tuple or array, or their number differs from that of the elements.
    """
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
