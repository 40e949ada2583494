"""How states are stored in a checkpoint's folder: one small JSON file for each JAX process.

Folders are whatever Orbax hands over (`epath.Path`, for buckets too) or a `pathlib.Path`: only what both have is used.

Every process looks at all the states, not at its own alone: so all of them refuse the same checkpoints. If only one
did, the others would wait for it in Orbax's barrier, until JAX's own timeout ends them minutes later.
"""

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.state import LoaderState
from millstream.sharding import jax_process

READS_AT_ONCE = 16
"""How many states are read at the same time: in a bucket, each of them takes its tens of milliseconds."""
_NAME = re.compile(r"process_(0|[1-9]\d{0,8})-of-([1-9]\d{0,8})\.json", re.ASCII)


def write_state(folder: Any, state: bytes) -> None:
    """Writes this process's state into a checkpoint's folder, which Orbax makes appear as a whole or not at all."""
    (folder / _name(*jax_process())).write_bytes(state)


def read_state(folder: Any) -> bytes:
    """Returns the state that this process resumes from: its own or, of another number of processes, the first one's.

    Processes of a 1:1 pipeline are at the same position, so any process can use the first one's state. Those of another
    pipeline are not: `set_state` refuses a state that another shard saved.

    Raises:
        CheckpointError: a state is missing or cannot be read, or the states of another number of processes are at
            different positions.
    """
    index, count = jax_process()
    own = _name(index, count)
    raw = _read_all(folder, own)
    states = {name: _decode(folder, name, text) for name, text in raw.items()}
    if own in raw:
        return raw[own]
    _check_same_position(folder, states)
    return raw[min(raw)]


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


def _decode(folder: Any, name: str, raw: bytes) -> LoaderState:
    """Returns the state in a file's content; the error of one that cannot be read names the file."""
    try:
        return LoaderState.decode(raw)
    except CheckpointError as error:
        error.add_note(f"millstream: in {folder / name}.")
        raise


def _check_same_position(folder: Any, states: Mapping[str, LoaderState]) -> None:
    """Raises unless all 1:1 pipelines among the states are at the same position."""
    positions = {state.position: name for name, state in states.items() if state.stream.one_to_one}
    if len(positions) > 1:
        listed = ", ".join(f"{name} at {position}" for position, name in sorted(positions.items()))
        raise CheckpointError(
            f"The loader states in {folder} are at different positions ({listed}), so another number of processes "
            "cannot resume from all of them at once. Save where all processes have taken the same number of batches, "
            "or restore with as many processes as saved."
        )
