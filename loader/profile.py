"""The time that each stage of a loader takes, as numbers and as a table."""

from collections.abc import Mapping
from typing import final

from millstream.loader.threads.profiler import CONSUMER, NEXT


@final
class Profile(dict[str, float]):
    """Seconds by stage, in the order of the pipeline. Printed, it is a table with the share of each stage.

    The seconds of a pipeline's stage are summed over all threads and processes, and its share is that of all stages.
    The table ends with the consumer's thread: inside `next`, and outside of it.
    """

    def __repr__(self) -> str:
        consumer = {stage: self[stage] for stage in (NEXT, CONSUMER) if stage in self}
        pipeline = {stage: seconds for stage, seconds in self.items() if stage not in consumer}
        width = max(map(len, ("stage", *self)))
        head = f"{'stage':<{width}}  {'seconds':>10}  share"
        line = "-" * len(head)
        return "\n".join([head, line, *_rows(pipeline, width), line, *_rows(consumer, width)])

    __str__ = __repr__


def _rows(seconds: Mapping[str, float], width: int) -> list[str]:
    whole = sum(seconds.values()) or 1.0
    return [f"{stage:<{width}}  {spent:>10.3f}  {spent / whole:>5.0%}" for stage, spent in seconds.items()]
