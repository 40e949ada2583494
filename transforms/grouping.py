"""The protocol of operations that build outputs from groups of elements, such as packers and window shuffles.

An operation is a grouping operation if positions alone cannot tell which elements belong together, because that depends
on their lengths or on which of them survived a Filter. It has four methods:

    prepare   runs where elements are made: reduces each element to the values that outputs need, and measures its sizes
    begin     runs in the consumer: opens an empty group, which takes elements by their sizes until it is full
    arrange   runs anywhere: decides which elements, or segments of elements, make up each output of a group
    make      runs anywhere: builds the outputs

Groups see sizes, never elements: the consumer passes elements on without inspecting them.

Every grouping operation obeys these laws, which `tests/loader/test_grouping_operations.py` checks:

* A group is a function of the operation, the sizes of the elements from its first one on, and the amount of them that
  earlier groups consumed. A stream can therefore resume at the start of any group.
* The result does not depend on how the elements are distributed over calls of `take`.
* Every group takes at least one element, and a full group takes none.
"""

import abc
import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate
from millstream.core.randomness import OF_GROUPS, generator
from millstream.core.segments import Segments
from millstream.transforms.base import Transformation

MAX_FAN_OUT = 1 << 20
"""Upper bound, exclusive, on the number of values that one element may be split into. Each value has its own index."""


class OpenGroup(abc.ABC):
    """A group that still takes elements."""

    @abc.abstractmethod
    def take(self, sizes: NDArray[np.int64]) -> int:
        """Takes the leading elements that belong to this group, and returns their number.

        `sizes` has the sizes of the next elements, shape (number of sizes, elements).
        """

    @property
    @abc.abstractmethod
    def is_full(self) -> bool:
        """True once the group takes no more elements."""

    def decisions(self) -> NDArray[np.int64]:
        """Returns the values that `arrange` needs for each element taken, shape (values, elements)."""
        return np.empty((0, 0), dtype=np.int64)

    @property
    def used(self) -> int:
        """The amount of the last element that is in this group if the next group continues it, otherwise 0."""
        return 0

    def truncate(self) -> int:
        """Ends the group after its last complete output, because an error follows. Returns the number of outputs."""
        return 0


class Grouping(abc.ABC):
    """The rule by which groups are filled."""

    @property
    def keeps_remainder(self) -> bool:
        """True if the last group of a stream is kept even if it is not full."""
        return True

    @property
    def fixed_size(self) -> int | None:
        """The number of elements in each full group; None if it depends on their sizes."""
        return None

    @property
    def output_size(self) -> int | None:
        """The size of one output if an element may span two groups; None if every element is in exactly one.

        If it is set, positions within a group count the consumed size (tokens, for instance) instead of outputs.
        """
        return None

    @abc.abstractmethod
    def begin(self, skip: int = 0) -> OpenGroup:
        """Returns a new, empty group.

        Args:
            skip: the amount of the group's elements that is already consumed. Always 0 if `output_size` is None.
        """


@final
class CountingGroup(OpenGroup):
    """A group of a fixed number of elements."""

    def __init__(self, size: int) -> None:
        self._missing = size

    def take(self, sizes: NDArray[np.int64]) -> int:
        taken: int = min(self._missing, sizes.shape[1])
        self._missing -= taken
        return taken

    @property
    def is_full(self) -> bool:
        return self._missing == 0


