"""The stream, said as plainly as possible: one record after another through generators, no blocks, no threads."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from millstream.core.randomness import Purpose, derive_seed, generator
from millstream.samplers import IndexSampler
from millstream.sharding import NoSharding, ShardOptions
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, PaddedBatch, RandomMap, Transformation
from millstream.transforms.batching.stack import stack
from millstream.transforms.components import leaves
from millstream.transforms.grouping import GroupingOperation
from support.oracle.groupings import PLAIN

Element = tuple[int, int, Any]  # position, index, value


def oracle(
    source: Sequence[Any],
    sampler: IndexSampler,
    operations: Sequence[Transformation],
    shard: ShardOptions | None = None,
    failing: "Failing | None" = None,
) -> Iterator[Any]:
    """Yields the stream of one shard, in the order of the design: shuffle, partition, read, operate.

    With `failing`, records that fail are skipped, and listed there.
    """
    operations = with_seeds(operations, sampler)
    shard = shard or NoSharding()
    share = (shard.logical_shards or shard.shard_count) // shard.shard_count
    if share == 1 or all(operation.keeps_count and not operation.regroups for operation in operations):
        elements = elements_of(source, sampler, operations, operations, shard, failing=failing)
    else:
        last = max(number for number, operation in enumerate(operations) if isinstance(operation, Batch))
        elements = joined(source, sampler, operations[: last + 1], shard, share, failing=failing)
        drawn = sum(isinstance(operation, RandomMap) for operation in operations[:last])
        elements = applied(operations[last + 1 :], elements, sampler, drawn, None)
    return (value for _, _, value in elements)


def with_seeds(operations: Sequence[Transformation], sampler: IndexSampler) -> list[Transformation]:
    """Returns the operations, those that shuffle groups with the seed that they take from the sampler."""
    seeded: list[Transformation] = []
    number = 0
    for operation in operations:
        if isinstance(operation, GroupingOperation) and operation.seed is None:
            seeded.append(
                operation.seeded(0 if sampler.seed is None else derive_seed(sampler.seed, Purpose.GROUPING, number))
            )
            number += 1
        else:
            seeded.append(operation)
    return seeded


def joined(
    source: Sequence[Any],
    sampler: IndexSampler,
    operations: Sequence[Transformation],
    shard: ShardOptions,
    share: int,
    *,
    failing: "Failing | None",
) -> Iterator[Element]:
    """Yields the batches of several logical shards, the last operation: equally many elements of each, end to end."""
    *before, batch = operations
    assert isinstance(batch, Batch)
    part = dataclasses.replace(batch, batch_size=batch.batch_size // share)
    numbers = range(shard.shard_index * share, (shard.shard_index + 1) * share)
    shards = [ShardOptions(number, share * shard.shard_count, shard.drop_remainder) for number in numbers]
    streams = [elements_of(source, sampler, before, [*before, part], logical, failing=failing) for logical in shards]
    while True:
        group: list[Element] = []
        for stream in streams:
            some = list(itertools.islice(stream, part.batch_size))
            if batch.drop_remainder and len(some) < part.batch_size:
                return
            group += some
        if not group:
            return
        yield from batches(batch, iter(group), None)


def elements_of(
    source: Sequence[Any],
    sampler: IndexSampler,
    operations: Sequence[Transformation],
    deciding: Sequence[Transformation],
    shard: ShardOptions,
    *,
    failing: "Failing | None",
) -> Iterator[Element]:
    """Yields what operations make of the records of a shard; what decides how these are dealt may be more than they."""
    positions, template = partitioned(len(sampler), deciding, shard)
    if failing is not None:
        count = sum(1 for _ in itertools.takewhile(lambda one: not one.gathers and not one.regroups, operations))
        working = skipping(
            source, sampler, operations[:count], operations[count:], positions=positions, failing=failing
        )
        drawn = sum(isinstance(operation, RandomMap) for operation in operations[:count])
        return applied(operations[count:], working, sampler, drawn, template)
    elements: Iterator[Element] = ((position, position, source[sampler[position].record_key]) for position in positions)
    return applied(operations, elements, sampler, 0, template)


@dataclasses.dataclass
class Failing:
    """The keys of the records that have failed, in order, and how many may fail."""

    limit: int
    keys: list[int] = dataclasses.field(default_factory=list)


def skipping(
    source: Sequence[Any],
    sampler: IndexSampler,
    operations: Sequence[Transformation],
    later: Sequence[Transformation],
    *,
    positions: Sequence[int],
    failing: Failing,
) -> Iterator[Element]:
    """Yields what operations make of those records that do not fail.

    If all of them are 1:1 and no packer follows, a record that fails is replaced by the next key.
    """
    has_places = all(one.keeps_count for one in operations) and not (later and later[0].regroups)
    cycle = sorted(set(range(sampler.num_records) if sampler.keys is None else map(int, sampler.keys)))
    for position in positions:
        key = sampler[position].record_key
        start = cycle.index(key)
        made: list[Element] = []
        errors: list[tuple[int, Exception]] = []
        for tried in [*cycle[start:], *cycle[:start]] if has_places else [key]:
            try:
                made = list(applied(operations, iter([(position, position, source[tried])]), sampler, 0, None))
                break
            except Exception as failure:  # noqa: BLE001  (any)
                errors.append((tried, failure))
        if has_places and len(errors) == len(cycle):
            raise errors[0][1]
        for failed, error in errors:
            if failed not in failing.keys:
                if len(failing.keys) >= failing.limit:
                    raise error
                failing.keys.append(failed)
        yield from made


def applied(
    operations: Sequence[Transformation],
    elements: Iterator[Element],
    sampler: IndexSampler,
    random_number: int,
    template: int | None,
) -> Iterator[Element]:
    """Returns what operations make of some elements, the first random one of them having a number."""
    for operation in operations:
        elements = apply(operation, elements, sampler, random_number, template)
        random_number += isinstance(operation, RandomMap)
    return elements


def partitioned(length: int, operations: Sequence[Transformation], shard: ShardOptions) -> tuple[list[int], int | None]:
    """Returns the positions of one shard: global batches of whole blocks, and an evenly split tail.

    A padded tail is not split: each shard has its part of it. The second value is the position that a shard without
    any there reads all the same, to know the structure of what it pads.
    """
    leading = [
        operation
        for operation in itertools.takewhile(lambda one: one.keeps_count and not one.regroups, operations)
        if isinstance(operation, Batch)
    ]
    before = list(itertools.takewhile(lambda one: not one.gathers, operations))
    gathering = operations[len(before)] if len(before) < len(operations) else None
    splits = any(isinstance(part, FlatMap) for operation in before for part in leaves(operation))
    first = gathering.batch_size if isinstance(gathering, Batch) and not splits else 1
    block = int(np.prod([batch.batch_size for batch in leading])) if leading else first
    whole = length // (block * shard.shard_count) * block * shard.shard_count
    rest = list(range(whole, length))
    # What shards drop on their own, they drop of equally many records.
    dropping = operations if all(operation.keeps_count for operation in operations) else leading
    if shard.drop_remainder or any(getattr(operation, "drop_remainder", False) for operation in dropping):
        rest = rest[: len(rest) // shard.shard_count * shard.shard_count]
    mine = [p for p in range(whole) if p // block % shard.shard_count == shard.shard_index]
    if any(batch.pad_remainder for batch in leading):
        own = [p for p in rest if p // block % shard.shard_count == shard.shard_index]
        template = rest[-1] if rest and not own else None
        return mine + (own or rest[-1:]), template
    tail = [int(p) for p in np.array_split(rest, shard.shard_count)[shard.shard_index]]
    count = len(tail)
    for batch in leading:
        count = count // batch.batch_size if batch.drop_remainder else -(-count // batch.batch_size)
    return mine + (tail if count else []), None  # What every batch drops is not read.


def apply(  # noqa: C901  (one case an operation)
    operation: Transformation,
    elements: Iterable[Element],
    sampler: IndexSampler,
    random_number: int,
    template: int | None,
) -> Iterator[Element]:
    """Yields what one operation makes of the elements, one by one."""
    if isinstance(operation, Batch):
        yield from batches(operation, iter(elements), template)
        return
    if operation.regroups:
        yield from PLAIN[type(operation)](operation, elements)
        return
    for position, index, value in elements:
        match operation:
            case Map():
                yield position, index, operation.map(value)
            case MapWithIndex():
                yield position, index, operation.map_with_index(index, value)
            case RandomMap():
                rng = generator(sampler.seed or 0, position // sampler.num_records, index, random_number)
                yield position, index, operation.random_map(value, rng)
            case Filter():
                if operation.filter(value):
                    yield position, index, value
            case FlatMap():
                children = list(operation.flat_map(value))
                if len(children) > operation.max_fan_out:
                    raise ValueError(children)
                for child, part in enumerate(children):
                    yield position, index * operation.max_fan_out + child, part


def batches(operation: Batch, elements: Iterator[Element], template: int | None) -> Iterator[Element]:
    while group := list(itertools.islice(elements, operation.batch_size)):
        if len(group) < operation.batch_size and operation.drop_remainder:
            return
        position, index, _ = group[0]
        values = [value for _, _, value in group]
        if operation.pad_remainder:
            yield position, index, padded(values, position == template, operation.batch_size)
        else:
            yield position, index, operation.batch_fn(values) if operation.batch_fn else stack(values)


def padded(values: list[Any], is_template: bool, size: int) -> PaddedBatch:
    """Returns the padded batch of some numbers or arrays, or only of their structure if they are a template."""
    real = [] if is_template else values
    zero = values[0] - values[0]
    return PaddedBatch(stack([*real, *[zero] * (size - len(real))]), np.arange(size) < len(real))
