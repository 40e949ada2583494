"""The thread of a trainer that answers `millstream top`.

Guarantees:
    * There is one thread a process, and none before something is served. It ends, and its socket goes, when nothing is
      served any more, and at the end of the interpreter, which waits for it for at most CLOSE_SECONDS.
    * `start` takes no lock: whoever starts a thread too many has it leave at once, since one alone can hold the place.
      The thread is started by one call of C code, which a signal's handler cannot interrupt.
    * It answers one connection after the other, a user's own only, and gives none more than ANSWER_SECONDS.
    * A forked process has neither thread nor socket: what it serves, it serves anew.
    * It only looks. What it calls must be fit for any thread, at any time.
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

from millstream.loader.monitoring.socket_folder import (
    address_in,
    connected,
    is_own_user,
    peer_user,
    private_folder,
    server_folder,
    socket_name,
)

LOOK_SECONDS = 0.5
"""How often to look whether anything is served still."""

ANSWER_SECONDS = 1.0
"""How long whoever asks may take to say what, and to read what it gets."""

START_SECONDS = 2.0
"""How long to wait for the socket to be there."""

CLOSE_SECONDS = 2.0
"""How long the end of the interpreter waits for the thread."""

MOST_REQUEST_BYTES = 1000


@final
class Server:
    """Answers questions from outside, for as long as there is something to ask about.

    Args:
        answer: what to say to a question, as JSON will have it; any thread may call it.
        is_wanted: whether there is anything to ask about.
    """

    def __init__(self, answer: Callable[[str], object], is_wanted: Callable[[], bool]) -> None:
        self._answer = answer
        self._is_wanted = is_wanted
        self._place = threading.Lock()
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._folder: int | None = None
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Has a thread that answers, and returns when it can be asked.

        Raises:
            OSError: there can be no socket.
        """
        if not self._place.locked():
            begun: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
            _thread.start_new_thread(self._begin, (begun,))
            with contextlib.suppress(queue.Empty):
                if (error := begun.get(timeout=START_SECONDS)) is not None:
                    raise error
        # Another thread's start, or one that was interrupted, may not be through.
        deadline = time.monotonic() + START_SECONDS
        while self._place.locked() and self._listener is None and time.monotonic() < deadline:
            time.sleep(0.001)

    def _begin(self, begun: "queue.SimpleQueue[BaseException | None]") -> None:
        # Of class Thread: it is on record then, with its name (see `reader_threads`, why not from where it is asked).
        thread = threading.Thread(target=self._live, args=(begun,), name="millstream-top", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            begun.put(OSError(f"The system refuses another thread: {error}"))

    def _live(self, begun: "queue.SimpleQueue[BaseException | None]") -> None:
        """The life of the thread: it serves while it has the place, and takes it again for what came in between."""
        while self._is_wanted() and not self._is_ending and self._place.acquire(blocking=False):
            self._thread = threading.current_thread()
            try:
                self._serve(begun)
            except Exception as error:  # noqa: BLE001  (a thread has no one to raise to: who started it gets it)
                begun.put(error)
                return
            finally:
                self._place.release()
        begun.put(None)

    def _serve(self, begun: "queue.SimpleQueue[BaseException | None]") -> None:
        name = socket_name(os.getpid())
        with private_folder(server_folder(), make=True) as folder:
            if (other := connected(folder, name)) is not None:
                other.close()
                raise FileExistsError(f"Process {os.getpid()} of another container has the socket {name!r} already.")
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
            if not poll.poll(LOOK_SECONDS * 1000):
                continue
            # Whoever asks may leave at any moment.
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    self._answer_one(connection)

    def _answer_one(self, connection: socket.socket) -> None:
        if not is_own_user(peer_user(connection)):
            return
        connection.settimeout(ANSWER_SECONDS)
        asked = b""
        while not asked.endswith(b"\n"):
            piece = connection.recv(MOST_REQUEST_BYTES)
            asked += piece
            if not piece or len(asked) > MOST_REQUEST_BYTES:
                return
        try:
            answer = self._answer(asked.decode(errors="replace").strip())
        except Exception as error:  # noqa: BLE001  (what is looked at changes all the time, and may be the user's)
            answer = {"error": f"{type(error).__name__}: {error}"}
        connection.sendall(json.dumps(answer).encode())

    def _end(self) -> None:
        """Ends the thread, at the end of the interpreter."""
        self._is_ending = True
        listener, thread = self._listener, self._thread
        if thread is None or not thread.is_alive():
            return
        if listener is not None:
            # Wakes it.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + CLOSE_SECONDS
        thread.join(max(0.0, deadline - time.monotonic()))

    def _forget(self) -> None:
        """Leaves the socket to the parent, in a forked process."""
        if (listener := self._listener) is not None:
            listener.close()
        if (folder := self._folder) is not None:
            os.close(folder)
        self._listener = self._folder = self._thread = None
        self._place = threading.Lock()


def _listening(folder: int, name: str) -> socket.socket:
    """Returns a socket that listens, in a folder; it has its name only then, so that nobody takes it for a dead one."""
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
