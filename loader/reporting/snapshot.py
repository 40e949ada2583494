"""The state of a loader at one moment: its configuration and its measurements, as plain data."""

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from millstream.loader.measuring import LOADER, Front

Bars: TypeAlias = tuple[tuple[str, Sequence[tuple[str, float]]], ...]
"""Bars that are divided in proportion: each has a caption, and the names and sizes of its parts."""


class Kind(enum.Enum):
    """The kind of a stage."""

    KEYS = enum.auto()
    """Finding the keys of the records that a call is about."""
    READ = enum.auto()
    """Reading these records."""
    OPERATION = enum.auto()
    """One of the operations."""
    HAND_OVER = enum.auto()
    """Pickling and unpickling between processes."""


class Location(enum.Enum):
    """The threads or processes that run a stage."""

    TRAINER = "trainer"
    """The thread that calls `next`."""
    THREADS = "threads"
    """Threads of the trainer's process that read ahead."""
    WORKERS = "workers"
    """Worker processes, or actors."""


@dataclasses.dataclass(frozen=True)
class StageSnapshot:
    """One stage of the pipeline's work.

    Attributes:
        label: its name within the pipeline: `operations[1], Map(decode)`.
        name: its name by itself: `Map(decode)`.
        seconds: the sum over the threads or processes that run it.
        regroups: True if its elements are built from those of several blocks.
        keeps_count: True if it builds one element from each.
        is_local: True if it runs in this process because it follows an `mp_prefetch`.
        structure: path, shape and dtype of each leaf of its results; None if they were not traced.
        includes: the calls of a MapDataset whose time is part of its seconds: `.map(decode)`; "" without any.
    """

    label: str
    name: str
    kind: Kind
    location: Location
    seconds: float = 0.0
    regroups: bool = False
    keeps_count: bool = True
    is_local: bool = False
    structure: tuple[str, ...] | None = None
    includes: str = ""

    @property
    def text(self) -> str:
        """Its label, with the calls that it includes."""
        return f"{self.label}, {self.includes}" if self.includes else self.label


@dataclasses.dataclass(frozen=True)
class SourceSnapshot:
    """The source of the records.

    Attributes:
        kind: the name of its class.
        one_by_one: the class, or classes, whose records are read one by one; "" if one call reads many.
        bars: one bar of the concatenated sources, by number of records; empty if there is one source.
        window_units: the number of its units that a shuffle should keep together; None if any order is as fast.
    """

    name: str
    kind: str
    one_by_one: str
    bars: Bars = ()
    window_units: int | None = None


@dataclasses.dataclass(frozen=True)
class OrderSnapshot:
    """The order of the records.

    Attributes:
        kind: the name of the sampler's class.
        is_vectorised: True if one call returns the keys of many positions.
        bars: a bar of weights for each of the latest changes of a mixture's weights; empty for other orders.
        is_global_shuffle: True if any record may follow any other.
    """

    name: str
    kind: str
    is_vectorised: bool
    bars: Bars = ()
    is_global_shuffle: bool = False


class ComponentSnapshot(NamedTuple):
    """The records of one component of a mixture so far, or its rows if documents are packed in advance.

    `tokens` counts those in its rows, without padding; None if lengths are not known.
    """

    name: str
    records: int
    tokens: int | None


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Counts and times, summed over all iterators of a loader.

    Attributes:
        timed_batches: the number of batches that the seconds cover. Several may be fetched together, and the time
            between them is known at the next fetch.
        first_seconds: the seconds of waiting for the first batch of each pass. They include the start of workers.
        wait_seconds: the seconds of waiting for all other batches, or of computing them in the trainer's thread.
        trainer_seconds: the seconds that the trainer spent between two batches.
        batch_bytes: the estimated size of the first batch; None before it.
        core_seconds: the seconds in which worker processes used a core, except during waits for first batches; None if
            they were not measured.
        delay_seconds: the seconds in which threads of these processes were ready to run and had no core.
        waits: the seconds of the last waits, except those for first batches, up to 1,000.
        records: the number of records in the batches delivered; None if the pipeline is not 1:1.
        step: the step of the newest iterator.
        components: those of a mixture in all global batches before `step`; empty for other orders, and for pipelines
            that are not 1:1.
    """

    batches: int = 0
    timed_batches: int = 0
    first_seconds: float = 0.0
    wait_seconds: float = 0.0
    trainer_seconds: float = 0.0
    batch_bytes: int | None = None
    deaths: int = 0
    stalls: int = 0
    core_seconds: float | None = None
    delay_seconds: float = 0.0
    waits: tuple[float, ...] = ()
    records: int | None = None
    errors: int = 0
    step: int = 0
    epoch: int | None = None
    components: tuple[ComponentSnapshot, ...] = ()

    @property
    def seconds(self) -> float:
        """The seconds of the training loop, except those of waiting for first batches."""
        return self.wait_seconds + self.trainer_seconds

    @property
    def wait_share(self) -> float:
        """The share of these seconds that the trainer waited, 0 … 1."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class LoaderSnapshot:
    """A loader at one moment.

    Attributes:
        shard: the shard that it reads: `0 of 1`.
        worker_buffer: the number of finished batches that each worker keeps ready.
        num_threads: the number of threads that read ahead, in this process or per worker; 0 if none do.
        records_ahead: the largest number of records that these threads prefetch.
        num_cores: the number of cores available to this process, or reserved for the actors by a cluster.
    """

    source: SourceSnapshot
    order: OrderSnapshot
    stages: tuple[StageSnapshot, ...]
    shard: str
    num_workers: int
    worker_buffer: int
    num_threads: int
    records_ahead: int
    num_cores: int
    front: Front = LOADER
    measured: Measurements = Measurements()

    @property
    def running_stages(self) -> tuple[StageSnapshot, ...]:
        """The stages without the hand-over if there are no workers to hand over from."""
        return self.stages if self.num_workers else tuple(one for one in self.stages if one.kind is not Kind.HAND_OVER)

    @functools.cached_property
    def pipeline_seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def worker_seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages if stage.location is Location.WORKERS)

    @property
    def busy_share(self) -> float:
        """The share of the time that the workers were busy, 0 … 1. There must be workers."""
        return self.worker_seconds / (self.num_workers * self.measured.seconds)

    @property
    def used_cores(self) -> float | None:
        """The average number of cores that the workers used; None if it was not measured."""
        if self.measured.core_seconds is None or not self.measured.seconds:
            return None
        return self.measured.core_seconds / self.measured.seconds

    @property
    def missing_cores(self) -> float:
        """The average number of threads of workers that were ready to run and had no core."""
        return self.measured.delay_seconds / self.measured.seconds if self.measured.seconds else 0.0

    def share(self, stage: StageSnapshot) -> float:
        """Returns the share of the stages' seconds that one stage took, 0 … 1."""
        return stage.seconds / self.pipeline_seconds if self.pipeline_seconds else 0.0

    @functools.cached_property
    def slowest(self) -> StageSnapshot:
        return max(self.stages, key=lambda stage: stage.seconds)

    def stage(self, kind: Kind) -> StageSnapshot:
        """Returns the only stage of a kind: KEYS, READ or HAND_OVER."""
        return next(stage for stage in self.stages if stage.kind is kind)
