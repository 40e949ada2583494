"""The messages between the parent, the fork server and the workers, and the channels that they travel on.

    parent → fork server   Fork, Kill, End       fork server → parent   Forked, NotForked, Exited, Ended
    parent → worker        Task, Load, Vary,     worker → parent        Ready, PipelineFailed, Imported, Logged, Result
                           Unload

Each pool has a connection of its own to the fork server. A connection ends with its socket. If the parent closes its
end, the other side stops. If a worker's end closes first, the worker has died; so has the fork server, unless it has
sent `Ended`.

A frame is the length of a pickled message, the number of descriptors passed with it, and the pickle. Both ends come
from one `socketpair` that only these processes hold, so every message was written by this library. A process that dies
within a frame leaves it incomplete. It is dropped, and affects no other channel.

Guarantees:
    * One thread sends and receives. Another thread, or a signal handler, may close the channel at any time: from then
      on, messages are dropped, and the other side seems to have closed.
    * Each descriptor is closed exactly once.
"""

import array
import contextlib
import errno
import os
import pickle
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final, get_args

from millstream.core.signals import SignalSafeLock
from millstream.loader.pipeline.pipeline import Variant
from millstream.loader.transport.payload import Failure
from millstream.loader.transport.pipeline_file import PipelineFile
from millstream.loader.workers.process_settings import Trainer, Variables


class Fork(NamedTuple):
    """Requests a worker. Its channel, arena, crash log and pipeline file are passed as descriptors.

    Attributes:
        number: the worker's number, for its name and for the answer.
        worker_index: its index among the running workers. A replacement has the index of the dead worker.
        num_threads: the maximum number of reader threads.
        imports_libraries: True if the fork server may import libraries that the pipelines need.
    """

    number: int
    worker_index: int
    num_workers: int
    arena_bytes: int
    num_threads: int
    imports_libraries: bool
    pipeline: PipelineFile
    trainer: Trainer


class Kill(NamedTuple):
    """Requests that a worker and all processes that it has started are killed."""

    pid: int


class End(NamedTuple):
    """Requests the end of all workers of the pool."""


class Ended(NamedTuple):
    """Reports that the workers of the pool have ended, and all processes that they had started."""


class Forked(NamedTuple):
    """Reports a new worker. Its process handle is passed as a descriptor if the system has handles."""

    number: int
    pid: int


class NotForked(NamedTuple):
    """Reports that a worker could not be forked."""

    errno: int


class Exited(NamedTuple):
    """Reports that a worker has exited.

    Attributes:
        status: its exit status as from `os.waitstatus_to_exitcode`, negative for a signal.
    """

    pid: int
    status: int
    peak_bytes: int


class Task(NamedTuple):
    """Requests the outputs of a call.

    Attributes:
        released: chunks of the worker's arena that the parent no longer holds.
        request: the first block, the block after the last, and the logical shard; or a pickled `Group` or `Fed`.
        num_reads: the maximum number of reads in flight, including this call's. With 1, no other call begins before
            this one has ended.
    """

    call: int
    released: list[int]
    request: tuple[int, int, int] | bytes
    pipeline: int
    num_reads: int


class Load(NamedTuple):
    """Gives a running worker another pipeline, with the numbers of the classes that crossed by value with it.

    Its file is passed as a descriptor. `variables` are those of modules that its code reads.
    """

    number: int
    file: PipelineFile
    classes: tuple[int, ...]
    variables: Variables


class Vary(NamedTuple):
    """Gives a running worker another pipeline: an epoch of one that it has, or the same with other weights."""

    number: int
    base: int
    variant: Variant


class Unload(NamedTuple):
    """Takes a pipeline from a worker. No later task belongs to it."""

    number: int


class Ready(NamedTuple):
    """Reports that the worker has unpickled the pipelines and waits for calls."""

    pid: int  # Because the fork server's report may arrive later.


class PipelineFailed(NamedTuple):
    """Reports that the pipelines could not be unpickled in a worker."""

    failure: Failure


class Imported(NamedTuple):
    """Reports that a worker imports a module of the user's that the trainer had not, with the digest of its file."""

    name: str
    digest: bytes


class Logged(NamedTuple):
    """Passes on a log record: its attributes, plain values, and the number of records dropped before."""

    fields: dict[str, Any]
    num_dropped: int


class Result(NamedTuple):
    """Reports the outputs of a call: the fields of its `CallResult`, a plain tuple, because it is pickled per batch."""

    call: int
    outputs: tuple[Any, ...]


Message: TypeAlias = (
    Fork
    | Kill
    | End
    | Ended
    | Forked
    | NotForked
    | Exited
    | Ready
    | PipelineFailed
    | Task
    | Load
    | Vary
    | Unload
    | Imported
    | Logged
    | Result
)

# A message crosses as a plain tuple with its kind as a number, because looking up a class would take longest.
_KINDS: tuple[Any, ...] = get_args(Message)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}

_HEADER = struct.Struct("<QB")
_RECEIVE_BYTES = 1 << 16
"""The size of each read: the C library returns memory above 128 KB to the system after each use."""

_MAX_DESCRIPTORS = 8

# Not the enum members, whose operators are slow.
_DESCRIPTORS_LOST = int(socket.MSG_CTRUNC)
NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
"""A broken connection is an error, and not the end of a program that has given SIGPIPE its default."""


