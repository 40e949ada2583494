"""Requests to a running trainer: `millstream top` over a socket of the user, and Prometheus over HTTP.

Guarantees:
    * There is at most one thread per process for each, and none before a pipeline is served. The thread and its socket
      end with the last served pipeline, and with the interpreter, which waits for them for at most CLOSE_SECONDS. That
      of Prometheus is a daemon.
    * `start` takes no lock. If two calls start a thread each, one thread gets the slot and the other ends immediately.
      One call of C code starts the thread, so a signal handler cannot interrupt the start.
    * Connections are answered one after another: on the socket those of the same user, over HTTP `GET /metrics` alone.
      A client that does not ask, or does not take the answer, within ANSWER_SECONDS or REQUEST_SECONDS is disconnected.
    * The folder of sockets is used only if it belongs to this user and no other user may enter it. It is checked once
      and then used by its descriptor, so replacing it later has no effect. A socket is called `PID.sock` from when it
      listens until the trainer ends. A socket that refuses a connection was left by a killed process, and whichever
      process finds it removes it.
    * A client that disconnects ends no trainer, not even one that has given SIGPIPE its default.
    * A forked process has neither thread nor socket, and may start its own.
    * The threads only read: no user code runs in them, answers wait for nothing, and may be a moment old. The callbacks
      must be safe in any thread at any time. Pipelines are described by the thread that calls `serve`, and are held
      weakly: serving keeps nothing alive. Streams that another served pipeline draws from are part of it.
"""

import _thread
import atexit
import contextlib
import dataclasses
import errno
import functools
import http.server
import io
import itertools
import json
import logging
import os
import queue
import select
import socket
import socketserver
import stat
import struct
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, Self, final

from millstream.core.signals import is_from_signal_handler
from millstream.loader.processes.channel import NO_SIGNAL
from millstream.loader.processes.process_report import process_report
from millstream.loader.reporting.advice import advice_of
from millstream.loader.reporting.snapshot import LoaderSnapshot, mixture_texts, workers_text
from millstream.loader.reporting.summary import exposition

POLL_SECONDS = 0.5
"""Interval at which the thread checks if any pipeline is still served."""

ANSWER_SECONDS = 1.0
START_SECONDS = 2.0
CLOSE_SECONDS = 2.0
MAX_REQUEST_BYTES = 1000


