"""The reader of a group: a thread that runs an executor, and sends its outputs to all members."""

import bisect
import collections
import contextlib
import errno
import functools
import math
import os
import pickle
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np

from millstream.core.signals import is_from_signal_handler
from millstream.loader.engine.engine import Engine, GivenUp
from millstream.loader.measuring import ExecutorStatus
from millstream.loader.pipeline.calls import Outputs, Position
from millstream.loader.pipeline.failing_records import FailuresByShard, FailuresOfPass
from millstream.loader.pipeline.plan import Plan
from millstream.loader.processes.process_control import is_of_own_user
from millstream.loader.replicas.messages import (
    INLINE_BYTES,
    MESSAGE_BYTES,
    OWN_SOCKETS,
    Apart,
    Ended,
    Published,
    Welcome,
    close_in_forked_processes,
    dumped,
)
from millstream.loader.threads.reader_threads import CLOSE_SECONDS, ReaderThreads
from millstream.loader.transport.pipeline_file import laid_out, write_chunks

AHEAD = 2
"""The number of outputs that the reader computes before the first member asks for them."""

MIN_KEPT, MAX_KEPT = 4, 16
"""The number of outputs that are kept for members that join, or join again, if all others have read them."""

MAX_KEPT_BYTES = 1 << 26
"""Upper bound on the memory of the outputs that are kept, if they are more than MIN_KEPT."""

MAX_UNREAD, MAX_UNREAD_BYTES = 64, 1 << 28
"""Upper bounds on the outputs that some members have read and others have not, and on their memory. The messages of
MAX_UNREAD outputs fit into the buffer of a socket."""

PATIENCE_SECONDS = 2.0
"""The time for which members that have read everything wait for those that hold them up."""

TICK_SECONDS = 0.1
"""The time after which the reader notices at the latest that its iterator was dropped."""


def bound(name: bytes) -> socket.socket | None:
    """Returns a socket that listens on a name, or None if another one has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(name)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    close_in_forked_processes()
    return listener


class _Entry(NamedTuple):
    """Published outputs.

    Attributes:
        start, end: the positions before the outputs that were not consumed before the reader began, and after them.
        outputs: the outputs without their values.
        descriptor: their memory; None if they are in the message.
    """

    start: Position
    end: Position
    outputs: Outputs
    message: bytes
    descriptor: int | None
    num_bytes: int

    def row_after(self, position: Position) -> int | None:
        """Returns the number of values before a position; None if the position is not here."""
        if position == self.start:
            return self.outputs.first
        rows = range(self.outputs.first, len(self.outputs.values) - 1)
        row = bisect.bisect_left(rows, position, key=self.outputs.position_after)
        return rows[row] + 1 if row < len(rows) and self.outputs.position_after(rows[row]) == position else None


@final
class _Member:
    """The reader's side of a connection. `read` is the number of the first output that the member has not read."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.position: Position | None = None
        self.is_placed = False
        self.read = 0
        self.since = time.monotonic()


