"""Threads that make the blocking requests of this process to object stores."""

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from millstream.core.signals import SignalSafeLock
from millstream.errors import DataSourceError
from millstream.sources.library_reads import is_forked
from millstream.sources.remote.object_clients import LIBRARY

if TYPE_CHECKING:
    from concurrent.futures import Future

_EXIT_SECONDS = 0.5
"""Time that requests in flight have to end when the process exits, in seconds."""

_FIRST_REQUESTS = 64
"""Limit of the first requests, during which the threads that wait for them are likely to start."""

_EXITING = "Cannot read from a store: the process is exiting."


@final
class RequestThreads:
    """Threads that make requests, started as needed.

    Unlike those of a `ThreadPoolExecutor`, they do not delay the exit of the process until all requests are answered.
    At the exit, threads that wait for a response get an error immediately.
    """

    def __init__(self, max_threads: int) -> None:
        import queue  # noqa: PLC0415  (lazy: only readers of stores need it)
        from concurrent.futures import Future  # noqa: PLC0415

        self._max_threads = max_threads
        self._new_future = Future[Any]
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._queue = queue.SimpleQueue()
        self._lock = SignalSafeLock(threading.RLock())
        self._threads: list[threading.Thread] = []
        self._unfinished: set[Future[Any]] = set()
        self._is_exiting = False
        self._num_requests = 0
        self._registered_at = 0.0

    def submit(self, request: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future = self._new_future()
        with self._lock:
            if self._is_exiting:
                _fail(future, DataSourceError(_EXITING))
                return future
            self._register()
            self._unfinished.add(future)
            self._queue.put((future, request, arguments))
            if len(self._unfinished) > len(self._threads) < self._max_threads:
                thread = threading.Thread(target=self._run, name="object-stores", daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError):  # The limit of the process or of its container.
                    if not self._threads:
                        raise
                else:
                    self._threads.append(thread)
        return future

    def _register(self) -> None:
        """Registers the handler of the exit after those that wait for threads that wait for responses.

        Handlers run in reverse order. Each registration leaves an empty entry, so it is repeated for the first requests
        only, and then once per second.
        """
        self._num_requests += 1
        now = time.monotonic()
        if self._num_requests <= _FIRST_REQUESTS or now - self._registered_at > 1.0:
            self._registered_at = now
            atexit.unregister(self._stop)
            atexit.register(self._stop)

    def run(self, request: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Makes a request in the calling thread, and returns the future of its response."""
        future = self._new_future()
        _make(future, request, arguments)
        return future

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            future, request, arguments = work
            if future.set_running_or_notify_cancel():
                _make(future, request, arguments)
            with self._lock:
                self._unfinished.discard(future)
            del work, future, request, arguments  # An idle thread must not keep the bytes of its last response.

    def _stop(self) -> None:
        """Fails all requests, and waits for those in flight: a response could crash an interpreter that has ended."""
        if is_forked(LIBRARY):
            return
        with self._lock:
            self._is_exiting = True
            unfinished = list(self._unfinished)
        for future in unfinished:
            if not future.cancel():
                _fail(future, DataSourceError(_EXITING))
        deadline = time.monotonic() + _EXIT_SECONDS
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _make(future: "Future[Any]", request: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        future.set_result(request(*arguments))
    except BaseException as error:  # noqa: BLE001  (raised by `result`)
        _fail(future, error)


def _fail(future: "Future[Any]", error: BaseException) -> None:
    from concurrent.futures import InvalidStateError  # noqa: PLC0415  (lazy, as above)

    # At the exit, a request may end while `_stop` fails it.
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
