"""Requests to a running trainer: `millstream top` over a socket of the user, and Prometheus over HTTP.

Both are HTTP: `GET /snapshot` and `GET /stacks` on the socket, `GET /metrics` on a port.

Guarantees:
    * There is at most one thread per process for each, and none before a pipeline is served. The thread and its socket
      end with the last served pipeline, and with the interpreter, which waits for them for at most CLOSE_SECONDS. That
      of Prometheus is a daemon.
    * The server is started in a fresh thread, which a signal handler cannot interrupt. The lock that guards the start
      and the end is held by such threads and by the server's own.
    * Requests are answered one after another: on the socket those of the same user, over HTTP `GET /metrics` alone.
      A client that does not ask, or does not take the answer, within REQUEST_SECONDS is disconnected.
    * The socket is in Linux's abstract namespace: it belongs to no folder, and ends with the trainer, however that
      dies. Its name has the user and the process. The kernel tells both ends whose process the other one is.
    * A client that disconnects ends no trainer, not even one that has given SIGPIPE its default.
    * A forked process has neither thread nor socket, and may start its own.
    * The threads only read: no user code runs in them, answers wait for nothing, and may be a moment old. The callbacks
      must be safe in any thread at any time. Pipelines are described by the thread that calls `serve`, and are held
      weakly: serving keeps nothing alive. Streams that another served pipeline draws from are part of it.
"""

import atexit
import contextlib
import dataclasses
import functools
import http.client
import http.server
import io
import itertools
import json
import os
import re
import socket
import socketserver
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, final

from millstream.core.signals import SignalSafeLock, is_from_signal_handler
from millstream.core.warn import log_info, log_warning
from millstream.loader.measuring import PipelineStatus, WorkerStatus
from millstream.loader.processes.channel import NO_SIGNAL
from millstream.loader.processes.process_control import is_of_own_user
from millstream.loader.processes.process_report import process_report
from millstream.loader.reporting.advice import advice_of
from millstream.loader.reporting.snapshot import LoaderSnapshot, mixture_texts, workers_text
from millstream.loader.reporting.summary import exposition
from millstream.loader.threads.thread_settings import in_fresh_thread
from millstream.loader.threads.waiting import stacks_of

POLL_SECONDS = 0.5
"""Interval at which the thread of `millstream top` checks if any pipeline is still served."""

REQUEST_SECONDS = 2.0
CLOSE_SECONDS = 2.0

Pages: TypeAlias = Mapping[str, Callable[[], object]]
"""Functions that return pages by path: text for Prometheus, or values for JSON. They run in the server's thread."""


class Server(socketserver.TCPServer):
    """Answers `GET` requests for pages, one after another. It asks no name server for its own name.

    Raises:
        OSError: the address cannot be used, because another process has it, for example.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: Any, pages: Pages) -> None:
        self.pages = pages
        if isinstance(address, tuple) and ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def handle_error(self, _request: Any, _client: Any) -> None:
        """Ignores that a client has disconnected."""


@final
class _Writer(io.BufferedIOBase):
    """Sends to a client that may disconnect at any moment, which must not end a program that SIGPIPE would end."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._connection.settimeout(REQUEST_SECONDS)
        with memoryview(data) as view:
            self._connection.sendall(view, NO_SIGNAL)
            return view.nbytes


