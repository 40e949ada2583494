"""The messages between the parent, the fork server and the workers.

    parent → fork server   Fork, Kill, End       fork server → parent   Forked, NotForked, Exited, Ended
    parent → worker        Task, Load, Unload    worker → parent        Ready, PipelineFailed, Imported, Logged, Result

Each pool has a connection of its own to the fork server. A connection ends with its socket. If the parent closes its
end, the other side stops. If a worker's end closes first, the worker has died; so has the fork server, unless it has
sent `Ended`.
"""

from typing import Any, NamedTuple, TypeAlias, get_args

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
    """

    number: int
    worker_index: int
    num_workers: int
    arena_bytes: int
    num_threads: int
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
        variant: the epoch that is run alone, or changes of weights; None for the complete order.
        num_reads: the maximum number of reads in flight, including this call's. With 1, no other call begins before
            this one has ended.
    """

    call: int
    released: list[int]
    request: tuple[int, int, int] | bytes
    pipeline: int
    variant: Variant
    num_reads: int


class Load(NamedTuple):
    """Gives a running worker another pipeline, with the numbers of the classes that crossed by value with it.

    Its file is passed as a descriptor. `variables` are those of modules that its code reads.
    """

    number: int
    file: PipelineFile
    classes: tuple[int, ...]
    variables: Variables


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
    | Unload
    | Imported
    | Logged
    | Result
)

_KINDS: tuple[Any, ...] = get_args(Message)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def to_wire(message: Message) -> tuple[Any, ...]:
    """Returns a message as a plain tuple with its kind as a number, because looking up a class would take longest."""
    return _NUMBERS[type(message)], *message


def from_wire(wire: tuple[Any, ...]) -> Any:
    return _KINDS[wire[0]](*wire[1:])