@final
class Server:
    """Answers questions of other processes with values for JSON, as long as `is_wanted` returns True.

    Both functions are called in the server's thread.
    """

    def __init__(self, answer: Callable[[str], object], is_wanted: Callable[[], bool]) -> None:
        self._answer = answer
        self._is_wanted = is_wanted
        self._slot = threading.Lock()
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._folder: int | None = None
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Starts the thread, unless it runs, and returns once its socket listens."""
        if not self._slot.locked():
            begun: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
            _thread.start_new_thread(self._begin, (begun,))
            with contextlib.suppress(queue.Empty):
                if (error := begun.get(timeout=START_SECONDS)) is not None:
                    raise error
        # Another call of `start`, or an interrupted one, may not have finished.
        deadline = time.monotonic() + START_SECONDS
        while self._slot.locked() and self._listener is None and time.monotonic() < deadline:
            time.sleep(0.001)

    def _begin(self, begun: "queue.SimpleQueue[BaseException | None]") -> None:
        # A Thread object registers its name. `reader_threads` explains why another thread creates it.
        thread = threading.Thread(target=self._run_thread, args=(begun,), name="millstream-top", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            begun.put(OSError(f"The system refuses another thread: {error}"))

    def _run_thread(self, begun: "queue.SimpleQueue[BaseException | None]") -> None:
        """Serves while it holds the slot, and tries again for pipelines that were served meanwhile."""
        while self._is_wanted() and not self._is_ending and self._slot.acquire(blocking=False):
            self._thread = threading.current_thread()
            try:
                self._serve(begun)
            except Exception as error:  # noqa: BLE001  (the caller of `start` raises it)
                begun.put(error)
                return
            finally:
                self._slot.release()
        begun.put(None)

    def _serve(self, begun: "queue.SimpleQueue[BaseException | None]") -> None:
        name = socket_name(os.getpid())
        with private_folder(folders()[0], make=True) as folder:
            if (other := connected(folder, name)) is not None:
                other.close()
                raise FileExistsError(f"Process {os.getpid()} of another container already has the socket {name!r}.")
            with _listening(folder, name) as listener:
                self._listener, self._folder = listener, folder
                try:
                    begun.put(None)
                    self._answer_all(listener)
                finally:
                    self._listener = self._folder = None
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)

    def _answer_all(self, listener: socket.socket) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while self._is_wanted() and not self._is_ending:
            if not poll.poll(POLL_SECONDS * 1000):
                continue
            # The client may disconnect at any moment.
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    self._answer_one(connection)

    def _answer_one(self, connection: socket.socket) -> None:
        if not is_of_own_user(connection):
            return
        connection.settimeout(ANSWER_SECONDS)
        # A question is sent in one call, and arrives as a whole.
        request = connection.recv(MAX_REQUEST_BYTES)
        if not request.endswith(b"\n"):
            return
        try:
            answer = self._answer(request.decode(errors="replace").strip())
        except Exception as error:  # noqa: BLE001  (the state changes meanwhile, and names may be user code)
            answer = {"error": f"{type(error).__name__}: {error}"}
        connection.sendall(json.dumps(answer).encode(), NO_SIGNAL)

    def _end(self) -> None:
        self._is_ending = True
        listener, thread = self._listener, self._thread
        if thread is None or not thread.is_alive():
            return
        if listener is not None:
            # Wakes the thread.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + CLOSE_SECONDS
        thread.join(max(0.0, deadline - time.monotonic()))

    def _forget(self) -> None:
        """Leaves the socket to the parent of a forked process."""
        if (listener := self._listener) is not None:
            listener.close()
        if (folder := self._folder) is not None:
            os.close(folder)
        self._listener = self._folder = self._thread = None
        self._slot = threading.Lock()


def _listening(folder: int, name: str) -> socket.socket:
    """Returns a listening socket. It gets its name last, so that no client takes it for a dead one."""
    new = f".{name}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(address_in(folder, new))
        os.chmod(address_in(folder, new), 0o600)  # noqa: PTH101
        listener.listen()
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        listener.close()
        raise
    return listener


logger = logging.getLogger("millstream")


class Pipeline(Protocol):
    """The views of a pipeline: an `Insight`, which is above this room."""

    is_closed: bool

    def snapshot(self) -> LoaderSnapshot: ...
    def status(self) -> Any: ...
    def everything_below(self) -> Iterable[Self]: ...
    def living_iterators(self) -> Sequence[Any]: ...


_served: "weakref.WeakKeyDictionary[Pipeline, int]" = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def serve(insight: Pipeline) -> None:
    """Lets `millstream top` query a pipeline until it is closed or collected."""
    if not sys.platform.startswith("linux"):
        raise OSError("`millstream top` needs Linux. Use loader.summary() instead.")
    _add(insight)
    _server().start()


def serve_by_environment(insight: Pipeline) -> None:
    """Serves a pipeline in the ways that the environment asks for: failures are logged, and training continues."""
    if os.environ.get("MILLSTREAM_TOP") == "1":
        try:
            serve(insight)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            logger.warning("millstream: `millstream top` cannot monitor this pipeline: %s", error)
    if text := os.environ.get(VARIABLE):
        _add(insight)
        _start_endpoint(text)


def _add(insight: Pipeline) -> None:
    _forget_in_forked_processes()
    if insight not in _served:
        insight.snapshot()
        _served[insight] = next(_numbers)


@functools.cache
def _forget_in_forked_processes() -> None:
    os.register_at_fork(after_in_child=_served.clear)


@functools.cache
def _server() -> Server:
    return Server(_answer, lambda: bool(_living()))


@functools.cache
def _start_endpoint(text: str) -> None:
    """Starts the endpoint for Prometheus, once for a value of the environment variable: a failure is logged once."""
    try:
        endpoint = MetricsEndpoint(_page_of_metrics, text)
    except (OSError, ValueError) as error:
        logger.warning("millstream: no metrics for Prometheus: %s", error)
    else:
        logger.info("millstream: metrics for Prometheus at /metrics, port %d", endpoint.port)


def _page_of_metrics() -> str:
    return exposition({str(number): insight.snapshot() for number, insight in _living().items()})


def _living() -> dict[int, Pipeline]:
    """Returns the outermost pipelines that are neither closed nor collected, by number."""
    references = _served.keyrefs()
    living = [insight for reference in references if (insight := reference()) is not None and not insight.is_closed]
    below = {id(one) for insight in living for one in insight.everything_below()}
    return {_served[insight]: insight for insight in living if id(insight) not in below}


def _answer(question: str) -> object:
    if question == "snapshot":
        return _snapshot()
    if question == "stacks":
        return _stacks()
    raise ValueError(f"unknown question {question!r}: the client has another version of millstream")


def _snapshot() -> dict[str, Any]:
    return {
        "format": FORMAT,
        "pid": os.getpid(),
        "command": sys.orig_argv,
        "process": _report(os.getpid()),
        "pipelines": [_pipeline(number, insight) for number, insight in _living().items()],
        # Last, so that no count is newer than the time.
        "at": time.perf_counter(),
    }


def _pipeline(number: int, insight: Pipeline) -> dict[str, Any]:
    snapshot, status = insight.snapshot(), dataclasses.asdict(insight.status())
    for load in status["loads"]:
        for worker in load["workers"]:
            worker["process"] = _report(worker["pid"]) if worker["is_here"] and worker["pid"] is not None else None
    return status | {
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


def _report(pid: int) -> Mapping[str, Any] | None:
    report = process_report(pid)
    return None if report is None else report._asdict()


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
    """Returns the stacks of all threads except the calling one, the main thread first.

    The format is that of `faulthandler`: a head per thread, then its frames, the most recent call first.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sys._current_frames()  # noqa: SLF001  (documented, for tools like this)
    order = sorted((ident for ident in frames if ident != own), key=lambda ident: (ident != main, ident))
    return "\n\n".join(
        "\n".join([f"Thread {names.get(ident, hex(ident))} (most recent call first):", *_lines_of(frames[ident])])
        for ident in order
    )


