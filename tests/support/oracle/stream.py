"""The stream, said as plainly as possible: one record after another through generators, no blocks, no threads."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        elements = applied(operations[last + 1 :], elements, sampler, drawn, None, [])
    for _, _, value in raised(elements):
        yield value
        if failing is not None:
            failing.num_delivered = len(failing.keys)


class Failed:
    """An element that fails, and each one after it, which are not read: what they would be is not known."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


Failure = list[Failed]
"""That of a stream, once an element has failed."""


def until_failure(positions: Iterable[int], value_at: Callable[[int], Any], failure: Failure) -> Iterator[Element]:
    """Yields the values at positions. From a failure on, wherever it is, it stands for them."""
    for position in positions:
        if failure:
            yield position, position, failure[0]
        else:
            yield from each([(position, position, None)], lambda p, _, __: value_at(p), failure)


def raised(elements: Iterable[Element]) -> Iterator[Element]:
    """Yields elements up to the first that fails, whose error is raised."""
    for element in elements:
        if isinstance(element[2], Failed):
            raise element[2].error
        yield element


def each(elements: Iterable[Element], function: Callable[[int, int, Any], Any], failure: Failure) -> Iterator[Element]:
    """Yields elements with the value that a function returns, given position, index and value."""
    for position, index, value in elements:
        made = value
        if not isinstance(value, Failed):
            try:
                made = function(position, index, value)
            except Exception as error:  # noqa: BLE001  (any)
                made = Failed(error)
                failure.append(made)
        yield position, index, made


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
        shares = [list(itertools.islice(stream, part.batch_size)) for stream in streams]
        group = [element for share in shares for element in share]
        if batch.drop_remainder and any(len(share) < part.batch_size for share in shares):
            # The error of another share comes nevertheless, whichever shard that is on.
            collections.deque(raised(element for s in shares if len(s) == part.batch_size for element in s), maxlen=0)
            return
        if not group:
            return
        yield from batches(batch, iter(group), None, [])


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
    failure: Failure = []
    if failing is not None:
        count = sum(1 for _ in itertools.takewhile(lambda one: not one.gathers and not one.regroups, operations))
        working = skipping(
            source, sampler, operations[:count], operations[count:], positions, failing=failing, failure=failure
        )
        drawn = sum(isinstance(operation, RandomMap) for operation in operations[:count])
        return applied(operations[count:], working, sampler, drawn, template, failure)
    elements = until_failure(positions, lambda position: source[sampler[position].record_key], failure)
    return applied(operations, elements, sampler, 0, template, failure)


@dataclasses.dataclass
class Failing:
    """The keys of the records that have failed, in order, and how many may fail.

    Attributes:
        limit: how many may fail; None for any number, unless all do.
        num_delivered: how many had failed before the last output.
    """

    limit: int | None
    keys: list[int] = dataclasses.field(default_factory=list)
    num_delivered: int = 0

    def too_many(self, errors: Sequence[tuple[int, Exception]]) -> Exception | None:
        """Adds the keys of errors. Returns the one that is too many, if any."""
        for key, error in errors:
            if key not in self.keys:
                if self.limit is not None and len(self.keys) >= self.limit:
                    return error
                self.keys.append(key)
        return None


def skipping(
    source: Sequence[Any],
    sampler: IndexSampler,
    operations: Sequence[Transformation],
    later: Sequence[Transformation],
    positions: Sequence[int],
    *,
    failing: Failing,
    failure: Failure,
) -> Iterator[Element]:
    """Yields what operations make of those records that do not fail.

    If all of them are 1:1 and no packer follows, a record that fails is replaced by the next key.
    """
    splits = any(map(may_split, operations))
    has_places = all(one.keeps_count for one in operations) and not (later and later[0].regroups)
    cycle = sorted(set(range(sampler.num_records) if sampler.keys is None else map(int, sampler.keys)))
    # Among so many are all records, whose order differs by epoch.
    in_a_row, most_in_a_row = 0, min(2 * len(source) - 1, len(sampler))
    for position in positions:
        if failure:
            yield position, position, failure[0]
            continue
        key = sampler[position].record_key
        start = cycle.index(key)
        made: list[Element] = []
        errors: list[tuple[int, Exception]] = []
        for tried in [*cycle[start:], *cycle[:start]] if has_places else [key]:
            try:
                one = iter([(position, position, source[tried])])
                made = list(raised(applied(operations, one, sampler, 0, None, [])))
                break
            except Exception as raised_error:  # noqa: BLE001  (any)
                errors.append((tried, raised_error))
        if has_places and len(errors) == len(cycle):
            raise errors[0][1]
        in_a_row = 0 if made else in_a_row + len(errors)
        if (error := failing.too_many(errors)) is not None:
            failure.append(Failed(error))
            made = [(position, position, failure[0])]
        elif failing.limit is None and errors and in_a_row >= most_in_a_row:
            # All have failed: it stands for each of them.
            failure.append(Failed(errors[-1][1]))
            made = [(position, position, failure[0])] * len(positions)
        if splits and failure:
            raise failure[0].error
        yield from made


