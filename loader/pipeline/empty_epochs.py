"""Says in the log when Filters have let nothing through for a whole epoch: a wrong key, perhaps, or a wrong split.

That is not an error: a random Filter may let something through in the next epoch. But `next` reads on until one does,
perhaps forever, and only this line says why.
"""

import dataclasses
from typing import final

from millstream.loader.pipeline.plan import Plan

EPOCHS_BETWEEN = 10
"""The next line comes after this many times as many epochs as the last one."""


@dataclasses.dataclass(slots=True)
class _Watch:
    """What is known of one stage that may drop elements.

    Attributes:
        filters: what to call its Filters and FlatMaps.
        blocks: how many blocks were read since it has last passed anything on.
        epochs: after how many epochs of them that is said.
    """

    filters: str
    blocks: int = 0
    epochs: int = 1


@final
class EmptyEpochs:
    """Watches the stages of one pass over a stream.

    Args:
        plan: what the stream is made by.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._watches = {
            number: _Watch(" and ".join(stage.filters)) for number, stage in enumerate(plan.stages) if stage.filters
        }

    def note(self, stage: int, blocks: int, num_outputs: int) -> None:
        """Takes note of a run of outputs, in the order of the stream.

        Args:
            stage: what made it.
            blocks: how many blocks were read for it; those of later stages are read by stage 0.
            num_outputs: how many outputs there are.
        """
        for watch in self._watches.values():
            watch.blocks += blocks
        if (noted := self._watches.get(stage)) is None:
            return
        if num_outputs:
            noted.blocks, noted.epochs = 0, 1
        elif noted.blocks >= noted.epochs * self._plan.blocks_per_epoch:
            import logging  # noqa: PLC0415  (takes long to import)

            num_records = self._plan.pipeline.order.num_records or len(self._plan.pipeline.source)
            logging.getLogger("millstream").warning(
                "millstream: %s dropped all %d records of %s. "
                "Reading continues until a record passes, or until the stream ends.",
                noted.filters,
                min(noted.blocks * self._plan.partition.block, noted.epochs * num_records),
                "an epoch" if noted.epochs == 1 else f"{noted.epochs} epochs",
            )
            noted.epochs *= EPOCHS_BETWEEN