def _lines_of(frame: object) -> list[str]:
    # Source lines are omitted, because files would be read for them.
    found = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)  # type: ignore[arg-type]
    return [f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in found]


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


@final
class _Writer(io.BufferedIOBase):
    """Sends to a client that may disconnect at any moment, which must not end a program that SIGPIPE would end."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with memoryview(data) as view:
            self._connection.sendall(view, NO_SIGNAL)
            return view.nbytes


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS
    page_of_metrics: Callable[[], str]

    def setup(self) -> None:
        super().setup()
        self.wfile = _Writer(self.connection)

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


SUFFIX = ".sock"

CONNECT_SECONDS = 5.0
"""Timeout for an answer. A trainer in C code that holds the interpreter's lock answers after it."""

FORMAT = 2
HOW_TO_SERVE = "Start it with MILLSTREAM_TOP=1 in its environment, or call loader.serve_top() in it."
NONE_SERVED = f"No running trainer of yours can be monitored. {HOW_TO_SERVE.replace('it', 'one', 1)}"


class NotServed(ValueError):  # noqa: N818  (the name is a sentence)
    """The process cannot be monitored. The text has the reason, and the remedy."""


def served_processes() -> list[int]:
    """Returns the processes of this user that can be monitored, and removes the sockets of dead ones."""
    found = set()
    for folder in folders():
        # A folder that does not exist or is not private has no socket to connect to.
        with contextlib.suppress(OSError), private_folder(folder) as descriptor:
            for name in os.listdir(descriptor):  # noqa: PTH208  (of a descriptor)
                number = name.removesuffix(SUFFIX)
                if not (name.endswith(SUFFIX) and number.isdecimal()):
                    continue
                # A process that is stopped may not accept a connection. The others are listed anyway.
                with contextlib.suppress(OSError):
                    if (there := connected(descriptor, name)) is not None:
                        there.close()
                        found.add(int(number))
    return sorted(found)


