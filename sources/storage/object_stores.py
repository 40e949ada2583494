"""Parts of objects in stores far away, many asked for at once: what of TensorStore is used.

TensorStore reads Google Cloud Storage, S3 and HTTP alike. Its key-value stores repeat what fails for a while, find the
credentials that the tools of each cloud use, and bound how many requests are on their way at one time.

Guarantees:
    - TensorStore is imported, and its threads start, in the process that reads, when it reads.
    - A process that was forked after that gets an error: TensorStore would abort it.
    - Every wait has a limit.
"""

import errno
import functools
import math
import os
import re
import threading
from collections.abc import Sequence
from typing import Any, final

from millstream.errors import DataSourceError
from millstream.sources.storage.redirects import Redirects
from millstream.sources.storage.urls import Url, without_secrets

REQUESTS_AT_ONCE = 128
"""How many requests of this process are on their way at one time, for each kind of store."""

ATTEMPTS = 8
"""How often a request is made that the store or the network fails."""

FIRST_DELAY_SECONDS = 0.25
"""How long to wait before the second attempt; each further one waits for twice as long, with some chance in it."""

LONGEST_DELAY_SECONDS = 8.0

STALL_SECONDS = 60.0
"""How long an answer may take, with all attempts; and a second more for each `SLOWEST_BYTES_PER_SECOND`."""

STALLS = 2
"""How often a request is made that is not answered."""

_CURL_LIMITS = {"CONNECT_TIMEOUT_SECONDS": "10", "LOW_SPEED_TIME_SECONDS": "20", "LOW_SPEED_LIMIT_BYTES": "1"}
"""When TensorStore gives up a connection: variables of the environment, which it reads once, where they are not set.

Without them, requests on connections that died unnoticed would keep all others waiting.
"""

SLOWEST_BYTES_PER_SECOND = 1 << 20

_HINTED_BYTES = 1 << 18
"""How much is read at most to be told how large an object is."""

_LARGEST_OBJECT = 1 << 50

_UNVERSIONED = b"\x10"
"""What TensorStore says of an object whose store gives no version."""

_TOTAL_SIZE = re.compile(r"total size (\d+)|value of size (\d+)|Content-Range header received: .bytes \d+-\d+/(\d+)")

_ANSWERED_RANGE = re.compile(r"Content-Range header received: .bytes (\d+)-\d+/(\d+)")
"""What TensorStore says where another range comes than it has asked for."""

_REDIRECTS = Redirects()

_forked = threading.Event()
"""Set in processes that were forked after TensorStore had been imported."""


