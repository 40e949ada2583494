"""Where the operations of a chain run; and the worker processes that iterators of a dataset leave to the next ones.

A pass over a dataset that ends, or is left, leaves its workers warm: `iter(dataset)` finds them there, as the iterators
of a `DataLoader` do. They end with the dataset, when an iterator of it is closed, or after a minute.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Self, final

from millstream.loader.execution import Execution
from millstream.loader.pipeline.feed import Feed
from millstream.loader.pipeline.filter_limits import UNLIMITED, FilterLimits
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.tolerance import Tolerance
from millstream.loader.threads.front import Front
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.shared_threads import SharedThreads

if TYPE_CHECKING:
    from collections.abc import Hashable

    from millstream.loader.workers.shared_workers import SharedWorkers
    from millstream.loader.workers.warm_pools import WarmPools


@final
class WarmWorkers:
    """The idle worker processes of one dataset, by what they run. A copy of it, in any process, has none."""

    def __init__(self) -> None:
        self._pools: dict[Hashable, WarmPools[Any]] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def lend(self, execution: Execution, *use: "Hashable") -> Execution:
        """Returns what runs a pipeline, with the workers that were left by what had the same use for them, if any."""
        if execution.pools is not None:
            # Two threads that begin at once have the same ones afterwards.
            execution.pools = self._pools.setdefault(use, execution.pools)
        return execution


@final
@dataclasses.dataclass(frozen=True)
class Shared:
    """The resources that all chains below one combination of datasets share.

    Attributes:
        threads: the threads of this process that read ahead.
        shared_workers: the worker processes of the iterator that draws from the combination. They also do the work of
            the chains; None without workers.
            are none.
    """

    threads: SharedThreads = dataclasses.field(default_factory=SharedThreads)
    shared_workers: "SharedWorkers | None" = None


@final
@dataclasses.dataclass(frozen=True)
class Running:
    """Where operations run, and what limits them there.

    Attributes:
        workers: the worker processes.
        reading: the threads, in this process or in each worker.
        warm: has the workers that were left.
        limits: how much filters may drop.
        tolerance: how many elements may fail; None if the first error is raised.
        shared_workers: the worker processes of the iterator that draws from this one. They also do its work; None
            without workers.
        name: what this is called among all that they work for.
        threads: the threads of this process, if others have them, too; None for its own.
    """

    workers: MultiprocessingOptions
    reading: ReadOptions
    warm: WarmWorkers = dataclasses.field(default_factory=WarmWorkers)
    limits: FilterLimits = UNLIMITED
    shared_workers: "SharedWorkers | None" = None
    name: "Hashable" = None
    threads: SharedThreads | None = None
    tolerance: Tolerance | None = None

    @property
    def options(self) -> tuple[MultiprocessingOptions, ReadOptions]:
        """The processes, and the threads."""
        return self.workers, self.reading

    def execution(self, part: str, pipeline: Pipeline, front: Front, feed: Feed | None = None) -> Execution:
        """Returns what runs a pipeline, which is the same each time for one part of a dataset."""
        name = (self.name, part)
        execution = Execution(
            pipeline,
            self.workers,
            self.reading,
            feed,
            front=front,
            shared_workers=self.shared_workers,
            name=name,
            threads=self.threads,
        )
        return self.warm.lend(
            execution, part, self.reading, self.limits, self.tolerance, execution.pipeline.measures_costs
        )
