"""What the parent, the zygote and the workers say to each other.

    parent → zygote   Fork, Kill            zygote → parent   Forked, Exited
    parent → worker   Make                  worker → parent   Ready, Broken, Made

A conversation ends with the end of the socket: the parent's end closing means "stop", a worker's end closing without
that means it died. The messages are named tuples, which pickle in C: a few microseconds less for each batch.
"""

from typing import NamedTuple

from millstream.loader.transport import Failure, Parcel


class PipelineFile(NamedTuple):
    """Where the pipeline lies in the file that all workers read it from.

    Attributes:
        num_bytes: the length of the pickle, at the beginning of the file.
        buffers: offset and length of each large array that the pickle left out.
        file_bytes: the length of the whole file.
    """

    num_bytes: int
    buffers: tuple[tuple[int, int], ...]
    file_bytes: int


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


class Units(NamedTuple):
    """A call of phase 0: make units start … stop - 1."""

    start: int
    stop: int


class Group(NamedTuple):
    """A call of a later phase: the elements of one group, pickled."""

    phase: int
    elements: bytes


class Make(NamedTuple):
    """Make the outputs of one call of the plan.

    Attributes:
        call: the number of the call, for the answer.
        work: what to make.
        released: chunks of the worker's arena that the parent no longer holds.
    """

    call: int
    work: Units | Group
    released: list[int]


class Ready(NamedTuple):
    """The pipeline is there: the worker waits for calls."""


class Broken(NamedTuple):
    """The pipeline cannot be made from its pickle in a worker."""

    failure: Failure


class Made(NamedTuple):
    """The outputs of a call, and what was raised instead of the next one, if anything.

    Attributes:
        call: the call's number.
        parcel: the values and origins.
        failure: the error at the end of the run.
        seconds: how long it took.
        stages: of these, how long each stage of the pipeline took, in the order of the plan's clock.
    """

    call: int
    parcel: Parcel
    failure: Failure | None
    seconds: float
    stages: tuple[float, ...]