@final
class BeyondEndError(OSError):
    """A range ends after the end of its object.

    Attributes:
        size: how many bytes the store says that the object has, or None.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        match = _TOTAL_SIZE.search(message)
        self.size = int(match[match.lastindex or 0]) if match else None


@final
class RangeRequests:
    """Ranges of one object, all asked for at once.

    Args:
        url: the name of the object.
        ranges: where each begins and ends, in bytes; the end is after the beginning.
    """

    def __init__(self, url: str, ranges: Sequence[tuple[int, int]]) -> None:
        self._url = url
        self._ranges = ranges
        self._has_followed = False
        self._answers: dict[int, tuple[bytes, bytes]] = {}
        self._ask()

    def _ask(self) -> None:
        parsed = Url.of(_REDIRECTS.address_of(self._url))
        self._read = functools.partial(_store_of(self._url, parsed).read, parsed.key)
        self._futures = [self._read(byte_range=slice(*place)) for place in self._ranges]

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
        stalls = 0
        while stalls < STALLS:
            try:
                answer = self._futures[number].result(timeout=seconds)
            except TimeoutError:
                stalls += 1
                self._futures[number].cancel()
                if stalls < STALLS:
                    self._futures[number] = self._read(byte_range=slice(start, stop))
                continue
            except (ValueError, KeyError, RuntimeError) as error:
                # All ranges are sent to the same address, so they are asked for again together.
                if not self._has_followed and _REDIRECTS.follow(self._url, str(error), STALL_SECONDS):
                    self._has_followed = True
                    self._ask()
                    continue
                # Not from TensorStore's own, which shows the query.
                raise _error(self._url, without_secrets(str(error))) from None
            if answer.state == "missing":
                raise FileNotFoundError(errno.ENOENT, "The store has no such object", self._url)
            version = answer.stamp.generation
            # Kept as bytes: each look at what TensorStore has is a copy.
            self._answers[number] = (answer.value, b"" if version == _UNVERSIONED else version)
            self._futures[number] = None
            return self._answers[number]
        raise DataSourceError(
            f"{self._url!r} was not read: the store has not answered {STALLS} times within {seconds:.0f} seconds. "
            "Look at the network and at the store, and try again."
        )

    def cancel(self) -> None:
        """Gives up what is not answered yet."""
        for future in filter(None, self._futures):
            future.cancel()


def version_of(url: str) -> bytes:
    """Returns which version of the object there is now; empty if its store does not say.

    Raises:
        OSError: as `RangeRequests.result`.
    """
    try:
        return RangeRequests(url, [(0, 1)]).result(0)[1]
    except BeyondEndError:
        return RangeRequests(url, [(0, 0)]).result(0)[1]  # It is empty.


def size_of(url: str) -> int:
    """Returns how many bytes an object has.

    Stores say it with every answer, but TensorStore passes it on only in the error of a range that goes beyond the
    end. So the end is looked for: eight bytes at a time, and with such a range when it is near.

    Raises:
        OSError: as `RangeRequests.result`.
    """
    least, most = 0, _LARGEST_OBJECT  # The size is least <= size <= most.
    places = [0, *(1 << power for power in range(9, int(math.log2(_LARGEST_OBJECT)), 3))]
    while True:
        for place, is_there in zip(places, _have_bytes(url, places), strict=True):
            least, most = (max(least, place + 1), most) if is_there else (least, min(most, place))
        if least >= most:
            return most
        if most - least <= _HINTED_BYTES and least:
            try:
                RangeRequests(url, [(least - 1, most)]).result(0)
            except BeyondEndError as error:
                hint = error.size
            else:
                return most
            if hint is not None and least <= hint <= most and _have_bytes(url, [hint - 1, hint]) == [True, False]:
                return hint
        places = sorted({least + (most - least) * part // 8 for part in range(8)})


def keys_within(beginning: Url) -> list[str]:
    """Returns the names of all objects of a bucket that begin as this one does, whose key may be empty.

    Raises:
        OSError: the store does not list them.
    """
    url = f"{beginning.scheme}://{beginning.root}/{beginning.key}"
    store = _store_of(url, beginning)
    prefix = beginning.key.encode("utf-8", "surrogateescape")
    key_range = _tensorstore().KvStore.KeyRange(prefix, _after_all_with(prefix))
    try:
        keys = store.list(key_range).result(timeout=STALL_SECONDS * STALLS)
    except TimeoutError:
        raise DataSourceError(
            f"The objects that begin with {url!r} were not listed within {STALL_SECONDS * STALLS:.0f} seconds."
        ) from None
    except (ValueError, KeyError, RuntimeError) as error:
        raise _error(url, without_secrets(str(error))) from None
    return [key.decode("utf-8", "surrogateescape") for key in keys]


def _have_bytes(url: str, places: Sequence[int]) -> list[bool]:
    """Returns whether the object has a byte at each of the places."""
    requests = RangeRequests(url, [(place, place + 1) for place in places])
    found = []
    for number in range(len(places)):
        try:
            requests.result(number)
        except BeyondEndError:
            found.append(False)
        else:
            found.append(True)
    return found


def _after_all_with(prefix: bytes) -> bytes:
    """Returns what comes right after all names that begin so."""
    shortened = prefix.rstrip(b"\xff")
    return shortened[:-1] + bytes([shortened[-1] + 1]) if shortened else b""


def _error(url: str, words: str) -> OSError:
    """Returns the error that TensorStore's words mean."""
    answered = _ANSWERED_RANGE.search(words)
    # Some servers say of a range after the end that it begins after the size, instead of that there is none.
    if words.startswith("OUT_OF_RANGE") or (answered and int(answered[1]) >= int(answered[2])):
        return BeyondEndError(words)
    if words.startswith(("PERMISSION_DENIED", "UNAUTHENTICATED")):
        return PermissionError(
            errno.EACCES,
            f"The store refuses it ({words}). Check the credentials of this process: for gs://, `gcloud auth "
            "application-default login` or $GOOGLE_APPLICATION_CREDENTIALS; for s3://, $AWS_PROFILE or "
            "$AWS_ACCESS_KEY_ID and $AWS_SECRET_ACCESS_KEY",
            url,
        )
    if words.startswith("NOT_FOUND"):
        return FileNotFoundError(errno.ENOENT, f"The store has no such object ({words})", url)
    if "was ignored by server" in words:
        return DataSourceError(
            f"{url!r} cannot be read at random: its server sends whole files only ({words}). Download it, or put it "
            "where ranges are served."
        )
    return DataSourceError(f"{url!r} cannot be read: {words}")


def _store_of(url: str, parsed: Url) -> Any:
    """Returns TensorStore's key-value store that an object is in."""
    if _forked.is_set():
        raise DataSourceError(
            f"{url!r} cannot be read in this process: it was forked after its parent had read from a store, and "
            "TensorStore would end it. Use worker_count, or start processes by 'spawn' or 'forkserver'."
        )
    return _opened_store(parsed.scheme, parsed.root)


@functools.cache
def _opened_store(scheme: str, root: str) -> Any:
    if scheme == "gs":
        spec = {"driver": "gcs", "bucket": root}
    elif scheme == "s3":
        spec = {"driver": "s3", "bucket": root} | _s3_endpoint()
    else:
        spec = {"driver": "http", "base_url": f"{scheme}://{root}"}
    return _tensorstore().KvStore.open(spec, context=_context()).result(timeout=STALL_SECONDS)


def _s3_endpoint() -> dict[str, str]:
    """Returns where the objects of S3 are, if the variables of AWS's tools say that they are somewhere else."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not endpoint:
        return {}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return {"endpoint": endpoint, "aws_region": region}


@functools.cache
def _context() -> Any:
    """Returns what all stores of this process share."""
    limit = {"limit": REQUESTS_AT_ONCE}
    retries = {
        "max_retries": ATTEMPTS,
        "initial_delay": f"{FIRST_DELAY_SECONDS * 1000:.0f}ms",
        "max_delay": f"{LONGEST_DELAY_SECONDS * 1000:.0f}ms",
    }
    kinds = ("gcs", "http", "s3")
    words = {f"{kind}_request_concurrency": limit for kind in kinds}
    return _tensorstore().Context(words | {f"{kind}_request_retries": retries for kind in kinds})


@functools.cache
def _tensorstore() -> Any:
    """Returns TensorStore, imported when it is needed first."""
    for name, value in _CURL_LIMITS.items():
        os.environ.setdefault(f"TENSORSTORE_CURL_{name}", value)
    try:
        import tensorstore  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("To read from gs://, s3:// and http://, pip install 'millstream[remote]'.") from error
    os.register_at_fork(after_in_child=_forked.set)
    return tensorstore
