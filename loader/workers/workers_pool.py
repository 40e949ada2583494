"""The protocols of workers and pools, as the executor sees them wherever they run."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

from millstream.loader.transport.class_table import ClassTable
from millstream.loader.workers.warm_pools import Pool


class Worker(Protocol):
    """A worker.

    Attributes:
        number: the worker's number. It is unique, and later workers have higher numbers.
        pid: the process ID; None until it is known.
        calls: the numbers of the unanswered calls, in the order sent.
        waited: seconds that the consumer has waited since the worker began its first unanswered call, or since its
            last sign of life.
        warned: True if a warning about the current stall has been logged.
    """

    number: int
    pid: int | None
    calls: list[int]
    waited: float
    warned: bool

    @property
    def accepts_calls(self) -> bool:
        """True if the worker may get calls, up to its limit."""


WorkerT = TypeVar("WorkerT", bound=Worker)


class WorkersPool(Pool, Protocol[WorkerT]):
    """Workers that have the same pipelines.

    Attributes:
        call_numbers: an iterator of new call numbers.
        classes: the classes that crossed by value with the pipelines.
        max_bytes: the maximum total size of elements made in advance.
        max_reads: the maximum number of reads in flight per worker.
    """

    call_numbers: Iterator[int]
    classes: ClassTable
    max_bytes: int
    max_reads: int

    @property
    def workers(self) -> list[WorkerT]:
        """The workers that are alive."""
