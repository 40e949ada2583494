"""The stages of a pipeline: operations that run without regrouping, compiled into steps."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from millstream.core.randomness import OF_GROUPS, derive_seed
from millstream.loader.operations.grouping import group_step, prepare_step
from millstream.loader.operations.random_streams import seed_of, streams_of
from millstream.loader.operations.steps import Step, compile_step, within_depth
from millstream.loader.pipeline.packing import pack_step
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.samplers.base import AdaptedSampler, VectorisedSampler
from millstream.transforms import Batch, Filter, Pack, Transformation
from millstream.transforms.grouping import Grouping, GroupingOperation

Instrument: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""A function that wraps another one, given the name of the stage whose work that one does."""


class Stage(NamedTuple):
    """Operations that run without regrouping.

    Attributes:
        grouping: the grouping of the stage before's elements in one logical shard; None in stage 0, which reads blocks.
        num_record_steps: the number of steps before the first that gathers elements. They work element by element, so
            a block may be divided anywhere between elements.
        filters: the labels of operations that may drop elements.
        unit: the size of one output of the grouping; None if outputs are counted.
        divides_units: True if an output of the grouping may become no output of the stage, or several. A position then
            has two numbers for this stage: the consumed size of the group, and the outputs of the next unit.
        num_remote_steps: the number of steps before the first local operation (see `Pipeline.num_local`).
        runs_user_code: True if the stage does more than copy elements. Otherwise the consumer runs it, because sending
            the elements to a worker would take longer.
    """

    steps: tuple[Step, ...]
    grouping: Grouping | None
    num_record_steps: int
    filters: tuple[str, ...]
    unit: int | None
    divides_units: bool
    num_remote_steps: int
    runs_user_code: bool

    @property
    def has_local_steps(self) -> bool:
        return self.num_remote_steps < len(self.steps)

    @property
    def num_cursor_numbers(self) -> int:
        return 2 if self.divides_units else 1


def split_stages(operations: Sequence[Transformation]) -> list[list[Transformation]]:
    """Returns the operations of each stage. Every stage but the first begins with the operation that regroups."""
    groups: list[list[Transformation]] = [[]]
    is_block_complete = True
    for operation in operations:
        if operation.regroups or (isinstance(operation, Batch) and not is_block_complete):
            groups.append([])
        is_block_complete = is_block_complete and operation.keeps_count and not operation.regroups
        groups[-1].append(operation)
    return groups


def compile_stages(
    pipeline: Pipeline,
    groups: Sequence[Sequence[Transformation]],
    *,
    is_template: Callable[[int], bool],
    instrument: Instrument,
) -> tuple[Stage, ...]:
    """Returns the compiled stages. `is_template` is true of a block whose record is read as a template only."""
    stages: list[Stage] = []
    before = _Before.each(pipeline)
    start = 0
    for stage, group in enumerate(groups):
        stop = start + len(group)
        next_one = groups[stage + 1][0] if stage + 1 < len(groups) else None
        grouping: Grouping | None = group[0] if stages and isinstance(group[0], Grouping) else None
        if next_one is None and pipeline.share is not None:
            grouping = pipeline.share
        unit = None if grouping is None else grouping.output_size
        divides_units = unit is not None and _changes_count(group[1:], next_one)
        labels, filters, own_filters = pipeline.labels[start:stop], list[str](), list[str]()
        checked = _checked_for_depth(group, skips=pipeline.tolerance is not None and not stages)
        steps = []
        for number, label in enumerate(labels, start):
            step = _step_of(pipeline, number, before[number], is_template, numbers_units=divides_units)
            if number - start in checked:
                step = within_depth(step, pipeline.error_labels[number])
            steps.append(instrument(label, step))
        for operation, label in zip(group, labels, strict=True):
            if not operation.keeps_count and not operation.regroups:
                (filters if operation.is_between else own_filters).append(label)
        if isinstance(next_one, GroupingOperation):
            # Elements are reduced to what it needs by the worker that makes them.
            steps.append(instrument(pipeline.labels[stop], prepare_step(next_one, pipeline.error_labels[stop])))
            filters.append(pipeline.labels[stop])
        gathering = [row for row, operation in enumerate(group) if operation.gathers]
        num_remote = len(pipeline.operations) - pipeline.num_local
        stages.append(
            Stage(
                steps=tuple(steps),
                grouping=grouping,
                num_record_steps=gathering[0] if gathering else len(steps),
                # Each operation is a step. The preparation for a grouping belongs to the operation that groups.
                num_remote_steps=min(len(steps), max(0, num_remote - start)),
                # If user operations drop elements, the others need not be named.
                filters=tuple(own_filters or filters),
                unit=unit,
                divides_units=divides_units,
                runs_user_code=not (stages and len(group) == 1 and _only_copies(group[0])),
            )
        )
        start = stop
    return tuple(stages)


