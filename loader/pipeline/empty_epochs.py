"""Warnings about Filters that drop all records of an epoch, because of a wrong key or split, for instance.

That is not an error, because a random Filter may pass a record in the next epoch. But `next` continues to read until a
record passes, possibly forever, and only this warning says why.
"""

import dataclasses
from typing import final

from millstream.loader.pipeline.plan import Plan

EPOCHS_BETWEEN = 10
"""The factor between the numbers of epochs after which one warning and the next are logged."""


@dataclasses.dataclass(slots=True)
class _Count:
    """The count of one stage that may drop elements.

    Attributes:
        filters: the labels of its Filters and FlatMaps.
        blocks: the number of blocks read since an element passed.
        epochs: the number of epochs after which the next warning is logged.
    """

    filters: str
    blocks: int = 0
    epochs: int = 1


@final
class EmptyEpochs:
    """Counts the blocks of one pass over a stream from which no stage has passed an element.

    Args:
        plan: the plan of the stream.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._counts = {
            number: _Count(" and ".join(stage.filters)) for number, stage in enumerate(plan.stages) if stage.filters
        }

    def record(self, stage: int, blocks: int, num_outputs: int) -> None:
        """Records outputs, in the order of the stream.

        Args:
            stage: the stage of the outputs.
            blocks: the number of blocks read for them; only stage 0 reads blocks.
            num_outputs: the number of outputs.
        """
        for count in self._counts.values():
            count.blocks += blocks
        if (own := self._counts.get(stage)) is None:
            return
        if num_outputs:
            own.blocks, own.epochs = 0, 1
        elif own.blocks >= own.epochs * self._plan.blocks_per_epoch:
            import logging  # noqa: PLC0415  (lazy: slow to import)

            num_records = self._plan.pipeline.order.num_records or len(self._plan.pipeline.source)
            logging.getLogger("millstream").warning(
                "millstream: %s dropped all %d records of %s. "
                "Reading continues until a record passes, or until the stream ends.",
                own.filters,
                min(own.blocks * self._plan.partition.block, own.epochs * num_records),
                "an epoch" if own.epochs == 1 else f"{own.epochs} epochs",
            )
            own.epochs *= EPOCHS_BETWEEN
