"""The pools that workers come from: those of a given number, and those of a number that is chosen at run time."""

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, final

from millstream.core.warn import log_warning
from millstream.loader.engine.worker_choice import BATCH_SECONDS, ELEMENT_SECONDS, WorkerChoice, widened
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions, available_cores
from millstream.loader.transport.importable_modules import LaunchContext, launch_context

if TYPE_CHECKING:
    from millstream.loader.workers.pools import WarmPools


def pools_of_processes(
    pipelines: Mapping[Hashable, Pipeline], workers: MultiprocessingOptions, reading: ReadOptions
) -> "WarmPools[Any]":
    """Returns pools of processes that start with these pipelines, which have names, as other processes have not yet."""
    from millstream.loader.processes.fork_servers import FORK_SERVERS  # noqa: PLC0415  (lazy: slow)

    context = launch_context()
    # It imports while the program builds its model. First, because it takes longest.
    modules = [type(owner).__module__ for pipeline in pipelines.values() for _, owner in pipeline.objects]
    FORK_SERVERS.prepare(context, [name for name in modules if name.startswith("millstream.")])
    from millstream.loader.engine import crew, processes  # noqa: F401, PLC0415

    return _pools_from(pipelines, workers, reading, context, lambda: workers.num_workers)


def _pools_from(
    pipelines: Mapping[Hashable, Pipeline],
    workers: MultiprocessingOptions,
    reading: ReadOptions,
    context: LaunchContext,
    num_workers: Callable[[], int],
) -> "WarmPools[Any]":
    """Returns pools of processes that start with `num_workers()` of them."""
    from millstream.loader.processes.pool import Pool  # noqa: PLC0415  (lazy: slow to import)
    from millstream.loader.workers.pools import WarmPools  # noqa: PLC0415
    from millstream.loader.workers.process_settings import ProcessSettings  # noqa: PLC0415

    return WarmPools(
        lambda settings: Pool(pipelines, workers, reading, context, settings=settings, num_workers=num_workers()),
        lambda: ProcessSettings.taken(pipelines.values()),
    )


@final
class ChosenWorkers:
    """The workers of "auto" that all passes share: their number, and those that are idle.

    Args:
        workers: the options of the workers, without their number.
        reading: the threads of each worker.
        makes_batches: True if the outputs are batches.

    Attributes:
        choice: the number of workers.
        options: the options of the largest number.
        pools: the idle workers; None before any were chosen.
    """

    def __init__(self, workers: MultiprocessingOptions, reading: ReadOptions, *, makes_batches: bool) -> None:
        limit, min_seconds = available_cores(), BATCH_SECONDS if makes_batches else ELEMENT_SECONDS
        self.choice = choice = WorkerChoice(limit, min_seconds, widened(reading))
        self.options = workers.of_number(limit)
        self._reading = reading
        # Workers are to compute the bytes that this process would.
        self._context = launch_context(limits_threads=False)
        self.pools: WarmPools[Any] | None = None
        self._is_closed = False
        # The reason for no worker, logged once an engine needs it: some executions of a chain have none.
        self._unlogged = ""
        if workers.worker_init_fn is not None:
            self.forbid("worker_init_fn is not called in this process, which computes batches, too")
        elif limit == 1:
            choice.stay("this process may use one core")

    def forbid(self, reason: str) -> None:
        """Ends the choice because workers might compute other bytes than this process."""
        if not self.choice.is_final:
            self.choice.stay(f"{reason}. Give a number of workers")
            self._unlogged = f'"auto" chose {self.choice.text}.'

    def log_reason(self) -> None:
        text, self._unlogged = self._unlogged, ""
        if text:
            log_warning(text)

    def pools_of(self, pipelines: Callable[[], Mapping[Hashable, Pipeline]]) -> "WarmPools[Any]":
        """Returns the pools. The first call starts them with these pipelines; ValueError if places do not agree."""
        if self.pools is None:
            from millstream.loader.workers.process_settings import check_places_agree  # noqa: PLC0415  (lazy: slow)

            known = pipelines()
            check_places_agree(known.values())
            choice = self.choice
            self.pools = _pools_from(known, self.options, self._reading, self._context, lambda: choice.num_workers)
            if self._is_closed:
                # Another thread, which did not see them, closed the loader.
                self.pools.close()
        return self.pools

    @property
    def are_idle(self) -> bool:
        """True if workers of an earlier pass wait for another one."""
        return self.pools is not None and bool(self.pools.idle)

    def stop_idle(self) -> None:
        if self.pools is not None:
            self.pools.stop_idle()

    def close(self) -> None:
        """Ends idle workers, now and in future."""
        self._is_closed = True
        if self.pools is not None:
            self.pools.close()
