"""The cluster, here on this machine, that loaders with workers on a cluster need before they are opened.

Each is started once in a process, and ends with it.
"""

import functools
import subprocess
import sys
from pathlib import Path

from suite.case import Contender

RAY_ACTORS = "Ray actors"
"""The mode of millstream in which actors of Ray are its workers."""

SERVICE = "service"
"""The beginning of the modes of tf.data in which the workers of its service build the batches."""

_SPARE_CORES = 2
"""Ray Data has tasks beside the actors of a pipeline, and waits forever where there is no core for them."""

ADDRESS = "address "
"""Begins the line in which a server of tf.data's says where it is."""

_SERVER = Path(__file__).with_name("tensorflow_server.py")

_servers: "list[subprocess.Popen[str]]" = []
"""Those that run: each lives while its standard input is open."""


def start(contender: Contender) -> None:
    if contender.peer == "ray_data" or contender.mode == RAY_ACTORS:
        ray_cluster(contender.workers)
    elif contender.mode.startswith(SERVICE):
        data_service(contender.workers)


@functools.cache
def ray_cluster(workers: int) -> None:
    import ray  # noqa: PLC0415  (only where it is measured)

    # One of its own, whichever else runs on this machine.
    cores = workers + _SPARE_CORES
    ray.init("local", num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


@functools.cache
def data_service(workers: int) -> str:
    """Starts the servers of tf.data's service, each a process; returns the dispatcher's address."""
    dispatcher = _served("dispatcher")
    for _ in range(workers):
        _served("worker", dispatcher)
    return f"grpc://{dispatcher}"


def _served(*arguments: str) -> str:
    """Starts a server, which ends when this process does; returns its address."""
    server = subprocess.Popen(
        [sys.executable, str(_SERVER), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    _servers.append(server)
    for line in server.stdout or ():
        if line.startswith(ADDRESS):
            return line.removeprefix(ADDRESS).strip()
    raise RuntimeError(f"The server of tf.data's service ended with status {server.wait()}.")
