"""Concurrent range reads from remote object stores, through obstore, in threads of this process.

obstore reads Google Cloud Storage, S3, Azure and HTTP. It repeats failed requests, follows redirects, and returns the
size and the version of an object with each response. Its blocking calls run in threads: its coroutines take 2.5 times
the CPU time, and its merging of near ranges does not report the version.

Guarantees:
    - Every wait has a limit.
    - No error shows the signature of a URL, nor the user and password in it.
"""

import atexit
import contextlib
import dataclasses
import errno
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np

from millstream.core.signals import SignalSafeLock
from millstream.errors import DataSourceError
from millstream.sources.reads import is_forked
from millstream.sources.remote import object_clients
from millstream.sources.remote.object_clients import LIBRARY, exceptions, first_line, obstore, path_of, store_of
from millstream.sources.remote.urls import Url

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


MAX_CONCURRENT_REQUESTS = 128
"""Limit of the requests of this process that are in flight, and of the threads that make them."""

STALL_SECONDS = 60.0
"""Limit of a wait for another process that copies an object, in addition to the time for its bytes."""

SLOWEST_BYTES_PER_SECOND = 1 << 20

FIRST_BYTES = 4 << 20
"""Bytes of the first request for an object of unknown size. If it is larger, a second request reads the remainder."""

_SLICE_SECONDS = 0.5
"""Waits are divided: Python handles a signal that comes just before a wait begins only when that wait has ended."""

_MAX_BROKEN_RESPONSES = 2
"""Number of responses that may break off before a request fails. obstore resumes each of them several times."""

_NEAR_BYTES = 32 << 10
"""Gap between spans up to which they are read by one request, because another request would take longer."""

_REQUEST_BYTES = 4 << 20
"""Limit of the bytes of one request, unless one span is larger."""

T = TypeVar("T")


@final
class BeyondEndError(OSError):
    """A range ends after the end of its object."""


@final
class RangeRequests:
    """Ranges of one object, all requested together: the start and the end of each, in bytes; none is empty.

    With `in_threads=False`, this thread reads them, one after another, before the constructor returns.
    """

    def __init__(self, url: str, ranges: Sequence[tuple[int, int]], *, in_threads: bool = True) -> None:
        self._url = url
        self._ranges = ranges
        parsed = Url.of(url)
        store, path = store_of(url, parsed), path_of(url, parsed)
        submit = request_threads().submit if in_threads else request_threads().run
        self._futures: list[Future[tuple[bytes, Any]]] = [
            submit(_fetch, store, path, start, stop) for start, stop in ranges
        ]

    def result(self, number: int) -> tuple[bytes, bytes]:
        """Returns the bytes of a range, and the version of the object that they belong to; empty if it has none.

        Raises:
            BeyondEndError: the object ends before the range does.
            FileNotFoundError, PermissionError: the object does not exist, or may not be read.
            DataSourceError: the store fails, or does not respond.
        """
        start, stop = self._ranges[number]
        try:
            content, meta = wait_for(self._futures[number], self._url, stop - start)
        except exceptions().BaseError as error:
            # Stores report a range beyond the end by different errors. The current size tells.
            if _is_shorter(self._url, stop):
                raise BeyondEndError from None
            raise error_for(self._url, error) from None
        if len(content) < stop - start:
            raise BeyondEndError
        if len(content) > stop - start:
            raise DataSourceError(f"Cannot read {self._url!r}: the store sent more bytes than were requested.")
        return content, _version_of(meta)

    def cancel(self) -> None:
        """Cancels the requests that have not been sent."""
        for future in self._futures:
            future.cancel()


@dataclasses.dataclass(slots=True)
class JoinedSpans:
    """The range of one request, and the indices of the spans in it."""

    start: int
    stop: int
    spans: list[int]


def join_near(starts: Sequence[int], lengths: Sequence[int]) -> list[JoinedSpans]:
    """Groups spans that are near each other, without the empty ones."""
    begins = np.array(starts, np.int64)
    ends = begins + np.array(lengths, np.int64)
    order = np.argsort(begins, kind="stable")
    joined: list[JoinedSpans] = []
    for span in order[ends[order] > begins[order]].tolist():
        begin, end = int(begins[span]), int(ends[span])
        if joined and begin - joined[-1].stop <= _NEAR_BYTES:
            stop = max(joined[-1].stop, end)
            if stop - joined[-1].start <= _REQUEST_BYTES:
                joined[-1].stop = stop
                joined[-1].spans.append(span)
                continue
        joined.append(JoinedSpans(begin, end, [span]))
    return joined


