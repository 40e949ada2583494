"""One logical shard of a plan: which blocks it has, and where their records are.

A shard runs one of them, or several whose elements its batches hold end to end; each advances at its own pace.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream.loader.pipeline.arguments import first_deciding
from millstream.loader.pipeline.locator import Locator, Watch
from millstream.loader.pipeline.partition import Partition, Tail
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, FlatMap, Transformation
from millstream.transforms.only_for import leaves


@final
class LogicalShard(NamedTuple):
    """What a plan knows of one logical shard.

    Attributes:
        number: its number among those that the plan runs, from 0.
        partition: which positions make up which block.
        tail_records: how many records of its tail get into an output, as far as stage 0's batches decide it. A
            template is none of them.
        num_blocks: how many blocks have outputs; None when the order is endless.
        block_limit: how many blocks can be asked for: num_blocks, and fewer than would have positions from 2**63 on.
        one_to_one: whether output k is block k: nothing that drops or splits elements, or groups them as they come.
        tail_grows: whether the outputs of the tail are the first ones of the block that a longer order has there.
        leading: the Batches of stage 0.
        locator: finds the records of its blocks.
        leading: the Batches of stage 0.
    """

    number: int
    partition: Partition
    tail_records: int
    num_blocks: int | None
    block_limit: int
    one_to_one: bool
    tail_grows: bool
    locator: Locator
    leading: Sequence[Batch]

    @classmethod
    def of(cls, number: int, pipeline: Pipeline, stages: Sequence[Sequence[Transformation]], watch: Watch) -> Self:
        """Returns what a plan knows of one of its logical shards.

        Args:
            number: which one.
            pipeline: what the plan is of.
            stages: the operations of each of its stages.
            watch: wraps the function that asks the order.
        """
        shard, one_to_one = pipeline.logical_shards[number], first_deciding(pipeline.operations) is None
        leading = [operation for operation in stages[0] if isinstance(operation, Batch)]
        partition = Partition(
            block=records_per_block(stages, pipeline.share),
            shard=shard,
            length=pipeline.order.length,
            tail_rule=_tail_rule(leading, shard),
        )
        tail_records = _tail_records(partition.tail_share, leading)
        has_tail = tail_records or partition.tail_rule is Tail.PADDED
        num_blocks = partition.num_blocks if has_tail else partition.whole_blocks
        limit = partition.block_limit
        return cls(
            number=number,
            partition=partition,
            tail_records=tail_records,
            num_blocks=num_blocks,
            block_limit=limit if num_blocks is None else min(limit, num_blocks),
            one_to_one=one_to_one,
            tail_grows=not one_to_one and not leading and shard.shard_count == 1,
            locator=Locator(pipeline.order, partition, watch, len(pipeline.logical_shards)),
            leading=leading,
        )

    def are_delivered(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which positions get into an output of some shard of a 1:1 pipeline, shape (m,)."""
        length, shards = self.partition.length, self.partition.shard.shard_count
        if length is None or self.partition.tail_rule is Tail.PADDED:
            return np.ones(len(positions), dtype=np.bool_)
        first = length // self.partition.global_block * self.partition.global_block
        share, extra = divmod(length - first, shards)
        if self.partition.tail_rule is Tail.TRIMMED:
            extra = 0
        # Of the tail, the first shards have one position more.
        within, larger = positions - first, extra * (share + 1)
        is_larger = within < larger
        places = np.where(is_larger, within % (share + 1), (within - larger) % max(1, share))
        kept = np.where(is_larger, _tail_records(share + 1, self.leading), _tail_records(share, self.leading))
        delivered: NDArray[np.bool_] = (within < 0) | ((within < larger + share * (shards - extra)) & (places < kept))
        return delivered


def records_per_block(stages: Sequence[Sequence[Transformation]], share: Batch | None) -> int:
    """Returns the number of positions per block, given the operations of each stage."""
    leading = [operation for operation in stages[0] if isinstance(operation, Batch)]
    if leading:
        return math.prod(batch.batch_size for batch in leading)
    # A record before a FlatMap may have more children than a batch has elements.
    if len(stages) == 1 or any(isinstance(part, FlatMap) for operation in stages[0] for part in leaves(operation)):
        return 1
    regrouping = share if share is not None and len(stages) == 2 else stages[1][0]
    return regrouping.batch_size if isinstance(regrouping, Batch) else 1


def _tail_rule(leading: Sequence[Batch], shard: ShardOptions) -> Tail:
    if any(batch.pad_remainder for batch in leading):
        return Tail.PADDED
    return Tail.TRIMMED if shard.drop_remainder or any(batch.drop_remainder for batch in leading) else Tail.SPREAD


def _tail_records(count: int, leading: Sequence[Batch]) -> int:
    """Returns how many of the tail's records are left when each Batch has dropped its remainder."""
    elements, size, kept = count, 1, count
    for batch in leading:
        size *= batch.batch_size
        if batch.drop_remainder:
            elements //= batch.batch_size
            kept = min(kept, elements * size)
        else:
            elements = math.ceil(elements / batch.batch_size)
    return kept
