"""The state of a loader at one moment as plain data, its configuration and measurements, and phrases about it.

The description of a loader reads no record. Renderings share the phrases: numbers with a unit, tables of them, the
threads and workers, and the trainer.
"""

import dataclasses
import enum
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from millstream.core.descriptions import Rendered, described
from millstream.loader.measuring import HAND_OVER, LOADER, Frontend
from millstream.loader.pipeline.pipeline import Pipeline, source_name
from millstream.loader.pipeline.plan import KEYS, READ, Plan
from millstream.loader.pipeline.stages import split_stages
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions, available_cores
from millstream.samplers.base import AdaptedSampler, is_mixed
from millstream.samplers.order import EpochSampler
from millstream.sources.source_checks import batched_read_of, reads_one_by_one

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


class StageLocation(enum.Enum):
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
    location: StageLocation
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
    """Counts and times of a `Profiler`, summed over all iterators of a loader. Its outputs are batches here.

    Attributes:
        wait_seconds: the seconds of waiting for all batches but the first of each pass, or of computing them in the
            trainer's thread.
        trainer_seconds: the seconds that the trainer spent between two batches.
        core_seconds: None if they were not measured.
        records: None if the pipeline is not 1:1.
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
    reader: int | None = None
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
        choice: the number of workers and the reason for it if the loader chooses it, otherwise empty.
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
    frontend: Frontend = LOADER
    choice: str = ""
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
        return sum(stage.seconds for stage in self.stages if stage.location is StageLocation.WORKERS)

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


Streams = Sequence[tuple[str, LoaderSnapshot]]
"""Snapshots of the iterators that another one draws from, each with a prefix for the labels of its stages."""


def joined(outermost: LoaderSnapshot, below: Streams, replaced: LoaderSnapshot | None = None) -> LoaderSnapshot:
    """Returns the snapshot of an iterator with the stages below it. Stages with equal labels are sums.

    Streams without workers of their own run in those of `outermost`, if it has some. `replaced` has the sums of the
    streams that others have replaced.
    """
    earlier: Streams = [] if replaced is None else [("", replaced)]
    streams = [*earlier, *below]
    runs = [outermost, *(snapshot for _, snapshot in below or earlier)]
    return dataclasses.replace(
        outermost,
        stages=tuple(_stages(outermost, streams)),
        measured=dataclasses.replace(
            outermost.measured, **_trouble([outermost, *(snapshot for _, snapshot in streams)])
        ),
        num_workers=sum(run.num_workers for run in runs),
        worker_buffer=max(run.worker_buffer for run in runs),
        num_threads=max(run.num_threads for run in runs),
        records_ahead=sum(run.records_ahead for run in runs),
    )


def added(before: LoaderSnapshot, last: LoaderSnapshot) -> LoaderSnapshot:
    """Returns the last snapshot of two, with the sums of what both measured."""
    return dataclasses.replace(
        last,
        stages=tuple(_merged([*before.stages, *last.stages])),
        measured=dataclasses.replace(last.measured, **_trouble([before, last])),
    )


def _stages(outermost: LoaderSnapshot, streams: Streams) -> list[StageSnapshot]:
    keys, read, *operations, hand_over = outermost.stages
    below = [stage for prefix, snapshot in streams for stage in _stages_of(prefix, snapshot, outermost)]
    reads = any(stage.kind is Kind.READ for stage in below)
    # If the streams alone have workers, this process runs the operations after them.
    after = [dataclasses.replace(stage, is_local=stage.is_local or not outermost.num_workers) for stage in operations]
    merged = _merged([keys, *([] if reads else [read]), *below, *after, hand_over])
    return sorted(merged, key=lambda stage: stage.kind is Kind.HAND_OVER)


def _stages_of(prefix: str, snapshot: LoaderSnapshot, outermost: LoaderSnapshot) -> Iterator[StageSnapshot]:
    """Yields the stages of a stream. Reading and operations get the prefix."""
    is_shared = outermost.num_workers > 0 and not snapshot.num_workers
    for stage in snapshot.stages:
        named = prefix if stage.kind in (Kind.READ, Kind.OPERATION) else ""
        yield dataclasses.replace(
            stage,
            label=named + stage.label,
            name=named + stage.name,
            location=StageLocation.WORKERS if is_shared else stage.location,
            # If other streams have workers, this process still runs it.
            is_local=not is_shared and (stage.is_local or not snapshot.num_workers),
        )


def _trouble(snapshots: Sequence[LoaderSnapshot]) -> dict[str, Any]:
    """Returns the sums of errors, deaths, stalls, and the processor time of workers."""
    measured = [snapshot.measured for snapshot in snapshots]
    return {
        "errors": sum(one.errors for one in measured),
        "deaths": sum(one.deaths for one in measured),
        "stalls": sum(one.stalls for one in measured),
        "core_seconds": sum(one.core_seconds or 0.0 for one in measured) or None,
        "delay_seconds": sum(one.delay_seconds for one in measured),
    }


def _merged(stages: Iterable[StageSnapshot]) -> list[StageSnapshot]:
    """Returns the sums of the stages with equal labels, in order."""
    sums: dict[str, StageSnapshot] = {}
    for stage in stages:
        if (before := sums.get(stage.label)) is not None:
            is_remote = StageLocation.WORKERS in (before.location, stage.location)
            location = StageLocation.WORKERS if is_remote else stage.location
            stage = dataclasses.replace(stage, seconds=before.seconds + stage.seconds, location=location)  # noqa: PLW2901
        sums[stage.label] = stage
    return list(sums.values())


def description_of(
    plan: Plan, workers: MultiprocessingOptions, reading: ReadOptions, frontend: Frontend, num_cores: int | None
) -> LoaderSnapshot:
    """Returns the snapshot of a loader without measurements. `num_cores` is None for the cores of this process."""
    pipeline = plan.pipeline
    source = pipeline.source
    reads_ahead = reading.num_threads > 0 if workers.num_workers else reading.reads_ahead
    location = StageLocation.THREADS if reading.reads_ahead else StageLocation.TRAINER
    if workers.num_workers:
        location = StageLocation.WORKERS
    return LoaderSnapshot(
        source=SourceSnapshot(
            name=source_name(source),
            kind=type(source).__name__,
            one_by_one=_one_by_one(source),
            bars=_bars(source),
            window_units=window if isinstance(window := getattr(source, "window_units", None), int) else None,
        ),
        order=order_of(pipeline),
        stages=tuple(_described_stages(plan, location)),
        shard=f"{pipeline.shard.shard_index} of {pipeline.shard.shard_count}",
        num_workers=workers.num_workers,
        worker_buffer=workers.per_worker_buffer_size,
        num_threads=reading.num_threads if reads_ahead else 0,
        records_ahead=0 if workers.num_workers else reading.prefetch_buffer_size,
        num_cores=num_cores or available_cores(),
        frontend=frontend,
    )


def order_of(pipeline: Pipeline) -> OrderSnapshot:
    sampler = pipeline.sampler
    return OrderSnapshot(
        name=described(sampler, with_defaults=False),
        kind=type(sampler).__name__,
        is_vectorised=not isinstance(pipeline.order, AdaptedSampler) or hasattr(sampler, "record_keys"),
        bars=_bars(sampler),
        is_global_shuffle=isinstance(sampler, EpochSampler)
        and getattr(sampler, "shuffle", False)
        and getattr(sampler, "window_units", None) is None,
    )


@final
class ComponentCounter:
    """Counts the elements of each component of a plan's mixture before a step. Each call continues the previous one.

    Args:
        earlier: the counts of epochs before this plan's, which are added; () for none.
    """

    def __init__(self, plan: Plan, earlier: tuple[ComponentSnapshot, ...] = ()) -> None:
        order, self._partition = plan.pipeline.order, plan.partition
        self._order = order if plan.one_to_one and is_mixed(order) else None
        self.earlier = earlier
        self._earlier = {component.name: component for component in earlier}
        self._last: tuple[Sequence[int], Sequence[int | None]] = (), ()

    def before(self, step: int, spans: Sequence[tuple[int, int]] | None = None) -> tuple[ComponentSnapshot, ...]:
        """Returns the counts in the global batches before a step; () without a mixture. It is safe in any thread.

        `spans` are the positions of these batches, as ranges; None for all positions before it.
        """
        order, length, size = self._order, self._partition.length, self._partition.global_block
        if order is None:
            return ()

        def drawn_before(position: int) -> Sequence[int]:
            return order.drawn_before(position if length is None else min(position, length))

        counted: Sequence[int | None]
        if is_beginning := not spans or (len(spans) == 1 and not spans[0][0]):
            records = drawn_before((step if spans is None else sum(stop for _, stop in spans) // size) * size)
            begun, counted = self._last
            if not begun or any(map(operator.gt, begun, records)):
                begun = counted = (0,) * len(records)
            ranges = [list(zip(begun, records, strict=True))]
        else:
            ranges = [list(zip(*map(drawn_before, span), strict=True)) for span in spans or ()]
            counted = (0,) * len(ranges[0])
            records = [sum(stop - start for start, stop in series) for series in zip(*ranges, strict=True)]
        tokens = [
            (tokens_before or 0) + sum(sampler.tokens_between(start, stop) for start, stop in series)
            if hasattr(sampler, "tokens_between")
            else None
            for sampler, tokens_before, series in zip(order.samplers, counted, zip(*ranges, strict=True), strict=True)
        ]
        if is_beginning:
            self._last = records, tokens
        return tuple(map(self._with_earlier, map(str, order.names), records, tokens))

    def _with_earlier(self, name: str, records: int, tokens: int | None) -> ComponentSnapshot:
        _, before, tokens_before = self._earlier.get(name, (name, 0, 0))
        return ComponentSnapshot(name, before + records, None if tokens is None else (tokens_before or 0) + tokens)


def _one_by_one(source: object) -> str:
    """Returns the name of the class that lacks a batched read, also if it is below a source that has one."""
    if not reads_one_by_one([source]):
        return ""
    kind = type(source).__name__
    return kind if batched_read_of(source) is None else f"the sources of {kind}"


def _bars(value: object) -> Bars:
    """Returns the bars of the library's own sources and samplers, because attributes of user classes mean anything."""
    return tuple(value._card_bars()) if isinstance(value, Rendered) else ()  # noqa: SLF001  (in its own library)


