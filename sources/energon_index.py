"""The index that NVIDIA's Megatron Energon writes of a WebDataset archive: `a.tar.idx`.

It is a uint64, little-endian, for each sample: where the headers of its first member begin; and one for the end. Where
it lies beside the archive and fits, the headers of the archive need not be gone through.
"""

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from millstream.sources.files.scan import Scan
from millstream.sources.storage.urls import is_url
from millstream.sources.tar_members import BLOCK_BYTES

_LOOKED_AT = 64
"""How many samples are compared."""


def energon_offsets(scan: Scan, keys_within: Callable[[int, int], list[str]]) -> NDArray[np.int64] | None:
    """Returns where the samples of an archive begin, and at last where they end, or None if no index says so.

    The index must be no older than the archive, and some samples, spread evenly, must be what it says: all members of
    one sample, and not of the one before. One that does not fit is named in the log, and not used.

    Args:
        scan: the archive.
        keys_within: returns the keys of the samples between two places, in order, once each; none where there is
            something else.
    """
    place = f"{scan.path}.idx"
    if is_url(scan.path):
        return None
    try:
        with open(place, "rb") as file:  # noqa: PTH123  (paths are strings throughout)
            is_older = os.fstat(file.fileno()).st_mtime_ns < os.stat(scan.path).st_mtime_ns  # noqa: PTH116
            content = b"" if is_older else file.read()
    except OSError:
        return None  # There is none.
    offsets = _parsed(content, scan.size)
    if offsets is not None and _agrees(offsets, scan.size, keys_within):
        return offsets
    import logging  # noqa: PLC0415  (takes long to import)

    reason = "is older than" if is_older else "is not the index of"
    logging.getLogger("millstream").info("millstream: %r %s %r, and is not used.", place, reason, scan.path)
    return None


def _parsed(content: bytes, size: int) -> NDArray[np.int64] | None:
    """Returns the offsets, if they are places of headers within an archive of this size."""
    if not content or len(content) % 8:
        return None
    offsets = np.frombuffer(content, "<u8").astype(np.int64)
    is_right = (offsets % BLOCK_BYTES == 0).all() and (np.diff(offsets) > 0).all() and 0 <= offsets[0] <= offsets[-1]
    return offsets if is_right and offsets[-1] <= size else None


def _agrees(offsets: NDArray[np.int64], size: int, keys_within: Callable[[int, int], list[str]]) -> bool:
    """Returns whether some samples are where the index says so, and none come after them."""
    count = len(offsets) - 1
    if not count:
        return False
    for number in np.unique(np.linspace(0, count - 1, _LOOKED_AT, dtype=np.int64)).tolist():
        keys = keys_within(int(offsets[number]), int(offsets[number + 1]))
        before = keys_within(int(offsets[number - 1]), int(offsets[number])) if number else []
        if len(keys) != 1 or keys == before:
            return False
    return not keys_within(int(offsets[-1]), size)
