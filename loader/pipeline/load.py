"""What an executor has to do at a moment, for those who look at it from outside."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class WorkerLoad:
    """A worker.

    Attributes:
        number: which worker.
        pid: its process; None while it is not known.
        is_here: whether that is a process of this machine.
        calls: how many calls it was given that it has not answered.
        begun: what the call is about that it began last, as text; None where that is not known.
        waited: seconds that the consumer has waited for it since it was last heard.
    """

    number: int
    pid: int | None
    is_here: bool
    calls: int
    begun: str | None
    waited: float


@dataclasses.dataclass(frozen=True)
class Load:
    """An executor.

    Attributes:
        begun: how many calls are begun, or can begin, or have outputs that were not given out.
        ready: how many of these are made.
        most_threads: how many threads may make calls at once.
        busy_threads: how many do.
        workers: the workers.
    """

    begun: int
    ready: int
    most_threads: int = 0
    busy_threads: int = 0
    workers: tuple[WorkerLoad, ...] = ()


@dataclasses.dataclass(frozen=True)
class IteratorLook:
    """An iterator.

    Attributes:
        step: the number of batches delivered.
        records: the number of records that its shards have used up.
        epoch: which one it is in; None where there are none.
        lifecycle: whether it is idle, running or closed.
        waits_for: for how many seconds the consumer has been inside `next`; None while it does something else.
        at_hand: how many outputs are there for `next` to take at once.
        load: what its executor has to do; None where there is none, or it cannot be said now.
    """

    step: int
    records: int
    epoch: int | None
    lifecycle: str
    waits_for: float | None
    at_hand: int
    load: Load | None
