"""Warnings and errors about Filters that drop too many records, because of a wrong key or split, for instance."""

import dataclasses
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.warn import log_warning
from millstream.loader.pipeline.calls import Outputs
from millstream.loader.pipeline.elements import Location
from millstream.loader.pipeline.plan import Plan

EPOCHS_BETWEEN = 10
"""The factor between the numbers of epochs after which one warning and the next are logged."""


@dataclasses.dataclass(slots=True)
class _Count:
    """The blocks read since an element passed one stage, and the epochs after which the next warning is logged."""

    filters: str
    blocks: int = 0
    epochs: int = 1


@final
class EmptyEpochs:
    """Counts the blocks of one pass over a stream from which no stage has passed an element. An empty epoch is logged.

    That is not an error, because a random Filter may pass a record in the next epoch. But `next` continues to read
    until a record passes, possibly forever, and only this warning says why.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._counts = {
            number: _Count(" and ".join(stage.filters)) for number, stage in enumerate(plan.stages) if stage.filters
        }

    def record(self, stage: int, blocks: int, num_outputs: int) -> None:
        """Records the number of outputs of a stage, and of blocks read for them, in the order of the stream."""
        for count in self._counts.values():
            count.blocks += blocks
        if (own := self._counts.get(stage)) is None:
            return
        if num_outputs:
            own.blocks, own.epochs = 0, 1
        elif own.blocks >= own.epochs * self._plan.blocks_per_epoch:
            num_records = self._plan.pipeline.order.num_records or len(self._plan.pipeline.source)
            dropped = min(own.blocks * self._plan.partition.block, own.epochs * num_records)
            log_warning(
                f"{own.filters} dropped all {dropped} records of "
                f"{'an epoch' if own.epochs == 1 else f'{own.epochs} epochs'}. "
                "Reading continues until a record passes, or until the stream ends."
            )
            own.epochs *= EPOCHS_BETWEEN


WINDOW: Final = 1000
"""The number of consecutive records per window, as in Grain."""


@final
class FilterWindows:
    """Counts the records that survive Filters in one pass of a single shard. Too few are logged, or end the stream.

    The windows are fixed positions of the order, so results do not depend on workers, threads or call sizes. A stream
    that is resumed within a window counts from the next one on.
    """

    def __init__(self, plan: Plan, block: int) -> None:
        self._plan = plan
        self._limits = plan.pipeline.filter_limits
        self._filters = " and ".join(plan.stages[0].filters)
        self._end = -(-block * plan.partition.global_block // WINDOW) * WINDOW + WINDOW
        self._kept = 0

    def check(self, outputs: Outputs, stop: int) -> None:
        """Counts outputs of stage 0, in the order of the stream. Truncates them if too few records are left."""
        if outputs.error is not None:
            return
        length = self._plan.partition.length
        end = stop * self._plan.partition.global_block
        positions = outputs.origins.position
        counted = int(np.searchsorted(positions, self._end - WINDOW))
        while self._end <= (end if length is None else min(end, length)):
            row = int(np.searchsorted(positions, self._end))
            dropped = 1 - (self._kept + _num_different(positions[counted:row])) / WINDOW
            if self._exceeds_limit(dropped):
                block = (self._end - 1) // self._plan.partition.global_block
                outputs.end_with(ValueError(self._text(dropped, "error")), row, Location(self._end - 1, block))
                return
            self._kept, counted, self._end = 0, row, self._end + WINDOW
        self._kept += _num_different(positions[counted:])

    def _exceeds_limit(self, dropped: float) -> bool:
        """Returns True if the share dropped is an error. Logs a warning if it reaches that limit."""
        if self._limits.error is not None and dropped >= self._limits.error:
            return True
        if self._limits.warning is not None and dropped >= self._limits.warning:
            self._plan.warn_once("filters", self._text(dropped, "warning"))
        return False

    def _text(self, dropped: float, limit: str) -> str:
        name = f"{'a' if limit == 'warning' else 'an'} {limit} is {getattr(self._limits, limit):.1%}"
        return (
            f"{self._filters} left {round((1 - dropped) * WINDOW)} of {WINDOW} records, those at the positions "
            f"{self._end - WINDOW} to {self._end - 1}: {dropped:.1%} were dropped, and the limit for {name}. If that "
            "is expected, filter ahead of training, or raise the limit (None disables it)."
        )


def _num_different(positions: NDArray[np.int64]) -> int:
    """Returns the number of records that ordered elements come from. A FlatMap makes several elements from one."""
    return int(np.count_nonzero(positions[1:] != positions[:-1])) + 1 if len(positions) else 0
