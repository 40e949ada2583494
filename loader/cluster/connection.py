"""The connection of this process to a Ray cluster. There is at most one, and it lasts until `ray.shutdown()`."""

import importlib.util

_connections: list[str] = []
"""The ID of this process's Ray job if this module made the current connection, otherwise empty."""


def check_installed() -> None:
    """Raises an ImportError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError("workers: RayWorkers need Ray, which is not installed here: pip install 'millstream[ray]'.")


def connect(address: str | None) -> None:
    """Connects this process to a cluster, unless it is connected.

    Raises:
        ValueError: the process is connected to another cluster.
        ConnectionError: there is no cluster at the address.
    """
    import ray  # noqa: PLC0415  (lazy: slow to import)

    if not ray.is_initialized():
        ray.init(address=address)
        _connections[:] = [ray.get_runtime_context().get_job_id()]
    here = ray.get_runtime_context().gcs_address
    if address not in {None, "auto", "local", here}:
        raise ValueError(
            f"RayWorkers: address is {address!r}, but this process is connected to the cluster {here!r}. Omit the "
            "address, or call ray.shutdown() first."
        )


def is_our_connection(job: str) -> bool:
    """Returns True if this module made the connection of the given job."""
    return _connections == [job]