@final
class WholeObjects:
    """The contents of objects of any size, all requested together."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        parsed = [(url, Url.of(url)) for url in urls]
        objects = [(store_of(*name), path_of(*name)) for name in parsed]
        self._futures: list[Future[tuple[bytes, Any]]] = [
            request_threads().submit(_fetch, store, path, 0, FIRST_BYTES) for store, path in objects
        ]

    def result(self, number: int) -> bytes:
        """Returns the content of an object. Errors are those of `RangeRequests.result`."""
        url = self._urls[number]
        try:
            beginning, meta = wait_for(self._futures[number], url, FIRST_BYTES)
        except exceptions().BaseError as error:
            # An empty object has no first bytes.
            if _head(url)[0] == 0:
                return b""
            raise error_for(url, error) from None
        size: int = meta["size"]
        if size <= len(beginning):
            return beginning
        remainder, version = RangeRequests(url, [(len(beginning), size)]).result(0)
        if version != _version_of(meta):
            raise DataSourceError(f"{url!r} changed while it was read. Read it again.")
        return beginning + remainder

    def cancel(self) -> None:
        """Cancels the requests that have not been sent."""
        for future in self._futures:
            future.cancel()


def state_of(url: str) -> tuple[int, bytes]:
    """Returns the size of an object in bytes, and its version, which is empty if the store has none, with one request.

    The request is for the first byte, because servers of signed URLs may allow no other method. If it fails, as for an
    empty object, a second request is for the headers. Errors are those of `RangeRequests.result`.
    """
    parsed = Url.of(url)
    try:
        _, meta = _request(url, _fetch, store_of(url, parsed), path_of(url, parsed), 0, 1)
    except exceptions().BaseError as error:
        try:
            size, version = _head(url)
        except OSError:
            raise error_for(url, error) from None
        if size and isinstance(error, exceptions().NotSupportedError):
            raise DataSourceError(
                f"Cannot read {url!r} at random: its server sends only whole files. Download it, or move it to a "
                "server that supports ranges."
            ) from None
        return size, version
    return meta["size"], _version_of(meta)


def _fetch(store: Any, path: str, start: int, stop: int) -> tuple[bytes, Any]:
    for remaining in reversed(range(_MAX_BROKEN_RESPONSES)):
        response = obstore().get(store, path, options={"range": (start, stop)})
        try:
            return bytes(response.bytes()), response.meta
        except exceptions().GenericError:
            if not remaining:
                raise
    raise AssertionError("No request was made.")


def _head(url: str) -> tuple[int, bytes]:
    """Returns the size and the version of an object from its headers, with a single attempt."""
    parsed = Url.of(url)
    try:
        meta = _request(url, obstore().head, store_of(url, parsed, attempts=1), path_of(url, parsed))
    except exceptions().BaseError as error:
        raise error_for(url, error) from None
    return meta["size"], _version_of(meta)


def _is_shorter(url: str, stop: int) -> bool:
    try:
        return _head(url)[0] < stop
    except FileNotFoundError:
        raise
    except OSError:
        return False


def _version_of(meta: Any) -> bytes:
    """Returns the version of an object: a generation, or a strong ETag."""
    if meta["version"]:
        return str(meta["version"]).encode()
    etag = meta["e_tag"]
    return etag.encode() if etag and not etag.startswith("W/") else b""


def _request(url: str, request: Callable[..., T], *arguments: Any) -> T:
    future: Future[T] = request_threads().submit(request, *arguments)
    return wait_for(future, url, 0)


def wait_for(future: "Future[T]", url: str, num_bytes: int) -> T:
    """Returns the result of a request. Errors of obstore about neither existence nor permission are raised as is."""
    # obstore's own limits end every request earlier, unless something is broken in this process.
    seconds = 2 * object_clients.REQUEST_SECONDS + num_bytes / SLOWEST_BYTES_PER_SECOND
    try:
        return _result_within(future, seconds)
    except TimeoutError:
        future.cancel()
        raise DataSourceError(
            f"Timed out reading {url!r}: no response within {seconds:.0f} seconds. Check the network and the store, "
            "then try again."
        ) from None
    except (FileNotFoundError, exceptions().PermissionDeniedError, exceptions().UnauthenticatedError) as error:
        # `from None`, because the error of obstore shows the query.
        raise error_for(url, error) from None


def _result_within(future: "Future[T]", seconds: float) -> T:
    """Returns the result of a future. Raises TimeoutError if there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            return future.result(max(0.0, min(left, _SLICE_SECONDS)))
        except TimeoutError:
            if future.done():
                # It ended just after the slice, or failed with a TimeoutError of its own.
                return future.result()
            if left <= 0:
                raise


def error_for(url: str, error: Exception) -> OSError:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "The store has no such object", url)
    message = first_line(error)
    if isinstance(error, exceptions().PermissionDeniedError | exceptions().UnauthenticatedError):
        return PermissionError(
            errno.EACCES,
            f"The store refuses access ({message}). Check the credentials of this process: for gs://, `gcloud auth "
            "application-default login` or $GOOGLE_APPLICATION_CREDENTIALS; for s3://, $AWS_PROFILE or "
            "$AWS_ACCESS_KEY_ID and $AWS_SECRET_ACCESS_KEY",
            url,
        )
    return DataSourceError(f"Cannot read {url!r}: {message}.")


@functools.cache
def request_threads() -> RequestThreads:
    return RequestThreads(MAX_CONCURRENT_REQUESTS)
