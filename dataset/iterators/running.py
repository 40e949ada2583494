"""The execution of a chain's operations, and the idle worker processes that later iterators of a dataset reuse.

When a pass over a dataset ends, or is abandoned, its workers stay warm, and the next `iter(dataset)` reuses them, as
iterators of a `DataLoader` do. They end with the dataset, when one of its iterators is closed, or after a minute.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Self, final

from millstream.dataset.options import DEFAULTS, DatasetOptions
from millstream.loader.execution import Execution
from millstream.loader.measuring import Front
from millstream.loader.pipeline.pipeline import UNLIMITED, FilterLimits, Pipeline, Tolerance
from millstream.loader.scheduling.feed import Feed
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.shared_threads import SharedThreads

if TYPE_CHECKING:
    from collections.abc import Hashable

    from millstream.dataset.fixed_chain import FixedChain
    from millstream.loader.workers.warm_pools import WarmPools
    from millstream.loader.workers.workers_executor import SharedWorkers


@final
class WarmWorkers:
    """Whatever the iterators of one dataset share. A copy of it, in any process, has nothing.

    It is the idle worker processes, by the pipeline they run.

    Attributes:
        fixed: the chain that ends with the dataset, as it was when its first iterator began.
    """

    def __init__(self) -> None:
        self.fixed: FixedChain | None = None
        self._pools: dict[Hashable, WarmPools[Any]] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def lend(self, execution: Execution, *use: "Hashable") -> Execution:
        """Returns an execution with the idle workers of earlier executions for the same use, if any."""
        if execution.pools is not None:
            # If two threads begin at the same time, both get the same pools.
            execution.pools = self._pools.setdefault(use, execution.pools)
        return execution


@final
@dataclasses.dataclass(frozen=True)
class Shared:
    """The resources that all chains below one combination of datasets share.

    Attributes:
        threads: the threads of this process; None for a chain that is alone and has its own.
        reading: the threads for chains without threads of their own; None to start none.
        raises_absent: True to raise AbsentElement for a missing element of a chain, or for None between two of its
            operations; False to skip it.
        options: the options of the datasets above, for those that are opened below, whenever that is.
        shared_workers: the worker processes of the iterator that draws from the combination. They also run the chains.
    """

    threads: SharedThreads | None = dataclasses.field(default_factory=SharedThreads)
    shared_workers: "SharedWorkers | None" = None
    reading: ReadOptions | None = None
    raises_absent: bool = False
    options: DatasetOptions = DEFAULTS

    @property
    def is_alone(self) -> bool:
        """True for a chain that is below no combination."""
        return self.threads is None and self.shared_workers is None

    def combined(self) -> "Shared":
        """Returns the resources for the datasets below a combination that has these."""
        return Shared(options=self.options) if self.is_alone else self


ALONE = Shared(None)


@final
@dataclasses.dataclass(frozen=True)
class Running:
    """The execution of operations, and its limits.

    Attributes:
        reading: the threads, in this process or in each worker.
        shared: the resources of the combination that draws from this chain, or that it draws from with its workers.
        name: the name of this execution among all that share workers.
        num_local: the number of last operations that run in this process even if workers or threads run the others.
        local_reading: the threads that run these in advance; None to run them in the consumer's thread.
    """

    workers: MultiprocessingOptions
    reading: ReadOptions
    warm: WarmWorkers = dataclasses.field(default_factory=WarmWorkers)
    limits: FilterLimits = UNLIMITED
    shared: Shared = ALONE
    name: "Hashable" = None
    tolerance: Tolerance | None = None
    num_local: int = 0
    local_reading: ReadOptions | None = None

    def execution(self, stage: str, pipeline: Pipeline, front: Front, feed: Feed | None = None) -> Execution:
        """Returns the execution of a pipeline, which is the same each time for one stage of a dataset."""
        name, reading, num_local = (self.name, stage), self.reading, self.num_local
        if self.shared.shared_workers is not None and not self.workers.num_workers:
            # The workers of the consumer run all operations.
            num_local = 0
        elif feed is not None and num_local == len(pipeline.operations):
            # Nothing is left for workers or other threads.
            reading, num_local = self.local_reading or ReadOptions(0, 0), 0
        elif not self.workers.num_workers and not reading.reads_ahead:
            # All operations run in one place.
            reading, num_local = self.local_reading or reading, 0
        execution = Execution(
            pipeline if pipeline.num_local == num_local else dataclasses.replace(pipeline, num_local=num_local),
            self.workers,
            reading,
            feed,
            front=front,
            shared_workers=self.shared.shared_workers,
            name=name,
            threads=self.shared.threads,
            local_reading=self.local_reading,
        )
        return self.warm.lend(
            execution, stage, self.reading, self.limits, self.tolerance, execution.pipeline.measures_costs
        )
