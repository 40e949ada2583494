"""This process's connection to a Ray cluster: one at a time, which lasts until `ray.shutdown()`."""

import importlib.util

_connections: list[str] = []
"""The job that this process became by a connection which this module made, if it is the one that there is."""


def check_installed() -> None:
    """Raises an ImportError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError("workers: RayWorkers need Ray, which is not installed here: pip install 'millstream[ray]'.")


def connect(address: str | None) -> None:
    """Sees to it that this process is connected to a cluster.

    Raises:
        ValueError: it is connected to another one than is asked for.
        ConnectionError: there is none at this address.
    """
    import ray  # noqa: PLC0415  (it takes long to import)

    if not ray.is_initialized():
        ray.init(address=address)
        _connections[:] = [ray.get_runtime_context().get_job_id()]
    here = ray.get_runtime_context().gcs_address
    if address not in {None, "auto", "local", here}:
        raise ValueError(
            f"RayWorkers: address is {address!r}, but this process is connected to the cluster {here!r}: leave the "
            "address out, or call ray.shutdown() first."
        )


def is_our_connection(job: str) -> bool:
    """Whether this module has made the connection by which this process became a job."""
    return _connections == [job]
