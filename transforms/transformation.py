"""What all operations of a pipeline have in common."""

import itertools
from collections.abc import Sequence
from typing import ClassVar


class Transformation:
    """One operation of a pipeline: a Map, RandomMap, MapWithIndex, Filter, FlatMap or Batch. Subclass one of these.

    Attributes:
        keeps_count: whether the number of elements that come out depends on nothing but the number that go in.
        is_complete: whether the class is a kind by itself, to which users add no method: Batch, OnlyFor.
        gathers: whether it makes elements of several: what comes before it works element by element.
        is_between: whether the library puts it between the user's operations, which are counted without it.
        regroups: whether it groups elements as they come, whatever their positions are (see `grouping`).

    Examples:
        >>> operations: list[millstream.transforms.Transformation] = [millstream.MapTransform(len), millstream.Batch(2)]
        >>> list(millstream.load(["a", "bc"], num_epochs=1, transformations=operations))
        [array([1, 2])]
    """

    keeps_count: ClassVar[bool] = True
    is_complete: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    is_between: ClassVar[bool] = False
    regroups: ClassVar[bool] = False


def numbers_of(operations: Sequence[Transformation]) -> tuple[int, ...]:
    """Returns how many of the user's operations come before each."""
    own = [not operation.is_between for operation in operations]
    return tuple(itertools.accumulate(own, initial=0))[: len(own)]


def paths_of(operations: Sequence[Transformation]) -> tuple[str, ...]:
    """Returns how to reach each operation in the user's list, or which one the library puts it before."""
    numbered = zip(numbers_of(operations), operations, strict=True)
    return tuple(f"{'before ' * operation.is_between}operations[{number}]" for number, operation in numbered)