def _described_stages(plan: Plan, location: StageLocation) -> Sequence[StageSnapshot]:
    """Returns the stages, without the steps that a chain inserts between the user's operations.

    With workers, the trainer's thread runs the operations that only copy elements.
    """
    pipeline = plan.pipeline
    found = [
        StageSnapshot(KEYS, "record keys", Kind.KEYS, location),
        StageSnapshot(READ, "read", Kind.READ, location, includes=getattr(pipeline.source, "calls_in_reads", "")),
    ]
    numbers, num_remote = itertools.count(), len(pipeline.operations) - pipeline.num_local
    for stage, group in zip(plan.stages, split_stages(pipeline.operations), strict=True):
        is_copied_here = location is StageLocation.WORKERS and not stage.runs_user_code
        for operation in group:
            number = next(numbers)
            if operation.is_between:
                continue
            found.append(
                StageSnapshot(
                    pipeline.labels[number],
                    pipeline.names[number],
                    Kind.OPERATION,
                    StageLocation.TRAINER if is_copied_here or number >= num_remote else location,
                    regroups=operation.regroups,
                    keeps_count=operation.keeps_count,
                    is_local=number >= num_remote,
                )
            )
    found.append(StageSnapshot(HAND_OVER, "hand-over", Kind.HAND_OVER, location))
    return found


