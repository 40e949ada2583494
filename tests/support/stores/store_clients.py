"""Sends what reads from stores to a server on this machine."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.sources.remote import object_clients


@contextlib.contextmanager
def clients_of(address: str, cache: Path) -> Iterator[None]:
    """For the length of a block, `gs://`, `s3://` and `az://` are at an address; what fails is repeated at once.

    Args:
        address: of the server.
        cache: the folder for indices.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLSTREAM_CACHE", str(cache))
        patch.setenv("STORAGE_EMULATOR_HOST", address)
        patch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", address)  # ArrayRecord's library looks there.
        patch.setenv("AWS_ENDPOINT_URL", address)
        patch.setenv("AZURE_STORAGE_ENDPOINT", address)
        patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setattr(object_clients, "FIRST_DELAY_SECONDS", 0.01)
        patch.setattr(object_clients, "LONGEST_DELAY_SECONDS", 0.02)
        patch.setattr(object_clients, "ATTEMPTS", 4)
        _forget_clients()
        yield
    _forget_clients()


def _forget_clients() -> None:
    """Makes the next read create new clients."""
    object_clients.open_store.cache_clear()
