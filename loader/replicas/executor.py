"""The executor of a member: it delivers what the reader of its group publishes, or reads by itself."""

import collections
import contextlib
import functools
import itertools
import operator
import os
import pickle
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.warn import log_info, log_warning
from millstream.loader.engine.engine import Engine
from millstream.loader.measuring import ExecutorStatus, Profiler
from millstream.loader.pipeline.calls import Outputs, Position
from millstream.loader.pipeline.failing_records import FailuresByShard, FailuresOfPass
from millstream.loader.pipeline.plan import Plan
from millstream.loader.processes.process_control import is_of_own_user
from millstream.loader.replicas import reader as readers
from millstream.loader.replicas.messages import MESSAGE_BYTES, OWN_SOCKETS, Apart, Ended, Published, Welcome, loaded
from millstream.loader.replicas.reader import Reader, bound, taken_failures
from millstream.loader.threads.waiting import SLICE_SECONDS, StallClock
from millstream.loader.transport.arena import MappedMemory
from millstream.loader.transport.payload import with_small_ones_copied

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 300.0
"""The time after which a member that reads by itself tries to join again. It doubles with each failure."""

_RACE_SECONDS = 0.001
_MAX_ATTEMPTS = 100
_NOTHING = np.empty(0, np.uint8)
_DESCRIPTOR = struct.Struct("i")
_RIGHTS_BYTES = socket.CMSG_LEN(_DESCRIPTOR.size)