def applied(  # noqa: PLR0917  (all that decides a stream)
    operations: Sequence[Transformation],
    elements: Iterator[Element],
    sampler: IndexSampler,
    random_number: int,
    template: int | None,
    failure: Failure,
) -> Iterator[Element]:
    """Returns what operations make of some elements, the first random one of them having a number.

    How many elements there are after one that splits or regroups is known only once all are there.
    """
    is_known = True
    for operation in operations:
        elements = apply(operation, elements, sampler, random_number, template, failure)
        random_number += isinstance(operation, RandomMap)
        is_known = is_known and not operation.regroups and not may_split(operation)
        elements = elements if is_known else raised(elements)
    return elements


def may_split(operation: Transformation) -> bool:
    return any(isinstance(part, FlatMap) for part in leaves(operation))


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
    splits = any(map(may_split, before))
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
    groups = [[p] for p in tail]
    for batch in leading:
        size = batch.batch_size
        runs = [groups[start : start + size] for start in range(0, len(groups), size)]
        kept = [run for run in runs if len(run) == size or not batch.drop_remainder]
        groups = [list(itertools.chain.from_iterable(run)) for run in kept]
    return mine + [p for group in groups for p in group], None  # What a batch drops is not read.


def apply(  # noqa: C901, PLR0917  (one case an operation)
    operation: Transformation,
    elements: Iterable[Element],
    sampler: IndexSampler,
    random_number: int,
    template: int | None,
    failure: Failure,
) -> Iterator[Element]:
    """Yields what one operation makes of the elements, one by one."""
    if isinstance(operation, Batch):
        yield from batches(operation, iter(elements), template, failure)
        return
    if operation.regroups:
        yield from PLAIN[type(operation)](operation, raised(elements))
        return
    match operation:
        case Map():
            yield from each(elements, lambda _, __, value: operation.map(value), failure)
        case MapWithIndex():
            yield from each(elements, lambda _, index, value: operation.map_with_index(index, value), failure)
        case RandomMap():

            def drawn(position: int, index: int, value: Any) -> Any:
                rng = generator(sampler.seed or 0, position // sampler.num_records, index, random_number)
                return operation.random_map(value, rng)

            yield from each(elements, drawn, failure)
        case Filter():
            # One that fails may have been kept.
            verdicts = each(elements, lambda _, __, value: (operation.filter(value), value), failure)
            for position, index, pair in verdicts:
                is_kept, value = (True, pair) if isinstance(pair, Failed) else pair
                if is_kept:
                    yield position, index, value
        case FlatMap():
            for position, index, value in raised(elements):
                children = list(operation.flat_map(value))
                if len(children) > operation.max_fan_out:
                    raise ValueError(children)
                for child, part in enumerate(children):
                    yield position, index * operation.max_fan_out + child, part


def batches(operation: Batch, elements: Iterator[Element], template: int | None, failure: Failure) -> Iterator[Element]:
    def batch(position: int, _: int, values: Any) -> Any:
        if failed := next((value for value in values if isinstance(value, Failed)), None):
            raise failed.error
        if operation.pad_remainder:
            return padded(values, position == template, operation.batch_size)
        return operation.batch_fn(values) if operation.batch_fn else stack(values)

    def groups() -> Iterator[Element]:
        while group := list(itertools.islice(elements, operation.batch_size)):
            if len(group) == operation.batch_size or not operation.drop_remainder:
                position, index, _ = group[0]
                yield position, index, [value for _, _, value in group]

    return each(groups(), batch, failure)


def padded(values: list[Any], is_template: bool, size: int) -> PaddedBatch:
    """Returns the padded batch of some numbers or arrays, or only of their structure if they are a template."""
    real = [] if is_template else values
    zero = values[0] - values[0]
    return PaddedBatch(stack([*real, *[zero] * (size - len(real))]), np.arange(size) < len(real))
