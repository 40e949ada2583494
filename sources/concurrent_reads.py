"""Reads from several sources for one batch, which threads share if there are any."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

Reads: TypeAlias = Sequence[Callable[[], Any]]

_local = threading.local()


@contextlib.contextmanager
def sharing(run_all: Callable[[Reads], list[Any]]) -> Iterator[None]:
    """Passes the reads of this thread to `run_all`, which returns their results in order, or raises the first error."""
    before = getattr(_local, "run_all", None)
    _local.run_all = run_all
    try:
        yield
    finally:
        _local.run_all = before


def read_all(reads: Reads) -> list[Any]:
    """Runs reads of several sources, and returns their results in order.

    Threads of the loader share them if it has any and the reads are slow. Otherwise they run one after another.
    """
    run_all = getattr(_local, "run_all", None)
    return [read() for read in reads] if run_all is None else run_all(reads)
