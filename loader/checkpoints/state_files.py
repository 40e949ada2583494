"""The files of states in a checkpoint's folder: one small JSON file per JAX process.

Folders are of Orbax's type (`epath.Path`, buckets included) or a `pathlib.Path`. Only their common methods are used.

Every process reads all states, not only its own, so all processes refuse the same checkpoints. If only one did, the
others would wait for it in Orbax's barrier until JAX's timeout, minutes later.
"""

import json
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.state import LoaderState
from millstream.sharding import jax_process

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
        iterator.set_state(_read_own_state(folder), **options)
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
    own = _name(*jax_process())
    raw = _read_all(folder, own)
    for name, text in raw.items():
        try:
            LoaderState.decode(text)
        except CheckpointError as error:
            error.add_note(f"millstream: in {folder / name}.")
            raise
    return [raw[own]] if own in raw else list(dict.fromkeys(raw.values()))


def _read_own_state(folder: Any) -> Any:
    own = _name(*jax_process())
    raw = _read_all(folder, own)
    if own not in raw:
        raise CheckpointError(
            f"{folder} holds no {own}, but {', '.join(sorted(raw))}. Restore the position of a dataset's iterator "
            "with the number of processes that saved it."
        )
    try:
        return json.loads(raw[own])
    except ValueError as error:
        raise CheckpointError(f"{folder / own} is not valid JSON: {error}.") from error


def _name(index: int, count: int) -> str:
    return f"process_{index}-of-{count}.json"


def _read_all(folder: Any, own: str) -> dict[str, bytes]:
    """Returns the content of every state in the folder, by file name. Raises an error if one is missing."""
    try:
        names = [path.name for path in folder.glob("process_*-of-*.json") if _NAME.fullmatch(path.name)]
        if not names:
            raise CheckpointError(
                f"{folder} holds no loader state: neither {own} nor another process_*-of-*.json. Pass the folder of "
                "the item."
            )
        # If every host saves to its own disk, a process finds only its own state.
        if names != [own]:
            _check_complete(folder, names)
        with ThreadPoolExecutor(READS_AT_ONCE, "millstream-states") as readers:
            contents = readers.map(lambda name: (folder / name).read_bytes(), names)
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
