"""Says in the log when Filters have let nothing through for a whole epoch: a wrong key, perhaps, or a wrong split.

That is not an error: a random Filter may let something through in the next epoch. But `next` reads on until one does,
perhaps for ever, and only this line says why.
"""

import dataclasses
from typing import final

from millstream.loader.plan import Plan

EPOCHS_BETWEEN = 10
"""The next line comes after this many times as many epochs as the last one."""


@dataclasses.dataclass(slots=True)
class _Watch:
    """What is known of one phase that may drop elements.

    Attributes:
        filters: what to call its Filters and FlatMaps.
        units: how many units were read since it has last passed anything on.
        epochs: after how many epochs of them that is said.
    """

    filters: str
    units: int = 0
    epochs: int = 1


@final
class EmptyEpochs:
    """Watches the phases of one pass over a stream.

    Args:
        plan: what the stream is made by.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._watches = {
            number: _Watch(" and ".join(phase.filters)) for number, phase in enumerate(plan.phases) if phase.filters
        }

    def note(self, phase: int, units: int, num_outputs: int) -> None:
        """Takes note of a run of outputs, in the order of the stream.

        Args:
            phase: what made it.
            units: how many units were read for it; those of later phases are read by phase 0.
            num_outputs: how many outputs there are.
        """
        for watch in self._watches.values():
            watch.units += units
        if (noted := self._watches.get(phase)) is None:
            return
        if num_outputs:
            noted.units, noted.epochs = 0, 1
        elif noted.units >= noted.epochs * self._plan.units_per_epoch:
            import logging  # noqa: PLC0415  (takes long to import)

            logging.getLogger("millstream").warning(
                "millstream: %s let nothing through in %s: none of %d records. "
                "The stream reads on until something is left, or to its end.",
                noted.filters,
                "a whole epoch" if noted.epochs == 1 else f"{noted.epochs} epochs",
                noted.units * self._plan.deal.unit,
            )
            noted.epochs *= EPOCHS_BETWEEN
