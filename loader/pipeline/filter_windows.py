"""How much Filters drop of each thousand records in a row: too much is said in the log, or ends the stream.

The thousands are positions of the order, so that what is said, and where, does not depend on who makes the elements,
nor on how many at a time. A stream that is resumed within one of them counts from the next one on.
"""

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from millstream.loader.pipeline.outputs import Outputs
from millstream.loader.pipeline.plan import Plan

WINDOW: Final = 1000
"""How many records in a row are counted together; as in Grain."""


@final
class FilterWindows:
    """Counts what is left of the records of one pass, which all come to one shard.

    Args:
        plan: what the stream is made by.
        block: the first block that is read.
    """

    def __init__(self, plan: Plan, block: int) -> None:
        self._plan = plan
        self._limits = plan.pipeline.filter_limits
        self._filters = " and ".join(plan.stages[0].filters)
        self._end = -(-block * plan.partition.global_block // WINDOW) * WINDOW + WINDOW
        self._kept = 0

    def check(self, outputs: Outputs, stop: int) -> None:
        """Takes note of outputs of stage 0, in the order of the stream; cuts them off where too few are left.

        Args:
            outputs: what was made of blocks.
            stop: the block after these.
        """
        if outputs.error is not None:
            return
        length = self._plan.partition.length
        end = stop * self._plan.partition.global_block
        positions = outputs.origins.position
        counted = int(np.searchsorted(positions, self._end - WINDOW))
        while self._end <= (end if length is None else min(end, length)):
            row = int(np.searchsorted(positions, self._end))
            dropped = 1 - (self._kept + _num_different(positions[counted:row])) / WINDOW
            if self._says(dropped):
                outputs.values, outputs.origins = outputs.values[:row], outputs.origins.take(slice(row))
                outputs.first = min(outputs.first, row)
                outputs.error = ValueError(self._text(dropped, "error"))
                return
            self._kept, counted, self._end = 0, row, self._end + WINDOW
        self._kept += _num_different(positions[counted:])

    def _says(self, dropped: float) -> bool:
        """Says it where too few are left for the log; returns whether there are too few to continue."""
        if self._limits.error is not None and dropped >= self._limits.error:
            return True
        if self._limits.warning is not None and dropped >= self._limits.warning:
            self._plan.tell_once("filters", self._text(dropped, "warning"))
        return False

    def _text(self, dropped: float, limit: str) -> str:
        what = f"{'a' if limit == 'warning' else 'an'} {limit} is {getattr(self._limits, limit):.1%}"
        return (
            f"{self._filters} left {round((1 - dropped) * WINDOW)} of {WINDOW} records, those at the positions "
            f"{self._end - WINDOW} to {self._end - 1}: {dropped:.1%} were dropped, and the limit for {what}. If so "
            "many are to be dropped, filter the data ahead of training, or set another limit, or None."
        )


def _num_different(positions: NDArray[np.int64]) -> int:
    """Returns how many records some elements, in order, come from: a FlatMap makes several of one."""
    return int(np.count_nonzero(positions[1:] != positions[:-1])) + 1 if len(positions) else 0
