"""A compiled pipeline: its stages, which are operations that run without regrouping, and its logical shards.

A shard runs one logical shard, or several whose elements its batches concatenate. Each advances at its own pace.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.randomness import Purpose, derive_seed
from millstream.loader.pipeline.elements import seed_of, streams_of
from millstream.loader.pipeline.order import Locator, pack_step
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.shards import Partition, Tail, first_dynamic, tail_rule
from millstream.loader.pipeline.steps import Step, compile_step, depth_step, group_step, prepare_step
from millstream.samplers.base import AdaptedSampler, VectorisedSampler, has_varying_batches
from millstream.transforms import Batch, Filter, FlatMap, Pack, Transformation
from millstream.transforms.components import leaves
from millstream.transforms.grouping import Grouping, GroupingOperation

Instrument: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""A function that wraps another one, given the name of the stage whose work that one does."""


class Stage(NamedTuple):
    """Operations that run without regrouping.

    Attributes:
        labels: for each step, the name under which it is measured; "" for one that is not.
        grouping: the grouping of the stage before's elements in one logical shard; None in stage 0, which reads blocks.
        num_record_steps: the number of steps before the first that gathers elements. They work element by element, so
            a block may be divided anywhere between elements.
        filters: the labels of operations that may drop elements.
        unit: the size of one output of the grouping; None if outputs are counted.
        divides_units: True if an output of the grouping may become no output of the stage, or several. A position then
            has two numbers for this stage: the consumed size of the group, and the outputs of the next unit.
        num_remote_steps: the number of steps before the first local operation (see `Pipeline.num_local`).
        splits: True if a group may become more outputs than it has; not known of stage 0 (see `LogicalShard`).
        runs_user_code: True if the stage does more than copy elements. Otherwise the consumer runs it, because sending
            the elements to a worker would take longer.
    """

    steps: tuple[Step, ...]
    labels: tuple[str, ...]
    grouping: Grouping | None
    num_record_steps: int
    filters: tuple[str, ...]
    unit: int | None
    divides_units: bool
    num_remote_steps: int
    splits: bool
    runs_user_code: bool

    def measured_by(self, instrument: Instrument) -> Self:
        """Returns the stage with steps that are wrapped by an instrument."""
        pairs = zip(self.labels, self.steps, strict=True)
        return self._replace(steps=tuple([instrument(label, step) if label else step for label, step in pairs]))

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
) -> tuple[Stage, ...]:
    """Returns the compiled stages. `is_template` is true of a block whose record is read as a template only."""
    before = _Before.each(pipeline)
    starts = itertools.accumulate(map(len, groups), initial=0)
    following = [*(group[0] for group in groups[1:]), None]
    stages = [
        _Uncompiled(pipeline, group, start, next_one, is_first=number == 0)
        for number, (group, start, next_one) in enumerate(zip(groups, starts, following, strict=False))
    ]
    return tuple(stage.compiled(before, is_template) for stage in stages)


