"""Clients of object stores: the configuration of obstore.

Guarantees:
    - obstore is imported, and its threads start, only in a process that reads from a store, when it first reads.
    - A process that was forked afterwards gets an error, because obstore would wait forever there.
"""

import functools
from typing import Any

from millstream.errors import DataSourceError
from millstream.sources.library_reads import is_forked
from millstream.sources.remote import hugging_face_hub
from millstream.sources.remote.credentials import azure_options, gcs_options, s3_options
from millstream.sources.remote.urls import Url, without_secrets

ATTEMPTS = 8
"""Number of attempts if the store or the network fails."""

FIRST_DELAY_SECONDS = 0.25
"""Delay before the second attempt. Each further delay is twice as long, with jitter."""

LONGEST_DELAY_SECONDS = 8.0

CONNECT_SECONDS = 10.0

SILENCE_SECONDS = 20.0
"""Time without any bytes after which a connection is given up, and the request is repeated.

Otherwise requests on broken connections would block all others.
"""

REQUEST_SECONDS = 120.0
"""Limit of an attempt, and of the time in which attempts begin."""

_MAX_STORES = 256
"""Limit of the cached clients, one per bucket, host or signed URL."""

LIBRARY = "obstore"


def check_process(url: str) -> None:
    """Raises DataSourceError in a process that was forked after its parent had read from a store."""
    if is_forked(LIBRARY):
        raise DataSourceError(
            f"Cannot read {url!r} in this process: it was forked after its parent had read from a store, and the "
            "connections of the parent do not work here. Use worker_count, or start processes by 'spawn' or "
            "'forkserver'."
        )


def path_of(url: str, parsed: Url) -> str:
    """Returns the path of an object in obstore's form, which does not support all paths."""
    path = parsed.key.strip("/")
    if any(name in {"", ".", ".."} for name in path.split("/")):
        raise DataSourceError(f"Cannot read {url!r}: its path has an empty part, `.` or `..`. Rename the object.")
    return path


def store_of(url: str, parsed: Url, *, attempts: int | None = None) -> Any:
    check_process(url)
    try:
        return open_store(parsed.scheme, parsed.root, ATTEMPTS if attempts is None else attempts)
    except exceptions().BaseError as error:
        raise DataSourceError(f"Cannot read {url!r}: its store is not configured: {first_line(error)}.") from None


@functools.lru_cache(maxsize=_MAX_STORES)
def open_store(scheme: str, root: str, attempts: int) -> Any:
    stores = obstore().store
    address, headers = hugging_face_hub.address_of(root) if scheme == "hf" else (f"{scheme}://{root}", {})
    connections = {
        "allow_http": not address.startswith("https:"),  # No redirect from https to http is followed.
        "default_headers": headers,
        "connect_timeout": f"{CONNECT_SECONDS * 1000:.0f}ms",
        "read_timeout": f"{SILENCE_SECONDS * 1000:.0f}ms",
        "timeout": f"{REQUEST_SECONDS * 1000:.0f}ms",
    }
    options = {"client_options": connections, "retry_config": _retry_options(attempts)}
    if scheme == "gs":
        return stores.GCSStore(root, **gcs_options(), **options)
    if scheme == "s3":
        return stores.S3Store(root, **s3_options(root), **options)
    if scheme == "az":
        return stores.AzureStore(root, **azure_options(), **options)
    return stores.HTTPStore.from_url(address, **options)


def _retry_options(attempts: int) -> dict[str, Any]:
    import datetime as dt  # noqa: PLC0415  (lazy: only readers of stores need it)

    return {
        "max_retries": attempts - 1,
        "backoff": {
            "init_backoff": dt.timedelta(seconds=FIRST_DELAY_SECONDS),
            "max_backoff": dt.timedelta(seconds=LONGEST_DELAY_SECONDS),
            "base": 2,
        },
        "retry_timeout": dt.timedelta(seconds=REQUEST_SECONDS),
    }


def first_line(error: Exception) -> str:
    """Returns the message of an error of obstore without secrets, and without the structures that it appends."""
    return without_secrets(str(error).partition("\n\n")[0]).strip()


def exceptions() -> Any:
    return obstore().exceptions


@functools.cache
def obstore() -> Any:
    try:
        import obstore as library  # noqa: PLC0415
        import obstore.exceptions  # noqa: PLC0415
        import obstore.store  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "Cannot read from gs://, s3://, az:// and http:// without obstore: pip install 'millstream[remote]'."
        ) from error
    return library
