"""Framed messages over one socket: how the parent, the zygote and a worker talk.

A frame is its length, eight bytes little-endian, and a pickle. Both ends come from one `socketpair` that only they
hold, so what arrives is what this library wrote. A process that dies in the middle of a frame leaves an incomplete
one, which is dropped: it can harm nobody's channel but its own.
"""

import pickle
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, final

_LENGTH = struct.Struct("<Q")
_RECEIVE_BYTES = 1 << 18
_MOST_DESCRIPTORS = 8


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
        self._outbox: deque[memoryview] = deque()
        self._descriptors: list[int] = []
        self.is_open = True

    def fileno(self) -> int:
        """Returns the descriptor to wait on."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outbox)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Sends a message, and with it copies of file descriptors.

        A broken connection is no error here: whoever waits for the other side to answer learns of its end.
        """
        body = pickle.dumps(message, protocol=5)
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        if descriptors:
            # Descriptors travel with the first byte of their frame: nothing may be in the way of it.
            try:
                sent = socket.send_fds(self._socket, [frame], list(descriptors))
            except (BrokenPipeError, ConnectionResetError):
                return
            frame = frame[sent:]
        self._outbox.append(frame)
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as the socket takes it."""
        while self._outbox:
            try:
                sent = self._socket.send(self._outbox[0])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._outbox.clear()
                return
            if sent == len(self._outbox[0]):
                self._outbox.popleft()
            else:
                self._outbox[0] = self._outbox[0][sent:]

    def receive(self) -> Iterator[Any]:
        """Yields the messages that are complete, after one read; at the other side's end, `is_open` becomes False."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _MOST_DESCRIPTORS)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, descriptors = b"", []
        self._descriptors.extend(descriptors)
        if not data:
            self.is_open = False
        self._inbox += data
        while len(self._inbox) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._inbox)[0]
            if len(self._inbox) < end:
                return
            body = bytes(self._inbox[_LENGTH.size : end])
            del self._inbox[:end]
            yield pickle.loads(body)  # noqa: S301  (written by the other end of our own socket pair)

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
        """Returns the descriptors received since last asked; the caller closes them."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        """Closes this end. Idempotent."""
        self.is_open = False
        self._socket.close()
