"""Operations that group elements as they come, where positions cannot say which belong together.

Such an operation says four things, each in a method of its own, and each runs where it belongs:

    prepare   where elements are made: what is left of each, and its sizes
    begin     in the consumer: an open group, which takes elements by their sizes until it is full
    arrange   anywhere: which elements, or pieces of elements, make up which output of a group
    make      anywhere: the outputs themselves

A group never sees an element, only its sizes. The laws, which `tests/loader/pipeline/test_groupings.py` proves of each:

* A group depends on nothing but the operation, the sizes of the elements from its first one on, and how much of these
  is used up already. So a stream can be resumed at the start of any group.
* It does not matter in how many pieces the elements come.
* Every group takes at least one element, and none after it is full.
"""

import abc
import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate
from millstream.randomness import OF_GROUPS, generator
from millstream.transforms.transformation import Transformation

MOST_PIECES = 1 << 20
"""An element may become fewer pieces than this, each of which has an index of its own."""


class OpenGroup(abc.ABC):
    """A group that is being filled."""

    @abc.abstractmethod
    def take(self, sizes: NDArray[np.int64]) -> int:
        """Takes as many of the next elements as belong to this group, and returns how many those are.

        Args:
            sizes: those of the next elements, shape (number of sizes, elements).
        """

    @property
    @abc.abstractmethod
    def is_full(self) -> bool:
        """Whether the group takes no more."""

    def decided(self) -> NDArray[np.int64]:
        """Returns what `arrange` has to know of each element that was taken, shape (numbers, elements)."""
        return np.empty((0, 0), dtype=np.int64)

    @property
    def used(self) -> int:
        """How much of the last element is in this group, if the rest of it belongs to the next one; 0 if all is."""
        return 0

    def cut(self) -> int:
        """Ends the group before it is full, since an error follows; returns how many outputs are whole all the same."""
        return 0


class Grouping(abc.ABC):
    """The rule by which groups are filled."""

    @property
    def keeps_remainder(self) -> bool:
        """Whether the last group counts where the stream ends before it is full."""
        return True

    @property
    def unit(self) -> int | None:
        """How much an output uses up, where an element may be in two groups; None where each is in one.

        Positions are then counted in what is used up since the start of a group, not in outputs.
        """
        return None

    @abc.abstractmethod
    def begin(self, skip: int = 0) -> OpenGroup:
        """Returns a new group, which is empty.

        Args:
            skip: how much of its elements is used up, where there is a unit.
        """


@final
class CountingGroup(OpenGroup):
    """A group of a number of elements."""

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, sizes: NDArray[np.int64]) -> int:
        """Takes what is left to the size."""
        taken: int = min(self._left, sizes.shape[1])
        self._left -= taken
        return taken

    @property
    def is_full(self) -> bool:
        """Whether the size is reached."""
        return self._left == 0


class Prepared(NamedTuple):
    """Elements that are ready to be grouped.

    Attributes:
        values: what is left of them.
        sizes: shape (number of sizes, values).
        counts: how many of the values each of the elements has become; None if each is one.
    """

    values: Sequence[Any]
    sizes: NDArray[np.int64]
    counts: Sequence[int] | None = None

    @classmethod
    def concatenate(cls, parts: "Sequence[Prepared]") -> "Prepared":
        """Returns what several runs, at least one, have become, one after the other."""
        values = [value for part in parts for value in part.values]
        counts = [n for part in parts for n in ([1] * len(part.values) if part.counts is None else part.counts)]
        return cls(values, np.concatenate([part.sizes for part in parts], axis=1), counts)