@final
class SplitGroup(OpenGroup):
    """Elements up to the one in which the last of a number of outputs of `unit` tokens ends.

    The elements are concatenated, and cut into outputs. If a remainder of the last element is left, the next group
    begins with the same element, and skips the consumed amount.
    """

    def __init__(self, unit: int, outputs: int, skip: int) -> None:
        self._unit = unit
        self._skip = skip
        self._goal = skip + outputs * unit
        self._total = 0
        self._end: int | None = None
        self._sizes: list[NDArray[np.int64]] = []

    def take(self, sizes: NDArray[np.int64]) -> int:
        if self.is_full:
            return 0
        totals = self._total + np.cumsum(sizes[0])
        taken = min(len(totals), int(np.searchsorted(totals, self._goal)) + 1)
        self._sizes.append(sizes[0, :taken])
        self._total = int(totals[taken - 1])
        if self._total >= self._goal:
            self.truncate()
        return taken

    @property
    def is_full(self) -> bool:
        return self._total >= self._goal

    @property
    def used(self) -> int:
        left = 0 if self._end is None else self._total - self._end
        return int(self._sizes[-1][-1]) - left if left else 0

    def truncate(self) -> int:
        whole = max(0, self._total - self._skip) // self._unit
        self._end = self._skip + whole * self._unit
        return whole

    def decisions(self) -> NDArray[np.int64]:
        """Returns the start and stop of each element's slice in this group, shape (2, elements)."""
        sizes = np.concatenate(self._sizes)
        lasts = np.cumsum(sizes)
        end = self._total if self._end is None else self._end
        return np.stack([np.clip(bound - lasts + sizes, 0, sizes) for bound in (self._skip, end)])


class Prepared(NamedTuple):
    """Elements that are ready to be grouped.

    Attributes:
        values: the prepared elements.
        sizes: their sizes, shape (number of sizes, values).
        counts: the number of values that each input element became; None if each became one.
    """

    values: Sequence[Any]
    sizes: NDArray[np.int64]
    counts: Sequence[int] | None = None

    @classmethod
    def concatenate(cls, runs: "Sequence[Prepared]") -> "Prepared":
        values = [value for run in runs for value in run.values]
        counts = [n for run in runs for n in ([1] * len(run.values) if run.counts is None else run.counts)]
        return cls(values, np.concatenate([run.sizes for run in runs], axis=1), counts)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupId:
    """Identifies a group by the origin of its first element.

    Attributes:
        position: the element's position in the sampler's order.
        index: the element's index.
    """

    position: int
    index: int

    def generator(self, seed: int | None) -> "np.random.Generator":
        """Returns this group's random generator for a seed; None counts as 0."""
        return generator(seed or 0, self.position, self.index, OF_GROUPS)


class GroupingOperation(Transformation, Grouping):
    """An operation that builds outputs from groups of elements as they arrive."""

    keeps_count: ClassVar[bool] = False
    is_complete: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    regroups: ClassVar[bool] = True

    seed: int | None = 0
    """The seed of an operation that shuffles; None until `seeded` sets it."""

    def seeded(self, seed: int) -> Self:
        """Returns the operation with a seed if it shuffles and has no seed of its own; otherwise itself."""
        if self.seed is not None:
            return self
        bound = copy.copy(self)
        bound.seed = seed
        return bound

    @property
    def splits(self) -> bool:
        """True if `prepare` may return several values for one element."""
        return False

    @property
    def may_drop(self) -> bool:
        """True if `prepare` may drop elements."""
        return False

    @abc.abstractmethod
    def prepare(self, values: Sequence[Any]) -> Prepared:
        """Reduces elements to the values that outputs need, and measures their sizes.

        Must accept an empty list. If it raises, it is called again for one element at a time, and the error of the
        first element that fails is reported.
        """

    @abc.abstractmethod
    def arrange(self, measures: NDArray[np.int64], group: GroupId) -> Segments:
        """Returns the composition of a group's outputs.

        Args:
            measures: the sizes of the group's elements, followed by the group's decisions, shape (rows, elements).
            group: identifies the group. Random choices may depend on nothing else.
        """

    @abc.abstractmethod
    def make(self, values: Sequence[Any], segments: Segments, allocate: Allocate) -> Sequence[Any]:
        """Builds outputs of a group.

        Args:
            values: the prepared elements of the group.
            segments: the composition of the outputs to build. After a failure, `make` is called again for one output
                at a time.
            allocate: allocates output arrays.

        Raises:
            StackError: elements of one output do not stack. Its `rows` are indices into `values`.
        """


def lengths_of(columns: Iterable[Sequence[Any]]) -> NDArray[np.int64]:
    """Returns the length of every array, shape (columns, elements)."""
    return np.array([list(map(len, column)) for column in columns], dtype=np.int64)