def query(pid: int, question: str) -> Any:
    """Returns the answer of a process to "snapshot" or "stacks".

    Raises:
        NotServed: it cannot be monitored, or has ended.
        OSError: it does not answer in time.
    """
    refused: OSError | None = None
    for folder in folders():
        try:
            with private_folder(folder) as descriptor:
                answer = _answer_in(descriptor, pid, question)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (TimeoutError, BlockingIOError):  # No answer, or too many questions wait.
            raise TimeoutError(
                f"Process {pid} does not answer: it is stopped, or runs C code that holds the interpreter's lock."
            ) from None
        except OSError as error:
            refused = error
            continue
        if answer is not None:
            return answer
    if refused is not None:
        raise refused
    if not Path(f"/proc/{pid}").exists():
        raise NotServed(f"There is no process {pid}. {_served_text()}")
    raise NotServed(f"Process {pid} cannot be monitored. {HOW_TO_SERVE}")


def _answer_in(folder: int, pid: int, question: str) -> Any:
    """Returns the answer of the process with a socket in a folder; None if there is no such socket."""
    connection = connected(folder, socket_name(pid))
    if connection is None:
        return None
    with connection:
        if not is_of_own_user(connection):
            raise PermissionError(f"Process {pid} does not belong to this user, {os.geteuid()}.")
        connection.sendall(f"{question}\n".encode(), NO_SIGNAL)
        chunks = []
        while chunk := connection.recv(1 << 16):
            chunks.append(chunk)
    if not chunks:
        raise NotServed(f"Process {pid} has ended, or does not answer this user.")
    answer = json.loads(b"".join(chunks))
    if "error" in answer:
        raise NotServed(f"Process {pid} could not answer: {answer['error']}")
    if answer["format"] != FORMAT:
        raise NotServed(f"Process {pid} runs another version of millstream. Monitor it with that version.")
    return answer


def _served_text() -> str:
    served = served_processes()
    return f"These can be monitored: {', '.join(map(str, served))}." if served else NONE_SERVED


def folders() -> list[Path]:
    """Returns the folders that may have sockets of this user's trainers, of any session or job.

    The first, in `$XDG_RUNTIME_DIR` or else a temporary folder, is that for a socket of this process.
    """
    user, runtime = os.geteuid(), os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(runtime) / "millstream"] if runtime else []
    temporary = [Path(folder) / f"millstream-{user}" for folder in (tempfile.gettempdir(), "/tmp")]  # noqa: S108
    return list(dict.fromkeys([*found, *temporary, Path(f"/run/user/{user}/millstream")]))


@contextlib.contextmanager
def private_folder(folder: Path, *, make: bool = False) -> Iterator[int]:
    """Yields the descriptor of a folder that only this user may enter; raises OSError if there is none."""
    if make:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(
                errno.EPERM,
                f"A folder for sockets must belong to this user, {os.geteuid()}, with the mode 0700; it belongs to "
                f"{status.st_uid}, with the mode {stat.S_IMODE(status.st_mode):04o}",
                str(folder),
            )
        yield descriptor
    finally:
        os.close(descriptor)


def address_in(descriptor: int, name: str) -> str:
    """Returns a short address of a socket in a folder, because a socket's path has at most 107 bytes."""
    return f"/proc/self/fd/{descriptor}/{name}"


def socket_name(pid: int) -> str:
    return f"{pid}{SUFFIX}"


def is_of_own_user(connection: socket.socket) -> bool:
    """Returns True if the other end belongs to this user, according to the kernel. Not even root is answered."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def connected(folder: int, name: str) -> socket.socket | None:
    """Returns a connection to a socket, or None if no process listens; then the socket is removed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(address_in(folder, name))
    except FileNotFoundError:
        connection.close()
        return None
    except ConnectionRefusedError:
        connection.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        return None
    except BaseException:
        connection.close()
        raise
    return connection