@final
class _Reader(io.RawIOBase):
    """Receives a request for REQUEST_SECONDS, even from a client that sends a byte at a time."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection
        self._deadline = time.monotonic() + REQUEST_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if (seconds := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        self._connection.settimeout(seconds)
        return self._connection.recv_into(buffer)


@final
class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def setup(self) -> None:
        self.connection = self.request
        self.rfile, self.wfile = io.BufferedReader(_Reader(self.connection)), _Writer(self.connection)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path not in self.server.pages:
            self.send_error(HTTPStatus.NOT_FOUND, f"There is {' and '.join(self.server.pages)}")
            return
        try:
            page = self.server.pages[path]()
            content = (page if isinstance(page, str) else json.dumps(page)).encode()
        except Exception as error:  # noqa: BLE001  (the state changes meanwhile, and names may be user code)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, f"No page: {type(error).__name__}")
            return
        self.send_response(HTTPStatus.OK)
        kind = "text/plain; version=0.0.4; charset=utf-8" if isinstance(page, str) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: Any) -> None:
        """Logs nothing: Prometheus asks every few seconds."""


@final
class _SocketServer(Server):
    """Answers requests of the same user on the socket of this process."""

    address_family = socket.AF_UNIX

    def __init__(self, pages: Pages) -> None:
        super().__init__(_socket_name(os.getpid()), pages)
        # A client that has disconnected is not waited for.
        self.socket.settimeout(POLL_SECONDS)

    def verify_request(self, request: Any, _client: Any) -> bool:
        return is_of_own_user(request)


@final
class _Top:
    """The server of `millstream top`, as long as a pipeline is served."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._server: _SocketServer | None = None
        self._lock = SignalSafeLock(threading.RLock())
        self._is_ending = False
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Starts the server, unless it runs. Called in fresh threads."""
        with self._lock:
            if self._server is None and not self._is_ending:
                self._server = server = _SocketServer({"/snapshot": _snapshot, "/stacks": _stacks})
                try:
                    self.thread = _start_thread(server, functools.partial(self._run, server), "millstream-top")
                except OSError:
                    self._server = None
                    raise

    def _run(self, server: _SocketServer) -> None:
        while self._server is server:
            server.handle_request()
            with self._lock:
                # A pipeline is added before `start` takes the lock.
                if self._is_ending or not _living():
                    self._server = None
                    server.server_close()

    def _end(self) -> None:
        # Without the lock: this thread may have interrupted a start.
        self._is_ending = True
        server, thread = self._server, self.thread
        if server is not None and thread is not None and thread.is_alive():
            # Wakes the thread.
            with contextlib.suppress(OSError):
                server.socket.shutdown(socket.SHUT_RDWR)
            thread.join(CLOSE_SECONDS)

    def _forget(self) -> None:
        """Leaves the socket to the parent of a forked process."""
        if self._server is not None:
            self._server.server_close()
        self._server = self.thread = None
        self._lock = SignalSafeLock(threading.RLock())


class Views(Protocol):
    """The views of a pipeline: an `Insight`, which is above this room."""

    is_closed: bool

    def snapshot(self) -> LoaderSnapshot: ...
    def status(self) -> PipelineStatus: ...
    def everything_below(self) -> Iterable[Self]: ...
    def living_iterators(self) -> Sequence[Any]: ...


_served: weakref.WeakKeyDictionary[Views, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def serve(insight: Views) -> None:
    """Lets `millstream top` query a pipeline until it is closed or collected."""
    if not sys.platform.startswith("linux"):
        raise OSError("`millstream top` needs Linux. Use loader.summary() instead.")
    _add(insight)
    in_fresh_thread(_top().start)


def serve_by_environment(insight: Views) -> None:
    """Serves a pipeline in the ways that the environment asks for: failures are logged, and training continues."""
    if os.environ.get("MILLSTREAM_TOP") == "1":
        try:
            serve(insight)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            log_warning(f"`millstream top` cannot monitor this pipeline: {error}")
    if text := os.environ.get(VARIABLE):
        _add(insight)
        _start_endpoint(text)


def _add(insight: Views) -> None:
    _forget_in_forked_processes()
    if insight not in _served:
        insight.snapshot()
        _served[insight] = next(_numbers)


@functools.cache
def _forget_in_forked_processes() -> None:
    os.register_at_fork(after_in_child=_served.clear)


@functools.cache
def _top() -> _Top:
    return _Top()


@functools.cache
def _start_endpoint(text: str) -> None:
    """Starts the endpoint for Prometheus, once for a value of the environment variable: a failure is logged once."""
    try:
        server = start_endpoint(text, _page_of_metrics)
    except (OSError, ValueError) as error:
        log_warning(f"no metrics for Prometheus: {error}")
    else:
        log_info(f"metrics for Prometheus at /metrics, port {server.server_address[1]}")


def start_endpoint(text: str, page: Callable[[], str]) -> Server:
    """Starts a server of `GET /metrics` in a daemon thread, at the address in the environment variable's value."""
    server = Server(address_from(text), {"/metrics": page})
    os.register_at_fork(after_in_child=server.socket.close)
    _start_thread(server, server.serve_forever, "millstream-metrics")
    return server


def _start_thread(server: Server, run: Callable[[], object], name: str) -> threading.Thread:
    """Starts the daemon thread of a server. If the system refuses it, raises an OSError and closes the server."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        server.server_close()
        raise OSError(f"The system refuses another thread: {error}") from error
    return thread


def _page_of_metrics() -> str:
    return exposition({str(number): insight.snapshot() for number, insight in _living().items()})


def _living() -> dict[int, Views]:
    """Returns the outermost pipelines that are neither closed nor collected, by number."""
    references = _served.keyrefs()
    living = [insight for reference in references if (insight := reference()) is not None and not insight.is_closed]
    below = {id(one) for insight in living for one in insight.everything_below()}
    return {_served[insight]: insight for insight in living if id(insight) not in below}


def _snapshot() -> dict[str, Any]:
    return {
        "format": FORMAT,
        "pid": os.getpid(),
        "command": sys.orig_argv,
        "process": _process(os.getpid()),
        "pipelines": [_pipeline(number, insight) for number, insight in _living().items()],
        # Last, so that no count is newer than the time.
        "at": time.perf_counter(),
    }


def _pipeline(number: int, insight: Views) -> dict[str, Any]:
    snapshot, status = insight.snapshot(), insight.status()
    return status._asdict() | {
        "loads": [load._asdict() | {"workers": list(map(_worker, load.workers))} for load in status.loads],
        "number": number,
        "source": snapshot.source.name,
        "order": snapshot.order.name,
        "mixture": list(mixture_texts(snapshot)),
        "shard": snapshot.shard,
        "who": workers_text(snapshot),
        "measured": dataclasses.asdict(snapshot.measured),
        "stages": [
            {"label": stage.text, "where": stage.location.value, "seconds": stage.seconds}
            for stage in snapshot.running_stages
        ],
        "advice": [advice.text for advice in advice_of(snapshot)],
    }


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    return worker._asdict() | {"process": _process(worker.pid) if worker.is_here else None}


def _process(pid: int | None) -> Mapping[str, Any] | None:
    report = None if pid is None else process_report(pid)
    return report and report._asdict()


def _stacks() -> dict[str, Any]:
    workers: dict[int, str] = {}
    for insight in _living().values():
        for one in (insight, *insight.everything_below()):
            for iterator in one.living_iterators():
                workers |= iterator.worker_stacks()
    of_workers = [{"who": f"worker process {pid}", "text": text} for pid, text in sorted(workers.items())]
    return {
        "format": FORMAT,
        "stacks": [{"who": f"process {os.getpid()}", "text": _stacks_of_threads()}, *of_workers],
    }


def _stacks_of_threads() -> str:
    """Returns the stacks of all threads except the calling one, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, current = threading.main_thread().ident, threading.get_ident()
    others = (ident for ident in sys._current_frames() if ident != current)  # noqa: SLF001  (documented)
    order = sorted(others, key=lambda ident: (ident != main, ident))
    return stacks_of({ident: names.get(ident, hex(ident)) for ident in order})


