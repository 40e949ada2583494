"""The pipeline that a trial of the soak reads: a random one, in a form that other shards and workers can resume.

Lives of a trial import this, and so do their worker processes: it needs neither pytest nor hypothesis.
"""

import dataclasses
import hashlib
import marshal
import math
import operator
import random
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

import millstream
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, RandomMap, Transformation, WindowShuffle
from soak import forms
from soak.chains import ChainForm
from support.oracle.stream import oracle
from support.streams import comparable

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FILES = {
    "bag": "BagzDataSource",
    "tfrecord": "TFRecordDataSource",
    "array_record": "ArrayRecordDataSource",
    "jsonl": "JsonLinesDataSource",
    "parquet": "ParquetDataSource",
}
"""The source of each kind of file, by how its name ends."""

_POSITIONS = 2_000
"""About how many positions a stream has."""


def decode(element: Any) -> Any:
    """Returns a number: itself, or from the record of a file."""
    if isinstance(element, dict):
        return int(element["number"])
    return struct.unpack("<q", element)[0] if isinstance(element, bytes) else element


def jitter(element: Any, rng: np.random.Generator) -> Any:
    return element + int(rng.integers(1 << 20))


def repeat(element: Any) -> Sequence[Any]:
    return [element + child for child in range(int(element) % 3)]


DECODE, JITTER, ADD_INDEX = Map(decode), RandomMap(jitter), MapWithIndex(operator.add)
REPEAT = FlatMap(repeat, max_fan_out=2)


@dataclasses.dataclass(frozen=True)
class Widen(Map):
    """Makes an array of a number."""

    width: int

    def map(self, element: Any) -> Any:
        return np.full(self.width, element, np.int64)


@dataclasses.dataclass(frozen=True)
class DropMultiples(Filter):
    """Drops what is divisible."""

    of: int

    def filter(self, element: Any) -> bool:
        return int(element) % self.of != 0


