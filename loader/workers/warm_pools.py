"""The pools of one loader that no iterator uses at the moment: the next iterator starts at once.

Guarantees:
    * A pool serves one iterator at a time: threads that take one at once get different ones.
    * Nothing here waits for a lock: finalizers and signal handlers may call all of it, in the middle of itself too.
    * Idle pools end after IDLE_SECONDS, with the loader, or when it is closed, whichever comes first, and the memory of
      their arenas with them, but for what arrays of the user's still hold.
    * No thread and no finalizer holds a pool. It holds the user's classes, they perhaps the loader, as globals of their
      module, and so none of them would ever end.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar, final

IDLE_SECONDS = 60.0
"""How long workers stay when no iterator uses them."""


class Pool(Protocol):
    """Workers that have the same pipelines, most often one."""

    @property
    def is_ours(self) -> bool:
        """Whether this process has made it: a forked one has only a copy, which it must not use."""

    @property
    def is_usable(self) -> bool:
        """Whether another iterator may use it: it is this process's, and has not been stopped."""

    def stop(self) -> None:
        """Ends the workers. Idempotent."""


PoolT = TypeVar("PoolT", bound=Pool)


class _Retirement:
    """The end of an idle pool, unless it is cancelled before."""

    def __init__(self, pools: "weakref.ref[WarmPools[PoolT]]", pool: PoolT) -> None:
        self._pools = pools
        # Held until it is cancelled. To release it never waits.
        self._lock = threading.Lock()
        self._lock.acquire()
        # The pool may end with the loader: there is nothing left to wait for, then.
        self._ending = weakref.finalize(pool, self._release)

    def begin(self) -> None:
        """Starts the thread that waits; without threads to be had, the pool stays as long as the loader."""
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._run, name="millstream-idle", daemon=True).start()

    def cancel(self) -> None:
        """Lets the pool live. Idempotent."""
        self._ending.detach()
        self._release()

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def _run(self) -> None:
        if self._lock.acquire(timeout=IDLE_SECONDS):
            return
        if (pools := self._pools()) is not None:
            pools.retire(self)


class _Idle(NamedTuple, Generic[PoolT]):
    """A pool that no iterator uses."""

    pool: PoolT
    retirement: _Retirement


@final
class WarmPools(Generic[PoolT]):
    """Keeps a pool for the next iterator.

    Args:
        start: starts a new pool.
    """

    def __init__(self, start: Callable[[], PoolT]) -> None:
        self._start = start
        self._idle: list[_Idle[PoolT]] = []
        self._closed = False

    @property
    def idle(self) -> list[PoolT]:
        """The pools that no iterator uses."""
        return [idle.pool for idle in list(self._idle)]

    def take(self) -> PoolT:
        """Returns a pool: a warm one if there is one."""
        for idle in list(self._idle):
            if idle.pool.is_usable and _remove(self._idle, idle):
                idle.retirement.cancel()
                return idle.pool
        return self._start()

    def give_back(self, pool: PoolT) -> None:
        """Keeps a pool for the next iterator; one is enough."""
        if not pool.is_usable or any(idle.is_ours for idle in self.idle):
            pool.stop()
            return
        retirement = _Retirement(weakref.ref(self), pool)
        # Before its thread can run.
        self._idle.append(_Idle(pool, retirement))
        retirement.begin()
        if self._closed:
            # Before, or just now by another thread, which did not see this pool.
            self.stop_idle()

    def retire(self, retirement: _Retirement) -> None:
        """Stops the pool whose time has come, if it is still idle."""
        for idle in list(self._idle):
            if idle.retirement is retirement and _remove(self._idle, idle):
                idle.pool.stop()

    def stop_idle(self) -> None:
        """Stops the pools that no iterator uses."""
        for idle in list(self._idle):
            idle.retirement.cancel()
            # Removed when it has ended: an interrupt leaves it to the next call, or to the end of the loader.
            idle.pool.stop()
            _remove(self._idle, idle)

    def close(self) -> None:
        """Stops the pools that no iterator uses, now and from now on."""
        self._closed = True
        self.stop_idle()


def _remove(pools: list[_Idle[PoolT]], idle: _Idle[PoolT]) -> bool:
    """Removes an idle pool from the list; says whether it was this call that did: several may try at once."""
    try:
        pools.remove(idle)
    except ValueError:
        return False
    return True


def give_back(pools: "weakref.ref[WarmPools[PoolT]]", pool: "weakref.ref[PoolT]") -> None:
    """Keeps the pool of an iterator that is gone, if its loader is still there: called by the iterator's end."""
    keeper, kept = pools(), pool()
    if keeper is not None and kept is not None:
        keeper.give_back(kept)
