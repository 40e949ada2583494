"""Operations that chains insert: random maps with their own seed, and those for missing elements.

An element is missing at the positions of a MapDataset at which a filter dropped it, or a map returned None. A chain is
compiled without missing elements unless one of its operations may drop some. A block is then a batch, and any step can
be sought. A missing element that turns up anyway is detected when it is read.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, final

from millstream.core.columnar import ColumnarRecords
from millstream.transforms import Filter
from millstream.transforms.base import RandomMap, Transformation


@final
class SeededRandomMap(RandomMap[Any, Any]):
    """Draws from the random streams of its own seed and operation number, independent of the sampler's."""

    def __init__(self, operation: RandomMap[Any, Any], seed: int, number: int) -> None:
        self.operation = operation
        self.seed = seed
        self.number = number

    def random_map(self, element: Any, rng: Any) -> Any:
        return self.operation.random_map(element, rng)

    def __repr__(self) -> str:
        return f"{self.operation!r}, seed={self.seed}"


class AbsentElement(LookupError):  # noqa: N818  (it is found, and changes the plan)
    """An element is None although the plan has no missing elements.

    An exception, because it takes the place of an element, and is raised in its turn, as errors are.
    """


@final
class Present(Transformation):
    """Passes elements on, up to the first None, which is an `AbsentElement`."""

    is_complete: ClassVar[bool] = True
    is_between: ClassVar[bool] = True

    def count(self, values: Sequence[Any]) -> int:
        """Returns the number of elements before the first None."""
        # `in` on the values themselves would compare arrays. This runs for each element, and takes 25 ns of it.
        if isinstance(values, ColumnarRecords) or all(map(operator.is_not, values, itertools.repeat(None))):
            return len(values)
        return next(row for row, value in enumerate(values) if value is None)


@final
class KeepAll(Filter[Any]):
    """Keeps every element. A pipeline that begins with it is not 1:1, so that records that fail can be dropped."""

    is_between: ClassVar[bool] = True

    def filter(self, element: Any) -> bool:
        del element
        return True


@final
class DropAbsent(Filter[Any]):
    """Drops missing elements."""

    is_between: ClassVar[bool] = True

    def filter(self, element: Any) -> bool:
        return element is not None
