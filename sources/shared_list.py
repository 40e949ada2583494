"""Lists in named shared memory, with which processes pass records to each other, as in Grain."""

from collections.abc import Sequence
from multiprocessing.shared_memory import ShareableList, SharedMemory
from typing import Any


def shared_list(records: Sequence[Any] | None, name: str) -> tuple[list[Any], SharedMemory]:
    """Copies records into shared memory of a name, or reads those that another process has copied there.

    Args:
        records: integers, floats, bools, text, bytes and None; None instead of the list to read.
        name: the name of the memory.

    Returns:
        The records, and the memory, to unlink it.
    """
    for key, record in enumerate(() if records is None else records):
        if not _is_storable(record):
            raise TypeError(
                f"Records of InMemoryDataSource(records, name={name!r}) must be 64-bit integers, floats, bools, None, "
                f"or text and bytes that end with no zero byte, got {type(record).__name__} as record {key}."
            )
    try:
        shared: ShareableList[Any] = ShareableList(records, name=name)
    except FileNotFoundError as error:
        error.add_note(f"Create InMemoryDataSource(records, name={name!r}) first, in a process of this machine.")
        raise
    copied = [shared[key] for key in range(len(shared))]
    shared.shm.close()
    return copied, shared.shm


def _is_storable(record: Any) -> bool:
    kind = type(record)
    if kind in (str, bytes):
        return bool(record[-1:] not in ("\0", b"\0"))
    return record is None or kind in (float, bool) or (kind is int and -(2**63) <= record < 2**63)