class Pieces(NamedTuple):
    """What some outputs are made of; int64 arrays.

    Attributes:
        starts: where the pieces of each output begin, shape (outputs + 1,): those of output i are the pieces
            starts[i] … starts[i + 1] - 1. Each has at least one.
        elements: which element of the group each piece is of, shape (pieces,), as are the next two.
        begins: where in the element it begins.
        ends: where it ends: one more than its last. Where these two are None, the pieces are whole elements.
    """

    starts: NDArray[np.int64]
    elements: NDArray[np.int64]
    begins: NDArray[np.int64] | None = None
    ends: NDArray[np.int64] | None = None

    @classmethod
    def one_of_each(cls, elements: NDArray[np.int64]) -> "Pieces":
        """Returns outputs that are one whole element each, in this order."""
        return cls(np.arange(len(elements) + 1), elements)

    @classmethod
    def by_number(cls, numbers: NDArray[np.int64]) -> "Pieces":
        """Returns outputs of whole elements, given the number of the output that each element belongs to.

        The outputs come in the order of the numbers, those without an element not at all.
        """
        elements = np.argsort(numbers, kind="stable")
        sorted_numbers = numbers[elements]
        return cls(np.flatnonzero(np.diff(sorted_numbers, prepend=-1, append=sorted_numbers[-1] + 1)), elements)

    @classmethod
    def cut(cls, begins: NDArray[np.int64], ends: NDArray[np.int64], unit: int) -> "Pieces":
        """Returns outputs of `unit` each, the last one perhaps shorter, of parts of elements laid end to end.

        Args:
            begins: where in each element its part begins, shape (elements,).
            ends: where it ends.
            unit: at least 1.
        """
        lasts = np.cumsum(ends - begins)
        total = int(lasts[-1])
        outputs = np.arange(0, total, unit)
        # Both are sorted, which a stable sort is quick with; np.unique, which hashes, takes five times as long.
        bounds = np.sort(np.concatenate([outputs, lasts[lasts < total], [total]]), kind="stable")
        bounds = bounds[np.append(True, bounds[1:] != bounds[:-1])]
        elements = np.searchsorted(lasts, bounds[:-1], side="right")
        offsets = ends[elements] - lasts[elements]
        starts = np.append(np.searchsorted(bounds, outputs), len(elements))
        return cls(starts, elements, bounds[:-1] + offsets, bounds[1:] + offsets)

    def only(self, output: int) -> "Pieces":
        """Returns the pieces of one output."""
        own = slice(*self.starts[output : output + 2].tolist())
        begins, ends = (None if column is None else column[own] for column in (self.begins, self.ends))
        return Pieces(np.array([0, own.stop - own.start]), self.elements[own], begins, ends)

    @classmethod
    def concatenate(cls, parts: "Sequence[Pieces]") -> "Pieces":
        """Returns the outputs of several, at least one, all made of parts of elements."""
        offsets = np.cumsum([0, *(len(part.elements) for part in parts)])
        starts = [part.starts[:-1] + offset for part, offset in zip(parts, offsets, strict=False)]
        columns = zip(*((part.elements, part.begins, part.ends) for part in parts), strict=True)
        return cls(np.concatenate([*starts, offsets[-1:]]), *map(np.concatenate, columns))

    def permuted(self, order: NDArray[np.int64]) -> "Pieces":
        """Returns the outputs in another order."""
        widths = np.diff(self.starts)[order]
        starts = np.concatenate([[0], np.cumsum(widths)])
        places = np.repeat(self.starts[:-1][order] - starts[:-1], widths) + np.arange(len(self.elements))
        begins, ends = (None if column is None else column[places] for column in (self.begins, self.ends))
        return Pieces(starts, self.elements[places], begins, ends)


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Which group it is: where in the stream its first element comes from.

    Attributes:
        position: the position in the sampler's order.
        index: the element's index.
    """

    position: int
    index: int

    def generator(self, seed: int | None) -> "np.random.Generator":
        """Returns the generator of the group under a seed; None counts as 0."""
        return generator(seed or 0, self.position, self.index, OF_GROUPS)


class GroupingOperation(Transformation, Grouping):
    """An operation whose outputs are made of groups of elements as they come."""

    keeps_count: ClassVar[bool] = False
    is_complete: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    regroups: ClassVar[bool] = True

    seed: int | None = 0
    """The seed of an operation that shuffles; None until `seeded` gives it one."""

    def seeded(self, seed: int) -> Self:
        """Returns the operation with a seed if it shuffles and has none of its own; otherwise the operation itself."""
        if self.seed is not None:
            return self
        bound = copy.copy(self)
        bound.seed = seed
        return bound

    @property
    def splits(self) -> bool:
        """Whether `prepare` may make several values of an element."""
        return False

    @property
    def may_drop(self) -> bool:
        """True if `prepare` may drop elements."""
        return False

    @abc.abstractmethod
    def prepare(self, values: Sequence[Any]) -> Prepared:
        """Returns what is left of some elements, and their sizes.

        An error is about all of them: asked for one alone, the element at fault raises one that says what is wrong.
        """

    @abc.abstractmethod
    def arrange(self, numbers: NDArray[np.int64], identity: Identity) -> Pieces:
        """Returns what the outputs of a group are made of.

        Args:
            numbers: the sizes of its elements, and below them what the group has decided, shape (…, elements).
            identity: which group it is; what randomness depends on.
        """

    @abc.abstractmethod
    def make(self, values: Sequence[Any], pieces: Pieces, allocate: Allocate) -> Sequence[Any]:
        """Returns outputs of a group.

        Args:
            values: the elements of the group, as they were prepared.
            pieces: what the outputs are made of: all of them, or one.
            allocate: gives the memory of arrays that are outputs.

        Raises:
            StackError: elements of one output do not go together; `rows` says which elements of the group.
        """


def lengths_of(columns: Iterable[Sequence[Any]]) -> NDArray[np.int64]:
    """Returns the lengths of the arrays in some columns, shape (columns, elements)."""
    return np.array([list(map(len, column)) for column in columns], dtype=np.int64)
