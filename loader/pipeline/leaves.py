"""The input of stage 0: calls for blocks, in order."""

from typing import Protocol, final

from millstream.loader.pipeline.calls import BlockCall
from millstream.loader.pipeline.logical_shard import LogicalShard


class Leaf(Protocol):
    """An input of stage 0. `BlockLeaf` reads records, and a `Feed` draws elements from an iterator."""

    def next_blocks(self, limit: int) -> int:
        """Returns the number of blocks of the next call, at most `limit`."""

    def take(self, shard: LogicalShard, max_blocks: int, skip: int) -> BlockCall | None:
        """Returns the next call, or None if the leaf has just ended.

        Args:
            shard: the logical shard of the blocks.
            max_blocks: the maximum number of blocks.
            skip: the number of outputs of the first block that are consumed already.
        """


@final
class BlockLeaf:
    """The blocks of positions of a logical shard.

    Args:
        num_blocks: the number of blocks; None if they never end.
        block: the next block.
    """

    def __init__(self, num_blocks: int | None, block: int) -> None:
        self._num_blocks = num_blocks
        self._block = block

    def next_blocks(self, limit: int) -> int:
        """Returns the number of blocks of the next call, at most `limit`."""
        last = self._num_blocks
        return limit if last is None else max(0, min(limit, last - self._block))

    def take(self, shard: LogicalShard, max_blocks: int, skip: int) -> BlockCall:
        """Returns the next call."""
        start = self._block
        self._block += self.next_blocks(max_blocks)
        return BlockCall(shard, start, self._block, skip)
