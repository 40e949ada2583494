"""What workers are to the executor that has them make calls, wherever they run."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

from millstream.loader.transport.class_table import ClassTable
from millstream.loader.workers.warm_pools import Pool


class Worker(Protocol):
    """A worker, as its executor sees it.

    Attributes:
        number: which worker; later ones have higher numbers.
        pid: the number of its process; None while it is not known.
        calls: the numbers of the calls it was given and has not answered, in order.
        waited: seconds that the consumer has waited since the worker began with the first of them, or was last heard.
        warned: whether it has been reported in the log since then.
    """

    number: int
    pid: int | None
    calls: list[int]
    waited: float
    warned: bool

    @property
    def takes_calls(self) -> bool:
        """Whether calls may be given to it, if it has not too many."""


WorkerT = TypeVar("WorkerT", bound=Worker)


class WorkersPool(Pool, Protocol[WorkerT]):
    """Workers that have the same pipelines, most often one.

    Attributes:
        call_numbers: gives each call a number.
        classes: those that crossed by value with these.
        max_bytes: the maximum number of bytes that elements made in advance may take.
        max_reads: the maximum number of reads that a worker may have in flight at a time.
    """

    call_numbers: Iterator[int]
    classes: ClassTable
    max_bytes: int
    max_reads: int

    @property
    def workers(self) -> list[WorkerT]:
        """The workers, dead ones not counted."""
