"""Iterators that Orbax saves and restores, and the files of their states: one small JSON file per JAX process.

States are bytes (loaders) or dicts (datasets). Folders are of Orbax's type (`epath.Path`, buckets included) or a
`pathlib.Path`. Only their common methods are used.

Every process reads all states, not only its own, so all processes refuse the same checkpoints. If only one did, the
others would wait for it in Orbax's barrier until JAX's timeout, minutes later.
"""

import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from millstream.core.closing import Closing
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import FORMAT, opened_dict, unreadable
from millstream.loader.checkpoints.state import LoaderState
from millstream.sharding import jax_process
from millstream.sources.reads import map_in_threads
from millstream.sources.remote.urls import is_url

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
        iterable = "loader" if self.states_are_bytes else "dataset"
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled: its threads and processes work for one consumer. "
            f"For another iterator at the same position: other = iter({iterable}); "
            "other.set_state(iterator.get_state())."
        )

    def get_state(self) -> Any:
        raise NotImplementedError

    def set_state(self, state: Any) -> None:
        raise NotImplementedError

    def start_prefetch(self) -> None:
        raise NotImplementedError

    def _unsealed_state(self) -> Any:
        """Returns the position as a value that can be compared, and that `_sealed` turns into a state."""
        return self.get_state()

    def _sealed(self, unsealed: Any) -> Any:
        """Returns the state of a result of `_unsealed_state`. Any thread may call it."""
        return unsealed

    def _return_to(self, unsealed: Any) -> None:
        """Moves to a result of `_unsealed_state` of this iterator."""
        self.set_state(unsealed)

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

        iterator: Any = self
        facts = []
        with contextlib.suppress(TypeError):  # A stream may have no step.
            facts.append(f"step {iterator.step:,}")
        if iterator.epoch is not None:
            facts.append(f"epoch {iterator.epoch}")
        with contextlib.suppress(TypeError):  # The number is unknown.
            facts.append(f"batches left {len(iterator):,}")
        return html_fragments.figure(
            html_fragments.card("iterator", repr(self), html_fragments.soft(" · ".join(facts)))
        )


def encoded_state(iterator: Checkpointable) -> bytes:
    """Returns an iterator's state as bytes: the state itself, or its JSON text."""
    state = iterator.get_state()
    return bytes(state) if iterator.states_are_bytes else json.dumps(state, allow_nan=False).encode()


READS_AT_ONCE = 16
"""The number of states that are read concurrently, because each read from a bucket takes tens of milliseconds."""
_NAME = re.compile(r"process_(0|[1-9]\d{0,8})-of-([1-9]\d{0,8})\.json", re.ASCII)


def write_state(folder: Any, state: bytes) -> None:
    (folder / _name(*jax_process())).write_bytes(state)


def restore_state(iterator: Any, folder: Any, *, allow: Collection[str] = (), strict: bool = False) -> None:
    """Moves an iterator to the position that a checkpoint's folder holds.

    A loader resumes from the states of any number of processes, a dataset from the state that this process saved.
    The iterator is unchanged by a CheckpointError: a state is missing, unreadable, or of another stream; or the states
    of another number of processes differ in step.
    """
    if not iterator.states_are_bytes:
        # A user's own iterator may have neither.
        options = {name: value for name, value in (("allow", allow), ("strict", strict)) if value}
        iterator.set_state(_read_state_of_process(folder), **options)
        return
    states = read_states(folder)
    if len(states) == 1:
        iterator.set_state(states[0], allow=allow, strict=strict)
        return
    try:
        iterator.set_states(states, allow=allow, strict=strict)
    except CheckpointError as error:
        error.add_note(f"millstream: in {folder}, saved by another number of processes.")
        raise


def read_states(folder: Any) -> list[bytes]:
    """Returns the states from which this process resumes: its own, or all if the number of processes has changed.

    Equal states, of processes that all read everything, are returned once.
    """
    expected = _name(*jax_process())
    raw = _read_all(folder, expected)
    _decoded(folder, raw, LoaderState.decode)
    return [raw[expected]] if expected in raw else list(dict.fromkeys(raw.values()))


def _read_state_of_process(folder: Any) -> Any:
    expected = _name(*jax_process())
    found = _decoded(folder, _read_all(folder, expected), _dict_of)
    if expected not in found:
        raise CheckpointError(
            f"{folder} holds no {expected}, but {', '.join(sorted(found))}. Restore the position of a dataset's "
            "iterator with the number of processes that saved it."
        )
    return found[expected]


def _decoded(folder: Any, raw: Mapping[str, bytes], decode: Callable[[bytes], Any]) -> dict[str, Any]:
    """Returns the states of all processes, by file name. An unreadable one is a CheckpointError in each process."""
    found = {}
    for name, text in raw.items():
        try:
            found[name] = decode(text)
        except CheckpointError as error:
            error.add_note(f"millstream: in {folder / name}.")
            raise
    return found


def _dict_of(text: bytes) -> Any:
    """Returns the state of a dataset's iterator, which is any value if the iterator is the user's."""
    try:
        state = json.loads(text)
    except ValueError as error:
        raise unreadable(f"it is not valid JSON ({error})") from error
    if isinstance(state, dict) and state.get("format") == FORMAT:
        opened_dict(state)
    return state


def _name(index: int, count: int) -> str:
    return f"process_{index}-of-{count}.json"


def _read_all(folder: Any, expected: str) -> dict[str, bytes]:
    """Returns the content of every state in the folder, by file name. Raises an error if one is missing."""
    try:
        names = [path.name for path in folder.glob("process_*-of-*.json") if _NAME.fullmatch(path.name)]
        if not names:
            raise CheckpointError(
                f"{folder} holds no loader state: neither {expected} nor another process_*-of-*.json. Pass the folder "
                "of the item."
            )
        # If every host saves to its own disk, a process finds only its own state; in a bucket, it would be incomplete.
        if names != [expected] or is_url(str(folder)):
            _check_complete(folder, names)
        contents = map_in_threads(lambda name: (folder / name).read_bytes(), names, READS_AT_ONCE, "millstream-states")
        return dict(zip(names, contents, strict=True))
    except OSError as error:
        raise CheckpointError(f"Cannot read the loader state in {folder}: {error}") from error


def _check_complete(folder: Any, names: list[str]) -> None:
    counts = sorted({int(name.removesuffix(".json").rpartition("-")[2]) for name in names})
    if len(counts) > 1:
        raise CheckpointError(
            f"{folder} mixes loader states of {' and '.join(map(str, counts))} processes. Remove the files that do not "
            "belong to this checkpoint."
        )
    found = set(names)
    missing = next((name for index in range(counts[0]) if (name := _name(index, counts[0])) not in found), None)
    if missing is not None:
        raise CheckpointError(
            f"{folder} is incomplete: {counts[0]} processes saved it, and it holds {len(names)} of their loader "
            f"states; {missing} is missing. Restore an older checkpoint, or the missing files."
        )
