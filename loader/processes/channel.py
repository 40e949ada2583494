"""Framed messages over one socket: how the parent, the fork server and a worker talk.

A frame is the length of a pickled message, the number of descriptors that travel with it, and the pickle. Both ends
come from one `socketpair` that only they hold, so what arrives is what this library wrote. A process that dies in the
middle of a frame leaves an incomplete one, which is dropped: it can harm no channel but its own.
"""

import array  # noqa: F401  (`socket` needs it: since Python 3.14 it looks for it late, perhaps in another folder)
import contextlib
import errno
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

from millstream.loader.processes.messages import Message, from_wire, to_wire

_HEADER = struct.Struct("<QB")
_RECEIVE_BYTES = 1 << 16
"""Memory for this many bytes is taken for each read: the C library gets and returns pages for more than 128 KB."""

_MOST_DESCRIPTORS = 8

# Not the enum's members, whose operators are Python.
_DESCRIPTORS_LOST = int(socket.MSG_CTRUNC)


@final
class Channel:
    """One end of a conversation.

    The parent's ends do not block: what cannot be sent at once waits in an outbox until the socket takes it, so that a
    worker that does not listen, because it waits to be heard, can always be heard first.
    """

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        self._socket = end
        self._socket.setblocking(blocking)
        self._inbox = bytearray()
        self._outbox: deque[tuple[memoryview, list[int]]] = deque()
        self._received: list[int] = []
        self._arrived: list[int] = []
        self.is_open = True

    def fileno(self) -> int:
        """Returns the descriptor to wait on."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outbox)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Sends a message, and with it copies of file descriptors.

        A broken connection is not an error here: whoever waits for the other side to answer learns of its end.
        """
        body = pickle.dumps(to_wire(message), protocol=5)
        frame = memoryview(_HEADER.pack(len(body), len(descriptors)) + body)
        # Copies of the descriptors: the caller may close its own before the frame's turn comes.
        self._outbox.append((frame, copies_of(descriptors) if descriptors else []))
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as the socket takes it."""
        while self._outbox:
            frame, descriptors = self._outbox[0]
            try:
                # Descriptors travel with the first byte of their frame.
                sent = socket.send_fds(self._socket, [frame], descriptors) if descriptors else self._socket.send(frame)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._empty_outbox()
                return
            close_all(descriptors)
            self._outbox[0] = frame[sent:], []
            if sent == len(frame):
                self._outbox.popleft()

    def receive(self) -> Iterator[Any]:
        """Yields the messages that are complete, after one read; at the other side's end, `is_open` becomes False.

        Raises:
            OSError: descriptors that came along were lost, because this process may not open more.
        """
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _MOST_DESCRIPTORS)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, descriptors, flags = b"", [], 0
        for descriptor in descriptors:
            # Programs that user code starts must not hold on to what a worker has.
            os.set_inheritable(descriptor, False)
        self._received.extend(descriptors)
        if flags & _DESCRIPTORS_LOST:
            raise OSError(errno.EMFILE, "Too many open files: raise the limit (`ulimit -n`) or use fewer workers")
        if not data:
            self.is_open = False
        self._inbox += data
        while len(self._inbox) >= _HEADER.size:
            num_bytes, num_descriptors = _HEADER.unpack_from(self._inbox)
            end = _HEADER.size + num_bytes
            if len(self._inbox) < end:
                return
            body = bytes(self._inbox[_HEADER.size : end])
            del self._inbox[:end]
            self._arrived += self._received[:num_descriptors]
            del self._received[:num_descriptors]
            yield from_wire(pickle.loads(body))  # noqa: S301  (written by the other end of our own socket pair)

    def receive_rest(self) -> Iterator[Any]:
        """Yields all that the other side, which is dead, has sent."""
        self._socket.setblocking(False)
        while self.is_open:
            before = len(self._inbox)
            messages = list(self.receive())
            yield from messages
            if not messages and len(self._inbox) == before:
                return

    def take_descriptors(self) -> list[int]:
        """Returns the descriptors that came with the messages since last asked; the caller closes them."""
        taken, self._arrived = self._arrived, []
        return taken

    def hang_up(self) -> None:
        """Closes this end for good: the other side hears of it even if a forked process has a copy of this end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Closes this process's copy of this end, and the descriptors that nobody took. Idempotent."""
        self.is_open = False
        self._socket.close()
        self._empty_outbox()
        close_all(self._arrived)
        close_all(self._received)

    def _empty_outbox(self) -> None:
        while self._outbox:
            close_all(self._outbox[0][1])
            self._outbox.popleft()


def copies_of(descriptors: Iterable[int]) -> list[int]:
    """Returns duplicates of all the descriptors, or makes none.

    Raises:
        OSError: this process may not open that many.
    """
    with contextlib.ExitStack() as undo:
        copies = []
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))
            undo.callback(os.close, copies[-1])
        undo.pop_all()
        return copies


def close_all(descriptors: list[int]) -> None:
    """Closes descriptors, and takes them off the list.

    An interrupt neither leaks one nor closes it twice, which might be to close somebody else's: Python looks for
    signals after a call and at the end of a loop, and there is neither between taking one off and closing it.
    """
    while descriptors:
        descriptor = descriptors[-1]
        del descriptors[-1]
        os.close(descriptor)
