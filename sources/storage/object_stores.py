"""Concurrent range reads from remote object stores, through obstore.

obstore reads Google Cloud Storage, S3 and HTTP alike. It retries what fails for a while, follows redirects, and returns
the size and the version of an object with each answer. Its requests are coroutines, which one thread of this process
runs for all others.

Guarantees:
    - Every wait has a limit.
    - No error shows what signs a URL, nor the user and the password in it.
"""

import asyncio
import atexit
import contextlib
import errno
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

from millstream.errors import DataSourceError
from millstream.sources.storage import object_clients
from millstream.sources.storage.object_clients import exceptions, obstore, path_of, store_of
from millstream.sources.storage.urls import Url, without_secrets

if TYPE_CHECKING:
    import concurrent.futures

REQUESTS_AT_ONCE = 128
"""The number of requests of this process that are in flight at one time."""

STALL_SECONDS = 60.0
"""How long an answer may take, with all attempts; and a second more for each `SLOWEST_BYTES_PER_SECOND`."""

STALLS = 2
"""How often a request is made that is not answered."""

SLOWEST_BYTES_PER_SECOND = 1 << 20

FIRST_BYTES = 4 << 20
"""The number of bytes that are requested of an object whose size is not known; the rest is another request."""

T = TypeVar("T")


@final
class BeyondEndError(OSError):
    """A range ends after the end of its object."""


class ObjectState(NamedTuple):
    """An object as it is now.

    Attributes:
        size: in bytes.
        version: the name of its content in the store; empty if the store has none.
    """

    size: int
    version: bytes


@final
class RangeRequests:
    """Ranges of one object, all requested together.

    Args:
        url: the name of the object.
        ranges: where each begins and ends, in bytes; the end is after the beginning.
    """

    def __init__(self, url: str, ranges: Sequence[tuple[int, int]]) -> None:
        self._url = url
        self._ranges = ranges
        parsed = Url.of(url)
        self._ask = functools.partial(_ask, _fetched, store_of(url, parsed), path_of(url, parsed))
        self._futures: list[concurrent.futures.Future[Any] | None] = [self._ask(*place) for place in ranges]
        self._answers: dict[int, tuple[bytes, bytes]] = {}

    def result(self, number: int) -> tuple[bytes, bytes]:
        """Returns the bytes of a range, and the version of the object that they are of; empty if it has none.

        Raises:
            BeyondEndError: the object ends before the range does.
            FileNotFoundError, PermissionError: there is no such object, or it may not be read.
            DataSourceError: the store fails, or does not answer.
        """
        if number in self._answers:
            return self._answers[number]
        start, stop = self._ranges[number]
        seconds = STALL_SECONDS + (stop - start) / SLOWEST_BYTES_PER_SECOND
        future = self._futures[number] or self._ask(start, stop)
        try:
            content, meta = _waited(future, self._url, seconds, lambda: self._ask(start, stop))
        except exceptions().GenericError as error:
            # A range after the end may be any error: one request tells whether the object has become shorter.
            if _has_fewer_bytes(self._url, stop):
                raise BeyondEndError from None
            raise _error(self._url, error) from None
        self._futures[number] = None
        self._answers[number] = bytes(content), _version(meta)
        if len(self._answers[number][0]) < stop - start:
            raise BeyondEndError
        return self._answers[number]

    def cancel(self) -> None:
        """Gives up what is not answered yet."""
        for future in filter(None, self._futures):
            future.cancel()