class _Before(NamedTuple):
    """The operations before one of a pipeline: their numbers of draws, of shuffles, and the last that makes elements.

    Computed for all operations in one pass, because looking back from each takes quadratic time.
    """

    num_random: int
    num_shuffles: int
    producer: str | None

    @classmethod
    def each(cls, pipeline: Pipeline) -> "list[_Before]":
        before = [cls(0, 0, None)]
        for operation, label in zip(pipeline.operations, pipeline.labels, strict=False):
            num_random, num_shuffles, producer = before[-1]
            shuffles = isinstance(operation, GroupingOperation) and operation.seed is None
            producer = producer if isinstance(operation, Filter) else label
            before.append(cls(num_random + operation.num_random, num_shuffles + shuffles, producer))
        return before


def _step_of(
    pipeline: Pipeline, number: int, before: _Before, is_template: Callable[[int], bool], *, numbers_units: bool
) -> Step:
    """Returns the step of an operation, given its number in the pipeline."""
    operation, where = pipeline.operations[number], pipeline.error_labels[number]
    if isinstance(operation, Pack):
        return pack_step(operation, pipeline.order, where)
    if isinstance(operation, GroupingOperation):
        return group_step(_seeded(operation, pipeline.order, before.num_shuffles), where, numbers_units=numbers_units)
    return compile_step(
        operation,
        where,
        producer=before.producer,
        streams=functools.partial(streams_of, pipeline.order),
        random_number=before.num_random,
        is_template=is_template,
        components=pipeline.components,
    )


def _checked_for_depth(group: Sequence[Transformation], *, skips: bool) -> set[int]:
    """Returns the numbers of the operations whose results must not be nested too deeply.

    That is the last one, unless it stacks; and if failing records are skipped, the last one before those that gather.
    """
    last = [len(group) - 1] if group and not (isinstance(group[-1], Batch) and group[-1].batch_fn is None) else []
    first_gathering = next((row for row, operation in enumerate(group) if operation.gathers), 0)
    return {*last, *([first_gathering - 1] if skips else [])}


def _changes_count(operations: Sequence[Transformation], next_one: Transformation | None) -> bool:
    """Returns True if operations, or the preparation for a grouping of their outputs, may drop or split elements."""
    prepares = isinstance(next_one, GroupingOperation) and (next_one.may_drop or next_one.splits)
    return prepares or not all(operation.keeps_count for operation in operations)


def _only_copies(operation: Transformation) -> bool:
    return operation.regroups or (isinstance(operation, Batch) and operation.batch_fn is None)


def _seeded(operation: GroupingOperation, order: VectorisedSampler | AdaptedSampler, number: int) -> GroupingOperation:
    """Returns the operation with a seed: its own, or one derived from the pipeline's seed and its number."""
    seed = seed_of(order)
    return operation if seed is None else operation.seeded(derive_seed(seed, OF_GROUPS - number))
