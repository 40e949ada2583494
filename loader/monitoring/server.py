"""The thread of a trainer that answers `millstream top`.

Guarantees:
    * There is at most one thread per process, and none before a pipeline is served. The thread and its socket end with
      the last served pipeline, and with the interpreter, which waits for them for at most CLOSE_SECONDS.
    * `start` takes no lock. If two calls start a thread each, one thread gets the slot and the other ends immediately.
      One call of C code starts the thread, so a signal handler cannot interrupt the start.
    * It answers one connection after another, of the same user only. A client that does not ask, or does not take the
      answer, within ANSWER_SECONDS is disconnected.
    * A forked process has neither thread nor socket, and may start its own.
    * It only reads. The callbacks must be safe in any thread at any time.
"""

import _thread
import atexit
import contextlib
import json
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import final

from millstream.loader.monitoring.client import (
    address_in,
    connected,
    folders,
    is_of_own_user,
    private_folder,
    socket_name,
)

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
        thread = threading.Thread(target=self._live, args=(begun,), name="millstream-top", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            begun.put(OSError(f"The system refuses another thread: {error}"))

    def _live(self, begun: "queue.SimpleQueue[BaseException | None]") -> None:
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
        connection.sendall(json.dumps(answer).encode())

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
