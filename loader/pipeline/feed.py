"""Elements of stage 0 that are drawn from an iterator, because there is no source to read them from.

They are drawn in order, in one place: where the schedule is. A block is a number of them in a row. The iterator's state
is kept from time to time, so that a position in the stream is one of these states and how many blocks follow it.
"""

from collections import deque
from typing import Any, Protocol, final

import numpy as np

from millstream.loader.pipeline.elements import Elements, Origins

KEPT_ELEMENTS = 1024
"""A state is kept each time after this many elements: where a stream is resumed, some of them are drawn again."""


class Leaf(Protocol):
    """What elements are drawn from."""

    def draw(self, count: int, number: int) -> Elements:
        """Returns the next elements: fewer than `count` where they end, or where an error ends them.

        Args:
            count: how many.
            number: how many were drawn before, since the beginning: what the first is called.
        """
        ...

    def get_state(self) -> Any:
        """Returns where it is."""
        ...

    def set_state(self, state: Any) -> None:
        """Goes to where it was."""
        ...


class FeedFailed(Exception):  # noqa: N818  (what failed is not this)
    """Stands for the error of a leaf, on the way through a plan: the error itself stays where it was raised."""


@final
class Feed:
    """The blocks of a leaf, in order.

    Args:
        leaf: what the elements are drawn from; it is at its beginning.
        block: how many elements are a block.

    Attributes:
        ended: whether no more can be drawn: the leaf has ended, or failed.
    """

    def __init__(self, leaf: Leaf, block: int) -> None:
        self._leaf = leaf
        self._block = block
        self._kept: deque[tuple[int, Any]] = deque([(0, leaf.get_state())])
        # The block that the leaf is at, None where it may be anywhere.
        self._at: int | None = 0
        # The block to draw next, None after an interrupt.
        self._next: int | None = 0
        self.ended = False

    def go_to(self, block: int, *, afresh: bool = False) -> None:
        """Goes to the beginning of a block, not before the first kept state: the leaf follows at the next `draw`.

        Args:
            block: which one.
            afresh: whether the leaf is moved there, even if that is where it is.
        """
        if self._next != block or self.ended or afresh:
            self._at = None
        self._next, self.ended = block, False

    def draw(self, blocks: int) -> Elements:
        """Returns the elements of some blocks, fewer at the end; an error comes after those before it."""
        start, self._next = self._next, None
        if start is None:
            raise AssertionError("an interrupted feed is not drawn from before it is sent to a block")
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
        """Returns the last state that was kept before a block, or at its beginning, and the block that it is at."""
        first, state = next(kept for kept in reversed(self._kept) if kept[0] <= block)
        return first, state

    def release(self, block: int) -> None:
        """Forgets what is needed only by positions before a block."""
        while len(self._kept) > 1 and self._kept[1][0] <= block:
            self._kept.popleft()

    def restore(self, block: int, state: Any) -> None:
        """Takes a state that was kept at the beginning of a block; what the leaf refuses is refused."""
        self._at = self._next = None
        self._leaf.set_state(state)
        self._kept = deque([(block, state)])

    def _move(self, stop: int) -> None:
        """Brings the leaf to the beginning of a block, or to its end before that."""
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
