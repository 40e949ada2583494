"""Snapshots of a pipeline, its engines and their workers, for monitoring."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """A snapshot of a worker.

    Attributes:
        pid: the process ID; None until it is known.
        is_here: True if the process runs on this machine.
        calls: the number of unanswered calls.
        begun: a description of the call that it began last; None if that is unknown.
        waited: seconds that the consumer has waited since the worker's last sign of life.
    """

    number: int
    pid: int | None
    is_here: bool
    calls: int
    begun: str | None
    waited: float


@dataclasses.dataclass(frozen=True)
class ExecutorStatus:
    """A snapshot of an engine.

    Attributes:
        begun: the number of calls that have begun, can begin, or have outputs that were not delivered.
        ready: the number of these calls that are complete.
    """

    begun: int
    ready: int
    max_threads: int = 0
    busy_threads: int = 0
    workers: tuple[WorkerStatus, ...] = ()


@dataclasses.dataclass(frozen=True)
class PipelineStatus:
    """A snapshot of the iterators of a pipeline.

    Attributes:
        lifecycle: the state of the newest one: idle, running or closed.
        waits_for: seconds that the trainer has been inside `next`; None if it is not.
        at_hand: the number of outputs that `next` can return immediately.
        loads: the engines, also those below.
    """

    lifecycle: str
    waits_for: float | None
    at_hand: int
    loads: tuple[ExecutorStatus, ...]
