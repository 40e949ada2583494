"""Workers and their pools, wherever they run, and the idle pools of a loader: its next iterator starts without delay.

Guarantees:
    * The workers of an iterator have the settings that the process had when it began (see `process_settings`).
    * A pool serves one iterator at a time. Threads that take one concurrently get different ones.
    * Nothing here waits for a lock. Finalizers and signal handlers may call any method, also during another call.
    * An idle pool ends after IDLE_SECONDS, with the loader, or when the loader is closed, whichever comes first. The
      memory of its arenas ends with it, except below arrays that the user still holds.
    * No thread and no finalizer holds a pool. A pool holds the user's classes, and their module's globals may hold the
      loader: none of them would ever end.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar, final

from millstream.loader.threads.waiting import StallClock
from millstream.loader.transport.pickling import ClassTable
from millstream.loader.workers.process_settings import ProcessSettings
from millstream.loader.workers.retirement import Retirement
from millstream.loader.workers.worker_imports import code_digests


class AnyWorker:
    """The consumer's side of a worker, wherever it runs.

    Attributes:
        number: unique in the pool. Replacements get new ones.
        pid: the process ID; None until it is known.
        calls: the numbers of the unanswered calls, in the order sent.
        clock: the wait since the worker began its first unanswered call, or since its last sign of life.
    """

    def __init__(self, number: int, stall_timeout: float) -> None:
        self.number = number
        self.pid: int | None = None
        self.calls: list[int] = []
        self.clock = StallClock(stall_timeout)

    @property
    def accepts_calls(self) -> bool:
        """True if the worker may get calls, up to its limit. By default, they wait until it is ready."""
        return True

    def record_call(self, call: int) -> None:
        if not self.calls:
            self.clock.restart()
        self.calls.append(call)

    def record_result(self, call: int) -> None:
        self.calls.remove(call)
        self.clock.restart()


def first_free(taken: Iterable[int]) -> int:
    """Returns the smallest index that no other worker has."""
    indices = set(taken)
    return next(index for index in itertools.count() if index not in indices)


WorkerT = TypeVar("WorkerT", bound=AnyWorker)


class Pool(Protocol[WorkerT]):
    """Workers that have the same pipelines.

    Attributes:
        settings: the settings that the workers have.
        call_numbers: yields new call numbers.
        classes: the classes that crossed by value with the pipelines.
        max_bytes: the maximum total size of elements made in advance.
        flight_bytes: the size of these up to which workers get more calls than their buffers hold, if reads wait.
        max_reads: the maximum number of reads in flight per worker.
    """

    settings: ProcessSettings
    call_numbers: Iterator[int]
    classes: ClassTable
    max_bytes: int
    flight_bytes: int
    max_reads: int

    @property
    def workers(self) -> list[WorkerT]:
        """The workers that are alive."""

    @property
    def is_ours(self) -> bool:
        """True in the process that created the pool. Forked processes hold a copy, which they must not use."""

    @property
    def is_usable(self) -> bool:
        """True if another iterator may use the pool: this process created it, and it has not been stopped."""

    def replace(self, worker: WorkerT) -> None:
        """Kills a worker if it is alive, and starts a replacement."""

    def stop(self) -> None:
        """Ends the workers. Idempotent: after an interrupt, the next call or a finalizer does the rest."""


PoolT = TypeVar("PoolT", bound=Pool[Any])


@final
class WarmPools(Generic[PoolT]):
    """Keeps an idle pool for the next iterator."""

    def __init__(self, start: Callable[[ProcessSettings], PoolT], take_settings: Callable[[], ProcessSettings]) -> None:
        self._start = start
        self._take_settings = take_settings
        # Now, because the files of modules may change before workers start.
        code_digests()
        self._idle: dict[PoolT, Retirement[PoolT]] = {}
        self._closed = False

    @property
    def idle(self) -> list[PoolT]:
        return list(self._idle)

    def take(self) -> PoolT:
        """Returns a pool whose workers have the settings that this process has now. An idle one with others ends."""
        settings = self._take_settings()
        for pool in self.idle:
            if pool.is_usable and (retirement := self._idle.pop(pool, None)) is not None:
                retirement.cancel()
                if pool.settings == settings:
                    return pool
                pool.stop()
        return self._start(settings)

    def release(self, pool: PoolT) -> None:
        """Keeps a pool for the next iterator, or stops it if there is one already."""
        if not pool.is_usable or any(idle.is_usable for idle in self.idle):
            pool.stop()
            return
        # Added before its thread can run.
        retirement = self._idle[pool] = Retirement(self._end, pool, "millstream-idle")
        retirement.begin()
        if self._closed:
            # Closed before, or just now by another thread, which did not see this pool.
            self.stop_idle()

    def stop_idle(self) -> None:
        for pool in self.idle:
            self._end(pool)

    def _end(self, pool: PoolT) -> None:
        """Stops a pool, if it is still idle."""
        # Removed first, so that no iterator gets it while it ends.
        if (retirement := self._idle.pop(pool, None)) is not None:
            retirement.cancel()
            try:
                pool.stop()
            except BaseException:
                # An interrupt leaves the rest to the next call or to the end of the loader.
                self._idle[pool] = retirement
                raise

    def close(self) -> None:
        """Stops the idle pools, and every pool released from now on."""
        self._closed = True
        self.stop_idle()


def release(
    pools: Callable[[], WarmPools[PoolT] | None], pool: Callable[[], PoolT | None], interrupted: Collection[None]
) -> None:
    """Releases the pool of an iterator that has ended, if its loader still exists.

    A pool whose last request was `interrupted` is stopped, because its workers may be in any state.
    """
    keeper, kept = pools(), pool()
    if kept is None:
        return
    if interrupted:
        kept.stop()
    elif keeper is not None:
        keeper.release(kept)
