"""Where the operations of a chain run; and the worker processes that iterators of a dataset leave to the next ones.

A pass over a dataset that ends, or is left, leaves its workers warm: `iter(dataset)` finds them there, as the iterators
of a `DataLoader` do. They end with the dataset, when an iterator of it is closed, or after a minute.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Self, final

from millstream.loader.execution import Execution
from millstream.loader.pipeline.feed import Feed
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions

if TYPE_CHECKING:
    from collections.abc import Hashable

    from millstream.loader.workers.warm_pools import WarmPools


@final
class WarmWorkers:
    """The idle worker processes of one dataset, by what they run. A copy of it, in any process, has none."""

    def __init__(self) -> None:
        self._pools: dict[Hashable, WarmPools[Any]] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def execution(
        self, part: str, pipeline: Pipeline, workers: MultiprocessingOptions, reading: ReadOptions, feed: Feed | None
    ) -> Execution:
        """Returns what runs a pipeline, with the workers that the same part of the dataset has left, if any."""
        execution = Execution(pipeline, workers, reading, feed)
        if execution.pools is not None:
            # Two threads that begin at once have the same ones afterwards.
            execution.pools = self._pools.setdefault((part, reading), execution.pools)
        return execution


@final
@dataclasses.dataclass(frozen=True)
class Running:
    """Where operations run.

    Attributes:
        workers: the worker processes.
        reading: the threads, in this process or in each worker.
        warm: has the workers that were left.
    """

    workers: MultiprocessingOptions
    reading: ReadOptions
    warm: WarmWorkers = dataclasses.field(default_factory=WarmWorkers)

    @property
    def options(self) -> tuple[MultiprocessingOptions, ReadOptions]:
        """The processes, and the threads."""
        return self.workers, self.reading

    def execution(self, part: str, pipeline: Pipeline, feed: Feed | None = None) -> Execution:
        """Returns what runs a pipeline, which is the same each time for one part of a dataset."""
        return self.warm.execution(part, pipeline, self.workers, self.reading, feed)
