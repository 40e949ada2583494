"""The base class of all operations of a pipeline."""

import itertools
from collections.abc import Sequence
from typing import ClassVar

BEFORE = "before "
"""The beginning of the path of an operation that the library inserts."""


class Transformation:
    """An operation of a pipeline: a Map, RandomMap, MapWithIndex, Filter, FlatMap or Batch. Subclass one of these.

    Attributes:
        keeps_count: True if the number of outputs depends only on the number of inputs.
        is_complete: True if the class needs no method from users, as Batch and OnlyFor.
        gathers: True if an output is built from several elements. Operations before it work element by element.
        is_between: True if the library inserts it between the user's operations, whose numbers do not count it.
        regroups: True if it groups elements as they arrive, whatever their positions are (see `grouping`).
        makes_batches: True if its outputs are batches: stacked elements.
        has_one_shape: False if the shapes of outputs depend on the elements, so that the shards of a step may differ.
        num_random: the number of functions in it that draw random numbers.

    Examples:
        >>> operations: list[millstream.transforms.Transformation] = [millstream.Map(len), millstream.Batch(2)]
        >>> list(millstream.load(["a", "bc"], num_epochs=1, transformations=operations))
        [array([1, 2])]
    """

    keeps_count: ClassVar[bool] = True
    is_complete: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    is_between: ClassVar[bool] = False
    regroups: ClassVar[bool] = False
    makes_batches: ClassVar[bool] = False
    has_one_shape: ClassVar[bool] = True
    num_random: ClassVar[int] = 0


def numbers_of(operations: Sequence[Transformation]) -> tuple[int, ...]:
    own = [not operation.is_between for operation in operations]
    return tuple(itertools.accumulate(own, initial=0))[: len(own)]


def paths_of(operations: Sequence[Transformation]) -> tuple[str, ...]:
    """Returns the path of each operation in the user's list; of an inserted one, the path that it precedes."""
    numbered = zip(numbers_of(operations), operations, strict=True)
    return tuple(f"{BEFORE * operation.is_between}operations[{number}]" for number, operation in numbered)
