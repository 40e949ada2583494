"""Snapshots of loaders that were never built: their renderings can be tested without running anything."""

import dataclasses
from typing import Any

from millstream.loader.measuring import LOADER, Frontend
from millstream.loader.reporting.snapshot import (
    Kind,
    LoaderSnapshot,
    Measurements,
    OrderSnapshot,
    SourceSnapshot,
    StageLocation,
    StageSnapshot,
)


def snapshot_of_run(
    *,
    keys: float = 0.0,
    read: float = 0.0,
    augment: float = 0.0,
    batch: float = 0.0,
    hand_over: float = 0.0,
    waits: float = 0.0,
    trains: float = 0.0,
    workers: int = 0,
    threads: int = 16,
    cores: int = 8,
    frontend: Frontend = LOADER,
    **measured: Any,
) -> LoaderSnapshot:
    """Returns the snapshot of a loader with an operation and a Batch, given seconds by stage, workers and counts."""
    location = StageLocation.WORKERS if workers else StageLocation.THREADS if threads else StageLocation.TRAINER
    return LoaderSnapshot(
        source=SourceSnapshot("Tokens of 1000 records", "Tokens", one_by_one=""),
        order=OrderSnapshot("IndexSampler(num_records=1000)", "IndexSampler", is_vectorised=True),
        stages=(
            StageSnapshot("keys", "record keys", Kind.KEYS, location, keys),
            StageSnapshot("read", "read", Kind.READ, location, read),
            StageSnapshot("operations[0], Augment", "Augment", Kind.OPERATION, location, augment),
            StageSnapshot("operations[1], Batch(8)", "Batch(8)", Kind.OPERATION, location, batch),
            StageSnapshot("hand-over", "hand-over", Kind.HAND_OVER, location, hand_over),
        ),
        measured=Measurements(batches=100, timed_batches=100, wait_seconds=waits, trainer_seconds=trains, **measured),
        shard="0 of 1",
        num_workers=workers,
        worker_buffer=1,
        num_threads=threads,
        records_ahead=500,
        num_cores=cores,
        frontend=frontend,
    )


def with_stage(snapshot: LoaderSnapshot, which: str, **changes: Any) -> LoaderSnapshot:
    """Returns a snapshot with one stage changed, found by the beginning of its label."""
    stages = tuple(
        dataclasses.replace(stage, **changes) if stage.label.startswith(which) else stage for stage in snapshot.stages
    )
    return dataclasses.replace(snapshot, stages=stages)


def with_source(snapshot: LoaderSnapshot, **changes: Any) -> LoaderSnapshot:
    return dataclasses.replace(snapshot, source=dataclasses.replace(snapshot.source, **changes))


def with_order(snapshot: LoaderSnapshot, **changes: Any) -> LoaderSnapshot:
    return dataclasses.replace(snapshot, order=dataclasses.replace(snapshot.order, **changes))
