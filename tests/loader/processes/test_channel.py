"""Messages and descriptors arrive whole, in order and together, however bytes are cut and whichever side is slow."""

import contextlib
import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.loader.processes.channel import Channel, Exited, Fork, Forked, Kill, Ready, Task
from millstream.loader.transport.pipeline_file import PipelineFile
from millstream.loader.workers.process_settings import ProcessSettings, Trainer
from support.processes.process_tree import open_descriptors


def said(content: Any) -> Task:
    return Task(1, [2, 3], content, 0, 1)


messages = st.one_of(
    st.one_of(st.none(), st.integers(), st.text(max_size=20), st.binary(max_size=300), st.just(b"x" * 3000)).map(said),
    st.builds(Task, st.integers(), st.lists(st.integers(), max_size=3), st.tuples(st.integers(), st.integers())),
    st.sampled_from(
        [
            Ready(7),
            Kill(5),
            Forked(1, 5),
            Exited(5, -9, 1 << 40),
            Fork(1, 0, 1, 2, 3, True, PipelineFile(4, ((5, 6),), 7), Trainer(1, ProcessSettings.taken(), {})),
        ]
    ),
)


@contextlib.contextmanager
def channels(*, blocking: bool = False, buffer_bytes: int | None = None) -> Iterator[tuple[Channel, Channel]]:
    """Yields the two ends of a channel; the first one's socket takes this many bytes at once."""
    ours, theirs = socket.socketpair()
    if buffer_bytes is not None:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    near, far = Channel(ours, blocking=blocking), Channel(theirs, blocking=blocking)
    try:
        yield near, far
    finally:
        near.close()
        far.close()


def frames_of(values: list[Any]) -> list[bytes]:
    """Returns the bytes that a channel sends for each of some messages."""
    with channels(blocking=True) as (near, far):
        frames = []
        for value in values:
            near.send(value)
            frames.append(far._socket.recv(1 << 16))
        return frames


def numbered_file(number: int) -> int:
    """Returns the descriptor of a file that holds a number."""
    with tempfile.TemporaryFile() as file:
        file.write(str(number).encode())
        file.flush()
        return os.dup(file.fileno())


def number_in(descriptor: int) -> int:
    """Returns the number in a file, and closes it."""
    try:
        return int(os.pread(descriptor, 20, 0))
    finally:
        os.close(descriptor)


@given(values=st.lists(messages, max_size=6), data=st.data())
@settings(deadline=None, max_examples=60)
def test_messages_cut_anywhere_arrive_whole(values: list[Any], data: st.DataObject) -> None:
    """However the bytes are cut into reads, the messages come out whole and in order, each as soon as it can."""
    frames = frames_of(values)
    stream = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    ends = [len(b"".join(frames[: count + 1])) for count in range(len(frames))]
    with channels() as (near, far):
        received: list[Any] = []
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            near._socket.sendall(stream[start:stop])
            received += far.receive()
            complete = values[: sum(end <= stop for end in ends)]
            assert received == complete
            assert list(map(type, received)) == list(map(type, complete))
        assert far.is_open


def test_the_last_message_cut_at_every_byte_is_dropped() -> None:
    """A sender that dies in the middle of a frame has sent the messages before it, and nothing else."""
    values = [said("first"), said({"second": b"y" * 70})]
    first, second = frames_of(values)
    stream = first + second
    for stop in range(len(stream) + 1):
        with channels() as (near, far):
            near._socket.sendall(stream[:stop])
            near.close()
            complete = (stop >= len(first)) + (stop == len(stream))
            assert list(far.receive_rest()) == values[:complete]
            assert not far.is_open
            assert list(far.receive_rest()) == []


@given(
    plan=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 10, 5_000, 60_000])), max_size=12),
    blocking=st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_descriptors_arrive_with_their_message(plan: list[tuple[int, int]], blocking: bool) -> None:
    """Each message brings its own descriptors, also where frames wait for a slow reader; none is left open."""
    before = len(open_descriptors())
    with channels(blocking=False, buffer_bytes=4096) as (near, far):
        far._socket.setblocking(blocking)
        for number, (count, size) in enumerate(plan):
            files = [numbered_file(10 * number + i) for i in range(count)]
            near.send(said((number, b"z" * size)), files)
            for descriptor in files:
                os.close(descriptor)
        arrived = 0
        while arrived < len(plan):
            near.flush()
            for message in far.receive():
                number, content = message.request
                count, size = plan[arrived]
                assert (number, len(content)) == (arrived, size)
                assert [number_in(file) for file in far.take_descriptors()] == [10 * number + i for i in range(count)]
                arrived += 1
        assert not near.has_unsent
    assert len(open_descriptors()) == before


@given(sizes=st.lists(st.sampled_from([0, 100, 10_000, 100_000]), min_size=1, max_size=20))
@settings(deadline=None, max_examples=50)
def test_sending_to_one_who_does_not_listen_returns_at_once(sizes: list[int]) -> None:
    """Frames that the socket does not take are queued in order, and two senders at the same time do not deadlock."""
    values = [said(bytes([number]) * size) for number, size in enumerate(sizes)]
    with channels(buffer_bytes=4096) as (near, far):
        for value in values:
            near.send(value)
            far.send(value)
        assert near.has_unsent or sum(sizes) < 10_000
        there: list[Any] = []
        back: list[Any] = []
        while near.has_unsent or far.has_unsent or len(there) < len(values) or len(back) < len(values):
            near.flush()
            there += far.receive()
            far.flush()
            back += near.receive()
        assert there == values
        assert back == values


def test_a_connection_that_broke_is_no_error_of_the_sender() -> None:
    """Messages to a side that is gone are dropped, with their descriptors; what it sent before still arrives.

    An end that is closed with unread messages resets the connection.
    """
    before = len(open_descriptors())
    with channels() as (near, far):
        near.send(said("never read"))
        far.send(said("last words"))
        far.close()
        file = numbered_file(1)
        near.send(said("hello"))
        near.send(said("hello"), [file])
        os.close(file)
        assert not near.has_unsent
        assert list(near.receive_rest()) == [said("last words")]
        assert not near.is_open
    assert len(open_descriptors()) == before


def test_closing_closes_descriptors_that_wait_or_were_not_taken() -> None:
    """Closing closes the descriptors of frames that were never sent and of messages that were never taken."""
    before = len(open_descriptors())
    with channels(buffer_bytes=4096) as (near, far):
        file = numbered_file(7)
        near.send(said("read, not taken"), [file])
        assert list(far.receive()) == [said("read, not taken")]
        near.send(said("not read"), [file])
        near.send(said(b"fills the socket" * 10_000))
        near.send(said("not sent"), [file, file])
        os.close(file)
        assert near.has_unsent
    assert len(open_descriptors()) == before


def test_descriptors_beyond_the_limit_are_an_error_with_a_hint() -> None:
    """A message whose descriptors the system refuses is not mistaken for one without: the error says what to do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(open_descriptors())
    with channels() as (near, far):
        file = numbered_file(7)
        near.send(said("hello"), [file] * 4)
        os.close(file)
        highest = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208  (no paths are wanted)
        kept = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, hard))
            with contextlib.suppress(OSError):
                while True:
                    kept.append(os.dup(0))
            os.close(kept.pop())
            os.close(kept.pop())
            with pytest.raises(OSError, match="Too many open files: raise the limit"):
                list(far.receive())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in kept:
                os.close(descriptor)
    assert len(open_descriptors()) == before
