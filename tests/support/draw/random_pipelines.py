"""Random pipelines of all operations, which work on numbers and on batches of numbers alike."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, PaddedBatch, RandomMap, Transformation

UNEVEN_ENDS = pytest.mark.filterwarnings("ignore:.*so shards may end at different steps:UserWarning")
"""For tests of any pipeline: some are finite, filtered and sharded, which the loader warns of."""


def total(element: Any) -> int:
    return int(np.sum(element.batch if isinstance(element, PaddedBatch) else element))


def on_numbers(change: Callable[[Any], Any], element: Any) -> Any:
    """Returns a number or batch changed; of a padded batch, the batch."""
    return element._replace(batch=change(element.batch)) if isinstance(element, PaddedBatch) else change(element)


@dataclasses.dataclass(frozen=True)
class Scale(Map):
    """Multiplies."""

    factor: int

    def map(self, element: Any) -> Any:
        return on_numbers(lambda numbers: numbers * self.factor, element)


@dataclasses.dataclass(frozen=True)
class ScaleTogether(Map):
    """Multiplies many elements in one call; fails if one of them has a sum with some remainder."""

    factor: int
    fails_on: int = 23

    def map_batch(self, elements: list[Any]) -> list[Any]:
        if any(total(element) % 23 == self.fails_on for element in elements):
            raise IndexError(self.fails_on)
        return [on_numbers(lambda numbers: numbers * self.factor, element) for element in elements]


class Jitter(RandomMap):
    """Adds a random number."""

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return on_numbers(lambda numbers: numbers + int(rng.integers(1000)), element)


class AddIndex(MapWithIndex):
    """Adds the index."""

    def map_with_index(self, index: int, element: Any) -> Any:
        return on_numbers(lambda numbers: numbers + index, element)


@dataclasses.dataclass(frozen=True)
class DropMultiples(Filter):
    """Drops what is divisible."""

    of: int

    def filter(self, element: Any) -> bool:
        return total(element) % self.of != 0


@dataclasses.dataclass(frozen=True)
class Split(FlatMap):
    """Splits into none up to `max_fan_out` children, and fails on some elements if `strict`."""

    max_fan_out: int
    strict: bool = False

    def flat_map(self, element: Any) -> Sequence[Any]:
        count = total(element) % (self.max_fan_out + 1 + self.strict)
        return [on_numbers(functools.partial(operator.add, child), element) for child in range(count)]


@dataclasses.dataclass(frozen=True)
class FailOn(Map):
    """Raises on some elements."""

    remainder: int

    def map(self, element: Any) -> Any:
        if total(element) % 23 == self.remainder:
            raise KeyError(self.remainder)
        return element


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Everything that decides a stream.

    Attributes:
        plain: the source and the sampler for the oracle, if those of the loader do more than it may use.
    """

    source: Any
    sampler: IndexSampler
    operations: tuple[Transformation, ...]
    shard: ShardOptions
    plain: tuple[Any, Any] | None = dataclasses.field(default=None, repr=False)


one_to_one_operations = st.one_of(
    st.builds(Scale, st.integers(2, 5)),
    st.builds(ScaleTogether, st.integers(2, 5)),
    st.just(Jitter()),
    st.just(AddIndex()),
    st.builds(Batch, st.integers(1, 7), st.booleans(), st.sampled_from([None, total])),
)
dropping_operations = st.one_of(
    st.builds(DropMultiples, st.integers(2, 4)), st.builds(Split, st.integers(1, 3), st.just(False))
)
operations = st.one_of(
    one_to_one_operations,
    st.builds(DropMultiples, st.integers(2, 4)),
    st.builds(Split, st.integers(1, 3), st.sampled_from([False, False, False, True])),
    st.builds(FailOn, st.integers(0, 22)),
    st.builds(ScaleTogether, st.integers(2, 5), st.integers(0, 22)),
)


@st.composite
def pipelines(draw: st.DrawFn, of: st.SearchStrategy[Transformation] = operations) -> Pipeline:
    """Draws a source, a sampler, operations and a shard; in some pipelines with a Batch, it is one that pads."""
    size = draw(st.integers(1, 60))
    num_records = draw(st.integers(1, size))
    sampler = IndexSampler(
        num_records,
        shuffle=draw(st.booleans()),
        num_epochs=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**64 - 1)),
        keys=draw(st.none() | st.lists(st.integers(0, size - 1), min_size=num_records, max_size=num_records)),
    )
    shard_count = draw(st.integers(1, 4))
    shard = ShardOptions(draw(st.integers(0, shard_count - 1)), shard_count, draw(st.booleans()))
    chosen = draw(st.lists(of, max_size=5))
    if any(isinstance(operation, Batch) for operation in chosen) and draw(st.booleans()):
        chosen = with_padding(chosen)
        shard = dataclasses.replace(shard, drop_remainder=False)
    return Pipeline(range(size), sampler, tuple(chosen), shard)


@st.composite
def dealt_pipelines(draw: st.DrawFn, *, fails: bool = True) -> Pipeline:
    """Draws a pipeline that is not 1:1, with a shard that runs some of several logical shards.

    Args:
        draw: draws.
        fails: whether some operations raise.
    """
    count = draw(st.sampled_from([2, 3, 4, 6]))
    shard_count = draw(st.sampled_from([shards for shards in (1, 2, 3) if count % shards == 0 and shards < count]))
    before = operations if fails else st.one_of(one_to_one_operations, dropping_operations)
    after = st.one_of(st.builds(Scale, st.integers(2, 5)), st.just(Jitter()), st.just(AddIndex()))
    batch = Batch(
        draw(st.integers(1, 4)) * count // shard_count, draw(st.booleans()), draw(st.sampled_from([None, total]))
    )
    first = draw(st.lists(before, max_size=2))
    pipeline = draw(pipelines(st.just(AddIndex())))
    shard = ShardOptions(draw(st.integers(0, shard_count - 1)), shard_count, draw(st.booleans()), count)
    chosen = (*first, draw(dropping_operations), *draw(st.lists(before, max_size=1)), batch, *draw(st.lists(after)))
    return dataclasses.replace(pipeline, operations=chosen, shard=shard)


def with_padding(chosen: Sequence[Transformation]) -> list[Transformation]:
    """Returns the operations with the first Batch padding its remainder, and without the others."""
    first = next(number for number, operation in enumerate(chosen) if isinstance(operation, Batch))
    return [
        Batch(operation.batch_size, pad_remainder=True) if isinstance(operation, Batch) else operation
        for number, operation in enumerate(chosen)
        if number == first or not isinstance(operation, Batch)
    ]
