"""Saving and restoring a loader's position with Orbax, beside the model and in the same step.

    manager.save(step, args=ocp.args.Composite(
        model=ocp.args.StandardSave(model), loader=millstream.checkpoint.CheckpointSave(iterator)))
    manager.restore(step, args=ocp.args.Composite(
        model=ocp.args.StandardRestore(model), loader=millstream.checkpoint.CheckpointRestore(iterator)))

The only module that imports Orbax.
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, final

import orbax.checkpoint as ocp

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.checkpointable import Checkpointable, encoded_state, restore_state
from millstream.loader.checkpoints.state_files import write_state


@final
class CheckpointHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]  # Orbax's classes are untyped
    """Orbax's way to a loader's iterator; `CheckpointSave` and `CheckpointRestore` are what users pass.

    Examples:
        >>> import orbax.checkpoint as ocp
        >>> handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        >>> handlers.add("loader", millstream.checkpoint.CheckpointSave, millstream.checkpoint.CheckpointHandler())
    """

    async def async_save(
        self, directory: Any, item: Checkpointable | None = None, args: Any = None
    ) -> list[ocp.future.Future]:
        """Takes the iterator's state as it is at this moment, and returns the writing of it.

        Training waits for this function, but neither for the folder to be made nor for the writing.

        Args:
            directory: the folder that Orbax is making for this item.
            item: the iterator, where the caller uses Orbax's older interface; None where it is in args.
            args: a `CheckpointSave`; None where there is an item.

        Raises:
            TypeError: what is to be saved is not an iterator.
        """
        state = encoded_state(_iterator(item, args))

        async def write() -> None:
            write_state(directory, state)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="millstream_save")]

    def save(self, directory: Any, item: Checkpointable | None = None, args: Any = None) -> None:
        """Writes the iterator's state into the folder, at once.

        Args:
            directory: the folder of this item, which is there.
            item: the iterator, as in `async_save`.
            args: a `CheckpointSave`, as in `async_save`.

        Raises:
            TypeError: what is to be saved is not an iterator.
            OSError: the state cannot be written.
        """
        write_state(directory, encoded_state(_iterator(item, args)))

    def restore(self, directory: Any, item: Checkpointable | None = None, args: Any = None) -> Checkpointable:
        """Returns the iterator, set to the position that was saved and already reading ahead.

        Args:
            directory: the folder of this item.
            item: the iterator, where the caller uses Orbax's older interface; None where it is in args.
            args: a `CheckpointRestore`; None where there is an item, whose state is then taken as it is by default.

        Raises:
            CheckpointError: the state is missing, unreadable or of another stream. The iterator is as it was.
            TypeError: what is to be set is not an iterator.
        """
        iterator = _iterator(item, args)
        if args is None:
            restore_state(iterator, directory)
        else:
            restore_state(iterator, directory, args.allow, strict=args.strict)
        iterator.start_prefetch()
        return iterator

    def metadata(self, directory: Any) -> None:
        """Returns nothing: a position has no shapes.

        Args:
            directory: the folder of this item.
        """
        del directory

    def finalize(self, directory: Any) -> None:
        """Does nothing: `save` has written everything.

        Args:
            directory: the folder of this item.
        """
        del directory

    def close(self) -> None:
        """Does nothing: the iterator is its user's."""


@ocp.args.register_with_handler(CheckpointHandler, for_save=True)
@dataclasses.dataclass
class CheckpointSave(ocp.args.CheckpointArgs):  # type: ignore[misc]  # Orbax's classes are untyped
    """Says to Orbax: save the position of this iterator.

    Attributes:
        item: the iterator.

    Raises:
        TypeError: it is something else.

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
    """Says to Orbax: set this iterator to the position that was saved, by this number of processes or another.

    A checkpoint without such an item is a CheckpointError, in place of Orbax's KeyError.

    Attributes:
        item: the iterator; it is changed, and is also what `restore` returns.
        allow: differences to accept on purpose, as in `DataLoaderIterator.set_state`.
        strict: whether to refuse code that has changed, as there.

    Raises:
        TypeError: the item is something else.

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
        _name_missing_items()


@functools.cache
def _name_missing_items() -> None:
    """Has Orbax raise a CheckpointError where a checkpoint lacks the item of a `CheckpointRestore`.

    Orbax looks for the items itself, and asks the handler of a missing one nothing: there is no other place to catch
    its KeyError than around its own method. Whatever else that does or raises is left as it is.
    """
    restore = ocp.CompositeCheckpointHandler.restore

    @functools.wraps(restore)
    def restore_or_name(self: Any, directory: Any, *positional: Any, **named: Any) -> Any:
        try:
            return restore(self, directory, *positional, **named)
        except KeyError as error:
            for args in (*positional, *named.values()):
                if isinstance(args, ocp.args.Composite):
                    _check_items(directory, args, error)
            raise

    ocp.CompositeCheckpointHandler.restore = restore_or_name


def _check_items(directory: Any, args: Any, error: KeyError) -> None:
    """Raises a CheckpointError if a checkpoint lacks an item that a `CheckpointRestore` asks for."""
    held = sorted(path.name for path in directory.iterdir() if path.is_dir())
    missing = [name for name, arg in args.items() if isinstance(arg, CheckpointRestore) and name not in held]
    if missing:
        raise CheckpointError(
            f'The checkpoint {directory} holds no item "{missing[0]}": it holds {", ".join(held) or "nothing"}. It was '
            "saved without the loader, or with it under another name. Restore the other items alone, and go to the "
            "step with iterator.seek(step)."
        ) from error


def _iterator(item: Checkpointable | None, args: Any) -> Checkpointable:
    """Returns the iterator, which Orbax's older interface hands over as it is and the newer one inside `args`."""
    return _check_iterator(getattr(args, "item", None) if item is None else item)


def _check_iterator(item: Any) -> Checkpointable:
    if not isinstance(item, Checkpointable):
        raise TypeError(
            f"millstream.checkpoint saves and restores iterators, got {type(item).__name__}: pass iter(loader), "
            "or what device_put made of it: the iterator that the training loop draws from."
        )
    return item