@final
class Reader:
    """Runs the executor of a group in a thread, and publishes its outputs.

    Attributes:
        error: the exception of the executor; None if there was none.
        apart: the reason why no other process can have its outputs; None if there is none.
        has_ended: True if it publishes no more.
    """

    def __init__(
        self, listener: socket.socket, make: Callable[[Position], Engine], plan: Plan, position: Position
    ) -> None:
        self.error: BaseException | None = None
        self.apart: Apart | None = None
        self.has_ended = False
        self._listener = listener
        self._make = make
        self._plan = plan
        self._start = self._head = position
        self._executor: Engine | None = None
        self._members: list[_Member] = []
        self._entries: collections.deque[_Entry] = collections.deque()
        # The number of the first entry that is kept, and the failures of kept outputs and of what follows.
        self._first = 0
        self._failures: FailuresByShard = [[] for _ in position]
        self._fresh: FailuresByShard = [[] for _ in position]
        self._blocked_since = math.inf
        self._is_stopped = self._pauses = False
        try:
            self._wake, self._waker = socket.socketpair()
        except OSError:
            listener.close()
            raise
        OWN_SOCKETS.update((listener, self._wake, self._waker))
        # Also if the thread never begins, because its owner has ended or was closed immediately.
        self._close_sockets = weakref.finalize(self, _close_all, listener, self._wake, self._waker)
        self._close_sockets.atexit = False
        self._has_begun = False
        self.readers = ReaderThreads(1)

    def begin(self, owner: Any) -> None:
        self.readers.end_with(owner)
        weakref.finalize(owner, _notify, self._waker).atexit = False
        self.readers.submit(functools.partial(self._run, threading.get_ident()))

    def status(self) -> ExecutorStatus:
        executor = self._executor
        return ExecutorStatus(0, 0) if executor is None else executor.status()

    def stacks(self) -> dict[int, str]:
        executor = self._executor
        return {} if executor is None else executor.stacks()

    def stop(self, deadline: float | None = None, *, pauses: bool = False) -> None:
        """Stops reading. What was published reaches the members. `pauses` keeps idle workers for the next executor."""
        self._pauses = pauses
        self._is_stopped = True
        _notify(self._waker)
        self.readers.stop()
        if pauses:
            self.readers.join(TICK_SECONDS)
        if (executor := self._executor) is not None and not self.has_ended:
            executor.close(deadline)
        self.readers.join(CLOSE_SECONDS if deadline is None else max(0.0, deadline - time.monotonic()))
        if not self._has_begun:
            # Its thread drops the job: no process may wait for the name.
            self._end()

    def _run(self, consumer: int) -> None:
        self._has_begun = True
        try:
            if threading.get_ident() == consumer:
                # `ReaderThreads` could not start one. The consumer has no outputs while it waits for itself.
                self._end_with(Apart(reason="the system has no thread left"))
                return
            self._executor = self._make(self._start)
            while not (self.has_ended or self._is_stopped or self.readers.is_stopped):
                self._exchange()
                if self._is_wanted():
                    self._publish_next()
                self._drop_slow()
        except BaseException as error:  # noqa: BLE001  (the consumer raises it)
            self.error = error
        finally:
            self._end()

    def _end(self) -> None:
        executor = self._executor
        with contextlib.suppress(Exception):
            if executor is not None:
                if self._pauses or (self.has_ended and self.error is None):
                    executor.pause()
                else:
                    executor.close()
        self.has_ended = True
        # Before the members: one that finds the end of its connection must not find the name in use.
        self._listener.close()
        for member in self._members:
            member.connection.close()
        for entry in self._entries:
            _close(entry.descriptor)
        self._entries.clear()
        self._close_sockets()

    @property
    def _next(self) -> int:
        """The number of the next output."""
        return self._first + len(self._entries)

    def _exchange(self) -> None:
        """Receives what members have sent. Waits for it if nothing is to be computed."""
        poll = select.poll()
        sockets = {one.fileno(): one for one in (self._listener, self._wake)}
        members = {member.connection.fileno(): member for member in self._members}
        for descriptor in (*sockets, *members):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(0 if self._is_wanted() else int(TICK_SECONDS * 1000)):
            if descriptor in members:
                self._hear(members[descriptor])
            elif descriptor == self._listener.fileno():
                self._accept()
            else:
                self._wake.recv(MESSAGE_BYTES)
        for member in self._members.copy():
            if not member.is_placed and member.position is not None:
                self._admit(member, member.position)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # No descriptor is left. The other end would wait forever.
            self._end_with(Apart(reason=f"no connection can be accepted: {error}"))
            return
        connection.setblocking(False)
        if is_of_own_user(connection):
            OWN_SOCKETS.add(connection)
            self._members.append(_Member(connection))
        else:
            connection.close()

    def _hear(self, member: _Member) -> None:
        try:
            data = member.connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(member)
        elif member.position is None:
            member.position = pickle.loads(data)  # noqa: S301  (of a process of this user)
        else:
            member.read += 1

    def _admit(self, member: _Member, position: Position) -> None:
        """Sends a member all outputs from its position on, or refuses it."""
        number, skip = self._next, 0
        if position != self._head:
            found = [(row, entry.row_after(position)) for row, entry in enumerate(self._entries)]
            here = [(row, skip) for row, skip in found if skip is not None]
            if not here:
                is_early = position > self._head
                if not is_early or time.monotonic() > member.since + PATIENCE_SECONDS:
                    self._send(member, Apart(None if is_early else self._entries[0].start if self._entries else None))
                    self._drop(member)
                return
            row, skip = here[-1]
            number = self._first + row
        member.is_placed, member.read = True, number
        self._send(member, Welcome(os.getpid(), skip, self._failures))
        for entry in list(self._entries)[number - self._first :]:
            self._send_entry(member, entry)

    def _is_wanted(self) -> bool:
        """Returns True if the next output is to be computed now."""
        placed = [member.read for member in self._members if member.is_placed]
        return bool(placed) and self._next - max(placed) < AHEAD and self._has_room(min(placed))

    def _has_room(self, first_unread: int) -> bool:
        unread = list(self._entries)[max(0, first_unread - self._first) :]
        return len(unread) < MIN_KEPT or (
            len(unread) < MAX_UNREAD and sum(entry.num_bytes for entry in unread) < MAX_UNREAD_BYTES
        )

    def _drop_slow(self) -> None:
        """Drops the members that have held the others up for too long."""
        placed = [member for member in self._members if member.is_placed]
        reads = [member.read for member in placed]
        if not placed or max(reads) < self._next or self._has_room(min(reads)):
            self._blocked_since = math.inf
            return
        now = time.monotonic()
        self._blocked_since = min(self._blocked_since, now)
        if now >= self._blocked_since + PATIENCE_SECONDS:
            for member in placed:
                if member.read == min(reads):
                    self._drop(member)
            self._blocked_since = math.inf

    def _publish_next(self) -> None:
        executor = self._executor
        if executor is None:
            raise AssertionError("it was created")
        try:
            outputs = executor.next_outputs()
        except GivenUp:
            executor.close()
            self._executor = self._make(self._head)
            return
        for number, found in enumerate(taken_failures(executor)):
            self._failures[number] += found
            self._fresh[number] += found
        if outputs is None:
            # A member that knows of the end may begin the next pass, which takes the idle workers.
            executor.pause()
            self._executor = None
            self._end_with(Ended(self._fresh))
        elif outputs.values or outputs.error is not None:
            self._publish(outputs, executor.failures)

    def _publish(self, outputs: Outputs, failures: FailuresOfPass | None) -> None:
        try:
            entry = self._entry_of(outputs, failures)
        except OSError as error:
            # No memory or descriptor is left: each process has its own from here on.
            self._end_with(Apart(reason=f"the outputs cannot be written to memory: {error}"))
            return
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            text = f"the batches cannot be pickled: {error}. Classes of their elements must belong to modules"
            self._end_with(Apart(reason=text, is_final=True))
            return
        self._fresh = [[] for _ in self._fresh]
        self._entries.append(entry)
        self._head = entry.end
        for member in self._members.copy():
            if member.is_placed:
                self._send_entry(member, entry)
        self.has_ended = outputs.error is not None
        self._forget()

    def _entry_of(self, outputs: Outputs, failures: FailuresOfPass | None) -> _Entry:
        buffers = [memoryview(buffer) for buffer in dumped(outputs, self._plan)]
        chunks, spans = laid_out(buffers)
        total, descriptor, content = sum(chunk.nbytes for chunk in chunks), None, None
        if total > INLINE_BYTES or len(buffers) > 1:
            descriptor = write_chunks(chunks)
        else:
            content = bytes(buffers[0])
        is_limit = failures is not None and outputs.error is not None and failures.error is outputs.error
        message = pickle.dumps(Published(total, tuple(spans), self._fresh, is_limit, content))
        # The positions need only the number of values.
        count = len(outputs.values)
        outputs.values = [None] * count
        end = outputs.position_after(count - 1) if count > outputs.first else self._head
        return _Entry(self._head, end, outputs, message, descriptor, total)

    def _forget(self) -> None:
        """Drops the oldest outputs that all members have read, but for those that are kept for others."""
        first_unread = min([member.read for member in self._members if member.is_placed], default=self._next)
        while self._first < first_unread and len(self._entries) > MIN_KEPT:
            is_small = sum(entry.num_bytes for entry in self._entries) <= MAX_KEPT_BYTES
            if is_small and len(self._entries) <= MAX_KEPT:
                break
            _close(self._entries.popleft().descriptor)
            self._first += 1
        oldest = self._entries[0].start
        self._failures = [
            [one for one in found if not one.is_before(cursor)]
            for found, cursor in zip(self._failures, oldest, strict=True)
        ]

    def _end_with(self, message: Ended | Apart) -> None:
        """Sends a message after which nothing is published."""
        self.has_ended = True
        if isinstance(message, Apart):
            self.apart = message
        for member in self._members.copy():
            if member.is_placed:
                self._send(member, message)

    def _send_entry(self, member: _Member, entry: _Entry) -> None:
        self._send_raw(member, entry.message, entry.descriptor)

    def _send(self, member: _Member, message: Any) -> None:
        self._send_raw(member, pickle.dumps(message), None)

    def _send_raw(self, member: _Member, data: bytes, descriptor: int | None) -> None:
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, np.int32(descriptor).tobytes())]
        try:
            member.connection.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except OSError:
            # It has died, or has left so much unread that the socket is full.
            self._drop(member)

    def _drop(self, member: _Member) -> None:
        if member in self._members:
            self._members.remove(member)
            member.connection.close()


def _close_all(*sockets: socket.socket) -> None:
    for each in sockets:
        each.close()


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _notify(waker: socket.socket) -> None:
    with contextlib.suppress(OSError):
        waker.send(b"\0", socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def taken_failures(executor: Engine) -> FailuresByShard:
    """Removes the failures that an executor has found, and returns them without their exceptions."""
    return [] if executor.failures is None else executor.failures.take()
