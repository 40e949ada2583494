"""An HTTP server on which Prometheus finds the measurements of this process, if MILLSTREAM_METRICS_PORT asks for it.

Guarantees:
    * Its thread is a daemon, and ends with `close()` or with the process.
    * It answers `GET /metrics` alone, one request after another. A client that sends or takes nothing for
      REQUEST_SECONDS is disconnected.
    * It only reads: no user code runs in its thread.
    * A forked process has neither thread nor socket.
"""

import http.server
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, final

VARIABLE = "MILLSTREAM_METRICS_PORT"
REQUEST_SECONDS = 5.0


def address_from(text: str) -> tuple[str, int]:
    """Returns host and port of `9400`, a port of the loopback address, or of `0.0.0.0:9400` or `[::1]:9400`."""
    host, _, port = text.strip().rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ValueError(
            f"{VARIABLE} must be a port, such as 9400, or an address with a port, such as 0.0.0.0:9400; got {text!r}."
        )
    return host.strip("[]") or "127.0.0.1", int(port)


@final
class MetricsEndpoint:
    """Answers `GET /metrics` with a page in the text format of Prometheus, from construction on.

    Args:
        page: returns the page. It is called in the server's thread.
        text: the value of the environment variable (see `address_from`); with port 0, the system chooses `port`.

    Raises:
        ValueError: the text names no address.
        OSError: the address cannot be used, because another process has it, for example.
    """

    def __init__(self, page: Callable[[], str], text: str) -> None:
        class Handler(_Handler):
            page_of_metrics = staticmethod(page)

        host, port = address_from(text)
        kind = _IPv6Server if ":" in host else _Server
        self._server = kind((host, port), Handler)
        self.port = int(self._server.server_address[1])
        os.register_at_fork(after_in_child=self._server.socket.close)
        self._thread = threading.Thread(target=self._server.serve_forever, name="millstream-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.TCPServer):
    """Unlike `http.server.HTTPServer`, it asks no name server for its own name."""

    allow_reuse_address = True

    def handle_error(self, _request: Any, _client: Any) -> None:
        """Ignores that a client has disconnected."""


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS
    page_of_metrics: Callable[[], str]

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "The measurements are at /metrics")
            return
        try:
            page = self.page_of_metrics().encode()
        except Exception as error:  # noqa: BLE001  (the state changes meanwhile, and names may be user code)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, f"No page: {type(error).__name__}")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_arguments: Any) -> None:
        """Logs nothing: Prometheus asks every few seconds."""