COMPONENTS_SHOWN = 8


def bytes_text(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(number) < 999.5:
            return _with_unit(number, unit)
        number /= 1000
    return _with_unit(number, "TB")


def seconds_text(seconds: float) -> str:
    if not seconds:
        return "0 s"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return _with_unit(seconds * factor, unit)
    return _with_unit(seconds, "s")


def share_text(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def count_text(number: int, noun: str) -> str:
    """Returns a count with its noun: `1 batch`, `12,000 records`."""
    plural = noun if number == 1 else f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"
    return f"{number:,} {plural}"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Returns rows of a table as lines: the first `left` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    adjust = [str.ljust if number < left else str.rjust for number in range(len(widths))]
    cells = ([fit(cell, width) for fit, cell, width in zip(adjust, row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def _with_unit(number: float, unit: str) -> str:
    # Two significant digits, as in 1.5 and 19.
    digits = 0 if abs(number) >= 9.95 or number == int(number) else 1
    return f"{number:,.{digits}f} {unit}"


def workers_text(snapshot: LoaderSnapshot) -> str:
    threads = count_text(snapshot.num_threads, "thread") if snapshot.num_threads else "no threads"
    cores = count_text(snapshot.num_cores, "core")
    if snapshot.num_workers:
        workers = count_text(snapshot.num_workers, snapshot.frontend.worker)
        each = " each" if snapshot.num_workers > 1 else ""
        return f"{workers} with {threads}{each}, {cores}{' for them' if snapshot.frontend.is_on_cluster else ''}"
    return f"no worker processes, {'up to ' if snapshot.num_threads else ''}{threads}, {cores}"


def trainer_text(measured: Measurements) -> str:
    if not measured.batches:
        return "no batch yet"
    size = "" if measured.batch_bytes is None else f" of {bytes_text(measured.batch_bytes)}"
    batches = f"{count_text(measured.batches, 'batch')}{size}"
    if not measured.seconds:
        return batches
    return f"{batches} in {seconds_text(measured.seconds)}, {share_text(measured.wait_share)} of it waiting"


def mixture_texts(snapshot: LoaderSnapshot) -> Iterator[str]:
    """Yields the shares of a mixture's weights, then its components so far.

    The first is like `mixture web 75 %, books 25 %; from position 800: web 50 %, books 50 %`.
    """
    if snapshot.order.bars:
        shares = [f"{f'{caption}: ' if caption else ''}{_shares_text(sizes)}" for caption, sizes in snapshot.order.bars]
        yield f"mixture {'; '.join(shares)}"
    if text := components_text(snapshot.measured):
        yield text


def components_text(measured: Measurements) -> str:
    """Returns `so far web 1,200 records, books 400 records`; for rows of documents, `web 30 rows of 1,890 tokens`."""
    if not measured.step or not measured.components:
        return ""
    noun = "record" if measured.components[0].tokens is None else "row"
    counts = [
        f"{name} {count_text(records, noun)}" + ("" if tokens is None else f" of {count_text(tokens, 'token')}")
        for name, records, tokens in measured.components
    ]
    return f"so far {_listed(counts)}"


def _shares_text(sizes: Sequence[tuple[str, float]]) -> str:
    total = sum(size for _, size in sizes) or 1.0
    return _listed([f"{name} {share_text(size / total)}" for name, size in sizes])


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - COMPONENTS_SHOWN
    return ", ".join([*texts[:COMPONENTS_SHOWN], *([f"{more} more"] if more > 0 else [])])


def size_text(snapshot: LoaderSnapshot) -> str:
    size = snapshot.measured.batch_bytes
    return "" if size is None else f" ({bytes_text(size)} each)"


def stages_by_location(snapshot: LoaderSnapshot) -> Iterator[tuple[str, list[StageSnapshot]]]:
    """Yields runs of consecutive stages that run in the same threads or processes, each with a name for these."""
    shown = [stage for stage in snapshot.stages if stage.kind is not Kind.HAND_OVER]
    runs = [(location, list(run)) for location, run in itertools.groupby(shown, key=lambda stage: stage.location)]
    if snapshot.num_workers:
        # The transfer comes after the workers' last stage, and before those of the trainer's thread.
        row = next((number for number, (location, _) in enumerate(runs) if location is StageLocation.WORKERS), -1)
        runs[row][1].append(snapshot.stage(Kind.HAND_OVER))
    return ((_location_text(snapshot, location), run) for location, run in runs)


def is_measured(snapshot: LoaderSnapshot) -> bool:
    """Returns True if there are batches, and durations of stages."""
    return snapshot.measured.batches > 0 and snapshot.pipeline_seconds > 0


def is_bottleneck(snapshot: LoaderSnapshot, stage: StageSnapshot) -> bool:
    return is_measured(snapshot) and stage is snapshot.slowest


def each_text(snapshot: LoaderSnapshot, stage: StageSnapshot) -> str:
    return f"{seconds_text(stage.seconds / snapshot.measured.batches)} per batch"


def _location_text(snapshot: LoaderSnapshot, location: StageLocation) -> str:
    threads = f" with up to {count_text(snapshot.num_threads, 'thread')}" if snapshot.num_threads else ""
    if location is StageLocation.WORKERS:
        each = " each" if snapshot.num_workers > 1 else ""
        return f"{count_text(snapshot.num_workers, snapshot.frontend.worker)}{threads}{each}"
    if location is StageLocation.THREADS:
        return f"up to {count_text(snapshot.num_threads, 'thread')} of the trainer's process"
    return "the trainer's thread"
