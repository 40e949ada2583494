"""The views of an iterator that only combines streams: the waits for it, and the stages of the streams below."""

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, final

from millstream.dataset.nodes.lowering import InOrder
from millstream.loader.measuring import FED_CHAIN
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.views import Insight
from millstream.sharding import NoSharding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.dataset.iterators.dataset_iterator import DatasetIterator
    from millstream.dataset.iterators.recovering_iterator import RecoveringIterator
    from millstream.loader.reporting.snapshot import LoaderSnapshot

MAX_NAMED = 8
"""The largest number of streams whose stages are displayed one by one."""


@final
class JoinInsight(Insight):
    """Computes the views of a join.

    Keys and hand-over are sums over its streams. Reading and operations have the name of their stream before theirs;
    with many streams, or if streams replace each other, they are sums by name, too.
    """

    def __init__(self, join: "RecoveringIterator[Any]") -> None:
        if (leader := join.leader) is None:
            order = InOrder(None, None)
            plan = Plan(Pipeline([], order, order, (), NoSharding()))
            super().__init__(plan, join.profiler, MultiprocessingOptions(), ReadOptions(0, 0), front=FED_CHAIN)
        else:
            led = leader.insight
            super().__init__(led._plan, join.profiler, led._workers, led._reading, front=FED_CHAIN)  # noqa: SLF001
            self.iterators[id(leader)] = leader
        self.iterators[id(join)] = join
        # The join has a reference to this object.
        self._of = weakref.ref(join)

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        join = self._of()
        return join is None or join.lifecycle == "closed"

    def snapshot(self) -> "LoaderSnapshot":
        from millstream.loader.reporting.snapshot import joined  # noqa: PLC0415  (lazy: only views need it)

        join, own = self._join, self._own_snapshot()
        shown = joined(own, self._below(), join.replaced)
        return dataclasses.replace(
            shown,
            source=dataclasses.replace(own.source, name=join.name),
            order=dataclasses.replace(own.order, name="in order"),
            # Those of its streams are not counted.
            measured=dataclasses.replace(shown.measured, records=None),
        )

    def draws_from(self) -> "Sequence[tuple[str, Insight]]":
        has_names = self.has_names
        return [
            (f"{name}: " if has_names else "", insight)
            for name, iterator in self._named_streams()
            for insight in insights_of(iterator)
        ]

    @property
    def has_names(self) -> bool:
        """True if the stages below have the names of their streams."""
        names = [name for name, _ in self._named_streams()]
        return 1 < len(names) <= MAX_NAMED and all(names)

    def _named_streams(self) -> "Sequence[tuple[str, DatasetIterator[Any]]]":
        """Returns the iterators below; none once this one is gone, as the thread of a server may find."""
        join = self._of()
        return [] if join is None else list(join.below())

    def _first_outputs(self, count: int, pipeline: Pipeline | None) -> "tuple[list[Any], bool, Any]":
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


def insights_below(stream: Any) -> list[tuple[str, Insight]]:
    """Returns the views of a stream below operations, with the prefix of its stages, which may be named like these."""
    return [
        ("" if isinstance(insight, JoinInsight) and insight.has_names else "stream: ", insight)
        for insight in insights_of(stream)
    ]


def insights_of(iterator: Any) -> list[Insight]:
    """Returns the views of an iterator; if its class is a user's, which measures nothing, those of the ones below."""
    try:
        return [iterator.insight]
    except (AttributeError, NotImplementedError):
        return [insight for parent in getattr(iterator, "_parents", ()) for insight in insights_of(parent)]
