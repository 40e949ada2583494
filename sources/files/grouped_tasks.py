"""Calls of a function for many files, by a few threads."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from millstream.sources.storage.open_files import descriptor_share

_T = TypeVar("_T")


def in_threads(
    function: Callable[[str], _T], paths: Sequence[str], count: int, cancel: Callable[[], None] | None = None
) -> Iterator[_T]:
    """Yields the result for each path, in order. A task costs 50 µs, so each one takes several paths.

    Args:
        function: the function of one path.
        paths: the paths.
        count: the number of threads. They are fewer if the process may not open so many files.
        cancel: is called after an error, before the threads are awaited, to end calls that take long.
    """
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (lazy: takes long to import)

    size = max(1, len(paths) // (8 * count))
    groups = [paths[start : start + size] for start in range(0, len(paths), size)]
    with ThreadPoolExecutor(min(count, descriptor_share()), "millstream-inspect") as threads:
        try:
            for results in threads.map(lambda group: [function(path) for path in group], groups):
                yield from results
        except BaseException:
            if cancel is not None:
                cancel()
            raise
