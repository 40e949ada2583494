"""Saving and restoring a loader's position with Orbax, together with the model of the same step.

    manager.save(step, args=ocp.args.Composite(
        model=ocp.args.StandardSave(model), loader=millstream.checkpoint.CheckpointSave(iterator)))
    manager.restore(step, args=ocp.args.Composite(
        model=ocp.args.StandardRestore(model), loader=millstream.checkpoint.CheckpointRestore(iterator)))

The only module that imports Orbax.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, final

import orbax.checkpoint as ocp

from millstream.loader.checkpoints.checkpointable import Checkpointable, encoded_state, restore_state, write_state


@final
class CheckpointHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]  # Orbax's classes are untyped
    """The Orbax handler of iterators. Users pass `CheckpointSave` and `CheckpointRestore`.

    Examples:
        >>> import orbax.checkpoint as ocp
        >>> handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        >>> handlers.add("loader", millstream.checkpoint.CheckpointSave, millstream.checkpoint.CheckpointHandler())
    """

    async def async_save(self, directory: Any, args: "CheckpointSave") -> list[ocp.future.Future]:
        """Takes the iterator's current state, and returns the write.

        Training waits for this function, but not until Orbax has created the folder or the write has ended.
        """
        state = encoded_state(args.item)

        async def write() -> None:
            write_state(directory, state)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="millstream_save")]

    def save(self, directory: Any, args: "CheckpointSave") -> None:
        """Writes the iterator's state into the folder.

        Raises:
            OSError: the state cannot be written.
        """
        write_state(directory, encoded_state(args.item))

    def restore(self, directory: Any, args: "CheckpointRestore") -> Checkpointable:
        """Returns the iterator, moved to the saved position and already prefetching.

        Raises:
            CheckpointError: the state is missing, unreadable or of another stream. The iterator is unchanged.
        """
        restore_state(args.item, directory, allow=args.allow, strict=args.strict)
        args.item.start_prefetch()
        return args.item


@ocp.args.register_with_handler(CheckpointHandler, for_save=True)
@dataclasses.dataclass
class CheckpointSave(ocp.args.CheckpointArgs):  # type: ignore[misc]  # Orbax's classes are untyped
    """The argument with which Orbax saves the position of an iterator.

    Attributes:
        item: the iterator.

    Raises:
        TypeError: the item is not an iterator.

    Examples:
        >>> from pathlib import Path
        >>> import orbax.checkpoint as ocp
        >>> batches = iter(millstream.load(range(100), batch_size=4))
        >>> _ = next(batches)
        >>> with ocp.CheckpointManager(Path("checkpoints").resolve()) as manager:
        ...     args = ocp.args.Composite(loader=millstream.checkpoint.CheckpointSave(batches))
        ...     print(manager.save(batches.step, args=args))
        True
    """

    item: Checkpointable

    def __post_init__(self) -> None:
        _check_iterator(self.item)


@ocp.args.register_with_handler(CheckpointHandler, for_restore=True)
@dataclasses.dataclass
class CheckpointRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]  # Orbax's classes are untyped
    """The argument with which Orbax moves an iterator to the saved position, of any number of processes.

    Attributes:
        item: the iterator. It is changed, and `restore` returns it.
        allow: differences to accept on purpose, as in `DataLoaderIterator.set_state`.
        strict: True to refuse changed content, too.

    Raises:
        TypeError: the item is not an iterator.

    Examples:
        >>> from pathlib import Path
        >>> import orbax.checkpoint as ocp
        >>> loader = millstream.load(range(100), batch_size=4)
        >>> batches, resumed = iter(loader), iter(loader)
        >>> batches.seek(7)
        >>> with ocp.CheckpointManager(Path("checkpoints").resolve()) as manager:
        ...     _ = manager.save(7, args=ocp.args.Composite(loader=millstream.checkpoint.CheckpointSave(batches)))
        ...     args = ocp.args.Composite(loader=millstream.checkpoint.CheckpointRestore(resumed))
        ...     _ = manager.restore(7, args=args)
        >>> resumed.step
        7
    """

    item: Checkpointable
    allow: Collection[str] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        _check_iterator(self.item)


def _check_iterator(item: Any) -> None:
    if not isinstance(item, Checkpointable):
        raise TypeError(
            f"millstream.checkpoint saves and restores iterators, got {type(item).__name__}. Pass the iterator of the "
            "training loop: iter(loader), or the result of device_put."
        )
