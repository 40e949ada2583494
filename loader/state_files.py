"""Where states lie in a checkpoint's folder: one small JSON file for each JAX process.

Folders are whatever Orbax hands over (`epath.Path`, for buckets too) or a `pathlib.Path`: only what both have is used.
"""

from typing import Any

from millstream.errors import CheckpointError
from millstream.sharding import jax_process


def write_state(folder: Any, state: bytes) -> None:
    """Writes this process's state into a checkpoint's folder, which Orbax makes appear as a whole or not at all."""
    index, count = jax_process()
    (folder / f"process_{index}-of-{count}.json").write_bytes(state)


def read_state(folder: Any) -> bytes:
    """Returns the state that this process goes on from: its own or, of another number of processes, the first one's.

    All processes of a 1:1 pipeline are at the same place, so any file will do. Where it will not, `set_state` refuses.

    Raises:
        CheckpointError: the folder holds no state, or it cannot be read.
    """
    index, count = jax_process()
    try:
        names = sorted(path.name for path in folder.glob("process_*-of-*.json"))
        own = f"process_{index}-of-{count}.json"
        if not names:
            raise CheckpointError(f"{folder} holds no loader state: looked for {own} and other process_*-of-*.json.")
        return (folder / (own if own in names else names[0])).read_bytes()  # type: ignore[no-any-return]
    except OSError as error:
        raise CheckpointError(f"The loader state in {folder} cannot be read: {error}") from error
