"""What is known of a loader, collected for those who show it. No record is read."""

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
    LoaderFacts,
    Measured,
    OrderFacts,
    Place,
    SourceFacts,
    StageFacts,
)
from millstream.loader.threads.front import Front
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions, available_cores
from millstream.loader.threads.profiler import CONSUMER, HAND_OVER, NEXT, Profiler
from millstream.notebook_repr import Pictured
from millstream.samplers import Sampler
from millstream.samplers.base import AdaptedSampler, VectorisedSampler
from millstream.samplers.epochs import EpochSampler
from millstream.sources import DataSource
from millstream.sources.files.multi_file import Files
from millstream.sources.source_checks import batched_read_of

Structures = Mapping[str, tuple[str, ...]]
"""The leaves of what each stage gives, by the stage's label."""


def facts_of(
    plan: Plan,
    profiler: Profiler,
    workers: MultiprocessingOptions,
    reading: ReadOptions,
    structures: Structures,
    *,
    front: Front,
    num_cores: int | None = None,
) -> LoaderFacts:
    """Returns what is known of a loader now.

    Args:
        plan: what it runs.
        profiler: what was measured.
        workers: its worker processes.
        reading: its threads.
        structures: what was traced.
        front: how the pipeline was said.
        num_cores: how many cores the workers may use; None for those that this process may.
    """
    pipeline, seconds = plan.pipeline, profiler.read()
    reads_ahead = reading.num_threads > 0 if workers.num_workers else reading.reads_ahead
    return LoaderFacts(
        source=source_facts(pipeline.source),
        order=order_facts(pipeline.sampler, pipeline.order),
        stages=tuple(_stages(plan, seconds, _place(workers, reading), structures)),
        measured=_measured(profiler, seconds),
        shard=f"{pipeline.shard.shard_index} of {pipeline.shard.shard_count}",
        num_workers=workers.num_workers,
        worker_buffer=workers.per_worker_buffer_size,
        num_threads=reading.num_threads if reads_ahead else 0,
        records_ahead=0 if workers.num_workers else reading.prefetch_buffer_size,
        num_cores=num_cores or available_cores(),
        front=front,
    )


def facts_later(facts: LoaderFacts, profiler: Profiler) -> LoaderFacts:
    """Returns the facts of a loader as they are now: what was measured is new. Any thread may ask.

    No code of the user's is called, which sources and samplers may have to be shown.
    """
    seconds = profiler.read()
    return dataclasses.replace(
        facts,
        measured=_measured(profiler, seconds),
        stages=tuple(dataclasses.replace(stage, seconds=seconds[stage.label]) for stage in facts.stages),
    )


def _measured(profiler: Profiler, seconds: Mapping[str, float]) -> Measured:
    return Measured(
        batches=profiler.outputs,
        first_seconds=profiler.first_seconds,
        wait_seconds=max(0.0, seconds[NEXT] - profiler.first_seconds),
        trainer_seconds=seconds[CONSUMER],
        batch_bytes=profiler.output_bytes,
        core_seconds=profiler.core_seconds or None,
        deaths=profiler.deaths,
        stalls=profiler.stalls,
    )


def source_facts(source: DataSource[Any]) -> SourceFacts:
    """Returns what is known of a source."""
    return SourceFacts(
        name=source_name(source),
        kind=type(source).__name__,
        num_records=len(source),
        reads_many=type(source) in (list, tuple, range) or batched_read_of(source) is not None,
        parts=_parts(source),
        window_units=source.window_units if isinstance(source, Files) and hasattr(source, "window_units") else None,
    )


def order_facts(sampler: Sampler, order: VectorisedSampler | AdaptedSampler) -> OrderFacts:
    """Returns what is known of a sampler, given also as one that answers for whole blocks."""
    return OrderFacts(
        name=described(sampler, with_defaults=False),
        kind=type(sampler).__name__,
        length=order.length,
        answers_for_many=not isinstance(order, AdaptedSampler) or hasattr(sampler, "record_keys"),
        weights=_parts(sampler),
        is_global_shuffle=isinstance(sampler, EpochSampler) and getattr(sampler, "shuffle", False),
    )


def _parts(whole: object) -> tuple[tuple[str, float], ...]:
    """Returns what our own sources and samplers consist of: a class of the user's may mean anything by its names."""
    return tuple(whole._picture_parts()) if isinstance(whole, Pictured) else ()  # noqa: SLF001  (in its own library)


def _place(workers: MultiprocessingOptions, reading: ReadOptions) -> Place:
    if workers.num_workers:
        return Place.WORKERS
    return Place.THREADS if reading.reads_ahead else Place.TRAINER


def _stages(plan: Plan, seconds: Mapping[str, float], place: Place, structures: Structures) -> Sequence[StageFacts]:
    """Returns the parts of the work, without steps that a chain puts between the user's operations.

    The trainer's thread makes what only copies out of workers.
    """
    pipeline = plan.pipeline
    found = [
        StageFacts(KEYS, "record keys", Kind.KEYS, place, seconds[KEYS]),
        StageFacts(READ, "read", Kind.READ, place, seconds[READ], structure=structures.get(READ)),
    ]
    numbers = itertools.count()
    for stage, group in zip(plan.stages, split_stages(pipeline.operations), strict=True):
        is_copied_here = place is Place.WORKERS and not stage.runs_user_code
        for operation in group:
            number = next(numbers)
            if operation.is_between:
                continue
            label = pipeline.labels[number]
            found.append(
                StageFacts(
                    label,
                    pipeline.names[number],
                    Kind.OPERATION,
                    Place.TRAINER if is_copied_here else place,
                    seconds[label],
                    regroups=operation.regroups,
                    keeps_count=operation.keeps_count,
                    structure=structures.get(label),
                )
            )
    found.append(StageFacts(HAND_OVER, "hand-over", Kind.HAND_OVER, place, seconds[HAND_OVER]))
    return found
