"""Reads for a batch: the record that fails alone, libraries with threads of their own, several sources together.

Guarantees:
    - Each process opens its own objects of a library, when it first reads. A pickled copy has none.
    - In a forked process, reading by such a library is an error: it would wait forever for threads that are missing.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError

_T = TypeVar("_T")
_Item = TypeVar("_Item")


def explained(
    read_all: Callable[[], _T],
    read_one: Callable[[int], object],
    keys: NDArray[np.int64],
    explain: Callable[[int, Any], Exception],
    failure: type[Exception] = ValueError,
) -> _T:
    """Reads the records of keys, or raises the error of the first record that fails alone.

    Args:
        read_all: reads all records.
        read_one: reads the record of a key, by the number of the key.
        keys: the record keys.
        explain: returns the error to raise, given a record key and the failure of its record.
        failure: the type of a failure. It is raised if no record fails alone.
    """
    try:
        return read_all()
    except failure:
        for row, key in enumerate(keys.tolist()):
            try:
                read_one(row)
            except failure as error:
                raise explain(key, error) from error
        raise


class LibraryReadError(Exception):
    """A library cannot read records. The text begins with the name of the data, and ends with the reason."""


def read_naming_failures(read: Callable[[NDArray[np.int64]], _T], keys: NDArray[np.int64]) -> _T:
    """Returns the records of keys; the error of a failure names the first record that cannot be read."""

    def explain(key: int, error: LibraryReadError) -> DataSourceError:
        return DataSourceError(f"Cannot read record {key} of {error}")

    try:
        return explained(lambda: read(keys), lambda row: read(keys[[row]]), keys, explain, LibraryReadError)
    except LibraryReadError as failed:
        raise DataSourceError(f"Cannot read a batch with record {keys[0]} of {failed}") from failed


@functools.cache
def first_process(library: str) -> int:  # noqa: ARG001  (the key of the cache)
    """Returns the ID of the process that was the first one to use a library: this one, at the first call."""
    return os.getpid()


def is_forked(library: str) -> bool:
    """Returns True if this process was forked after a library was used. The first call counts as a use."""
    return first_process(library) != os.getpid()


@final
class OpenedHere(Generic[_T]):
    """An object of a library, opened by the process that reads."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._opened: list[_T] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenedHere, (self._library,)  # Another process opens its own.

    def get(self, open_object: Callable[[], _T]) -> _T:
        """Returns the object, opened at the first call; raises DataSourceError after a fork."""
        if is_forked(self._library):
            raise DataSourceError(
                f"{self._library} cannot read after a fork of the process that used it first. Use worker_count, or "
                "start processes by 'spawn' or 'forkserver'."
            )
        if not self._opened:
            self._opened = [open_object()]
        return self._opened[0]


Reads: TypeAlias = Sequence[Callable[[], Any]]

_local = threading.local()


def map_in_threads(function: Callable[[_Item], _T], items: Sequence[_Item], max_threads: int, name: str) -> list[_T]:
    """Returns the results for items, in order. If there are several, they are computed in threads, which then end."""
    if not len(items) > 1 < max_threads:
        return list(map(function, items))
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (lazy: it takes long to import)

    with ThreadPoolExecutor(min(max_threads, len(items)), name) as threads:
        return list(threads.map(function, items))


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
