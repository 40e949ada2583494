"""Which schedule a pass over a stream has: that of one logical shard, of several, or of what is fed with elements."""

from typing import TYPE_CHECKING, TypeAlias

from millstream.loader.pipeline.outputs import Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from millstream.loader.pipeline.feed import Feed
    from millstream.loader.pipeline.joined_schedule import JoinedSchedule

AnySchedule: TypeAlias = "Schedule | JoinedSchedule"
"""The calls of one pass over what a shard reads."""


def schedule_from(plan: Plan, position: Position, feed: "Feed | None" = None) -> AnySchedule:
    """Returns the calls of one pass over the stream of a plan.

    Args:
        plan: what the calls are of.
        position: where the pass begins.
        feed: where the elements of stage 0 come from; None where they are read.
    """
    # Most streams do without what these import.
    if feed is not None:
        from millstream.loader.pipeline.fed_schedule import FedSchedule  # noqa: PLC0415

        return FedSchedule(plan, position[0], feed)
    if plan.share is not None:
        from millstream.loader.pipeline.joined_schedule import JoinedSchedule  # noqa: PLC0415

        return JoinedSchedule(plan, plan.share, position)
    (cursor,) = position
    return Schedule(plan, cursor)
