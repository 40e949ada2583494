"""What decides which elements form the next group, between two stages.

A grouping cuts the stream of one stage's outputs into groups, in order: each element is in one group. It runs in the
consumer, never looks into an element, and obeys three laws, which a test proves of every grouping:

* A group depends on nothing but the grouping's options and the elements from the group's first one on: so a stream can
  be restarted at the start of any group.
* It does not matter in how many pieces the elements come.
* Every group has at least one element, and takes none after it is full.
"""

import abc
from typing import final

from millstream.transforms import Batch, Transformation


class OpenGroup(abc.ABC):
    """A group that is being filled."""

    @abc.abstractmethod
    def take(self, count: int) -> int:
        """Takes as many of the next `count` elements as belong to this group, and returns how many those are."""

    @property
    @abc.abstractmethod
    def is_full(self) -> bool:
        """Whether the group takes no more."""


class Grouping(abc.ABC):
    """The rule by which groups are filled."""

    @abc.abstractmethod
    def begin(self) -> OpenGroup:
        """Returns a new group, which is empty."""

    @property
    @abc.abstractmethod
    def keeps_remainder(self) -> bool:
        """Whether the last group counts where the stream ends before it is full."""


@final
class _Counting(OpenGroup):
    """A group of a number of elements."""

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, count: int) -> int:
        """Takes what is left to the size."""
        taken = min(self._left, count)
        self._left -= taken
        return taken

    @property
    def is_full(self) -> bool:
        """Whether the size is reached."""
        return self._left == 0


@final
class EqualGroups(Grouping):
    """Groups of equally many elements: those of a Batch.

    Args:
        size: how many, at least 1.
        keeps_remainder: whether fewer of them, at the end of the stream, are a group.
    """

    def __init__(self, size: int, *, keeps_remainder: bool) -> None:
        self._size = size
        self._keeps_remainder = keeps_remainder

    def begin(self) -> OpenGroup:
        """Returns a group without elements."""
        return _Counting(self._size)

    @property
    def keeps_remainder(self) -> bool:
        """Whether the last, short group counts."""
        return self._keeps_remainder


def grouping_of(operation: Transformation) -> Grouping | None:
    """Returns how an operation groups elements where they cannot be grouped by their positions; None if it does not."""
    if isinstance(operation, Batch):
        return EqualGroups(operation.batch_size, keeps_remainder=not operation.drop_remainder)
    return None
