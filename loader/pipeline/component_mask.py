"""Operations on the elements of one component of a mixture."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from millstream.loader.pipeline.elements import Elements

Results = Callable[[Elements], Iterator[Any]]
"""A function that yields the result of an operation for each element of a run."""


def within(component: int | None, results: Results, otherwise: Callable[[Any], Any]) -> Results:
    """Returns a function that applies `results` to one component, and `otherwise` to the elements of the others.

    Args:
        component: the number of the component; None for all elements.
        results: yields the results of the operation. It raises an error when the element's turn comes.
        otherwise: returns the replacement for the result of an element of another component.
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
