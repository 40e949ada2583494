"""What is known of a loader when somebody looks: how it is built, and what was measured. Nothing here is computed."""

import dataclasses
import enum

from millstream.loader.threads.front import LOADER, Front


class Kind(enum.Enum):
    """What a part of the work is."""

    KEYS = enum.auto()
    """Finding out which records a call is about."""
    READ = enum.auto()
    """Reading them."""
    OPERATION = enum.auto()
    """One of the operations."""
    HAND_OVER = enum.auto()
    """Pickling and unpickling between processes."""


class Place(enum.Enum):
    """Who does a part of the work."""

    TRAINER = "trainer"
    """The thread that calls `next`."""
    THREADS = "threads"
    """Threads that read ahead, in the trainer's process."""
    WORKERS = "workers"
    """Worker processes."""


@dataclasses.dataclass(frozen=True)
class StageFacts:
    """One part of the work.

    Attributes:
        label: what it is called where the whole pipeline is looked at: `operations[1], Map(decode)`.
        name: what it is called by itself: `Map(decode)`.
        kind: what it is.
        place: who does it.
        seconds: how long it took so far, added up over all who did it.
        regroups: whether it makes elements of those that came, whichever block they are of.
        keeps_count: whether it makes one element of each.
        structure: the leaves of what it gives, each with path, shape and dtype; None where nobody has traced it.
    """

    label: str
    name: str
    kind: Kind
    place: Place
    seconds: float
    regroups: bool = False
    keeps_count: bool = True
    structure: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class SourceFacts:
    """Where the records come from.

    Attributes:
        name: what it is called.
        kind: its class.
        num_records: how many it has.
        reads_many: whether many records can be read in one call, or are at hand without a read.
        parts: the sources that lie end to end in it, with the number of records of each.
        window_units: how many of its units a shuffle should keep together; None if any order is as fast.
    """

    name: str
    kind: str
    num_records: int
    reads_many: bool
    parts: tuple[tuple[str, float], ...] = ()
    window_units: int | None = None


@dataclasses.dataclass(frozen=True)
class OrderFacts:
    """Which records come when.

    Attributes:
        name: what the sampler is called.
        kind: its class.
        length: how many positions it has; None where it is endless.
        answers_for_many: whether it gives the keys of many positions at once.
        weights: what the components of a mixture are called, and how many of their records come in proportion.
        is_global_shuffle: true if any record may follow any other.
    """

    name: str
    kind: str
    length: int | None
    answers_for_many: bool
    weights: tuple[tuple[str, float], ...] = ()
    is_global_shuffle: bool = False


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was counted and timed, over all iterators of a loader.

    Attributes:
        batches: how many batches the trainer got.
        first_seconds: how long it waited for the first batch of each pass: the start of workers is in it.
        wait_seconds: how long it waited for all others, or made them itself where nobody else does.
        trainer_seconds: how long it did something else, between two batches.
        batch_bytes: how large the arrays of the first batch were; None before there is one.
        deaths: how many worker processes died and were replaced.
        stalls: how often a worker made no progress for so long that it was reported.
        core_seconds: the seconds in which worker processes had a core; None if that was not measured.
    """

    batches: int = 0
    first_seconds: float = 0.0
    wait_seconds: float = 0.0
    trainer_seconds: float = 0.0
    batch_bytes: int | None = None
    deaths: int = 0
    stalls: int = 0
    core_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """How long the loop ran, the waits for first batches left out."""
        return self.wait_seconds + self.trainer_seconds

    @property
    def wait_share(self) -> float:
        """Which part of that time the trainer waited, 0 … 1."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class LoaderFacts:
    """A loader.

    Attributes:
        source: where the records come from.
        order: which of them come when.
        stages: the parts of the work, in the order in which they are done.
        measured: what was counted and timed.
        shard: which shard it reads: `0 of 1`.
        num_workers: how many workers it has.
        worker_buffer: how many finished batches each of them has ready.
        num_threads: how many threads read ahead, in this process or in each worker; 0 where nothing is read ahead.
        records_ahead: how many records these threads read ahead at most.
        num_cores: how many cores the work may use: this process's, or those that a cluster set aside for the actors.
        front: how it was said.
    """

    source: SourceFacts
    order: OrderFacts
    stages: tuple[StageFacts, ...]
    measured: Measured
    shard: str
    num_workers: int
    worker_buffer: int
    num_threads: int
    records_ahead: int
    num_cores: int
    front: Front = LOADER

    @property
    def pipeline_seconds(self) -> float:
        """What all parts of the work took together."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def busy_share(self) -> float:
        """The share of the time in which the workers worked, 0 … 1, if there are any."""
        return self.pipeline_seconds / (self.num_workers * self.measured.seconds)

    @property
    def used_cores(self) -> float | None:
        """The number of cores that the workers used on average; None if that was not measured."""
        if self.measured.core_seconds is None or not self.pipeline_seconds:
            return None
        share = min(1.0, self.measured.core_seconds / self.pipeline_seconds)
        return share * min(self.busy_share, 1.0) * self.num_workers

    def share(self, stage: StageFacts) -> float:
        """Returns which part of the work's time one part took, 0 … 1."""
        return stage.seconds / self.pipeline_seconds if self.pipeline_seconds else 0.0

    @property
    def slowest(self) -> StageFacts:
        """The part of the work that took longest."""
        return max(self.stages, key=lambda stage: stage.seconds)

    def stage(self, kind: Kind) -> StageFacts:
        """Returns the one part of a kind of which there is one."""
        return next(stage for stage in self.stages if stage.kind is kind)
