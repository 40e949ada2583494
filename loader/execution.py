"""Pipelines that are ready to run: compiled, measured, and with their threads or processes."""

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, final

from millstream.configuration import config
from millstream.loader import reporting
from millstream.loader.engine.engine import Budget, Engine, ReadAhead
from millstream.loader.engine.staffing import ChosenWorkers, pools_of_processes
from millstream.loader.engine.worker_choice import WorkerChoice
from millstream.loader.measuring import LOADER, Frontend, Profiler
from millstream.loader.pipeline.calls import Position
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan, may_be_stream
from millstream.loader.pipeline.stages import Instrument
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.reader_threads import CLOSE_SECONDS
from millstream.loader.transport.importable_modules import launch_context
from millstream.loader.views import Insight, Measured, serve_if_requested

if TYPE_CHECKING:
    from millstream.loader.cluster.options import RayWorkers
    from millstream.loader.engine.auto import AutoCrew
    from millstream.loader.engine.crew import Crew, TakeWorkers
    from millstream.loader.scheduling.feed import Feed
    from millstream.loader.threads.shared_threads import SharedThreads
    from millstream.loader.workers.pools import WarmPools


@final
class Execution:
    """Creates the engines of a pipeline, and keeps the iterators that use them.

    Args:
        workers: the options of worker processes or actors.
        reading: the options of threads, in this process or in each worker.
        feed: the source of the elements of stage 0; None if records are read.
        instrument: wraps each function that does part of the work, given its name; None for the profiler's.
        ray_workers: the actors to use instead of processes, if any.
        frontend: the API with which the pipeline was built, for advice.
        crew: the workers that this pipeline shares with others, which it draws from or which draw from it.
        name: the name of this pipeline among those of the crew.
        threads: the threads of this process if they are shared with other pipelines; None for its own.
        local_reading: the threads that run local operations in advance; None to run them on demand.
        parent: the execution that this one is an epoch of, whose workers it uses; None for its own.
        compiled: the plan of the same pipeline, compiled before; None to compile it.
        chosen: the workers whose number is chosen at run time, if `workers` asks for that; None for its own.

    Attributes:
        insight: the views of the pipeline, which know its iterators.
        chosen: these workers; None if their number is that of the options.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        workers: MultiprocessingOptions,
        reading: ReadOptions,
        feed: "Feed | None" = None,
        *,
        profiler: Profiler | None = None,
        instrument: Instrument | None = None,
        ray_workers: "RayWorkers | None" = None,
        frontend: Frontend = LOADER,
        crew: "Crew | None" = None,
        name: Hashable = None,
        threads: "SharedThreads | None" = None,
        local_reading: ReadOptions | None = None,
        parent: "Execution | None" = None,
        compiled: Plan | None = None,
        chosen: ChosenWorkers | None = None,
    ) -> None:
        if config.py_debug_mode:
            pipeline, compiled = dataclasses.replace(pipeline, measures_costs=True), None
        self.pipeline = pipeline
        self._ray_workers = ray_workers
        self._frontend = frontend
        self.workers = workers
        self.reading = reading
        self.stall_timeout = workers.stall_timeout
        self._feed = feed
        self._crew = crew
        self._threads = threads
        self._local_reading = local_reading
        self._name = name
        if crew is not None and not workers.are_wanted:
            crew.register(name, self)
        # Modules are imported now: a trainer that changes its folder later must not import files from there.
        self._pools: WarmPools[Any] | None = None
        self._parent = parent
        if parent is None and workers.num_workers:
            self._pools = self._pools_of(pipeline)
        self.profiler = profiler or Profiler(pipeline.labels)
        if pipeline.measures_costs:
            self.profiler.measure_costs()
        self._instrument = instrument or self.profiler.timed
        self.plan = Plan(pipeline, self._instrument) if compiled is None else compiled.measured_by(self._instrument)
        cores = None if ray_workers is None else ray_workers.num_cores
        self.chosen: ChosenWorkers | None = chosen if parent is None else parent.chosen
        if workers.chooses_workers and (auto_crew := self._auto_crew) is not None:
            self.chosen = auto_crew.chosen
            auto_crew.lead(self.profiler, self.stall_timeout, {name: pipeline})
        elif workers.chooses_workers and self.chosen is None:
            makes_batches = any(operation.makes_batches for operation in pipeline.operations)
            self.chosen = ChosenWorkers(workers, reading, makes_batches=makes_batches)
        choice = None if self.chosen is None else self.chosen.choice
        self.keep_streams_here(lambda: [pipeline.source])
        self.insight = Insight(
            self.plan, self.profiler, workers, reading, frontend=frontend, num_cores=cores, choice=choice
        )

    @property
    def pools(self) -> "WarmPools[Any] | None":
        """The idle worker processes; None without workers, and before any were chosen."""
        if self.chosen is not None:
            return self.chosen.pools
        return self._pools if self._parent is None else self._parent.pools

    @pools.setter
    def pools(self, pools: "WarmPools[Any]") -> None:
        self._pools = pools

    @property
    def choice(self) -> WorkerChoice | None:
        """The number of workers that is chosen at run time; None for that of the options."""
        return None if self.chosen is None else self.chosen.choice

    def keep_streams_here(self, sources: Callable[[], Iterable[Any]]) -> None:
        """Chooses no workers for "auto" if one of the sources may be a stream."""
        if (chooser := self.chosen or self._auto_crew) is not None and any(map(may_be_stream, sources())):
            chooser.forbid("the source may be a stream, which only one process can read")

    @property
    def _auto_crew(self) -> "AutoCrew | None":
        """The crew of all engines of a chain with joins, if it chooses its number of workers."""
        return None if self._crew is None else self._crew.as_auto

    def of_epoch(self, pipeline: Pipeline, instrument: Instrument) -> "Execution":
        """Returns the execution of an epoch's pipeline. It uses the workers, measurements and errors of this one."""
        epoch = Execution(
            pipeline,
            self.workers,
            self.reading,
            profiler=self.profiler,
            instrument=instrument,
            ray_workers=self._ray_workers,
            frontend=self._frontend,
            parent=self,
        )
        epoch.plan.errors = self.plan.errors
        return epoch

    def with_changes(self, changes: str) -> "Execution":
        """Returns the execution of the pipeline with weights set at run time. It has the workers and views of this."""
        changed = self.of_epoch(self.pipeline.with_changes(changes), self._instrument)
        changed.insight = self.insight
        return changed

    @property
    def is_debugging(self) -> bool:
        """True if everything runs in the consumer's thread, as with `debug=True`."""
        return self._frontend.is_debugging

    def register(self, iterator: Measured) -> None:
        """Adds a new iterator to those that the views know, and that `close` closes."""
        self.insight.add(iterator)
        # Checked after the iterator is registered, because another thread may close the loader.
        if self.insight.is_closed:
            iterator.close_with_loader()
        self.check_open()
        if self.pipeline.measures_costs:
            log = reporting.summary.ExecutionLog(self.profiler, self.insight.snapshot)
            self.profiler.on_wait = log.write_if_due
            iterator.call_at_end(log.write)
            weakref.finalize(iterator, log.write)

    def serve_if_requested(self) -> None:
        """Lets other processes query this pipeline, or the one that it is an epoch of, if the environment says so."""
        serve_if_requested(self if self._parent is None else self._parent)

    def check_open(self) -> None:
        if self.insight.is_closed:
            raise ValueError("This DataLoader is closed: build a new one.")

    def stop_idle_workers(self) -> None:
        if (pools := self._own_pools) is not None:
            pools.stop_idle()

    def close(self) -> None:
        """Closes the iterators, and stops the workers, now and in future."""
        self.insight.is_closed = True
        # One for all: threads that hang are not waited for one iterator after another.
        deadline = time.monotonic() + CLOSE_SECONDS
        for iterator in self.insight.living_iterators():
            iterator.close_with_loader(deadline)
        if (pools := self._own_pools) is not None:
            pools.close()

    @property
    def _own_pools(self) -> "WarmPools[Any] | ChosenWorkers | None":
        """The idle workers that end with this execution; None for those of its parent."""
        return self._pools if self.chosen is None or self._parent is not None else self.chosen

    def _pools_of(self, pipeline: Pipeline) -> "WarmPools[Any]":
        reading = self.reading
        if self._ray_workers is None:
            below = {} if self._crew is None else self._crew.pipelines()
            return pools_of_processes({self._name: pipeline, **below}, self.workers, reading)
        from millstream.loader.cluster.actor_pool import ActorPool  # noqa: PLC0415
        from millstream.loader.cluster.options import check_installed  # noqa: PLC0415
        from millstream.loader.workers.pools import WarmPools  # noqa: PLC0415
        from millstream.loader.workers.process_settings import ProcessSettings  # noqa: PLC0415

        check_installed()
        ray_workers, workers, path = self._ray_workers, self.workers, launch_context().path
        # Ray has given the actors an environment.
        return WarmPools(
            lambda settings: ActorPool(pipeline, ray_workers, workers, reading, path, settings=settings),
            lambda: ProcessSettings.taken([pipeline], with_environment=False),
        )

    def make_engine(self, position: Position) -> Engine:
        if self._feed is not None:
            self._feed.go_to(position[0].block)
        options: dict[str, Any] = {"stall_timeout": self.stall_timeout, "local_reading": self._local_reading}
        if (crew := self._choosing_crew()) is not None:
            from millstream.loader.engine.auto import MovingEngine  # noqa: PLC0415  (lazy: slow to import)

            options |= {"crew": crew, "name": self._name, "profiler": self.profiler, "reading": self.reading}
            is_last = self.workers.are_wanted
            return MovingEngine(self.plan, position, self._feed, self._budget_here, is_last=is_last, **options)
        requests = self._crew.requests if self._crew is not None and self.workers.num_workers else None
        return Engine(self.plan, position, self._feed, self._budget_of, requests=requests, **options)

    def _choosing_crew(self) -> "AutoCrew | None":
        """Returns the crew of an engine that may move to workers; None if it does not."""
        if self.chosen is not None:
            self.chosen.log_reason()
        if self._crew is not None or self.chosen is None or self.chosen.choice.is_final:
            return self._auto_crew
        from millstream.loader.engine.auto import AutoCrew  # noqa: PLC0415  (lazy: slow to import)

        root = self if self._parent is None else self._parent
        crew = AutoCrew(self.chosen)
        crew.lead(self.profiler, self.stall_timeout, {root._name: root.pipeline})  # noqa: SLF001  (its own class)
        return crew

    @property
    def _budget_of(self) -> Callable[[Engine], Budget]:
        """The function that creates the budget of an engine."""
        if (pools := self.pools) is not None and self.workers.num_workers:
            return self._slots_of(pools)
        if self._crew is not None:
            from millstream.loader.engine.crew import Joined  # noqa: PLC0415  (lazy: for workers)

            return functools.partial(Joined, crew=self._crew, name=self._name, profiler=self.profiler)
        return self._budget_here

    def _budget_here(self, engine: Engine) -> Budget:
        return ReadAhead(engine, self.reading, self._threads) if self.reading.reads_ahead else Budget(engine)

    def _slots_of(self, pools: "WarmPools[Any]") -> Callable[[Engine], Budget]:
        """Returns a function that takes workers from the pools for an engine."""
        from millstream.loader.engine.crew import Crew, WorkerSlots  # noqa: PLC0415  (lazy: slow to import)

        take: TakeWorkers
        common: dict[str, Any] = {"profiler": self.profiler, "pools": pools, "options": self.workers}
        # The next iterator has to find the beginning of a stream that these workers have read from.
        common["returns"] = not self.plan.source_is_stream
        if self._ray_workers is not None:
            from millstream.loader.engine.actors import Actors  # noqa: PLC0415  (lazy: slow to import)

            take = functools.partial(Actors, ray_workers=self._ray_workers, **common)
        else:
            from millstream.loader.engine.processes import Processes  # noqa: PLC0415  (lazy: slow to import)

            take = functools.partial(Processes, **common)

        def slots(engine: Engine) -> Budget:
            crew = self._crew or Crew(engine.requests)
            crew.staff(take, engine.stall_timeout)
            return WorkerSlots(engine, crew, self._name)

        return slots
