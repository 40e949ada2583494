"""A feed: the elements of stage 0 are drawn from an iterator instead of being read from a source.

They are drawn in order, by the schedule. A block is a number of consecutive elements. The iterator's state is saved
from time to time, so a position in the stream is a saved state and a number of blocks after it.
"""

import math
from collections import deque
from typing import Any, Protocol, final

import numpy as np

from millstream.errors import CheckpointError
from millstream.loader.pipeline.calls import BlockCall, Fed, Outputs
from millstream.loader.pipeline.elements import Awaited, Elements, Location, Origins
from millstream.loader.pipeline.stages import LogicalShard

KEPT_ELEMENTS = 1024
"""The number of elements between two saved states. A stream that is resumed draws up to this many again.

The positions are multiples of it, or of a block, so that a saved state does not depend on the sizes of draws.
"""


class Drawable(Protocol):
    """An iterator that elements are drawn from."""

    @property
    def num_drawn(self) -> int:
        """The number of elements that were drawn for a call that lacks further ones."""
        ...

    def draw(self, count: int, number: int) -> Elements | Awaited:
        """Returns the elements from `number` on: fewer than `count` if they end, or if an error ends them.

        If it would have to wait, it returns the reason, and keeps the elements so far for the next call.
        """
        ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class FeedFailed(Exception):  # noqa: N818  (a placeholder)
    """Replaces the error of an iterator on its way through a plan. The error itself stays in the consumer.

    A value that is never raised. It is an exception like all others that end a run.
    """


@final
class FedCall(BlockCall):
    """A call of stage 0 that carries the elements of its blocks, and the error that ends them, if any."""

    __slots__ = ("_elements", "_failure")

    def __init__(self, of: LogicalShard, start: int, stop: int, skip: int, drawn: Elements) -> None:
        super().__init__(of, start, stop, skip)
        self._failure = drawn.error
        self._elements = drawn if drawn.error is None else Elements(drawn.values, drawn.origins, FeedFailed())
        self.first_request = Fed(self._elements)

    def complete(self, elements: Elements) -> None:
        """Takes the result. If it is FeedFailed, the iterator's own error replaces it."""
        if isinstance(elements.error, FeedFailed):
            block = self.start + len(self._elements.values) // self._of.partition.block
            at = Location(-1, block)
            elements = Elements(elements.values, elements.origins, self._failure, at, elements.failures)
        super().complete(elements)

    def split(self) -> list[BlockCall]:
        values, origins = self._elements.values, self._elements.origins
        calls: list[BlockCall] = []
        for call in super().split():
            rows = slice(*origins.block.searchsorted([call.start, call.stop]).tolist())
            failure = self._failure if call.stop == self.stop else None
            elements = Elements(values[rows], origins.take(rows), failure)
            calls.append(FedCall(self._of, call.start, call.stop, call.skip, elements))
        return calls


