"""What the parent, the fork server and the workers say to each other.

    parent → fork server   Fork, Kill            fork server → parent   Forked, NotForked, Exited
    parent → worker        Task                  worker → parent        Ready, PipelineFailed, Result

A conversation ends with the end of the socket: the parent's end closing means "stop", a worker's end closing without
that means it died.
"""

from typing import Any, NamedTuple, TypeAlias

from millstream.loader.pipeline.elements import FailedRecord
from millstream.loader.transport.payload import Failure, Payload
from millstream.loader.transport.pipeline_file import PipelineFile


class Fork(NamedTuple):
    """Make a worker. Its channel, arena, last words and pipeline file come along as descriptors.

    Attributes:
        number: which worker, for its name and for the answer.
        arena_bytes: the size of its arena.
        num_threads: how many threads it may read with.
        pipeline: where the pipeline lies in its file.
    """

    number: int
    arena_bytes: int
    num_threads: int
    pipeline: PipelineFile


class Kill(NamedTuple):
    """Kill a worker and all that it started."""

    pid: int


class Forked(NamedTuple):
    """A worker was made; where the system has handles of processes, one comes along as a descriptor."""

    number: int
    pid: int


class NotForked(NamedTuple):
    """A worker could not be made.

    Attributes:
        number: which one.
        errno: why, as the system says.
    """

    number: int
    errno: int


class Exited(NamedTuple):
    """A worker is gone.

    Attributes:
        pid: its number.
        status: as `os.waitstatus_to_exitcode` gives it, negative for a signal.
        peak_bytes: the most memory it ever had.
    """

    pid: int
    status: int
    peak_bytes: int


class Task(NamedTuple):
    """Make the outputs of a call.

    Attributes:
        call: the number of the call, for the answer.
        released: chunks of the worker's arena that the parent no longer holds.
        request: the first of its blocks, the one after the last, and of which logical shard; or a pickled `Group` or
            `Fed`.
        pipeline: the number of the pipeline that is to make them.
        num_reads: the maximum number of reads in flight at a time, this call's included. With 1, no call is begun
            before this one has ended.
    """

    call: int
    released: list[int]
    request: tuple[int, int, int] | bytes
    pipeline: int
    num_reads: int


class Ready(NamedTuple):
    """The pipelines are there: the worker waits for calls.

    Attributes:
        pid: its number, for a parent that has not heard it from the fork server yet.
    """

    pid: int


class PipelineFailed(NamedTuple):
    """The pipelines cannot be made from their pickle in a worker."""

    failure: Failure


class Result(NamedTuple):
    """The outputs of a call, and what was raised instead of the next one, if anything.

    Attributes:
        call: the call's number.
        payload: the values and origins.
        failure: the error at the end of the outputs.
        seconds: how long it took, without a read that was made in advance.
        idle_seconds: of these, how long no thread of the process computed.
        read_seconds: how long the read took that was made in advance; 0 without one.
        stages: of these, how long each part of the pipeline took, in the order of the profiler.
        begun: when it began, on the clock of `time.perf_counter`, which all processes of a machine share.
        failures: the records that failed, and were left out or replaced, with packed errors.
    """

    call: int
    payload: Payload
    failure: Failure | None
    seconds: float
    idle_seconds: float
    read_seconds: float
    stages: tuple[float, ...]
    begun: float
    failures: tuple[FailedRecord, ...] = ()


Message: TypeAlias = Fork | Kill | Forked | NotForked | Exited | Ready | PipelineFailed | Task | Result

_KINDS: tuple[Any, ...] = (Fork, Kill, Forked, NotForked, Exited, Ready, PipelineFailed, Task, Result)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def to_wire(message: Message) -> tuple[Any, ...]:
    """Returns a message as a plain tuple, its kind as a number: to look up a class takes longer than all the rest."""
    return _NUMBERS[type(message)], *message


def from_wire(wire: tuple[Any, ...]) -> Any:
    """Returns the message that `to_wire` was called on."""
    return _KINDS[wire[0]](*wire[1:])
