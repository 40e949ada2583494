"""The pools of one loader that no iterator uses at the moment: the next iterator starts at once.

Guarantees:
    * A pool serves one iterator at a time: threads that take one at once get different ones.
    * Nothing here waits for a lock: finalizers and signal handlers may call all of it, in the middle of itself too.
    * Idle pools end after IDLE_SECONDS, with the loader, or when it is closed, whichever comes first, and the memory of
      their arenas with them, but for what arrays of the user's still hold.
"""

import contextlib
import threading
import weakref
from typing import NamedTuple, final

from millstream.loader.interpreter import Surroundings
from millstream.loader.options import MultiprocessingOptions, ReadOptions
from millstream.loader.plan import Plan
from millstream.loader.pool import Pool

IDLE_SECONDS = 60.0
"""How long worker processes stay when no iterator uses them."""


class _Retirement:
    """The end of an idle pool, unless it is cancelled before."""

    def __init__(self, idle: "list[_Idle]") -> None:
        self._idle = idle
        # Held until it is cancelled. To release it never waits.
        self._lock = threading.Lock()
        self._lock.acquire()

    def begin(self) -> None:
        """Starts the thread that waits; without threads to be had, the pool stays as long as the loader."""
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._run, name="millstream-idle", daemon=True).start()

    def cancel(self) -> None:
        """Lets the pool live. Idempotent."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def _run(self) -> None:
        if self._lock.acquire(timeout=IDLE_SECONDS):
            return
        for idle in list(self._idle):
            if idle.retirement is self and _remove(self._idle, idle):
                idle.pool.stop()


class _Idle(NamedTuple):
    """A pool that no iterator uses."""

    pool: Pool
    retirement: _Retirement


@final
class WarmPools:
    """Keeps a pool for the next iterator.

    Args:
        surroundings: where the processes of new pools are to run.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._idle: list[_Idle] = []
        self._closed = False
        weakref.finalize(self, _stop_all, self._idle)

    @property
    def idle(self) -> list[Pool]:
        """The pools that no iterator uses."""
        return [idle.pool for idle in list(self._idle)]

    def take(self, plan: Plan, workers: MultiprocessingOptions, reading: ReadOptions) -> Pool:
        """Returns a pool: a warm one if there is one."""
        for idle in list(self._idle):
            if idle.pool.is_usable and _remove(self._idle, idle):
                idle.retirement.cancel()
                return idle.pool
        return Pool(plan, workers, reading, self._surroundings)

    def give_back(self, pool: Pool) -> None:
        """Keeps a pool for the next iterator; one is enough."""
        if not pool.is_usable or any(idle.is_ours for idle in self.idle):
            pool.stop()
            return
        retirement = _Retirement(self._idle)
        # Before its thread can run.
        self._idle.append(_Idle(pool, retirement))
        retirement.begin()
        if self._closed:
            # Before, or just now by another thread, which did not see this pool.
            self.stop_idle()

    def stop_idle(self) -> None:
        """Stops the pools that no iterator uses."""
        _stop_all(self._idle)

    def close(self) -> None:
        """Stops the pools that no iterator uses, now and from now on."""
        self._closed = True
        self.stop_idle()


def _remove(pools: list[_Idle], idle: _Idle) -> bool:
    """Removes an idle pool from the list; says whether it was this call that did: several may try at once."""
    try:
        pools.remove(idle)
    except ValueError:
        return False
    return True


def _stop_all(pools: list[_Idle]) -> None:
    for idle in list(pools):
        idle.retirement.cancel()
        # Removed when it has ended: an interrupt leaves it to the next call, or to the end of the loader.
        idle.pool.stop()
        _remove(pools, idle)
