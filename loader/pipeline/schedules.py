"""The choice of a schedule: for one logical shard, or for several."""

from typing import TYPE_CHECKING, TypeAlias

from millstream.loader.pipeline.outputs import Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from millstream.loader.pipeline.feed import Feed
    from millstream.loader.pipeline.joined_schedule import JoinedSchedule

AnySchedule: TypeAlias = "Schedule | JoinedSchedule"
"""The calls of one pass over the records of a shard."""


def schedule_from(plan: Plan, position: Position, feed: "Feed | None" = None) -> AnySchedule:
    """Returns the schedule of one pass over the stream of a plan.

    Args:
        plan: the plan of the calls.
        position: the position of the first output.
        feed: the source of the elements of stage 0; None if they are read.
    """
    if plan.share is not None:
        from millstream.loader.pipeline.joined_schedule import JoinedSchedule  # noqa: PLC0415  (lazy: rare)

        return JoinedSchedule(plan, plan.share, position)
    (cursor,) = position
    return Schedule(plan, cursor, feed=feed)
