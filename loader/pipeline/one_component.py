"""What is done with the elements of one component of a mixture, among those of the others."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from millstream.loader.pipeline.elements import Elements

Results = Callable[[Elements], Iterator[Any]]
"""Gives what an operation makes of each element of a run, one after the other."""


def within(component: int | None, results: Results, otherwise: Callable[[Any], Any]) -> Results:
    """Returns what an operation gives for the elements of one component, and `otherwise` of the others in their places.

    Args:
        component: its number; None for all elements, which are then not looked at.
        results: what the operation gives. An error comes where it is the element's turn.
        otherwise: what stands for the result of an element that the operation does not get.
    """
    if component is None:
        return results

    def mixed(run: Elements) -> Iterator[Any]:
        is_own = run.origins.component == component
        if is_own.all():
            return results(run)
        values, own_rows = list(run.values), is_own.tolist()
        own = results(Elements(list(itertools.compress(values, own_rows)), run.origins.take(is_own)))
        return (next(own) if owned else otherwise(value) for value, owned in zip(values, own_rows, strict=True))

    return mixed