@final
@dataclasses.dataclass(frozen=True)
class _Uncompiled:
    """The operations of one stage.

    Attributes:
        start: the number of the first operation in the pipeline.
        next_one: the operation that begins the next stage; None if this is the last one.
    """

    pipeline: Pipeline
    operations: Sequence[Transformation]
    start: int
    next_one: Transformation | None
    is_first: bool

    def compiled(self, before: "list[_Before]", is_template: Callable[[int], bool]) -> Stage:
        pipeline, operations, grouping = self.pipeline, self.operations, self.grouping
        unit = None if grouping is None else grouping.output_size
        divides_units = unit is not None and _changes_count(operations[1:], self.next_one)
        checked = _checked_for_depth(operations, skips=pipeline.tolerance is not None and self.is_first)
        stop = self.start + len(operations)
        # The steps of each operation, each with its label.
        steps: list[list[tuple[str, Step]]] = []
        for number in range(self.start, stop):
            step = _step_of(pipeline, number, before[number], is_template, numbers_units=divides_units)
            checks = [("", depth_step(pipeline.error_labels[number]))] if number - self.start in checked else []
            steps.append([(pipeline.labels[number], step), *checks])
        if isinstance(self.next_one, GroupingOperation):
            # Elements are reduced to what it needs by the worker that makes them.
            steps.append([(pipeline.labels[stop], prepare_step(self.next_one, pipeline.error_labels[stop]))])
        # The number of steps before each operation. The preparation for a grouping belongs to the one that groups.
        num_steps = [0, *itertools.accumulate(map(len, steps))]
        first_gathering = next((row for row, operation in enumerate(operations) if operation.gathers), -1)
        first_local = max(0, len(pipeline.operations) - pipeline.num_local - self.start)
        pairs = list(itertools.chain.from_iterable(steps))
        return Stage(
            steps=tuple(step for _, step in pairs),
            labels=tuple(label for label, _ in pairs),
            grouping=grouping,
            num_record_steps=num_steps[first_gathering],
            num_remote_steps=num_steps[min(len(steps), first_local)],
            filters=self.filters,
            unit=unit,
            divides_units=divides_units,
            splits=not self.is_first and may_split(operations),
            runs_user_code=self.is_first or len(operations) > 1 or not _only_copies(operations[0]),
        )

    @property
    def grouping(self) -> Grouping | None:
        if self.next_one is None and self.pipeline.share is not None:
            return self.pipeline.share
        return self.operations[0] if not self.is_first and isinstance(self.operations[0], Grouping) else None

    @property
    def filters(self) -> tuple[str, ...]:
        """The labels of operations that may drop elements. If the user's do, the others need not be named."""
        labels = self.pipeline.labels[self.start :]
        dropping = [
            (label, operation.is_between)
            for label, operation in zip(labels, self.operations, strict=False)
            if not operation.keeps_count and not operation.regroups
        ]
        if isinstance(self.next_one, GroupingOperation):
            dropping.append((labels[len(self.operations)], True))
        named = [label for label, is_between in dropping if not is_between]
        return tuple(named or [label for label, _ in dropping])


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
        by_block=has_varying_batches(pipeline.order),
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
    return operation if seed is None else operation.seeded(derive_seed(seed, Purpose.GROUPING, number))


