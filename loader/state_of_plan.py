"""What a state says: the stream of a plan, and a position in it."""

from millstream.loader.fingerprint import Fingerprint
from millstream.loader.plan import Plan
from millstream.loader.runs import Cursor
from millstream.loader.state import LoaderState, Stream


def stream_of(plan: Plan, fingerprint: Fingerprint) -> Stream:
    """Returns which stream a plan makes."""
    deal = plan.deal
    return Stream(
        shard_index=deal.shard.shard_index,
        shard_count=deal.shard.shard_count,
        drop_remainder=deal.shard.drop_remainder,
        global_batch=deal.global_unit,
        one_to_one=plan.one_to_one,
        length=deal.length,
        fingerprint=fingerprint,
    )


def state_at(place: Cursor, step: int, plan: Plan, stream: Stream) -> LoaderState:
    """Returns the state of an iterator.

    Args:
        place: where it is.
        step: how many batches it has delivered.
        plan: what it runs.
        stream: what `stream_of` said of the plan.
    """
    position = place.unit * stream.global_batch
    whole_units = plan.deal.whole_units
    return LoaderState(
        step=step,
        # After a short or padded batch, the end of the order: the rest of its unit holds no records.
        position=position if stream.length is None else min(position, stream.length),
        skip=place.skip,
        is_final=whole_units is not None and place.unit > whole_units if plan.one_to_one else place.is_final,
        stream=stream,
    )
