"""Iterators that Orbax saves and restores. States are bytes (loaders) or dicts (datasets)."""

import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from millstream.core.closing import Closing
from millstream.errors import CheckpointError

ResultT = TypeVar("ResultT")


class Checkpointable:
    """An iterator with `get_state`, `set_state` and `start_prefetch`, which Orbax's newer interface accepts directly.

    Attributes:
        states_are_bytes: True if its states are bytes, False if they are dicts that JSON can hold.
    """

    states_are_bytes: bool = True

    def __bool__(self) -> bool:
        """Returns True, even if nothing is left, or the number of elements left is not known."""
        return True

    def __iter__(self) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses `copy`, `deepcopy` and `pickle`, because two copies would share what is prefetched."""
        made_of = "loader" if self.states_are_bytes else "dataset"
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled: its threads and processes work for one consumer. "
            f"For another iterator at the same position: other = iter({made_of}); "
            "other.set_state(iterator.get_state())."
        )

    def get_state(self) -> Any:
        raise NotImplementedError

    def set_state(self, state: Any) -> None:
        raise NotImplementedError

    def start_prefetch(self) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in a dict, `{"state": get_state()}`, as PyTorch's `Stateful` protocol wants it."""
        return {"state": self.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Moves to the position in a dict that `state_dict` returned.

        Args:
            state_dict: a result of `state_dict()`, of this or another iterator over the same stream.

        Raises:
            CheckpointError: the dict is anything else, or its state is of another stream. The iterator is unchanged.
        """
        if not isinstance(state_dict, dict) or state_dict.keys() != {"state"}:
            raise CheckpointError("The dict must have only the key 'state'. Pass a result of state_dict().")
        self.set_state(state_dict["state"])

    async def save(self, directory: Any) -> Awaitable[None]:
        """Saves the current position, for Orbax's newer interface (`StatefulCheckpointable`).

        Args:
            directory: the folder that Orbax is creating; awaited before the write.

        Returns:
            The write, which Orbax awaits in the background.
        """
        from millstream.loader.checkpoints.state_files import write_state  # noqa: PLC0415  (lazy: only Orbax needs it)

        state = encoded_state(self)

        async def write() -> None:
            write_state(await directory.await_creation(), state)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Moves to the position that a folder holds, for Orbax's newer interface (`StatefulCheckpointable`).

        Returns:
            The start of read-ahead, which Orbax awaits in the background.

        Raises:
            CheckpointError: the state is missing, unreadable or of another stream.
        """
        from millstream.loader.checkpoints.state_files import restore_state  # noqa: PLC0415  (as above)

        # Not in the background, where Orbax would replace a CheckpointError by an error about handlers.
        restore_state(self, directory)

        async def read_ahead() -> None:
            self.start_prefetch()

        return read_ahead()


class Exclusive:
    """An iterator with work that one call at a time may do."""

    _in_use: ClassVar[str] = (
        "This iterator is in use: another thread, or the code that a signal handler interrupted, is fetching its next "
        "batch. Use it in one thread at a time: take a lock around next(iterator), or give each thread its own "
        "iter(loader) over its own shard."
    )
    """The text of the error if another call is in progress."""
    _is_in_use = False
    """True while a call is in progress that excludes others."""

    def _alone(self, work: Callable[[], ResultT]) -> ResultT:
        """Returns the result of work that one call at a time may do.

        A flag costs less than a lock. CPython switches threads and runs signal handlers only at calls and backward
        jumps. There are none between the test of the flag and the `try`, or in `finally`. So two calls never pass, and
        the flag is always reset, even if a handler raises an exception.
        """
        is_in_use, self._is_in_use = self._is_in_use, True
        if is_in_use:
            raise ValueError(self._in_use)
        try:
            return work()
        finally:
            self._is_in_use = False


class ResumableIterator(Checkpointable, Exclusive, Closing):
    """Yields batches, and knows its position among them: just after the last batch that it delivered."""

    def _repr_html_(self) -> str:
        from millstream.core import html_fragments  # noqa: PLC0415  (lazy: only notebooks need it)

        own: Any = self
        facts = []
        with contextlib.suppress(TypeError):  # A stream may have no step.
            facts.append(f"step {own.step:,}")
        if own.epoch is not None:
            facts.append(f"epoch {own.epoch}")
        with contextlib.suppress(TypeError):  # The number is unknown.
            facts.append(f"batches left {len(own):,}")
        return html_fragments.figure(
            html_fragments.card("iterator", repr(self), html_fragments.soft(" · ".join(facts)))
        )


def encoded_state(iterator: Checkpointable) -> bytes:
    """Returns an iterator's state as bytes: the state itself, or its JSON text."""
    state = iterator.get_state()
    return bytes(state) if iterator.states_are_bytes else json.dumps(state, allow_nan=False).encode()
