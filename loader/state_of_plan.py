"""What a state says: the stream of a plan, and a position in it."""

from millstream.loader.checkpoints.fingerprint import fingerprint_of
from millstream.loader.checkpoints.state import LoaderState, Stream
from millstream.loader.pipeline.outputs import Cursor
from millstream.loader.pipeline.plan import Plan


def stream_of(plan: Plan) -> Stream:
    """Returns which stream a plan makes, described as its source, sampler and operations are now."""
    pipeline, partition = plan.pipeline, plan.partition
    return Stream(
        shard_index=partition.shard.shard_index,
        shard_count=partition.shard.shard_count,
        drop_remainder=partition.shard.drop_remainder,
        global_batch=partition.global_block,
        one_to_one=plan.one_to_one,
        length=partition.length,
        fingerprint=fingerprint_of(pipeline.source, pipeline.sampler, pipeline.operations),
    )


def state_at(cursor: Cursor, step: int, plan: Plan, stream: Stream) -> LoaderState:
    """Returns the state of an iterator.

    Args:
        cursor: where it is.
        step: how many batches it has delivered.
        plan: what it runs.
        stream: what `stream_of` said of the plan.
    """
    position = cursor.block * stream.global_batch
    whole_blocks = plan.partition.whole_blocks
    return LoaderState(
        step=step,
        # After a short or padded batch, the end of the order: the rest of its block holds no records.
        position=position if stream.length is None else min(position, stream.length),
        skip=cursor.skip,
        is_final=whole_blocks is not None and cursor.block > whole_blocks if plan.one_to_one else cursor.is_final,
        stream=stream,
    )
