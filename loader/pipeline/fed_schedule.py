"""The schedule of a plan whose stage 0 is fed with elements, where other plans read records."""

from typing import final

from millstream.loader.pipeline.calls import BlockCall, Call
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.feed import Feed, FeedFailed
from millstream.loader.pipeline.logical_shard import LogicalShard
from millstream.loader.pipeline.outputs import Cursor, Outputs
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.requests import Fed
from millstream.loader.pipeline.schedule import Schedule


@final
class FedCall(BlockCall):
    """A call of stage 0 that carries the elements of its blocks, and the error that ends them, if any."""

    __slots__ = ("elements", "failure")

    def __init__(
        self, of: LogicalShard, start: int, stop: int, skip: int, *, elements: Elements, failure: BaseException | None
    ) -> None:
        super().__init__(of, start, stop, skip)
        self.elements = elements if failure is None else Elements(elements.values, elements.origins, FeedFailed())
        self.failure = failure

    @property
    def request(self) -> Fed:  # type: ignore[override]  # a request of another kind
        """What to ask the plan for."""
        return Fed(self.elements)

    def complete(self, elements: Elements) -> None:
        """Takes the result; what failed is the feed's own error."""
        if isinstance(elements.error, FeedFailed):
            elements = Elements(elements.values, elements.origins, self.failure)
        super().complete(elements)


@final
class FedSchedule(Schedule):
    """The calls of one pass over the stream; how long it is shows when the feed ends.

    Args:
        plan: what the calls are of.
        cursor: where the first one begins.
        feed: where the elements come from; it is at the cursor's block.
    """

    def __init__(self, plan: Plan, cursor: Cursor, feed: Feed) -> None:
        self._feed = feed
        self._released = cursor.block
        super().__init__(plan, cursor)

    def next_blocks(self, most: int) -> int:
        """Returns how many blocks a call of stage 0 that makes `most` at most would make now, if that many follow."""
        return 0 if self._failed or self._feed.ended else most

    def take(self, stage: int, most_blocks: int = 1) -> Call | None:
        """Returns the next call of a stage, in order, or None if none may run now, or the feed has just ended."""
        if self._untaken[stage] or stage > 0:
            return super().take(stage, most_blocks)
        blocks = self.next_blocks(most_blocks)
        if not blocks:
            return None
        drawn = self._feed.draw(blocks)
        if not drawn.values and drawn.error is None:
            self._end_stages()
            return None
        # Fewer than that many where it ends.
        stop = int(drawn.origins.block[-1]) + 1 if drawn.values else self._block + 1
        call = FedCall(self._shard, self._block, stop, self._take_skip(0), elements=drawn, failure=drawn.error)
        self._block = stop
        self._pending[0].append(call)
        return call

    def split(self, call: BlockCall) -> list[BlockCall]:
        """Returns calls of one block each that replace a call."""
        pieces = super().split(call)
        if not pieces or not isinstance(call, FedCall):
            return pieces
        blocks = call.elements.origins.block
        fed: list[BlockCall] = []
        for piece in pieces:
            rows = slice(*blocks.searchsorted([piece.start, piece.stop]).tolist())
            elements = Elements(call.elements.values[rows], call.elements.origins.take(rows))
            failure = call.failure if piece is pieces[-1] else None
            fed.append(FedCall(self._shard, piece.start, piece.stop, piece.skip, elements=elements, failure=failure))
        first = self._pending[0].index(pieces[0])
        for number, one in enumerate(fed):
            self._pending[0][first + number] = one
        return fed

    def pop(self) -> Outputs | None:
        """Returns the next outputs in order, if they are ready: all that came before them is delivered."""
        outputs = super().pop()
        if outputs is not None:
            self._feed.release(self._released)
            if outputs.values:
                self._released = outputs.after(len(outputs.values) - 1).block
        return outputs
