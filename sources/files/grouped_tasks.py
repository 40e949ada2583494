"""Calls of a function for many files, by a few threads."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor

_T = TypeVar("_T")


def in_threads(threads: "Executor", count: int, function: Callable[[str], _T], paths: Sequence[str]) -> Iterator[_T]:
    """Yields the result for each path, in order. A task costs 50 µs, so each one takes several paths.

    Args:
        threads: the executor.
        count: the number of its threads.
        function: the function of one path.
        paths: the paths.
    """
    size = max(1, len(paths) // (8 * count))
    groups = [paths[start : start + size] for start in range(0, len(paths), size)]
    for results in threads.map(lambda group: [function(path) for path in group], groups):
        yield from results