@final
class Channel:
    """One end of a connection.

    The parent's ends do not block. Data that a socket does not take immediately waits in an outbox. So the parent can
    always receive from a worker, even if the worker does not receive because it is sending.
    """

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        self._socket = end
        self._socket.setblocking(blocking)
        self._inbox = bytearray()
        self._outbox: deque[tuple[memoryview, list[int]]] = deque()
        # Guards the outbox. A signal handler may close the channel while its thread sends.
        self._sending = SignalSafeLock(threading.RLock())
        self._received: list[int] = []
        self._arrived: list[int] = []
        self.is_open = True

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def watch(self, poll: "select.poll") -> int:
        """Registers the events to wait for: data to receive, or room for data to send. Returns the descriptor."""
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Sends a message, with copies of file descriptors.

        A connection that is broken or closed is not an error here. The caller that waits for an answer notices it.
        """
        body = pickle.dumps((_NUMBERS[type(message)], *message), protocol=5)
        frame = memoryview(_HEADER.pack(len(body), len(descriptors)) + body)
        with self._sending:
            if self.is_open:
                # Copies, because the caller may close its descriptors before the frame is sent.
                self._outbox.append((frame, duplicate_all(descriptors) if descriptors else []))
                self._flush()

    def flush(self) -> None:
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        while self._outbox:
            frame, descriptors = self._outbox[0]
            try:
                # Descriptors travel with the first byte of their frame.
                sent = send_now(self._socket, frame, descriptors)
            except BlockingIOError:
                return
            except OSError as error:
                if self.is_open and not isinstance(error, BrokenPipeError | ConnectionResetError):
                    raise
                self._empty_outbox()
                return
            if descriptors:
                close_all(descriptors)
            if not self.is_open:
                return
            self._outbox[0] = frame[sent:], []
            if sent == len(frame):
                self._outbox.popleft()

    def receive(self) -> Iterator[Any]:
        """Reads once, and yields the messages that are complete. At the end of the connection, `is_open` becomes False.

        Raises:
            OSError: descriptors were lost because this process may not open more. The messages came without them.
        """
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _MAX_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError as error:
            if self.is_open and not isinstance(error, ConnectionResetError):
                raise
            data, descriptors, flags = b"", [], 0
        for descriptor in descriptors:
            # Programs that user code starts must not inherit a worker's descriptors.
            os.set_inheritable(descriptor, False)
        self._received.extend(descriptors)
        if not data:
            self.is_open = False
        self._inbox += data
        while len(self._inbox) >= _HEADER.size:
            num_bytes, num_descriptors = _HEADER.unpack_from(self._inbox)
            end = _HEADER.size + num_bytes
            if len(self._inbox) < end:
                break
            body = bytes(self._inbox[_HEADER.size : end])
            del self._inbox[:end]
            self._arrived += self._received[:num_descriptors]
            del self._received[:num_descriptors]
            kind, *fields = pickle.loads(body)  # noqa: S301  (written by the other end of our own socket pair)
            yield _KINDS[kind](*fields)
        if flags & _DESCRIPTORS_LOST:
            raise OSError(errno.EMFILE, "Too many open files: raise the limit (`ulimit -n`) or use fewer workers")

    def receive_rest(self) -> Iterator[Any]:
        """Yields all remaining messages of the other side, which is dead."""
        with contextlib.suppress(OSError):  # Closed by another thread.
            self._socket.setblocking(False)
        while self.is_open:
            before = len(self._inbox)
            messages = list(self.receive())
            yield from messages
            if not messages and len(self._inbox) == before:
                return

    def take_descriptors(self) -> list[int]:
        """Returns the descriptors received since the last call. The caller closes them."""
        taken, self._arrived = self._arrived, []
        return taken

    def shut_down(self) -> None:
        """Closes the connection, which the other side notices even if a forked process has a copy of this end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Closes this process's copy of this end, and the descriptors that were not taken. Idempotent."""
        self.is_open = False
        with self._sending:
            self._socket.close()
            self._empty_outbox()
        close_all(self._arrived)
        close_all(self._received)

    def _empty_outbox(self) -> None:
        while self._outbox:
            close_all(self._outbox[0][1])
            self._outbox.popleft()


def send_now(end: socket.socket, data: bytes | memoryview, descriptors: Sequence[int]) -> int:
    """Sends what a socket takes, with descriptors if there are any. Returns the number of bytes."""
    if not descriptors:
        return end.send(data, NO_SIGNAL)
    # Not `socket.send_fds`, which ignores flags.
    return end.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))], NO_SIGNAL)


def duplicate_all(descriptors: Iterable[int]) -> list[int]:
    """Duplicates all descriptors, or none if an OSError says that this process may not open more."""
    with contextlib.ExitStack() as undo:
        copies = []
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))
            undo.callback(os.close, copies[-1])
        undo.pop_all()
        return copies


def close_all(descriptors: list[int]) -> None:
    """Closes descriptors, and removes them from the list.

    An interrupt neither leaks a descriptor nor closes it twice, which could close another one of the same number:
    Python checks for signals after calls and at the end of loops, and there is neither between removing and closing.
    """
    while descriptors:
        descriptor = descriptors[-1]
        del descriptors[-1]
        os.close(descriptor)
