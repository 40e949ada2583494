"""Sends what reads from stores to a server on this machine."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.sources.storage import object_stores


@contextlib.contextmanager
def clients_of(address: str, cache: Path) -> Iterator[None]:
    """For the length of a block, `gs://` and `s3://` are at an address; what fails is repeated at once.

    Args:
        address: of the server.
        cache: the folder for indices.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLSTREAM_CACHE", str(cache))
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        patch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", address)  # ArrayRecord's library looks there.
        patch.setenv("GCE_METADATA_ROOT", "127.0.0.1:1")
        patch.setenv("AWS_ENDPOINT_URL", address)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setattr(object_stores, "FIRST_DELAY_SECONDS", 0.01)
        patch.setattr(object_stores, "LONGEST_DELAY_SECONDS", 0.02)
        patch.setattr(object_stores, "ATTEMPTS", 4)
        _forget_clients()
        yield
    _forget_clients()


def _forget_clients() -> None:
    """Has the next read make its clients anew."""
    object_stores._context.cache_clear()
    object_stores._opened_store.cache_clear()
    object_stores._REDIRECTS._addresses.clear()
