"""Ports for servers that have to be told which one to take, before they run."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yields a port that the system gives to nobody else meanwhile; a server may share it that sets SO_REUSEPORT.

    gRPC's do. A port that is only looked up may be another's by the time that the server starts.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]
