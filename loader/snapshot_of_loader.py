"""Describes a loader that has measured nothing. It reads no record."""

import itertools
import operator
from collections.abc import Sequence
from typing import final

from millstream.core.descriptions import Rendered, described
from millstream.loader.measuring import HAND_OVER, Front
from millstream.loader.pipeline.pipeline import source_name
from millstream.loader.pipeline.plan import KEYS, READ, Plan
from millstream.loader.pipeline.stages import split_stages
from millstream.loader.reporting.snapshot import (
    Bars,
    ComponentSnapshot,
    Kind,
    LoaderSnapshot,
    Location,
    OrderSnapshot,
    SourceSnapshot,
    StageSnapshot,
)
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions, available_cores
from millstream.samplers.base import AdaptedSampler
from millstream.samplers.epochs import EpochSampler
from millstream.samplers.protocols import is_mixed
from millstream.sources.source_checks import batched_read_of, reads_one_by_one


def description_of(
    plan: Plan, workers: MultiprocessingOptions, reading: ReadOptions, front: Front, num_cores: int | None
) -> LoaderSnapshot:
    """Returns the snapshot of a loader without measurements. `num_cores` is None for the cores of this process."""
    pipeline = plan.pipeline
    source, sampler = pipeline.source, pipeline.sampler
    reads_ahead = reading.num_threads > 0 if workers.num_workers else reading.reads_ahead
    return LoaderSnapshot(
        source=SourceSnapshot(
            name=source_name(source),
            kind=type(source).__name__,
            one_by_one=_one_by_one(source),
            bars=_bars(source),
            window_units=window if isinstance(window := getattr(source, "window_units", None), int) else None,
        ),
        order=OrderSnapshot(
            name=described(sampler, with_defaults=False),
            kind=type(sampler).__name__,
            is_vectorised=not isinstance(pipeline.order, AdaptedSampler) or hasattr(sampler, "record_keys"),
            bars=_bars(sampler),
            is_global_shuffle=isinstance(sampler, EpochSampler)
            and getattr(sampler, "shuffle", False)
            and getattr(sampler, "window_units", None) is None,
        ),
        stages=tuple(_stages(plan, _location(workers, reading))),
        shard=f"{pipeline.shard.shard_index} of {pipeline.shard.shard_count}",
        num_workers=workers.num_workers,
        worker_buffer=workers.per_worker_buffer_size,
        num_threads=reading.num_threads if reads_ahead else 0,
        records_ahead=0 if workers.num_workers else reading.prefetch_buffer_size,
        num_cores=num_cores or available_cores(),
        front=front,
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
        self._earlier = {component.name: component for component in earlier}
        self._last: tuple[Sequence[int], Sequence[int | None]] = (), ()

    def before(self, step: int) -> tuple[ComponentSnapshot, ...]:
        """Returns the counts in the global batches before a step; () without a mixture. It is safe in any thread."""
        order, length = self._order, self._partition.length
        if order is None:
            return ()
        position = step * self._partition.global_block
        drawn = order.drawn_before(position if length is None else min(position, length))
        begun, counted = self._last
        if not begun or any(map(operator.gt, begun, drawn)):
            begun = counted = (0,) * len(drawn)
        tokens = [
            (own or 0) + sampler.tokens_between(start, stop) if hasattr(sampler, "tokens_between") else None
            for sampler, own, start, stop in zip(order.samplers, counted, begun, drawn, strict=True)
        ]
        self._last = drawn, tokens
        return tuple(map(self._with_earlier, map(str, order.names), drawn, tokens))

    def _with_earlier(self, name: str, records: int, tokens: int | None) -> ComponentSnapshot:
        _, before, tokens_before = self._earlier.get(name, (name, 0, 0))
        return ComponentSnapshot(name, before + records, None if tokens is None else (tokens_before or 0) + tokens)


def _one_by_one(source: object) -> str:
    """Returns the name of the class that lacks a batched read, also if it is below a source that has one."""
    if not reads_one_by_one([source]):
        return ""
    kind = type(source).__name__
    return kind if batched_read_of(source) is None else f"the sources of {kind}"


def _bars(whole: object) -> Bars:
    """Returns the bars of the library's own sources and samplers, because attributes of user classes mean anything."""
    return tuple(whole._card_bars()) if isinstance(whole, Rendered) else ()  # noqa: SLF001  (in its own library)


def _location(workers: MultiprocessingOptions, reading: ReadOptions) -> Location:
    if workers.num_workers:
        return Location.WORKERS
    return Location.THREADS if reading.reads_ahead else Location.TRAINER


def _stages(plan: Plan, location: Location) -> Sequence[StageSnapshot]:
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
        is_copied_here = location is Location.WORKERS and not stage.runs_user_code
        for operation in group:
            number = next(numbers)
            if operation.is_between:
                continue
            found.append(
                StageSnapshot(
                    pipeline.labels[number],
                    pipeline.names[number],
                    Kind.OPERATION,
                    Location.TRAINER if is_copied_here or number >= num_remote else location,
                    regroups=operation.regroups,
                    keeps_count=operation.keeps_count,
                    is_local=number >= num_remote,
                )
            )
    found.append(StageSnapshot(HAND_OVER, "hand-over", Kind.HAND_OVER, location))
    return found
