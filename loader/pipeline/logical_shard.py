"""One logical shard of a plan: its blocks, and their records.

A shard runs one logical shard, or several whose elements its batches concatenate. Each advances at its own pace.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream.loader.pipeline.arguments import first_dynamic
from millstream.loader.pipeline.ends import tail_rule
from millstream.loader.pipeline.locator import Instrument, Locator
from millstream.loader.pipeline.partition import Partition, Tail
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.transforms import Batch, FlatMap, Transformation
from millstream.transforms.only_for import leaves


@final
class LogicalShard(NamedTuple):
    """The compiled facts about one logical shard.

    Attributes:
        number: its number among the logical shards of the plan, from 0.
        tail_records: the number of the tail's records that reach an output of stage 0's batches. A template does not
            count.
        num_blocks: the number of blocks with outputs; None if the order is endless.
        block_limit: the number of blocks that can be requested: num_blocks, but no positions from 2**63 on.
        one_to_one: True if output k is block k: no operation drops, splits or regroups elements.
        tail_grows: True if the outputs of the tail are the first outputs of this block in a longer order.
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
    def of(
        cls, number: int, pipeline: Pipeline, stages: Sequence[Sequence[Transformation]], instrument: Instrument
    ) -> Self:
        shard, one_to_one = pipeline.logical_shards[number], first_dynamic(pipeline.operations) is None
        leading = _leading(stages)
        partition = Partition(
            block=records_per_block(stages, pipeline.share),
            shard=shard,
            length=pipeline.order.length,
            tail_rule=tail_rule(pipeline.operations, shard),
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
            locator=Locator(pipeline.order, partition, instrument, len(pipeline.logical_shards)),
            leading=leading,
        )

    def records_between(self, first: int, stop: int) -> int:
        """Returns the number of this shard's records in blocks [first, stop), without the padding of the last one."""
        partition, tail = self.partition, self.partition.whole_blocks
        missing = partition.block - self.tail_records if tail is not None and first <= tail < stop else 0
        return (stop - first) * partition.block - missing

    def are_delivered(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns True for each position that reaches an output of some shard of a 1:1 pipeline, shape (m,)."""
        length, shards = self.partition.length, self.partition.shard.shard_count
        if length is None or self.partition.tail_rule is Tail.PADDED:
            return np.ones(len(positions), dtype=np.bool_)
        first = length // self.partition.global_block * self.partition.global_block
        share, extra = divmod(length - first, shards)
        if self.partition.tail_rule is Tail.TRIMMED:
            extra = 0
        # In the tail, the first shards have one position more.
        within, larger = positions - first, extra * (share + 1)
        is_larger = within < larger
        offsets = np.where(is_larger, within % (share + 1), (within - larger) % max(1, share))
        kept = np.where(is_larger, _tail_records(share + 1, self.leading), _tail_records(share, self.leading))
        delivered: NDArray[np.bool_] = (within < 0) | ((within < larger + share * (shards - extra)) & (offsets < kept))
        return delivered


def records_per_block(stages: Sequence[Sequence[Transformation]], share: Batch | None) -> int:
    """Returns the number of positions per block, given the operations of each stage."""
    if leading := _leading(stages):
        return math.prod(batch.batch_size for batch in leading)
    # A record before a FlatMap may have more children than a batch has elements.
    if len(stages) == 1 or any(isinstance(leaf, FlatMap) for operation in stages[0] for leaf in leaves(operation)):
        return 1
    regrouping = share if share is not None and len(stages) == 2 else stages[1][0]
    return regrouping.batch_size if isinstance(regrouping, Batch) else 1


def _leading(stages: Sequence[Sequence[Transformation]]) -> list[Batch]:
    return [operation for operation in stages[0] if isinstance(operation, Batch)]


def _tail_records(count: int, leading: Sequence[Batch]) -> int:
    """Returns the number of the tail's records that are left after each Batch has dropped its remainder."""
    elements, size, kept = count, 1, count
    for batch in leading:
        size *= batch.batch_size
        if batch.drop_remainder:
            elements //= batch.batch_size
            kept = min(kept, elements * size)
        else:
            elements = math.ceil(elements / batch.batch_size)
    return kept
