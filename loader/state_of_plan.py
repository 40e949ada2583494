"""The stream of a plan and the positions in it: their states, the length, and the progress."""

import dataclasses

from millstream.loader.checkpoints.fingerprint import Declared, Fingerprint
from millstream.loader.checkpoints.state import LoaderState, SavedCursor, Stream
from millstream.loader.pipeline.calls import Cursor, Position
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.shards import first_dynamic, joining_batch


def stream_of(plan: Plan, fingerprint: Fingerprint | None = None) -> Stream:
    """Returns the stream of a plan, with the current fingerprint of its source, sampler and operations if not given."""
    partition, shard = plan.partition, plan.pipeline.shard
    return Stream(
        shard_index=shard.shard_index,
        shard_count=shard.shard_count,
        logical_shards=partition.shard.shard_count,
        drop_remainder=shard.drop_remainder,
        global_batch=partition.global_block,
        one_to_one=plan.one_to_one,
        length=partition.length,
        fingerprint=fingerprint or fingerprint_of_pipeline(plan.pipeline),
    )


def declared_by(pipeline: Pipeline) -> Declared:
    """Returns the description of the source and the operations of a pipeline."""
    sizes: dict[int, str] | None = None if first_dynamic(pipeline.operations) is None else {}
    if sizes is not None and (joining := joining_batch(pipeline.operations)) is not None:
        # Each shard has a part of the batch, whose size depends on the number of shards.
        number, batch = joining
        sizes[number] = f"{batch.batch_size * pipeline.shard.shard_count} over all shards"
    return Declared(pipeline.source, pipeline.operations, sizes)


def fingerprint_of_pipeline(pipeline: Pipeline, declared: Declared | None = None) -> Fingerprint:
    """Returns the fingerprint of a pipeline. Only the sampler is described if the rest is given."""
    found = (declared or declared_by(pipeline)).with_sampler(pipeline.sampler)
    # The number of errors is not part of it, because it decides where the stream stops, not its content.
    own = {} if pipeline.tolerance is None else {"on_error": "skip"}
    return dataclasses.replace(found, identity={**found.identity, **own})


def state_at(position: Position, step: int, plan: Plan, stream: Stream) -> LoaderState:
    cursors = tuple(saved_cursor(cursor, plan) for cursor in position)
    return LoaderState(step, cursors, stream.before(max(cursor.position for cursor in cursors)))


def saved_cursor(cursor: Cursor, plan: Plan) -> SavedCursor:
    """Returns the cursor of a logical shard of a plan as a state has it."""
    partition = plan.partition
    position, whole_blocks = cursor.block * partition.global_block, partition.whole_blocks
    return SavedCursor(
        # After a short or padded batch, the end of the order: the remainder of its block has no records.
        position=position if partition.length is None else min(position, partition.length),
        skip=cursor.skip,
        is_final=whole_blocks is not None and cursor.block > whole_blocks if plan.one_to_one else cursor.is_final,
    )


def count_outputs(plan: Plan, owner: str) -> int:
    """Returns the number of outputs of a stream. If it is unknown, a TypeError says why `owner` has no `len()`."""
    if not plan.one_to_one:
        raise TypeError(f"This {owner} has no len(): the number of outputs depends on {plan.deciding}.")
    num_blocks = plan.shards[0].num_blocks
    if num_blocks is None:
        raise TypeError(f"This {owner} has no len(): its sampler is endless. Pass num_epochs to the sampler.")
    return num_blocks


def epoch_of(plan: Plan, position: Position) -> int | None:
    """Returns the epoch of the first record that is not consumed, from 0; None if the order has no epochs."""
    num_records, length = plan.pipeline.order.num_records, plan.pipeline.order.length
    epoch = plan.pipeline.epoch
    if not num_records:
        return epoch if num_records is None else num_records
    first_epoch: int = getattr(plan.pipeline.sampler, "first_epoch", epoch or 0)
    first = min(cursor.block for cursor in position) * plan.partition.global_block
    return first_epoch + (first if length is None else min(first, length)) // num_records
