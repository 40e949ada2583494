"""The stages of a pipeline: operations that run without regrouping, compiled into steps."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from millstream.loader.pipeline.grouping import group_step, prepare_step
from millstream.loader.pipeline.packing import pack_step
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.random_streams import seed_of, streams_of
from millstream.loader.pipeline.steps import Step, compile_step
from millstream.randomness import OF_GROUPS
from millstream.samplers.base import AdaptedSampler, VectorisedSampler
from millstream.seed_hashing import derive_seed
from millstream.transforms import Batch, Filter, Pack, RandomMap, Transformation
from millstream.transforms.grouping import Grouping, GroupingOperation
from millstream.transforms.only_for import leaves

Watch: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Returns a function that does the same as one given, which does the part of the work that has this name."""


class Stage(NamedTuple):
    """Operations that run without regrouping.

    Attributes:
        steps: the compiled operations, the one that regroups first in every stage but stage 0.
        grouping: how the elements of the stage before are grouped; None in stage 0, which reads blocks.
        num_record_steps: how many of the steps come before the first that makes an element of several: these work
            element by element, so a block may be cut anywhere between them.
        filters: what to call those operations that may drop elements.
        unit: how much of a group each output of its grouping uses up; None if outputs are counted.
        divides_units: True if what the grouping makes of a unit may become no output, or several. A position then has
            two numbers for this stage: how much of the group is used up, and how many outputs of the next unit.
        runs_user_code: whether more is done than to copy what is in elements. Else the consumer does it: to send the
            elements to a worker would take it longer, as `loader/README.md` shows.
    """

    steps: tuple[Step, ...]
    grouping: Grouping | None
    num_record_steps: int
    filters: tuple[str, ...]
    unit: int | None
    divides_units: bool
    runs_user_code: bool

    @property
    def num_cursor_numbers(self) -> int:
        """The number of numbers that a position has for this stage."""
        return 2 if self.divides_units else 1


def split_stages(operations: Sequence[Transformation]) -> list[list[Transformation]]:
    """Returns the operations of each stage; every stage but the first begins with the one that regroups."""
    groups: list[list[Transformation]] = [[]]
    whole_blocks = True
    for operation in operations:
        if operation.regroups or (isinstance(operation, Batch) and not whole_blocks):
            groups.append([])
        whole_blocks = whole_blocks and operation.keeps_count and not operation.regroups
        groups[-1].append(operation)
    return groups


def compile_stages(
    pipeline: Pipeline,
    groups: Sequence[Sequence[Transformation]],
    *,
    is_template: Callable[[int], bool],
    watch: Watch,
) -> tuple[Stage, ...]:
    """Returns the stages.

    Args:
        pipeline: whose they are.
        groups: the operations of each stage.
        is_template: says of a block whether its record is read as a template only.
        watch: wraps each step, given what the operation is called.
    """
    stages: list[Stage] = []
    streams = functools.partial(streams_of, pipeline.order)
    labels, number, random_number, shuffle_number = pipeline.labels, 0, 0, 0
    maker: str | None = None
    for stage, group in enumerate(groups):
        steps: list[Step] = []
        filters: list[str] = []
        own_filters: list[str] = []
        grouping = group[0] if stages and isinstance(group[0], Grouping) else None
        unit = None if grouping is None else grouping.output_size
        next_one = groups[stage + 1][0] if stage + 1 < len(groups) else None
        divides_units = unit is not None and _changes_count(group[1:], next_one)
        for operation in group:
            where = pipeline.places[number]
            if isinstance(operation, Pack):
                step = pack_step(operation, pipeline.order, where)
            elif isinstance(operation, GroupingOperation):
                with_seed = _seeded(operation, pipeline.order, shuffle_number)
                step = group_step(with_seed, where, numbers_units=divides_units)
                shuffle_number += operation.seed is None
            else:
                step = compile_step(
                    operation,
                    where,
                    maker=maker,
                    streams=streams,
                    random_number=random_number,
                    is_template=is_template,
                    components=pipeline.components,
                )
                if not operation.keeps_count:
                    (filters if operation.is_between else own_filters).append(labels[number])
            steps.append(watch(labels[number], step))
            maker = maker if isinstance(operation, Filter) else labels[number]
            number += 1
            random_number += sum(isinstance(part, RandomMap) for part in leaves(operation))
        if isinstance(next_one, GroupingOperation):
            # What it leaves out of the elements is left out where they are made.
            steps.append(watch(labels[number], prepare_step(next_one, pipeline.places[number])))
            filters.append(labels[number])
        gathering = [row for row, operation in enumerate(group) if operation.gathers]
        stages.append(
            Stage(
                steps=tuple(steps),
                grouping=grouping,
                num_record_steps=gathering[0] if gathering else len(steps),
                # If the user's own ones drop something, the others need not be named.
                filters=tuple(own_filters or filters),
                unit=unit,
                divides_units=divides_units,
                runs_user_code=not (stages and len(group) == 1 and _only_copies(group[0])),
            )
        )
    return tuple(stages)


def _changes_count(operations: Sequence[Transformation], next_one: Transformation | None) -> bool:
    """Returns whether operations, or the preparing for one that groups their outputs, may drop or split elements."""
    prepares = isinstance(next_one, GroupingOperation) and (next_one.may_drop or next_one.splits)
    return prepares or not all(operation.keeps_count for operation in operations)


def _only_copies(operation: Transformation) -> bool:
    return operation.regroups or (isinstance(operation, Batch) and operation.batch_fn is None)


def _seeded(operation: GroupingOperation, order: VectorisedSampler | AdaptedSampler, number: int) -> GroupingOperation:
    """Returns an operation that has a seed: its own, or one derived from the pipeline's seed and its number."""
    seed = seed_of(order)
    return operation if seed is None else operation.seeded(derive_seed(seed, OF_GROUPS - number))
