"""Reads by libraries with threads of their own, which do not survive a fork and do not say which record failed.

Guarantees:
    - Each process opens its own objects of a library, when it first reads. A pickled copy has none.
    - In a forked process, reading is an error: the library would wait forever for threads that are missing.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.base import explained

_T = TypeVar("_T")


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