@final
class LogicalShard(NamedTuple):
    """The compiled facts about one logical shard.

    Attributes:
        number: its number among the logical shards of the plan, from 0.
        tail_records: the number of the tail's records that reach an output of stage 0's batches. A template does not
            count.
        num_blocks: the number of blocks with outputs; None if the order is endless.
        block_limit: the number of blocks that can be requested: num_blocks, but no positions from 2**63 on.
        one_to_one: True if output k is block k: no operation drops, splits or regroups elements.
        tail_grows: True if the outputs of the tail are the first outputs of this block in a longer order.
        splits: True if an element of stage 0 may become several elements of a later stage.
        locator: the locator for lookups by people, which take no time of the pipeline.
        first_batches: the Batches of stage 0.
    """

    number: int
    partition: Partition
    tail_records: int
    num_blocks: int | None
    block_limit: int
    one_to_one: bool
    tail_grows: bool
    splits: bool
    locator: Locator
    first_batches: Sequence[Batch]

    @classmethod
    def of(cls, number: int, pipeline: Pipeline, stages: Sequence[Sequence[Transformation]]) -> Self:
        shard, one_to_one = pipeline.logical_shards[number], first_dynamic(pipeline.operations) is None
        first_batches = _first_batches(stages)
        partition = Partition(
            block=records_per_block(stages, pipeline.share),
            shard=shard,
            length=pipeline.order.length,
            tail_rule=tail_rule(pipeline.operations, shard),
        )
        tail_records = _tail_records(partition.tail_share, first_batches)
        if partition.tail_rule is not Tail.PADDED and tail_records < len(partition.tail):
            # What batches drop is not read.
            partition = dataclasses.replace(partition, tail_limit=tail_records)
        return cls(
            number=number,
            partition=partition,
            tail_records=tail_records,
            num_blocks=partition.num_blocks,
            block_limit=partition.block_limit,
            one_to_one=one_to_one,
            tail_grows=not one_to_one and not first_batches and shard.shard_count == 1,
            splits=len(stages) > 1 and may_split(stages[0]),
            locator=Locator(pipeline.order, partition, len(pipeline.logical_shards)),
            first_batches=first_batches,
        )

    def records_between(self, first: int, stop: int) -> int:
        """Returns the number of this shard's records in blocks [first, stop), without the padding of the last one."""
        if self.locator.varying is not None:
            return int(self.locator.varying.are_used(self.partition.positions(first, stop)).sum())
        partition, tail = self.partition, self.partition.complete_blocks
        missing = partition.block - self.tail_records if tail is not None and first <= tail < stop else 0
        return (stop - first) * partition.block - missing

    def outputs_from(self, block: int, position: int = -1) -> int | None:
        """Returns the largest number of outputs of stage 0 from a position in a block on; None if it is not known."""
        if self.num_blocks is None or self.splits:
            return None
        if self.first_batches:
            return max(0, self.num_blocks - block)
        return self.partition.positions_from(block, position)

    def are_delivered(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns True for each position that reaches an output of some shard of a 1:1 pipeline, shape (m,)."""
        length, shards = self.partition.length, self.partition.shard.shard_count
        if length is None or self.partition.tail_rule is Tail.PADDED:
            return np.ones(len(positions), dtype=np.bool_)
        first = length // self.partition.global_block * self.partition.global_block
        share, extra = divmod(length - first, shards)
        if self.partition.tail_rule is Tail.TRIMMED:
            extra = 0
        # In the tail, the first shards have one position more.
        within, larger = positions - first, extra * (share + 1)
        is_larger = within < larger
        offsets = np.where(is_larger, within % (share + 1), (within - larger) % max(1, share))
        kept = np.where(
            is_larger, _tail_records(share + 1, self.first_batches), _tail_records(share, self.first_batches)
        )
        delivered: NDArray[np.bool_] = (within < 0) | ((within < larger + share * (shards - extra)) & (offsets < kept))
        return delivered


def records_per_block(stages: Sequence[Sequence[Transformation]], share: Batch | None) -> int:
    """Returns the number of positions per block, given the operations of each stage."""
    if first_batches := _first_batches(stages):
        return math.prod(batch.batch_size for batch in first_batches)
    # A record before a FlatMap may have more children than a batch has elements.
    if len(stages) == 1 or may_split(stages[0]):
        return 1
    regrouping = share if share is not None and len(stages) == 2 else stages[1][0]
    return regrouping.batch_size if isinstance(regrouping, Batch) else 1


def may_split(operations: Sequence[Transformation]) -> bool:
    return any(isinstance(leaf, FlatMap) for operation in operations for leaf in leaves(operation))


def used_records(operations: Sequence[Transformation], length: int) -> int:
    """Returns the number of records that outputs of a 1:1 pipeline are made of, on a single shard."""
    first_batches = _first_batches([operations])
    block = math.prod(batch.batch_size for batch in first_batches)
    return length // block * block + _tail_records(length % block, first_batches)


def _first_batches(stages: Sequence[Sequence[Transformation]]) -> list[Batch]:
    return [operation for operation in stages[0] if isinstance(operation, Batch)]


def _tail_records(count: int, first_batches: Sequence[Batch]) -> int:
    """Returns the number of the tail's records that are left after each Batch has dropped its remainder."""
    elements, size, kept = count, 1, count
    for batch in first_batches:
        size *= batch.batch_size
        if batch.drop_remainder:
            elements //= batch.batch_size
            kept = min(kept, elements * size)
        else:
            elements = math.ceil(elements / batch.batch_size)
    return kept