VARIABLE = "MILLSTREAM_METRICS_PORT"


def address_from(text: str) -> tuple[str, int]:
    """Returns host and port of `9400`, a port of the loopback address, or of `0.0.0.0:9400` or `[::1]:9400`."""
    host, _, port = text.strip().rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ValueError(
            f"{VARIABLE} must be a port, such as 9400, or an address with a port, such as 0.0.0.0:9400; got {text!r}."
        )
    return host.strip("[]") or "127.0.0.1", int(port)


SOCKETS = "millstream-top"
"""The beginning of the names of sockets."""

CONNECT_SECONDS = 5.0
"""Timeout for an answer. A trainer in C code that holds the interpreter's lock answers after it."""

FORMAT = 4
HOW_TO_SERVE = "Start it with MILLSTREAM_TOP=1 in its environment, or call loader.serve_top() in it."
NONE_SERVED = f"No running trainer of yours can be monitored. {HOW_TO_SERVE.replace('it', 'one', 1)}"


class NotServed(ValueError):  # noqa: N818  (the name is a sentence)
    """The process cannot be monitored. The text has the reason, and the remedy."""


def served_processes() -> list[int]:
    """Returns the processes of this user that can be monitored. One that is stopped may accept no connection."""
    listed = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
    numbers = re.findall(rf" @{re.escape(_socket_name()[1:])}(\d+)$", listed, re.MULTILINE)
    found = []
    for number in sorted(set(map(int, numbers))):
        with contextlib.suppress(OSError):
            connected(number).close()
            found.append(number)
    return found


def query(pid: int, question: str) -> Any:
    """Returns the answer of a process to "snapshot" or "stacks".

    Raises:
        NotServed: it cannot be monitored, or has ended.
        OSError: it does not answer in time, or another user has its name.
    """
    try:
        with contextlib.closing(http.client.HTTPConnection("localhost")) as asked:
            asked.sock = connected(pid)
            asked.request("GET", f"/{question}")
            response = asked.getresponse()
            content = response.read()
    except ConnectionRefusedError:
        if not Path(f"/proc/{pid}").exists():
            served = ", ".join(map(str, served_processes()))
            others = f"These can be monitored: {served}." if served else NONE_SERVED
            raise NotServed(f"There is no process {pid}. {others}") from None
        raise NotServed(f"Process {pid} cannot be monitored. {HOW_TO_SERVE}") from None
    except (TimeoutError, BlockingIOError):  # No answer, or too many questions wait.
        raise TimeoutError(
            f"Process {pid} does not answer: it is stopped, or runs C code that holds the interpreter's lock."
        ) from None
    except (http.client.HTTPException, ConnectionError) as error:
        raise NotServed(f"Process {pid} has ended, or does not answer this user.") from error
    if response.status != HTTPStatus.OK:
        raise NotServed(f"Process {pid} could not answer: {response.reason}")
    answer = json.loads(content)
    if answer["format"] != FORMAT:
        raise NotServed(f"Process {pid} runs another version of millstream. Monitor it with that version.")
    return answer


def connected(pid: int) -> socket.socket:
    """Returns a connection to the socket of a process of this user. It is refused if the process has none."""
    with contextlib.ExitStack() as on_failure:
        connection = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(_socket_name(pid))
        if not is_of_own_user(connection):
            raise PermissionError(f"Process {pid} does not belong to this user, {os.geteuid()}.")
        on_failure.pop_all()
    return connection


def _socket_name(pid: int | str = "") -> str:
    # Containers that share a network may have the same users and numbers of processes.
    return f"\0{SOCKETS}-{os.geteuid()}-{Path('/proc/self/ns/pid').stat().st_ino}-{pid}"
