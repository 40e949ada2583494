"""The views of an iterator that only combines streams: the waits for it, and the stages of the streams below."""

import contextlib
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, final

from millstream.dataset.nodes.lowering import InOrder
from millstream.loader.insight import Insight
from millstream.loader.measuring.front import FED_CHAIN
from millstream.loader.measuring.profiler import CONSUMER, HAND_OVER, NEXT
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import KEYS, Plan
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.sharding import NoSharding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from millstream.dataset.iterators.dataset_iterator import DatasetIterator
    from millstream.dataset.iterators.recovering_iterator import RecoveringIterator
    from millstream.loader.reporting.snapshot import LoaderSnapshot, StageSnapshot

MAX_NAMED = 8
"""The largest number of streams whose stages are displayed one by one."""


@final
class JoinInsight(Insight):
    """Computes the views of a join.

    Keys and hand-over are sums over its streams. Reading and operations have the name of their stream before theirs;
    with many streams, or if streams replace each other, they are sums by name, too.
    """

    def __init__(self, join: "RecoveringIterator[Any]") -> None:
        order = InOrder(None, None)
        plan = Plan(Pipeline([], order, order, (), NoSharding()))
        super().__init__(plan, join.profiler, MultiprocessingOptions(), ReadOptions(0, 0), front=FED_CHAIN)
        # The join has a reference to this object.
        self._of = weakref.ref(join)

    def count_delivered(self) -> None:
        self._join.count_delivered()

    def snapshot(self) -> "LoaderSnapshot":
        join, own = self._join, super().snapshot()
        below = list(snapshots(list(join.below())))
        replaced = [] if join.replaced is None else [join.replaced]
        measured = [*replaced, *(snapshot for _, snapshot in below)]
        # The workers that all streams share, or those of each open stream.
        shared = [] if join.leader is None else [join.leader.insight.snapshot()]
        runs = shared or [snapshot for _, snapshot in below] or replaced
        stages = _joined_stages(own, [*stages_of(("", one) for one in replaced), *stages_of(below)])
        if shared:
            from millstream.loader.reporting.snapshot import Location  # noqa: PLC0415  (lazy: only views need it)

            stages = [dataclasses.replace(stage, location=Location.WORKERS) for stage in stages]
        return dataclasses.replace(
            own,
            source=dataclasses.replace(own.source, name=join.name),
            order=dataclasses.replace(own.order, name="in order"),
            stages=tuple(stages),
            measured=dataclasses.replace(own.measured, records=None, **_trouble([*shared, *measured])),
            num_workers=sum(run.num_workers for run in runs),
            worker_buffer=max([run.worker_buffer for run in runs], default=own.worker_buffer),
            num_threads=max([run.num_threads for run in runs], default=0),
            records_ahead=sum(run.records_ahead for run in runs),
        )

    def profile(self) -> dict[str, float]:
        stages, trainer = self.snapshot().stages, self.profiler.read()
        return {stage.label: stage.seconds for stage in stages} | {label: trainer[label] for label in (NEXT, CONSUMER)}

    def _first_outputs(self, count: int, pipeline: Pipeline | None) -> tuple[list[Any], bool, Any]:
        """Returns the first elements, which this thread draws a second time."""
        if (dataset := self._join.dataset) is None:
            return super()._first_outputs(count, pipeline)
        return dataset._first_elements(count), dataset.makes_batches, ()  # noqa: SLF001  (of the same library)

    @property
    def _join(self) -> "RecoveringIterator[Any]":
        join = self._of()
        if join is None:
            raise AssertionError("only the iterator itself has its views")
        return join

    def _delivered_position(self) -> tuple[int, int | None]:
        return self._join.delivered_position()


def snapshots(named: "Sequence[tuple[str, DatasetIterator[Any]]]") -> "Iterator[tuple[str, LoaderSnapshot]]":
    """Yields the snapshots of named iterators that have some, each with a prefix for the labels of its stages."""
    for name, iterator in named:
        prefix = f"{name}: " if name and 1 < len(named) <= MAX_NAMED else ""
        # A user's iterator measures nothing.
        with contextlib.suppress(NotImplementedError):
            yield prefix, iterator.insight.snapshot()


def stages_of(snapshots: "Iterable[tuple[str, LoaderSnapshot]]") -> "Iterator[StageSnapshot]":
    """Yields the stages of snapshots. Reading and operations get the prefixes."""
    for prefix, snapshot in snapshots:
        for stage in snapshot.stages:
            if stage.label in {KEYS, HAND_OVER}:
                yield stage
                continue
            # If other streams have workers, this process still runs it.
            is_local = stage.is_local or not snapshot.num_workers
            yield dataclasses.replace(stage, label=prefix + stage.label, name=prefix + stage.name, is_local=is_local)


def added(before: "LoaderSnapshot", last: "LoaderSnapshot") -> "LoaderSnapshot":
    """Returns the last snapshot of two, with the sums of what both measured."""
    return dataclasses.replace(
        last,
        stages=tuple(_merged([*before.stages, *last.stages])),
        measured=dataclasses.replace(last.measured, **_trouble([before, last])),
    )


def _trouble(snapshots: "Sequence[LoaderSnapshot]") -> dict[str, Any]:
    """Returns the sums of errors, deaths, stalls, and the processor time of workers."""
    measured = [snapshot.measured for snapshot in snapshots]
    return {
        "errors": sum(one.errors for one in measured),
        "deaths": sum(one.deaths for one in measured),
        "stalls": sum(one.stalls for one in measured),
        "core_seconds": sum(one.core_seconds or 0.0 for one in measured) or None,
    }


def _merged(stages: "Iterable[StageSnapshot]") -> "list[StageSnapshot]":
    """Returns the sums of the stages with equal labels, in order."""
    sums: dict[str, StageSnapshot] = {}
    for stage in stages:
        before = sums[stage.label].seconds if stage.label in sums else 0.0
        sums[stage.label] = dataclasses.replace(stage, seconds=before + stage.seconds)
    return list(sums.values())


def _joined_stages(own: "LoaderSnapshot", below: "Sequence[StageSnapshot]") -> "list[StageSnapshot]":
    keys, read, hand_over = own.stages
    reads = any(stage.kind is read.kind for stage in below)
    whole = _merged([keys, *([] if reads else [read]), *below, hand_over])
    return sorted(whole, key=lambda stage: stage.kind is hand_over.kind)
