"""What the parent, the zygote and the workers say to each other.

    parent → zygote   Fork, Kill            zygote → parent   Forked, NotForked, Exited
    parent → worker   MakeUnits, MakeGroup  worker → parent   Ready, Broken, Made

A conversation ends with the end of the socket: the parent's end closing means "stop", a worker's end closing without
that means it died. What is said for each batch consists of plain tuples and numbers, and the kind of a message is a
number on its way (`to_wire`): to look up classes by name is most of what pickle would do.
"""

from typing import Any, NamedTuple, TypeAlias

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


class MakeUnits(NamedTuple):
    """Make the outputs of a call of phase 0.

    Attributes:
        call: the number of the call, for the answer.
        released: chunks of the worker's arena that the parent no longer holds.
        start: the first of its units.
        stop: the unit behind the last one.
    """

    call: int
    released: list[int]
    start: int
    stop: int


class MakeGroup(NamedTuple):
    """Make the outputs of a call of a later phase.

    Attributes:
        call: the number of the call, for the answer.
        released: chunks of the worker's arena that the parent no longer holds.
        phase: which one.
        elements: those of one group, pickled.
    """

    call: int
    released: list[int]
    phase: int
    elements: bytes


Make: TypeAlias = MakeUnits | MakeGroup


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


Message: TypeAlias = Fork | Kill | Forked | NotForked | Exited | Ready | Broken | Made | Make

_KINDS: tuple[Any, ...] = (Fork, Kill, Forked, NotForked, Exited, Ready, Broken, Made, MakeUnits, MakeGroup)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def to_wire(message: Message) -> tuple[Any, ...]:
    """Returns a message as a plain tuple: the number of its kind, and its fields."""
    return _NUMBERS[type(message)], *message


def from_wire(wire: tuple[Any, ...]) -> Any:
    """Returns the message that `to_wire` was called on."""
    return _KINDS[wire[0]](*wire[1:])