@final
class WholeObjects:
    """The contents of objects of any size, all requested together.

    Args:
        urls: the names of the objects.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        named = [(url, Url.of(url)) for url in urls]
        self._asks = [
            functools.partial(_ask, _fetched, store_of(*name), path_of(*name), 0, FIRST_BYTES) for name in named
        ]
        self._futures = [ask() for ask in self._asks]

    def result(self, number: int) -> bytes:
        """Returns the content of an object.

        Raises:
            OSError: as `RangeRequests.result`.
        """
        url = self._urls[number]
        try:
            content, meta = _waited(
                self._futures[number], url, STALL_SECONDS + FIRST_BYTES / SLOWEST_BYTES_PER_SECOND, self._asks[number]
            )
        except exceptions().GenericError as error:
            # An empty object has no first bytes.
            if _headers_of(url).size == 0:
                return b""
            raise _error(url, error) from None
        beginning, size = bytes(content), meta["size"]
        if size <= len(beginning):
            return beginning
        rest, version = RangeRequests(url, [(len(beginning), size)]).result(0)
        if version != _version(meta):
            raise DataSourceError(f"{url!r} was replaced while it was being read. Read it again.")
        return beginning + rest

    def cancel(self) -> None:
        """Cancels the requests that are not answered yet."""
        for future in self._futures:
            future.cancel()


def state_of(url: str) -> ObjectState:
    """Returns the size and the version of an object, by one request.

    That is one for its first byte, because servers that sign URLs may allow no other method. Only if it fails, as for
    an empty object, the object's headers are requested.

    Raises:
        OSError: as `RangeRequests.result`.
    """
    parsed = Url.of(url)
    path = path_of(url, parsed)
    store = store_of(url, parsed)
    try:
        _, meta = _asked(url, _fetched, store, path, 0, 1)
    except (exceptions().GenericError, exceptions().NotSupportedError) as error:
        try:
            state = _headers_of(url)
        except OSError:
            raise _error(url, error) from None
        if state.size and isinstance(error, exceptions().NotSupportedError):
            raise DataSourceError(
                f"{url!r} cannot be read at random: its server sends whole files only. Download it, or put it where "
                "ranges are served."
            ) from None
        return state
    return ObjectState(meta["size"], _version(meta))


def keys_within(beginning: Url) -> list[str]:
    """Returns the names of all objects of a bucket that begin as this one does, whose key may be empty.

    Raises:
        OSError: the store does not list them.
    """
    url = f"{beginning.scheme}://{beginning.root}/{beginning.key}"
    # Stores list whole folders, so the last part of the name is compared here.
    folder = beginning.key.rpartition("/")[0]
    try:
        keys: list[str] = _asked(url, _listed, store_of(url, beginning), folder)
    except exceptions().BaseError as error:
        raise _error(url, error) from None
    return [key for key in keys if key.startswith(beginning.key)]


async def _fetched(store: Any, path: str, start: int, stop: int) -> tuple[Any, Any]:
    """Returns the bytes of a range, and what the store says of their object."""
    async with _slots():
        for _ in range(STALLS - 1):
            answer = await obstore().get_async(store, path, options={"range": (start, stop)})
            # An answer that breaks off is resumed where it did, until that has failed too often.
            with contextlib.suppress(exceptions().GenericError):
                return await answer.bytes_async(), answer.meta
        answer = await obstore().get_async(store, path, options={"range": (start, stop)})
        return await answer.bytes_async(), answer.meta


async def _head(store: Any, path: str) -> Any:
    async with _slots():
        return await obstore().head_async(store, path)


async def _listed(store: Any, folder: str) -> list[str]:
    return [meta["path"] async for some in obstore().list(store, prefix=folder or None) for meta in some]


def _headers_of(url: str) -> ObjectState:
    """Returns the size and the version of an object by its headers, without any further attempt.

    Raises:
        OSError: as `RangeRequests.result`.
    """
    parsed = Url.of(url)
    try:
        meta = _asked(url, _head, store_of(url, parsed, attempts=1), path_of(url, parsed))
    except exceptions().BaseError as error:
        raise _error(url, error) from None
    return ObjectState(meta["size"], _version(meta))


def _has_fewer_bytes(url: str, stop: int) -> bool:
    try:
        return _headers_of(url).size < stop
    except FileNotFoundError:
        raise
    except OSError:
        return False


def _version(meta: Any) -> bytes:
    """Returns the version that a store gives: a generation, or a strong ETag."""
    if meta["version"]:
        return str(meta["version"]).encode()
    etag = meta["e_tag"]
    return etag.encode() if etag and not etag.startswith("W/") else b""


def _asked(url: str, request: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    """Returns the answer to a request, which is made again if there is none in time."""
    ask = functools.partial(_ask, request, *arguments)
    return _waited(ask(), url, STALL_SECONDS, ask)


def _ask(request: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> "concurrent.futures.Future[T]":
    """Makes a request, and returns the future of its answer."""
    return asyncio.run_coroutine_threadsafe(request(*arguments), _loop())


def _waited(
    future: "concurrent.futures.Future[T]",
    url: str,
    seconds: float,
    ask_again: Callable[[], "concurrent.futures.Future[T]"],
) -> T:
    """Returns the answer to a request; errors of obstore that have no class of Python's own are raised as they are.

    Raises:
        FileNotFoundError, PermissionError: there is no such object, or it may not be read.
        DataSourceError: there was no answer in time.
    """
    for stall in range(STALLS):
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            if stall + 1 < STALLS:
                future = ask_again()
        except (FileNotFoundError, exceptions().PermissionDeniedError, exceptions().UnauthenticatedError) as error:
            # Not from the library's own error, which shows the query.
            raise _error(url, error) from None
    raise DataSourceError(
        f"Timed out reading {url!r}: the store has not answered {STALLS} times within {seconds:.0f} seconds. Check the "
        "network and the store, then try again."
    )


def _error(url: str, error: Exception) -> OSError:
    """Returns the error of Python's or of ours that an error of obstore means."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "The store has no such object", url)
    # After the first paragraph there are its structures.
    words = without_secrets(str(error).partition("\n\n")[0]).strip()
    if isinstance(error, exceptions().PermissionDeniedError | exceptions().UnauthenticatedError):
        return PermissionError(
            errno.EACCES,
            f"The store refuses it ({words}). Check the credentials of this process: for gs://, `gcloud auth "
            "application-default login` or $GOOGLE_APPLICATION_CREDENTIALS; for s3://, $AWS_PROFILE or "
            "$AWS_ACCESS_KEY_ID and $AWS_SECRET_ACCESS_KEY",
            url,
        )
    return DataSourceError(f"{url!r} cannot be read: {words}.")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop that the requests of this process run in, in a thread until the process ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="object-stores", daemon=True)
    thread.start()

    def stop() -> None:
        if not object_clients.forked.is_set():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(STALL_SECONDS)

    # Answers that come after the interpreter has ended would crash it.
    atexit.register(stop)
    return loop


@functools.cache
def _slots() -> asyncio.Semaphore:
    """Returns what bounds the number of requests in flight."""
    return asyncio.Semaphore(REQUESTS_AT_ONCE)