@dataclasses.dataclass(frozen=True)
class Course:
    """Everything that decides the stream of a trial, whatever hosts and workers there are.

    Attributes:
        form: what the pipeline is: `classic`, or named for what it has besides.
        place: where the records are: `memory`, `store` or one of `FILES`.
        size: how many there are.
        sampler: their order.
        before: the operations before the Batch.
        batch: the elements of a global batch; 0 for none.
        drop_remainder: as the Batch takes it.
        after: the operations after the Batch.
        logical_shards: into how many parts the stream is dealt; None to deal it to the hosts there are.
        shard_counts: the numbers of hosts that can have this stream.
        chain: how all this is said as a chain; None for a DataLoader.
    """

    form: str
    place: str
    size: int
    sampler: Any
    before: tuple[Transformation, ...]
    batch: int
    drop_remainder: bool
    after: tuple[Transformation, ...]
    logical_shards: int | None
    shard_counts: tuple[int, ...]
    chain: ChainForm | None = None

    @classmethod
    def of(cls, seed: int) -> "Course":
        """Returns the course of a seed: a classic one, or one with other samplers or operations."""
        course, chance = cls._classic(seed), random.Random(f"form {seed}")
        form = chance.choice(
            ["classic", "hierarchical", "mixture", "packing", "grouping", "grouping", "chain", "chain"]
        )
        course = dataclasses.replace(course, form=form)
        size, num_epochs = course.size, -(-_POSITIONS // 4 // course.size)
        if form == "hierarchical":
            order = forms.hierarchical(chance, size, num_epochs)
            course = dataclasses.replace(course, sampler=order)
            return course._balanced(chance) if course.is_one_to_one and course.batch else course
        if form == "mixture" and size > 1:
            return dataclasses.replace(course, sampler=forms.mixture(chance, size, num_epochs))
        if form == "packing":
            counts = tuple(count for count in (1, 2, 3, 4) if course.batch and course.batch % count == 0) or (1,)
            sampler = forms.packing(chance, size, num_epochs)
            rows = (DECODE, *forms.rows())
            return dataclasses.replace(
                course, sampler=sampler, before=rows, after=(), logical_shards=None, shard_counts=counts
            )
        if form == "chain":
            grouped, has_one_shape = forms.grouping(chance) if chance.random() < 0.3 else ((), True)
            steps: list[Transformation] = [DropMultiples(3), DropMultiples(2), REPEAT, JITTER, ADD_INDEX]
            return dataclasses.replace(
                course,
                before=(DECODE, *chance.sample(steps, k=chance.randrange(3)), *grouped),
                batch=course.batch if has_one_shape else 0,
                after=(),
                logical_shards=None,
                shard_counts=(1,),
                chain=ChainForm.of(chance, size, num_epochs),
            )
        if form == "grouping":
            grouped, has_one_shape = forms.grouping(chance)
            kinds: list[Transformation] = [DropMultiples(3), DropMultiples(2), REPEAT, JITTER]
            dropping = chance.sample(kinds, k=chance.randrange(1, 4))
            count = chance.choice([1, 1, 2, 3]) if has_one_shape else 1
            return dataclasses.replace(
                course,
                before=(DECODE, *dropping, *grouped),
                batch=chance.choice([0, 4 * count]) if has_one_shape else 0,
                after=(),
                logical_shards=None,
                shard_counts=(count,),
            )
        return dataclasses.replace(course, form="classic")

    def _balanced(self, chance: random.Random) -> "Course":
        if chance.random() < 0.5:
            return self
        if chance.random() < 0.5:
            num_epochs = self.sampler.num_epochs or 1
            # A multiple of each number of shards.
            sizes: Any = chance.choice([self.batch, [self.batch, math.lcm(*self.shard_counts)]])
            return dataclasses.replace(self, sampler=forms.buckets(chance, self.size, sizes, num_epochs))
        sampler = forms.balanced(chance, self.sampler, self.size, self.batch)
        counts = tuple(count for count in self.shard_counts if sampler.parts % count == 0)
        return dataclasses.replace(self, sampler=sampler, shard_counts=counts)

    @classmethod
    def _classic(cls, seed: int) -> "Course":
        chance = random.Random(f"course {seed}")
        size = chance.choice([1, 7, 40, 150, 400])
        sampler = millstream.IndexSampler(
            size, shuffle=chance.random() < 0.8, num_epochs=-(-_POSITIONS // size), seed=chance.getrandbits(64)
        )
        kind = chance.choice(["one to one", "one to one", "logical shards", "fixed", "fixed"])
        before: list[Transformation] = [DECODE]
        before += chance.choices([JITTER, ADD_INDEX], k=chance.randrange(3))
        if kind != "one to one":
            before += chance.sample([DropMultiples(3), DropMultiples(2), REPEAT], k=chance.randrange(1, 3))
        if kind == "fixed" and chance.random() < 0.4:
            before.append(WindowShuffle(chance.choice([2, 10, 50]), chance.getrandbits(32)))
        before += chance.choices([[], [Widen(1)], [Widen(512)], [Widen(1 << 15)]], [3, 3, 3, 1])[0]
        logical = chance.choice([2, 4]) if kind == "logical shards" else None
        batch = chance.choice([4, 8, 12, 24]) if kind != "fixed" or chance.random() < 0.8 else 0
        after: list[Transformation] = chance.choices([JITTER, ADD_INDEX], k=chance.randrange(2)) if batch else []
        one_host_count = chance.choice([1, 1, 2, 3])
        counts = {
            "one to one": tuple(count for count in (1, 2, 3, 4) if batch and batch % count == 0),
            "logical shards": tuple(count for count in (1, 2, 4) if logical and logical % count == 0),
            "fixed": (one_host_count,),
        }[kind]
        batch *= one_host_count if kind == "fixed" else 1
        drop = chance.random() < 0.5
        place = chance.choice(["memory", "memory", "store", *FILES])
        return cls("classic", place, size, sampler, tuple(before), batch, drop, tuple(after), logical, counts)

    @property
    def records(self) -> list[bytes]:
        return [struct.pack("<q", number) for number in range(self.size)]

    @property
    def is_one_to_one(self) -> bool:
        """True if each record, or row that a sampler plans, becomes one element at its position."""
        return self.form == "packing" or all(
            operation.keeps_count and not operation.regroups for operation in self.before
        )

    def source(self, folder: Path, url: str) -> Any:
        if self.place == "memory":
            return range(self.size)
        if self.place == "store":
            return millstream.BagzDataSource(f"{url}/bucket/numbers.bag")
        return getattr(millstream, FILES[self.place])(folder / f"numbers.{self.place}")

    def operations(self, shard_count: int) -> tuple[Transformation, ...]:
        batch = (Batch(self.batch // shard_count, self.drop_remainder),) if self.batch else ()
        return (*self.before, *batch, *self.after)

    def shard(self, index: int, count: int) -> millstream.ShardOptions:
        return millstream.ShardOptions(index, count, logical_shards=self.logical_shards)

    def loader(
        self,
        source: Any,
        index: int,
        count: int,
        *,
        breaks: tuple[Transformation, ...] = (),
        workers: millstream.MultiprocessingOptions | None = None,
        reading: millstream.ReadOptions | None = None,
        chooses_workers: bool = False,
    ) -> Any:
        """Returns the loader of one host, or its chain, where operations may be broken.

        A loader without workers may choose some while it is read.
        """
        first, *following = self.operations(count)
        workers = workers or millstream.MultiprocessingOptions()
        reading = reading or millstream.ReadOptions()
        if self.chain is None:
            return millstream.DataLoader(
                data_source=source,
                sampler=self.sampler,
                operations=(first, *breaks, *following),
                shard_options=self.shard(index, count),
                worker_count="auto" if chooses_workers and not workers.num_workers else workers.num_workers,
                worker_buffer_size=workers.per_worker_buffer_size,
                read_options=reading,
                stall_timeout=workers.stall_timeout,
            )
        count_before = len(self.before) - 1
        dataset = self.chain.dataset(
            source, first, (*breaks, *following[:count_before]), tuple(following[count_before:]), reading
        )
        return dataset.mp_prefetch(workers)

    def expected(self, index: int, count: int) -> list[bytes]:
        """Returns the stream of one host, as the oracle says it: the mark of each element.

        The oracle knows neither mixtures nor rows nor chains nor steps of several sizes: there it is what is read
        without workers at one go.
        """
        if self.form in {"mixture", "packing", "chain"} or getattr(self.sampler, "batch_sizes", None):
            loader = self.loader(range(self.size), index, count)
            with iter(loader) as iterator:
                return [mark(element) for element in iterator]
        stream = oracle(range(self.size), self.sampler, self.operations(count), self.shard(index, count))
        return [mark(element) for element in stream]


def mark(element: Any) -> bytes:
    """Returns what two elements share only if they agree to the last byte; streams of large ones are not kept."""
    # Version 2 writes equal values alike; later ones also say which of them are one object.
    return hashlib.blake2b(marshal.dumps(comparable(element), 2), digest_size=16).digest()