@final
class SharedExecutor:
    """Delivers the outputs of a group of processes. It is used like an `Engine`.

    Args:
        make: creates an executor of this process at a position.
        profiler: knows the process that reads.
        name: the address of the group.
        stall_timeout: the number of seconds that the consumer waits, as for other executors.
    """

    runs_user_code_here = False

    def __init__(
        self,
        make: Callable[[Position], Engine],
        plan: Plan,
        position: Position,
        profiler: Profiler,
        *,
        name: bytes,
        stall_timeout: float,
    ) -> None:
        self._make = make
        self._plan = plan
        self._position = position
        self._profiler = profiler
        self._name = name
        self._stall_timeout = stall_timeout
        self.failures = None if plan.errors is None else FailuresOfPass(plan.errors, position, plan.num_in_a_row)
        self._process = os.getpid()
        self._connection: socket.socket | None = None
        # The message that is being read, as `recvmsg` returns it. Another thread that closes this leaves it alone.
        self._inbox: list[Any] = []
        weakref.finalize(self, _empty, self._inbox)
        self._closing: weakref.finalize[[], Any] = weakref.finalize(self, int)
        self._reader: Reader | None = None
        # The executor of this process if it reads by itself, and when and from where on it may join again.
        self._alone: Engine | None = None
        self._retry_at = self._retry_seconds = 0.0
        self._retry_from: Position | None = None
        self._may_join = True
        self._skip = 0
        self._is_unread = False
        self._is_closed = False

    @property
    def is_orphaned(self) -> bool:
        return self._process != os.getpid() or (self._alone is not None and self._alone.is_orphaned)

    def status(self) -> ExecutorStatus:
        for at_work in (self._alone, self._reader):
            if at_work is not None:
                return at_work.status()
        return ExecutorStatus(0, 0)

    def stacks(self) -> dict[int, str]:
        at_work = self._alone or self._reader
        return {} if at_work is None else at_work.stacks()

    def start(self) -> None:
        if self._alone is not None:
            self._alone.start()
        elif self._connection is None:
            self._join()

    def pause(self) -> None:
        self._leave()
        if (reader := self._reader) is not None:
            reader.stop(pauses=True)
        if self._alone is not None:
            self._alone.pause()

    def close(self, deadline: float | None = None) -> None:
        self._is_closed = True
        if self._process != os.getpid():
            return
        self._leave()
        if (reader := self._reader) is not None:
            reader.stop(deadline)
        if (alone := self._alone) is not None:
            alone.close(deadline)

    def poll(self) -> Outputs | None:
        """Returns the next outputs as `next_outputs` does, after waiting for them: those of all processes come here."""
        return self.next_outputs()

    def next_outputs(self) -> Outputs | None:
        attempts = 0
        while True:
            if self._is_closed:
                raise ValueError("The iterator was closed, possibly by another thread.")
            if self._alone is not None and self._connection is None and not self._tries_again():
                return self._outputs_alone(self._alone)
            if self._connection is None:
                attempts += 1
                if attempts > _MAX_ATTEMPTS:
                    self._read_alone(Apart(reason="no process answers"))
                else:
                    self._join()
                    if self._connection is None:
                        self._find_end()
                continue
            message, memory = self._received(self._connection)
            if isinstance(message, Published):
                return self._outputs_of(message, memory)
            self._heed(message)
            if isinstance(message, Ended):
                return None

    def _heed(self, message: Welcome | Ended | Apart | None) -> None:
        """Follows a message that has no outputs; None is the end of the connection."""
        if message is None:
            self._find_end()
        elif isinstance(message, Apart):
            self._read_alone(message)
        elif isinstance(message, Ended):
            self._add_failures(message.failures)
            self._leave()
        else:
            self._retry_seconds, self._skip = 0.0, message.skip
            self._profiler.reader = None if message.process == self._process else message.process
            self._add_failures(message.failures)
            if (alone := self._alone) is not None:
                self._alone = None
                alone.pause()

    def _outputs_of(self, message: Published, memory: NDArray[np.uint8]) -> Outputs:
        body, *buffers = [memory[start : start + length] for start, length in message.spans]
        # A small array which is kept does not pin a large one.
        outputs = loaded(body, with_small_ones_copied(buffers), self._plan)
        outputs.first, self._skip = max(outputs.first, self._skip), 0
        self._add_failures(message.failures)
        if message.is_limit and self.failures is not None:
            self.failures.error = outputs.error
        self._move_on(outputs)
        self._is_unread = True
        return outputs

    def _outputs_alone(self, alone: Engine) -> Outputs | None:
        outputs = alone.next_outputs()
        self._add_failures(taken_failures(alone))
        if outputs is not None:
            if alone.failures is not None and self.failures is not None and alone.failures.error is outputs.error:
                self.failures.error = outputs.error
            self._move_on(outputs)
        return outputs

    def _move_on(self, outputs: Outputs) -> None:
        if len(outputs.values) > outputs.first:
            self._position = outputs.position_after(len(outputs.values) - 1)

    def _add_failures(self, found: FailuresByShard) -> None:
        if self.failures is not None:
            self.failures.add(found)

    def _tries_again(self) -> bool:
        """Returns True if it is time to join the group again."""
        if not self._may_join or time.monotonic() < self._retry_at:
            return False
        return self._retry_from is None or self._position >= self._retry_from

    def _read_alone(self, apart: Apart) -> None:
        """Goes on with an executor of this process."""
        self._leave()
        if apart.reason:
            again = "" if apart.is_final else " It will try to share again."
            log_warning(f"share_on_host: this process reads by itself: {apart.reason}.{again}")
        self._may_join = self._may_join and not apart.is_final
        is_first = not self._retry_seconds and apart.until is not None
        self._retry_from = apart.until
        self._retry_seconds = min(MAX_RETRY_SECONDS, 2 * self._retry_seconds or FIRST_RETRY_SECONDS)
        self._retry_at = 0.0 if is_first else time.monotonic() + self._retry_seconds
        self._profiler.reader = None
        if self._alone is None:
            self._alone = self._make(self._position)
            if self._is_closed:
                # Closed by another thread, which did not see it.
                self._alone.close()

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        self._is_unread = False
        if connection is not None:
            with contextlib.suppress(OSError):
                # It wakes another thread that waits.
                connection.shutdown(socket.SHUT_RDWR)
            self._closing()

    def _find_end(self) -> None:
        """Leaves the group, because the reader has ended. Raises its error if it belongs to this process."""
        self._leave()
        reader = self._reader
        if reader is not None and reader.has_ended and not self._is_closed:
            self._reader = None
            if reader.error is not None:
                raise reader.error
            if reader.apart is not None:
                self._read_alone(reader.apart)

    def _join(self) -> None:
        """Connects to the reader of the group, and becomes it if there is none."""
        try:
            with contextlib.ExitStack() as on_failure:
                connection = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                if (listener := bound(self._name)) is not None:
                    reader = self._reader = Reader(listener, self._make, self._plan, self._position)
                    reader.begin(self)
                    log_info(f"share_on_host: process {self._process} reads for the processes of its host")
                connection.settimeout(SLICE_SECONDS)
                connection.connect(self._name)
                if not is_of_own_user(connection):
                    raise PermissionError("another user has the name of the group")
                connection.send(pickle.dumps(self._position), socket.MSG_NOSIGNAL)
                on_failure.pop_all()
        except (ConnectionError, TimeoutError):
            # The reader has just ended, or has bound its name and does not listen yet.
            time.sleep(_RACE_SECONDS)
        except OSError as error:
            self._read_alone(Apart(reason=str(error), is_final=True))
        else:
            OWN_SOCKETS.add(connection)
            self._connection = connection
            self._closing = weakref.finalize(self, connection.close)
            if self._is_closed:
                self.close()

    def _received(self, connection: socket.socket) -> tuple[Any, NDArray[np.uint8]]:
        """Returns the next message, None at the end of the connection, and the memory of outputs."""
        if self._is_unread:
            self._is_unread = False
            with contextlib.suppress(OSError):
                connection.send(b"\0", socket.MSG_NOSIGNAL)
        try:
            self._wait_for(connection)
        except TimeoutError as timeout:
            return Apart(reason="" if self._alone is not None else str(timeout)), _NOTHING
        except OSError:
            return None, _NOTHING
        data = self._inbox[-1][0]
        try:
            if not data:
                return None, _NOTHING
            message = pickle.loads(data)  # noqa: S301  (of a process of this user)
            if not isinstance(message, Published):
                return message, _NOTHING
            if (memory := self._memory_of(message)) is None:
                # The system drops descriptors that would exceed the limit of open files.
                return Apart(reason="this process may not open another file"), _NOTHING
            return message, memory
        finally:
            _empty(self._inbox)

    def _memory_of(self, published: Published) -> NDArray[np.uint8] | None:
        """Returns the memory of outputs; None if its descriptor did not arrive."""
        if published.content is not None:
            return np.frombuffer(bytearray(published.content), np.uint8)
        if (descriptor := next(_descriptors_of(self._inbox), None)) is None:
            return None
        return MappedMemory(descriptor, published.num_bytes, is_shared=False).view(0, published.num_bytes)

    def _wait_for(self, connection: socket.socket) -> None:
        """Puts the next message into the inbox. Raises TimeoutError to read alone instead."""
        reads_here = self._reader is not None
        limit = self._stall_timeout if reads_here else self._stall_timeout / 2
        if self._alone is not None:
            limit = min(limit, 2 * readers.PATIENCE_SECONDS)
        receive = functools.partial(connection.recvmsg, MESSAGE_BYTES, _RIGHTS_BYTES)
        clock = StallClock(limit)
        while True:
            since = time.monotonic()
            connection.settimeout(max(clock.seconds, _RACE_SECONDS))
            # A reader that ends before it has taken all acknowledgements resets the connection. Its messages are there.
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                # Without Python code between the reception and the list: an exception of a signal handler would lose
                # the descriptor, which would then stay open.
                self._inbox.extend(map(receive, (socket.MSG_CMSG_CLOEXEC,)))
                return
            clock.passed(time.monotonic() - since)
            if reads_here:
                if (error := clock.stall_of("the outputs for this host", self._threads)) is not None:
                    raise error
            elif clock.is_over:
                raise TimeoutError(f"the process that reads has sent nothing for {clock.waited:.1f} s")

    @property
    def _threads(self) -> Sequence[Any]:
        return [] if self._reader is None else self._reader.readers.busy_threads


def _descriptors_of(messages: Iterable[Any]) -> Iterator[int]:
    rights = itertools.chain.from_iterable(map(operator.itemgetter(1), messages))
    return itertools.chain.from_iterable(map(_DESCRIPTOR.unpack, map(operator.itemgetter(2), rights)))


def _empty(inbox: list[Any]) -> None:
    """Closes the descriptors of messages, each once, without Python code in between, which handlers could interrupt."""
    messages = map(inbox.pop, itertools.repeat(-1, len(inbox)))
    collections.deque(map(os.close, _descriptors_of(messages)), maxlen=0)
