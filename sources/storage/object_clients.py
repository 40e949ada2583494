"""Clients of object stores: what obstore is told of each store, and how it retries.

Guarantees:
    - obstore is imported, and its threads start, in the process that reads, when it reads.
    - A process that was forked after that gets an error: obstore would wait there forever.
"""

import functools
import os
import threading
from typing import Any

from millstream.errors import DataSourceError
from millstream.sources.storage.credentials import azure_options, gcs_options, s3_options
from millstream.sources.storage.urls import Url, without_secrets

ATTEMPTS = 8
"""How often a request is made that the store or the network fails."""

FIRST_DELAY_SECONDS = 0.25
"""The wait before the second attempt; each further wait is twice as long, with some chance in it."""

LONGEST_DELAY_SECONDS = 8.0

CONNECT_SECONDS = 10.0

SILENCE_SECONDS = 20.0
"""When a connection that nothing comes from is given up.

Without it, requests on connections that died unnoticed would keep all others waiting.
"""

_REQUEST_SECONDS = 120.0
"""How long a request may take with all its attempts, and each attempt."""

_MAX_STORES = 256
"""How many clients are kept: one for each bucket or host, and one for each signed URL."""

forked = threading.Event()
"""Set in processes that were forked after obstore had been used."""


def path_of(url: str, parsed: Url) -> str:
    """Returns the path of an object as obstore wants it.

    Raises:
        DataSourceError: obstore cannot ask for it.
    """
    path = parsed.key.strip("/")
    if any(part in {"", ".", ".."} for part in path.split("/")):
        raise DataSourceError(f"{url!r} cannot be read: its path has an empty part, `.` or `..`. Rename the object.")
    return path


def store_of(url: str, parsed: Url, *, attempts: int | None = None) -> Any:
    """Returns obstore's client of the store that an object is in."""
    if forked.is_set():
        raise DataSourceError(
            f"{url!r} cannot be read in this process: it was forked after its parent had read from a store, and the "
            "connections of the parent do not work here. Use worker_count, or start processes by 'spawn' or "
            "'forkserver'."
        )
    try:
        return opened_store(parsed.scheme, parsed.root, ATTEMPTS if attempts is None else attempts)
    except exceptions().BaseError as error:
        words = without_secrets(str(error).partition("\n\n")[0])
        raise DataSourceError(f"{url!r} cannot be read, because its store is not configured: {words}.") from None


@functools.lru_cache(maxsize=_MAX_STORES)
def opened_store(scheme: str, root: str, attempts: int) -> Any:
    """Returns the client of a bucket or host."""
    stores = obstore().store
    options = {"client_options": _client_options(is_secure=scheme == "https"), "retry_config": _retry_options(attempts)}
    if scheme == "gs":
        return stores.GCSStore(root, **gcs_options(), **options)
    if scheme == "s3":
        return stores.S3Store(root, **s3_options(root), **options)
    if scheme == "az":
        return stores.AzureStore(root, **azure_options(), **options)
    return stores.HTTPStore.from_url(f"{scheme}://{root}", **options)


def _client_options(*, is_secure: bool) -> dict[str, Any]:
    """Returns the options of connections; those of https are never redirected to http."""
    return {
        "allow_http": not is_secure,
        "connect_timeout": f"{CONNECT_SECONDS * 1000:.0f}ms",
        "read_timeout": f"{SILENCE_SECONDS * 1000:.0f}ms",
        "timeout": f"{_REQUEST_SECONDS * 1000:.0f}ms",
    }


def _retry_options(attempts: int) -> dict[str, Any]:
    import datetime as dt  # noqa: PLC0415  (only readers of stores need it)

    return {
        "max_retries": attempts - 1,
        "backoff": {
            "init_backoff": dt.timedelta(seconds=FIRST_DELAY_SECONDS),
            "max_backoff": dt.timedelta(seconds=LONGEST_DELAY_SECONDS),
            "base": 2,
        },
        "retry_timeout": dt.timedelta(seconds=_REQUEST_SECONDS),
    }


def exceptions() -> Any:
    """Returns the module of the errors of obstore."""
    return obstore().exceptions


@functools.cache
def obstore() -> Any:
    """Returns obstore, imported when it is needed first."""
    try:
        import obstore as library  # noqa: PLC0415
        import obstore.exceptions  # noqa: PLC0415
        import obstore.store  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("To read from gs://, s3:// and http://, pip install 'millstream[remote]'.") from error
    os.register_at_fork(after_in_child=forked.set)
    return library
