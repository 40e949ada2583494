"""A step of a chain, as a value: the nodes of a `MapDataset` and the steps of a stream.

A step knows the steps before it. It knows neither the datasets that hold it nor how it is run.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Folded = TypeVar("Folded")


class Step:
    """A step with all steps before it. Subclasses are frozen dataclasses, which threads share."""

    given_seed: int | None = None
    """The seed for the random operations after it; None if it sets none."""
    drawing_seed: int | None = None
    """The seed of the random map that it is; None for any other step."""

    above: tuple[Any, ...]
    """The steps before it, a field of those that have any number of them."""

    @property
    def parents(self) -> tuple[Any, ...]:
        """The steps before it."""
        return self.above

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """Its description, without its parents: `.shuffle(seed=0)`, without the dot if it does not follow one."""

    @property
    def shares(self) -> Sequence[tuple[str, float]]:
        """The names of the parents with their weights or lengths, for a diagram; empty if all count the same."""
        return ()

    @functools.cached_property
    def makes_batches(self) -> bool:
        """True if its elements are batches, as far as the operations tell."""
        return bool(self.parents) and all(parent.makes_batches for parent in self.parents)

    def __getstate__(self) -> dict[str, Any]:
        # Cached values are computed again.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]


def folded(end: Any, combine: Callable[[Any, list[Folded]], Folded]) -> Folded:
    """Returns `combine(step, results of its parents)` for a step, once for one that is used several times."""
    known: dict[int, Folded] = {}

    def result_of(one: Any) -> Folded:
        if id(one) not in known:
            known[id(one)] = combine(one, [result_of(parent) for parent in one.parents])
        return known[id(one)]

    return result_of(end)
