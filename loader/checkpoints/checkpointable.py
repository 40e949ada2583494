"""Iterators that Orbax saves and restores, whatever their states are: the bytes of a loader, or a dataset's dict."""

import json
from collections.abc import Awaitable, Collection
from typing import Any

from millstream.errors import CheckpointError


class Checkpointable:
    """An iterator with `get_state`, `set_state` and `start_prefetch`, which Orbax's newer interface takes as it is.

    Attributes:
        states_are_bytes: whether its states are bytes; else they are dicts that JSON can hold.
    """

    states_are_bytes: bool = True

    def start_prefetch(self) -> None:
        """Begins to work ahead in the background and returns at once."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in a dict, `{"state": get_state()}`, for what saves PyTorch's `Stateful` objects."""
        return {"state": _as_any(self).get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Moves to the position in a dict that `state_dict` returned.

        Args:
            state_dict: what `state_dict()` returned, here or on another iterator over the same stream.

        Raises:
            CheckpointError: it is not such a dict, or its state is of another stream. The iterator is as it was.
        """
        if not isinstance(state_dict, dict) or state_dict.keys() != {"state"}:
            raise CheckpointError("The dict is not one that state_dict() returned: it must have the key 'state' alone.")
        _as_any(self).set_state(state_dict["state"])

    async def save(self, directory: Any) -> Awaitable[None]:
        """Saves the position as it is now, for Orbax's newer interface (`StatefulCheckpointable`).

        Args:
            directory: the folder that Orbax is making; awaited before it is written to.

        Returns:
            The writing, which Orbax awaits in the background.
        """
        from millstream.loader.checkpoints.state_files import write_state  # noqa: PLC0415  (takes long to import)

        state = encoded_state(self)

        async def write() -> None:
            write_state(await directory.await_creation(), state)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Moves to the position saved in a folder, for Orbax's newer interface (`StatefulCheckpointable`).

        Returns:
            The beginning of read-ahead, which Orbax awaits in the background.

        Raises:
            CheckpointError: the state is missing, unreadable or of another stream.
        """
        # Here, not in the background: there Orbax would turn a CheckpointError into one of its own about handlers.
        restore_state(self, directory)

        async def read_ahead() -> None:
            self.start_prefetch()

        return read_ahead()


def encoded_state(iterator: Checkpointable) -> bytes:
    """Returns what is written of an iterator's position: the state itself, or its JSON text."""
    state = _as_any(iterator).get_state()
    return state if iterator.states_are_bytes else json.dumps(state, allow_nan=False).encode()


def restore_state(
    iterator: Checkpointable, directory: Any, allow: Collection[str] = (), *, strict: bool = False
) -> None:
    """Moves an iterator to the position that this process has saved in a folder.

    Args:
        iterator: which one.
        directory: the folder.
        allow: differences to accept on purpose, where states are bytes.
        strict: whether to refuse code that has changed, where states are bytes.

    Raises:
        CheckpointError: the state is missing, unreadable or of another stream.
    """
    from millstream.loader.checkpoints.state_files import read_own_state, restore  # noqa: PLC0415  (as above)

    if iterator.states_are_bytes:
        restore(_as_any(iterator), directory, allow=allow, strict=strict)
    else:
        _as_any(iterator).set_state(read_own_state(directory))


def _as_any(iterator: Checkpointable) -> Any:
    """Returns the iterator: what its states are, each class says itself."""
    return iterator
