"""The base of iterators over batches, in host or device memory: a position to report, save and seek."""

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn, Self, TypeVar

from millstream.closing import Closing
from millstream.loader.checkpoints.checkpointable import Checkpointable

ResultT = TypeVar("ResultT")


class ResumableIterator(Checkpointable, Closing):
    """Yields batches, and knows its position among them: just after the last batch that it delivered."""

    _is_in_use = False
    """True while a call is in progress that excludes others."""

    def __bool__(self) -> bool:
        """Returns True, even if no batch is left or their number is unknown."""
        return True

    def _repr_html_(self) -> str:
        from millstream import html_fragments  # noqa: PLC0415  (lazy: only notebooks need it)

        own: Any = self
        facts = [f"step {own.step:,}"]
        if own.epoch is not None:
            facts.append(f"epoch {own.epoch}")
        with contextlib.suppress(TypeError):  # The number is unknown.
            facts.append(f"batches left {len(own):,}")
        return html_fragments.figure(
            html_fragments.card("iterator", repr(self), html_fragments.soft(" · ".join(facts)))
        )

    def __iter__(self) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses `copy`, `deepcopy` and `pickle`, because two copies would share the prefetched batches."""
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled: its threads and processes work for one consumer. "
            "For another iterator at the same position: other = iter(loader); other.set_state(iterator.get_state())."
        )

    def _alone(self, work: Callable[[], ResultT]) -> ResultT:
        """Returns the result of work that one call at a time may do.

        A flag costs less than a lock. CPython switches threads and runs signal handlers only at calls and backward
        jumps. There are none between the test of the flag and the `try`, or in `finally`. So two calls never pass, and
        the flag is always reset, even if a handler raises an exception.

        Raises:
            ValueError: another call is in progress.
            Exception: an error of the work.
        """
        is_in_use, self._is_in_use = self._is_in_use, True
        if is_in_use:
            raise ValueError(
                "This iterator is in use: another thread, or the code that a signal handler interrupted, is fetching "
                "its next batch. Use it in one thread at a time: take a lock around next(iterator), or give each "
                "thread its own iter(loader) over its own shard."
            )
        try:
            return work()
        finally:
            self._is_in_use = False
