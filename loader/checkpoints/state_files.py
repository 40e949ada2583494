"""How states are stored in a checkpoint's folder: one small JSON file for each JAX process.

Folders are whatever Orbax hands over (`epath.Path`, for buckets too) or a `pathlib.Path`: only what both have is used.

Every process looks at all the states, not at its own alone: so all of them refuse the same checkpoints. If only one
did, the others would wait for it in Orbax's barrier, until JAX's own timeout ends them minutes later.
"""

import json
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.state import LoaderState
from millstream.sharding import jax_process

if TYPE_CHECKING:
    from millstream.loader.checkpoints.resumable import ResumableIterator

READS_AT_ONCE = 16
"""How many states are read at the same time: in a bucket, each of them takes its tens of milliseconds."""
_NAME = re.compile(r"process_(0|[1-9]\d{0,8})-of-([1-9]\d{0,8})\.json", re.ASCII)


def write_state(folder: Any, state: bytes) -> None:
    """Writes this process's state into a checkpoint's folder, which Orbax makes appear as a whole or not at all."""
    (folder / _name(*jax_process())).write_bytes(state)


def restore(iterator: "ResumableIterator", folder: Any, *, allow: Collection[str] = (), strict: bool = False) -> None:
    """Moves an iterator to the position that was saved in a checkpoint's folder, by any number of processes.

    Raises:
        CheckpointError: a state is missing, cannot be read, or is of another stream; or those of another number of
            processes are not of the same step. The iterator is as it was.
    """
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
    """Returns the states that this process resumes from: its own or, of another number of processes, those of all.

    Processes that all read everything have saved the same: that is one state.

    Raises:
        CheckpointError: a state is missing or cannot be read.
    """
    own = _name(*jax_process())
    raw = _read_all(folder, own)
    for name, text in raw.items():
        _check(folder, name, text)
    return [raw[own]] if own in raw else list(dict.fromkeys(raw.values()))


def read_own_state(folder: Any) -> Any:
    """Returns the state of a dataset's iterator that this process has saved: what its JSON text says.

    Raises:
        CheckpointError: it is missing, or cannot be read.
    """
    own = _name(*jax_process())
    try:
        raw = _read_all(folder, own)
        if own not in raw:
            raise CheckpointError(
                f"{folder} holds no {own}, but {', '.join(sorted(raw))}: the position of a dataset's iterator can be "
                "restored by as many processes as have saved it."
            )
        return json.loads(raw[own])
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder / own} is not valid JSON: {error}.") from error


def _name(index: int, count: int) -> str:
    """Returns the name of the file in which a process keeps its state."""
    return f"process_{index}-of-{count}.json"


def _read_all(folder: Any, own: str) -> dict[str, bytes]:
    """Returns the content of every state in the folder by the name of its file, once all of them are there."""
    try:
        names = [path.name for path in folder.glob("process_*-of-*.json") if _NAME.fullmatch(path.name)]
        if not names:
            raise CheckpointError(f"{folder} holds no loader state: looked for {own} and other process_*-of-*.json.")
        # Where every host saves to a disk of its own, a process finds nothing but its own state there.
        if names != [own]:
            _check_complete(folder, names)
        with ThreadPoolExecutor(READS_AT_ONCE, "millstream-states") as readers:
            contents = readers.map(lambda name: (folder / name).read_bytes(), names)
            return dict(zip(names, contents, strict=True))
    except OSError as error:
        raise CheckpointError(f"The loader state in {folder} cannot be read: {error}") from error


def _check_complete(folder: Any, names: list[str]) -> None:
    """Raises unless these are the states of all processes that saved together."""
    counts = sorted({int(name.removesuffix(".json").rpartition("-")[2]) for name in names})
    if len(counts) > 1:
        raise CheckpointError(
            f"{folder} mixes loader states of {' and '.join(map(str, counts))} processes, and a checkpoint holds those "
            "of one number of processes: remove those that are not of this checkpoint."
        )
    missing = next((name for index in range(counts[0]) if (name := _name(index, counts[0])) not in names), None)
    if missing is not None:
        raise CheckpointError(
            f"{folder} is not complete: it was saved by {counts[0]} processes and holds {len(names)} of their loader "
            f"states; {missing} is missing. Restore an older checkpoint, or bring back the missing files."
        )


def _check(folder: Any, name: str, raw: bytes) -> None:
    """Raises unless a file's content is a state; the error names the file."""
    try:
        LoaderState.decode(raw)
    except CheckpointError as error:
        error.add_note(f"millstream: in {folder / name}.")
        raise
