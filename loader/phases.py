"""The phases of a pipeline: operations that run without regrouping, compiled into steps."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from millstream.loader.elements import Origins
from millstream.loader.stage_clock import StageClock
from millstream.loader.steps import Step, compile_step
from millstream.transforms import Batch, Filter, RandomMap, Transformation

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """Operations that run without regrouping.

    Attributes:
        steps: the compiled operations, the regrouping Batch first in every phase but phase 0.
        batch: that Batch; None in phase 0.
        num_record_steps: how many of the steps come before the first Batch: these work element by element, so a unit
            may be cut anywhere between them.
        filters: what to call those operations that may drop elements.
    """

    steps: tuple[Step, ...]
    batch: Batch | None
    num_record_steps: int
    filters: tuple[str, ...]

    @property
    def is_plain_stack(self) -> bool:
        """Whether the phase stacks elements and does nothing else: no code of the user's runs in it."""
        return self.batch is not None and self.batch.batch_fn is None and len(self.steps) == 1


def operation_label(number: int, name: str) -> str:
    """Returns what to call an operation where the whole pipeline is looked at."""
    return f"operations[{number}], {name}"


def split_phases(operations: Sequence[Transformation]) -> list[list[Transformation]]:
    """Returns the operations of each phase; every phase but the first begins with the Batch that regroups."""
    groups: list[list[Transformation]] = [[]]
    whole_units = True
    for operation in operations:
        if isinstance(operation, Batch) and not whole_units:
            groups.append([])
        whole_units = whole_units and operation.keeps_count
        groups[-1].append(operation)
    return groups


def compile_phases(
    groups: Sequence[Sequence[Transformation]],
    names: Sequence[str],
    streams: Callable[[Origins, int], Iterator["np.random.Generator"]],
    *,
    is_template: Callable[[int], bool],
    clock: StageClock,
) -> tuple[Phase, ...]:
    """Returns the phases.

    Args:
        groups: the operations of each phase.
        names: what to call each operation.
        streams: gives the generators of a random operation, given its number among those.
        is_template: says of a position whether its record is read as a template only.
        clock: what measures each step.
    """
    phases: list[Phase] = []
    number = random_number = 0
    maker: str | None = None
    for group in groups:
        steps, filters = [], []
        for operation in group:
            name = names[number]
            label = operation_label(number, name)
            if not operation.keeps_count:
                filters.append(label)
            step = compile_step(
                operation,
                number,
                name,
                maker=maker,
                streams=streams,
                random_number=random_number,
                is_template=is_template,
            )
            steps.append(clock.timed(label, step))
            maker = maker if isinstance(operation, Filter) else label
            number += 1
            random_number += isinstance(operation, RandomMap)
        batches = [i for i, operation in enumerate(group) if isinstance(operation, Batch)]
        first = group[0] if phases else None
        phases.append(
            Phase(
                steps=tuple(steps),
                batch=first if isinstance(first, Batch) else None,
                num_record_steps=batches[0] if batches else len(group),
                filters=tuple(filters),
            )
        )
    return tuple(phases)