@final
class Feed:
    """The blocks of an iterator, in order: a leaf of any number of passes. `drawn` is at its beginning.

    Attributes:
        awaited: the call that the iterator has to wait for. It is not drawn from until this is set to None.
        has_ended: True if no more elements can be drawn, because the iterator has ended or failed.
    """

    def __init__(self, drawn: Drawable, block: int) -> None:
        self._drawn = drawn
        self._block = block
        self._interval = max(1, KEPT_ELEMENTS // block)
        self._kept: deque[tuple[int, Any]] = deque([(0, drawn.get_state())])
        # The block that the iterator is at; None if that is unknown.
        self._at: int | None = 0
        # The next block to draw; None while it is drawn, and after an interrupt.
        self._next: int | None = 0
        self.awaited: Awaited | None = None
        self.has_ended = False
        # The block of the latest delivered outputs.
        self._delivered = 0

    def go_to(self, block: int) -> None:
        """Sets the next block to draw, not before the first saved state. The iterator follows at the next draw."""
        if self._next != block or self.has_ended:
            self._at = None
        self._next, self.awaited, self.has_ended, self._delivered = block, None, False, block

    def next_blocks(self, limit: int) -> int:
        """Returns the number of blocks of the next call: `limit`, although the iterator may end earlier."""
        return 0 if self.has_ended or self.awaited is not None or self._next is None else limit

    def take(self, shard: LogicalShard, max_blocks: int, skip: int) -> FedCall | None:
        """Draws the next call, up to the end of the iterator or its next saved state.

        Returns None if the iterator has ended, or has to wait.
        """
        if self.awaited is not None:
            return None
        start, self._next = self._next, None
        if start is None:
            raise AssertionError("an interrupted feed must be moved to a block before it is drawn from")
        blocks = min(max_blocks, self._interval - start % self._interval)
        call = self._draw(shard, start, blocks, skip) if self._is_at(start) else None
        if self.awaited is None:
            self._at = start = start + blocks
        self._next = start
        return call

    def take_drawn(self, shard: LogicalShard, skip: int) -> FedCall | None:
        """Returns a call of the blocks that were drawn before the iterator had to wait; None if there are none."""
        blocks = self._drawn.num_drawn // self._block
        if self._at is None or self._at != self._next or not blocks:
            return None
        self.awaited = None
        return self.take(shard, blocks, skip)

    def _draw(self, shard: LogicalShard, start: int, blocks: int, skip: int) -> FedCall | None:
        if start % self._interval == 0 and start > self._kept[-1][0]:
            self._kept.append((start, self._drawn.get_state()))
        if (drawn := self._drawn_at(start, blocks)) is None:
            return None
        count = len(drawn.values)
        self.has_ended = count < blocks * self._block
        if not count and drawn.error is None:
            return None
        table = drawn.origins.table.copy()
        table[3] = start + np.arange(count) // self._block
        stop = start + max(1, math.ceil(count / self._block))
        return FedCall(shard, start, stop, skip, Elements(drawn.values, Origins(table), drawn.error))

    def _drawn_at(self, start: int, blocks: int) -> Elements | None:
        drawn = self._drawn.draw(blocks * self._block, start * self._block)
        if isinstance(drawn, Elements):
            return drawn
        self.awaited = drawn
        return None

    def kept(self) -> tuple[tuple[int, Any], ...]:
        """Returns the saved states that may be needed, each with its block, in order. Any thread may call it."""
        return tuple(self._kept)

    def delivered(self, outputs: Outputs) -> None:
        """Drops the states that only positions before these outputs need, because all earlier ones are consumed."""
        while len(self._kept) > 1 and self._kept[1][0] < self._delivered:
            self._kept.popleft()
        if outputs.values:
            self._delivered = outputs.after(len(outputs.values) - 1).block

    def restore(self, block: int, state: Any) -> None:
        """Restores a state that was saved at the beginning of a block. The iterator may refuse it."""
        self._at = self._next = None
        self._drawn.set_state(state)
        # Not the given one, which may have marks of other content.
        self._kept = deque([(block, self._drawn.get_state())])

    def _is_at(self, stop: int) -> bool:
        """Moves the iterator to the beginning of a block. Returns False if it ends just before, or has to wait.

        Raises:
            CheckpointError: it ends in an earlier block.
        """
        if self._at is None:
            at, state = next(kept for kept in reversed(self._kept) if kept[0] <= stop)
            self._drawn.set_state(state)
            self._at = at
        while self._at < stop:
            blocks = max(1, min(stop - self._at, KEPT_ELEMENTS // self._block))
            if (elements := self._drawn_at(self._at, blocks)) is None:
                return False
            if elements.error is not None:
                raise elements.error
            if len(elements.values) < blocks * self._block:
                count = self._at * self._block + len(elements.values)
                self.has_ended = True
                if count > (stop - 1) * self._block:
                    # The last block is shorter.
                    return False
                raise CheckpointError(
                    f"The state is after {stop * self._block} elements of a stream, which has {count}. Build it as "
                    "it was when the state was saved."
                )
            self._at += blocks
        return True
