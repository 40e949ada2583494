"""A pipeline that is ready to run: compiled, measured, and with the threads or processes that are to run it."""

import dataclasses
import functools
import os
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, final

from millstream.configuration import config
from millstream.loader.checkpoints.state import Stream
from millstream.loader.insight import Insight
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.pipeline.executor import Executor
from millstream.loader.pipeline.outputs import Position
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.stages import Watch
from millstream.loader.repeated_passes import RepeatedPasses
from millstream.loader.state_of_plan import stream_of
from millstream.loader.threads.front import LOADER, Front
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.profiler import Profiler

if TYPE_CHECKING:
    from millstream.loader.cluster.options import RayWorkers
    from millstream.loader.pipeline.feed import Feed
    from millstream.loader.threads.shared_threads import SharedThreads
    from millstream.loader.workers.shared_workers import SharedWorkers
    from millstream.loader.workers.warm_pools import WarmPools


@final
class Execution:
    """Makes the iterators of a pipeline.

    Args:
        pipeline: what to run.
        workers: the worker processes, or actors, if any.
        reading: the threads, in this process or in each worker.
        feed: where the elements of stage 0 come from; None where records are read.
        profiler: adds up where the time goes; None for a new one.
        watch: looks at each part of the work; None for the profiler alone.
        ray_workers: what the actors are that work instead of processes, if any.
        front: how the pipeline was said: advice says what to write there.
        shared_workers: which pipelines the workers have, where this one draws from others, or others from it.
        name: what this one is called there.
        threads: the threads of this process, if other pipelines have them, too; None for its own.
        whole: the execution that this one is an epoch of. Its worker processes serve this one; None for its own.

    Attributes:
        pipeline: what is run.
        plan: the same, compiled.
        profiler: adds up where the time goes.
        insight: the views of the pipeline, which know its iterators.
        is_closed: whether it was closed for good.
        pools: the worker processes that wait for the next iterator; None where there are to be none.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        workers: MultiprocessingOptions,
        reading: ReadOptions,
        feed: "Feed | None" = None,
        *,
        profiler: Profiler | None = None,
        watch: Watch | None = None,
        ray_workers: "RayWorkers | None" = None,
        front: Front = LOADER,
        shared_workers: "SharedWorkers | None" = None,
        name: Hashable = None,
        threads: "SharedThreads | None" = None,
        whole: "Execution | None" = None,
    ) -> None:
        if config.py_debug_mode:
            pipeline = dataclasses.replace(pipeline, measures_costs=True)
        if workers.worker_init_fn is not None:
            pipeline = dataclasses.replace(pipeline, worker_init_fn=workers.worker_init_fn)
        self.pipeline = pipeline
        self._ray_workers = ray_workers
        self._workers = workers
        self._reading = reading
        self._feed = feed
        self._shared_workers = shared_workers
        self._threads = threads
        self._number = 0 if shared_workers is None else shared_workers.register(name, pipeline)
        # What an iterator needs is imported now: a trainer that changes its folder must not import what lies there.
        self.pools: WarmPools[Any] | None = None
        # Actors have no other epochs.
        self._borrows_pools = whole is not None and ray_workers is None
        if whole is not None and self._borrows_pools:
            self.pools = whole.pools
        elif workers.num_workers:
            self.pools = self._pools_of(pipeline, reading)
        if self.pools is None:
            _executor_here(reading, workers, threads)
        self.profiler = profiler or Profiler(pipeline.labels)
        if pipeline.measures_costs:
            self.profiler.measure_costs()
        self.plan = Plan(pipeline, watch or self.profiler.timed)
        cores = None if ray_workers is None else ray_workers.num_cores
        self.insight = Insight(self.plan, self.profiler, workers, reading, front=front, num_cores=cores)
        self.is_closed = False

    def begin(self, stream: Stream | None = None, passes: RepeatedPasses | None = None) -> DataLoaderIterator:
        """Returns a new iterator at the beginning of the stream, which is described now where it was not before."""
        # Before any of the user's operations has run: one that counts its calls is what it was built as.
        stream = stream_of(self.plan) if stream is None else stream
        iterator = DataLoaderIterator(
            self.plan,
            stream,
            self.profiler,
            self._make_executor,
            self.stop_idle_workers,
            passes=passes,
            stall_timeout=self._workers.stall_timeout,
            insight=self.insight,
        )
        self.insight.iterators[id(iterator)] = iterator
        if self.pipeline.measures_costs:
            from millstream.loader.execution_log import log_execution  # noqa: PLC0415  (lazy: off by default)

            log_execution(iterator, self.insight)
        if os.environ.get("MILLSTREAM_TOP") == "1" or os.environ.get("MILLSTREAM_METRICS_PORT"):
            from millstream.loader.monitoring.served_pipelines import serve_by_environment  # noqa: PLC0415  (lazy)

            serve_by_environment(self)
        return iterator

    def stop_idle_workers(self) -> None:
        """Ends the processes that no iterator uses, unless they are those of another execution."""
        if self.pools is not None and not self._borrows_pools:
            self.pools.stop_idle()

    def close(self) -> None:
        """Ends the processes that no iterator uses, now and from now on, unless they are those of another execution."""
        self.is_closed = True
        if self.pools is not None and not self._borrows_pools:
            self.pools.close()

    def _pools_of(self, pipeline: Pipeline, reading: ReadOptions) -> "WarmPools[Any]":
        from millstream.loader.processes.interpreter import launch_context  # noqa: PLC0415  (these take long to import)
        from millstream.loader.workers.warm_pools import WarmPools  # noqa: PLC0415

        if self._ray_workers is None:
            from millstream.loader.processes import pool_executor  # noqa: F401, PLC0415
            from millstream.loader.processes.pool import Pool  # noqa: PLC0415

            # Those that are drawn from are all there: each iterator is made after what it draws from.
            pipelines = [pipeline] if self._shared_workers is None else self._shared_workers.pipelines
            return WarmPools(functools.partial(Pool, pipelines, self._workers, reading, launch_context()))
        from millstream.loader.cluster.actor_pool import ActorPool  # noqa: PLC0415
        from millstream.loader.cluster.connection import check_installed  # noqa: PLC0415

        check_installed()
        return WarmPools(
            functools.partial(ActorPool, pipeline, self._ray_workers, self._workers, reading, launch_context().path)
        )

    def _make_executor(self, position: Position) -> Executor:
        if self._feed is not None:
            # What is drawn from may have begun work that a leader before this one was to have made.
            leads_again = self.pools is not None and self._shared_workers is not None and self._shared_workers.has_led
            self._feed.go_to(position[0].block, afresh=leads_again)
        if self.pools is not None and self._ray_workers is not None:
            from millstream.loader.cluster.ray_executor import RayExecutor  # noqa: PLC0415

            return RayExecutor(
                self.plan,
                position,
                profiler=self.profiler,
                pools=self.pools,
                options=self._workers,
                ray_workers=self._ray_workers,
                feed=self._feed,
            )
        if self.pools is not None:
            from millstream.loader.processes.pool_executor import PoolExecutor  # noqa: PLC0415  (as above)

            return PoolExecutor(
                self.plan,
                position,
                profiler=self.profiler,
                pools=self.pools,
                options=self._workers,
                feed=self._feed,
                shared_workers=self._shared_workers,
                pipeline=self._number,
            )
        if self._shared_workers is not None:
            from millstream.loader.workers.shared_workers import SubstreamExecutor  # noqa: PLC0415  (as above)

            return SubstreamExecutor(
                self.plan,
                position,
                profiler=self.profiler,
                shared_workers=self._shared_workers,
                pipeline=self._number,
                feed=self._feed,
            )
        return _executor_here(self._reading, self._workers, self._threads)(self.plan, position, feed=self._feed)


def _executor_here(
    reading: ReadOptions, workers: MultiprocessingOptions, threads: "SharedThreads | None"
) -> Callable[..., Executor]:
    """Returns what makes the executor of a plan where this process does all the work."""
    if reading.reads_ahead:
        from millstream.loader.threads.thread_executor import ThreadExecutor  # noqa: PLC0415  (nobody needs both)

        return functools.partial(ThreadExecutor, options=reading, stall_timeout=workers.stall_timeout, threads=threads)
    from millstream.loader.threads.inline_executor import InlineExecutor  # noqa: PLC0415

    return functools.partial(InlineExecutor, stall_timeout=workers.stall_timeout)
