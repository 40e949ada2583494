"""The snapshot of an iterator that draws from others: what it measured, and the stages of all of them."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from millstream.loader.reporting.snapshot import Kind, LoaderSnapshot, Location, StageSnapshot

Streams = Sequence[tuple[str, LoaderSnapshot]]
"""Snapshots of the iterators that another one draws from, each with a prefix for the labels of its stages."""


def joined(own: LoaderSnapshot, below: Streams, replaced: LoaderSnapshot | None = None) -> LoaderSnapshot:
    """Returns the snapshot of an iterator with the stages below it. Stages with equal labels are sums.

    Streams without workers of their own run in those of `own`, if it has some. `replaced` has the sums of the streams
    that others have replaced.
    """
    earlier: Streams = [] if replaced is None else [("", replaced)]
    streams = [*earlier, *below]
    runs = [own, *(snapshot for _, snapshot in below or earlier)]
    return dataclasses.replace(
        own,
        stages=tuple(_stages(own, streams)),
        measured=dataclasses.replace(own.measured, **_trouble([own, *(snapshot for _, snapshot in streams)])),
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


def _stages(own: LoaderSnapshot, streams: Streams) -> list[StageSnapshot]:
    keys, read, *operations, hand_over = own.stages
    below = [stage for prefix, snapshot in streams for stage in _stages_of(prefix, snapshot, own)]
    reads = any(stage.kind is Kind.READ for stage in below)
    # If the streams alone have workers, this process runs the operations after them.
    after = [dataclasses.replace(stage, is_local=stage.is_local or not own.num_workers) for stage in operations]
    whole = _merged([keys, *([] if reads else [read]), *below, *after, hand_over])
    return sorted(whole, key=lambda stage: stage.kind is Kind.HAND_OVER)


def _stages_of(prefix: str, snapshot: LoaderSnapshot, own: LoaderSnapshot) -> Iterator[StageSnapshot]:
    """Yields the stages of a stream. Reading and operations get the prefix."""
    is_shared = own.num_workers > 0 and not snapshot.num_workers
    for stage in snapshot.stages:
        named = prefix if stage.kind in (Kind.READ, Kind.OPERATION) else ""
        yield dataclasses.replace(
            stage,
            label=named + stage.label,
            name=named + stage.name,
            location=Location.WORKERS if is_shared else stage.location,
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
            is_remote = Location.WORKERS in (before.location, stage.location)
            location = Location.WORKERS if is_remote else stage.location
            stage = dataclasses.replace(stage, seconds=before.seconds + stage.seconds, location=location)  # noqa: PLW2901
        sums[stage.label] = stage
    return list(sums.values())
