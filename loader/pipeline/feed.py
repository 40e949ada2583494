"""A feed: the elements of stage 0 are drawn from an iterator instead of being read from a source.

They are drawn in order, by the schedule. A block is a number of consecutive elements. The iterator's state is saved
from time to time, so a position in the stream is a saved state and a number of blocks after it.
"""

from collections import deque
from typing import Any, Protocol, final

import numpy as np

from millstream.loader.pipeline.elements import Elements, Origins

KEPT_ELEMENTS = 1024
"""The number of elements between two saved states. A stream that is resumed draws up to this many again."""


class Leaf(Protocol):
    """An iterator that elements are drawn from."""

    def draw(self, count: int, number: int) -> Elements:
        """Returns the next elements: fewer than `count` if they end, or if an error ends them.

        Args:
            count: the number of elements.
            number: the number of elements drawn before, since the beginning.
        """
        ...

    def get_state(self) -> Any:
        """Returns the state of the iterator."""
        ...

    def set_state(self, state: Any) -> None:
        """Restores a state of the iterator."""
        ...


class FeedFailed(Exception):  # noqa: N818  (a placeholder)
    """Replaces the error of a leaf on its way through a plan. The error itself stays in the consumer."""


@final
class Feed:
    """The blocks of a leaf, in order.

    Args:
        leaf: the iterator to draw from, at its beginning.
        block: the number of elements per block.

    Attributes:
        ended: True if no more elements can be drawn, because the leaf has ended or failed.
    """

    def __init__(self, leaf: Leaf, block: int) -> None:
        self._leaf = leaf
        self._block = block
        self._kept: deque[tuple[int, Any]] = deque([(0, leaf.get_state())])
        # The block that the leaf is at; None if that is unknown.
        self._at: int | None = 0
        # The next block to draw; None after an interrupt.
        self._next: int | None = 0
        self.ended = False

    def go_to(self, block: int, *, afresh: bool = False) -> None:
        """Sets the next block to draw, not before the first saved state. The leaf follows at the next `draw`.

        Args:
            block: the block.
            afresh: True to restore the leaf's state even if it is at this block.
        """
        if self._next != block or self.ended or afresh:
            self._at = None
        self._next, self.ended = block, False

    def draw(self, blocks: int) -> Elements:
        """Returns the elements of the next blocks, fewer at the end. An error comes after the elements before it."""
        start, self._next = self._next, None
        if start is None:
            raise AssertionError("an interrupted feed must be moved to a block before it is drawn from")
        if self._at != start:
            self._move(start)
        self._at = None
        if self.ended:
            self._at = self._next = start
            return Elements([], Origins.none())
        if (start - self._kept[-1][0]) * self._block >= KEPT_ELEMENTS:
            self._kept.append((start, self._leaf.get_state()))
        count = blocks * self._block
        elements = self._leaf.draw(count, start * self._block)
        if len(elements.values) < count:
            self.ended = True
        table = elements.origins.table.copy()
        table[3] = start + np.arange(table.shape[1]) // self._block
        self._at = self._next = start + blocks
        return Elements(elements.values, Origins(table), elements.error)

    def kept_before(self, block: int) -> tuple[int, Any]:
        """Returns the last state saved at or before a block, and its block."""
        first, state = next(kept for kept in reversed(self._kept) if kept[0] <= block)
        return first, state

    def release(self, block: int) -> None:
        """Drops the states that only positions before a block need."""
        while len(self._kept) > 1 and self._kept[1][0] <= block:
            self._kept.popleft()

    def restore(self, block: int, state: Any) -> None:
        """Restores a state that was saved at the beginning of a block. The leaf may refuse it."""
        self._at = self._next = None
        self._leaf.set_state(state)
        self._kept = deque([(block, state)])

    def _move(self, stop: int) -> None:
        """Moves the leaf to the beginning of a block, or to its end if that comes first."""
        block, state = self.kept_before(stop)
        self._leaf.set_state(state)
        while block < stop:
            blocks = max(1, min(stop - block, KEPT_ELEMENTS // self._block))
            elements = self._leaf.draw(blocks * self._block, block * self._block)
            if elements.error is not None:
                raise elements.error
            if len(elements.values) < blocks * self._block:
                self.ended = True
                return
            block += blocks
