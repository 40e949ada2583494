"""The schedule of a plan whose stage 0 gets elements from a feed instead of reading records."""

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
        """The request to the plan."""
        return Fed(self.elements)

    def complete(self, elements: Elements) -> None:
        """Takes the result. If it is FeedFailed, the feed's own error replaces it."""
        if isinstance(elements.error, FeedFailed):
            elements = Elements(elements.values, elements.origins, self.failure)
        super().complete(elements)


@final
class FedSchedule(Schedule):
    """The calls of one pass over the stream of a feed. Its length is known when the feed ends.

    Args:
        plan: the plan of the calls.
        cursor: the position of the first output.
        feed: the source of the elements, at the cursor's block.
    """

    def __init__(self, plan: Plan, cursor: Cursor, feed: Feed) -> None:
        self._feed = feed
        self._released = cursor.block
        super().__init__(plan, cursor)

    def next_blocks(self, limit: int) -> int:
        """Returns the number of blocks of the next call of stage 0, at most `limit`, unless the feed ends earlier."""
        return 0 if self._failed or self._feed.ended else limit

    def take(self, stage: int, max_blocks: int = 1) -> Call | None:
        """Takes the next call of a stage. Returns None if none may run now, or if the feed has just ended."""
        if self._untaken[stage] or stage > 0:
            return super().take(stage, max_blocks)
        blocks = self.next_blocks(max_blocks)
        if not blocks:
            return None
        drawn = self._feed.draw(blocks)
        if not drawn.values and drawn.error is None:
            self._end_stages()
            return None
        # Fewer blocks if the feed ends.
        stop = int(drawn.origins.block[-1]) + 1 if drawn.values else self._block + 1
        call = FedCall(self._shard, self._block, stop, self._take_skip(0), elements=drawn, failure=drawn.error)
        self._block = stop
        self._pending[0].append(call)
        return call

    def split(self, call: BlockCall) -> list[BlockCall]:
        """Replaces a call by calls of one block each."""
        calls = super().split(call)
        if not calls or not isinstance(call, FedCall):
            return calls
        blocks = call.elements.origins.block
        fed: list[BlockCall] = []
        for single in calls:
            rows = slice(*blocks.searchsorted([single.start, single.stop]).tolist())
            elements = Elements(call.elements.values[rows], call.elements.origins.take(rows))
            failure = call.failure if single is calls[-1] else None
            fed.append(FedCall(self._shard, single.start, single.stop, single.skip, elements=elements, failure=failure))
        first = self._pending[0].index(calls[0])
        for number, fed_call in enumerate(fed):
            self._pending[0][first + number] = fed_call
        return fed

    def pop(self) -> Outputs | None:
        """Returns the next outputs in order, if they are complete. All outputs before them have been delivered."""
        outputs = super().pop()
        if outputs is not None:
            self._feed.release(self._released)
            if outputs.values:
                self._released = outputs.after(len(outputs.values) - 1).block
        return outputs
