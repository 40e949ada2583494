"""Collects the snapshot of a loader. It reads no record."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.descriptions import described
from millstream.loader.pipeline.arguments import source_name
from millstream.loader.pipeline.plan import KEYS, READ, Plan
from millstream.loader.pipeline.stages import split_stages
from millstream.loader.reporting.snapshot import (
    Kind,
    LoaderSnapshot,
    Location,
    Measurements,
    OrderSnapshot,
    SourceSnapshot,
    StageSnapshot,
)
from millstream.loader.threads.front import Front
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions, available_cores
from millstream.loader.threads.profiler import CONSUMER, HAND_OVER, NEXT, Profiler
from millstream.notebook_repr import Pictured
from millstream.samplers import Sampler
from millstream.samplers.base import AdaptedSampler, VectorisedSampler
from millstream.samplers.epochs import EpochSampler
from millstream.samplers.protocols import is_mixed
from millstream.sources import DataSource
from millstream.sources.files.multi_file import Files
from millstream.sources.source_checks import batched_read_of

Structures = Mapping[str, tuple[str, ...]]
"""Descriptions of the leaves of each stage's results, by the stage's label."""


def snapshot_of(
    plan: Plan,
    profiler: Profiler,
    workers: MultiprocessingOptions,
    reading: ReadOptions,
    structures: Structures,
    *,
    front: Front,
    num_cores: int | None = None,
    position: tuple[int, int | None] = (0, None),
) -> LoaderSnapshot:
    """Returns the snapshot of a loader.

    Args:
        plan: the compiled pipeline.
        profiler: its measurements.
        workers: its worker processes.
        reading: its threads.
        structures: traced results of its stages.
        front: the API that it was built with.
        num_cores: the number of cores for the workers; None for those of this process.
        position: step and epoch of the newest iterator.
    """
    pipeline, seconds = plan.pipeline, profiler.read()
    reads_ahead = reading.num_threads > 0 if workers.num_workers else reading.reads_ahead
    return LoaderSnapshot(
        source=source_snapshot(pipeline.source),
        order=order_snapshot(pipeline.sampler, pipeline.order),
        stages=tuple(_stages(plan, seconds, _location(workers, reading), structures)),
        measured=_measured(plan, profiler, seconds, position),
        shard=f"{pipeline.shard.shard_index} of {pipeline.shard.shard_count}",
        num_workers=workers.num_workers,
        worker_buffer=workers.per_worker_buffer_size,
        num_threads=reading.num_threads if reads_ahead else 0,
        records_ahead=0 if workers.num_workers else reading.prefetch_buffer_size,
        num_cores=num_cores or available_cores(),
        front=front,
    )


def updated_snapshot(
    snapshot: LoaderSnapshot, plan: Plan, profiler: Profiler, position: tuple[int, int | None]
) -> LoaderSnapshot:
    """Returns a snapshot with current measurements. It is safe in any thread, and calls no user code."""
    seconds = profiler.read()
    return dataclasses.replace(
        snapshot,
        measured=_measured(plan, profiler, seconds, position),
        stages=tuple(dataclasses.replace(stage, seconds=seconds[stage.label]) for stage in snapshot.stages),
    )


def _measured(
    plan: Plan, profiler: Profiler, seconds: Mapping[str, float], position: tuple[int, int | None]
) -> Measurements:
    return Measurements(
        batches=profiler.outputs,
        first_seconds=profiler.first_seconds,
        wait_seconds=max(0.0, seconds[NEXT] - profiler.first_seconds),
        trainer_seconds=seconds[CONSUMER],
        batch_bytes=profiler.output_bytes,
        core_seconds=profiler.core_seconds or None,
        deaths=profiler.deaths,
        stalls=profiler.stalls,
        waits=tuple(profiler.waits.copy()),
        records=profiler.outputs * plan.partition.block if plan.one_to_one else None,
        errors=0 if plan.errors is None else len(plan.errors.texts),
        step=position[0],
        epoch=position[1],
        components=_components_before(plan, position[0]),
    )


def _components_before(plan: Plan, step: int) -> tuple[tuple[str, int], ...]:
    """Returns the records of each component of a mixture in the global batches before a step."""
    order, partition = plan.pipeline.order, plan.partition
    if not plan.one_to_one or not is_mixed(order):
        return ()
    position = step * partition.global_block
    drawn = order.drawn_before(position if partition.length is None else min(position, partition.length))
    return tuple(zip(map(str, order.names), drawn, strict=True))


def source_snapshot(source: DataSource[Any]) -> SourceSnapshot:
    """Returns the snapshot of a source."""
    return SourceSnapshot(
        name=source_name(source),
        kind=type(source).__name__,
        num_records=len(source),
        reads_batches=type(source) in (list, tuple, range) or batched_read_of(source) is not None,
        parts=_parts(source),
        window_units=source.window_units if isinstance(source, Files) and hasattr(source, "window_units") else None,
    )


def order_snapshot(sampler: Sampler, order: VectorisedSampler | AdaptedSampler) -> OrderSnapshot:
    """Returns the snapshot of a sampler, given as the user built it and as the plan calls it."""
    return OrderSnapshot(
        name=described(sampler, with_defaults=False),
        kind=type(sampler).__name__,
        length=order.length,
        is_vectorised=not isinstance(order, AdaptedSampler) or hasattr(sampler, "record_keys"),
        weights=_parts(sampler),
        is_global_shuffle=isinstance(sampler, EpochSampler) and getattr(sampler, "shuffle", False),
    )


def _parts(whole: object) -> tuple[tuple[str, float], ...]:
    """Returns the parts of the library's own sources and samplers, because attributes of user classes mean anything."""
    return tuple(whole._picture_parts()) if isinstance(whole, Pictured) else ()  # noqa: SLF001  (in its own library)


def _location(workers: MultiprocessingOptions, reading: ReadOptions) -> Location:
    if workers.num_workers:
        return Location.WORKERS
    return Location.THREADS if reading.reads_ahead else Location.TRAINER


def _stages(
    plan: Plan, seconds: Mapping[str, float], location: Location, structures: Structures
) -> Sequence[StageSnapshot]:
    """Returns the stages, without the steps that a chain inserts between the user's operations.

    With workers, the trainer's thread runs the operations that only copy elements.
    """
    pipeline = plan.pipeline
    found = [
        StageSnapshot(KEYS, "record keys", Kind.KEYS, location, seconds[KEYS]),
        StageSnapshot(READ, "read", Kind.READ, location, seconds[READ], structure=structures.get(READ)),
    ]
    numbers = itertools.count()
    for stage, group in zip(plan.stages, split_stages(pipeline.operations), strict=True):
        is_copied_here = location is Location.WORKERS and not stage.runs_user_code
        for operation in group:
            number = next(numbers)
            if operation.is_between:
                continue
            label = pipeline.labels[number]
            found.append(
                StageSnapshot(
                    label,
                    pipeline.names[number],
                    Kind.OPERATION,
                    Location.TRAINER if is_copied_here else location,
                    seconds[label],
                    regroups=operation.regroups,
                    keeps_count=operation.keeps_count,
                    structure=structures.get(label),
                )
            )
    found.append(StageSnapshot(HAND_OVER, "hand-over", Kind.HAND_OVER, location, seconds[HAND_OVER]))
    return found
