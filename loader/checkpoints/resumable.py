"""What every iterator of a loader offers, wherever its batches lie: a position that can be told, saved and sought."""

import abc
import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn, Self, TypeVar

from millstream.closing import Closing
from millstream.loader.checkpoints.checkpointable import Checkpointable

ResultT = TypeVar("ResultT")


class ResumableIterator(Checkpointable, Closing):
    """Yields batches, and knows its position among them: just after the last batch that it delivered."""

    _is_in_use = False
    """Whether a call is at what one at a time may do."""

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """The number of batches delivered since the beginning of the stream."""

    @property
    @abc.abstractmethod
    def epoch(self) -> int | None:
        """The epoch that the next batch begins in, from 0; None where the sampler has no epochs."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns how many batches are left; TypeError where that is not known."""

    def __bool__(self) -> bool:
        """Returns True: an iterator is one even where nothing is left, or it is not known how much."""
        return True

    @abc.abstractmethod
    def __next__(self) -> Any: ...

    @abc.abstractmethod
    def start_prefetch(self) -> None:
        """Begins to work ahead in the background and returns at once."""

    @abc.abstractmethod
    def get_state(self) -> Any:
        """Returns the position."""

    @abc.abstractmethod
    def set_state(self, state: Any, *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position recorded in a state."""

    @abc.abstractmethod
    def set_states(self, states: Iterable[bytes], *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position recorded in the states of all shards that saved together."""

    @abc.abstractmethod
    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` batches."""

    def _repr_html_(self) -> str:
        from millstream import html_fragments  # noqa: PLC0415  (for notebooks)

        facts: dict[str, object] = {"step": f"{self.step:,}"}
        if self.epoch is not None:
            facts["epoch"] = self.epoch
        with contextlib.suppress(TypeError):  # Where it is not known how many are left.
            facts["batches left"] = f"{len(self):,}"
        return html_fragments.figure(html_fragments.card("iterator", repr(self), html_fragments.words(facts)))

    def __iter__(self) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses `copy`, `deepcopy` and `pickle`: two copies would share what works ahead, and so the batches."""
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled: its threads and processes work for one consumer. "
            "For another iterator at the same position: other = iter(loader); other.set_state(iterator.get_state())."
        )

    def _alone(self, work: Callable[[], ResultT]) -> ResultT:
        """Returns what some work gives that one call at a time may do.

        It is marked without a lock, which costs less. CPython changes threads and runs handlers at calls and jumps back
        only, and there is none between the look at the mark and the `try`, or in `finally`: so two never pass, and no
        mark stays, whatever a handler raises.

        Raises:
            ValueError: another call is at such work.
            Exception: whatever the work raises.
        """
        is_in_use, self._is_in_use = self._is_in_use, True
        if is_in_use:
            raise ValueError(
                "This iterator is in use: another thread, or the code that a signal's handler interrupted, is fetching "
                "its next batch. Use it in one thread at a time: take a lock around next(iterator), or give each "
                "thread an iter(loader) of its own, of a shard of its own."
            )
        try:
            return work()
        finally:
            self._is_in_use = False
