"""Ports for servers that have to be told which one to take, before they run."""

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yields a port that the system gives to nobody else meanwhile; a server may share it that sets SO_REUSEPORT.

    gRPC's do. A port that is only looked up may be another's by the time that the server starts.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]


def unassigned_port(host: str) -> int:
    """Returns a port that is free, and that the system gives to nobody who does not ask for it by its number.

    For servers that share no port with anybody.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = list(range(20_000, first))
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise OSError(f"No port from 20000 to {first} is free.")
