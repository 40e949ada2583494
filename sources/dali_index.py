"""The index that NVIDIA's `tfrecord2idx` writes of a TFRecord file: a line "offset size" for each record.

DALI reads TFRecord files with it, and so does the package `tfrecord`. Where it lies beside the file and fits, nothing
has to be looked for: of a terabyte of small records on network storage, only some headers are read.
"""

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from millstream.sources.files.scan import Scan
from millstream.sources.storage.urls import is_url

_DIGITS_AND_BLANKS = b"0123456789 \r\n"

_LOOKED_AT = 64
"""How many records are compared."""


def dali_offsets(scan: Scan, sizes_at: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> NDArray[np.int64] | None:
    """Returns where the records of a file begin, and at last where it ends, or None if no index says so.

    The index of `a.tfrecord` is `a.tfrecord.idx` or `a.idx`. It must be no older than the file, its records must fill
    the file, and some of them, spread evenly, must have the sizes that their headers say. One that does not fit is
    named in the log, and not used.

    Args:
        scan: the file.
        sizes_at: returns how long the records at some places are, with all that frames them; -1 where none begins.
    """
    if is_url(scan.path):
        return None
    for place in dict.fromkeys([f"{scan.path}.idx", f"{os.path.splitext(scan.path)[0]}.idx"]):  # noqa: PTH122
        try:
            with open(place, "rb") as file:  # noqa: PTH123  (paths are strings throughout)
                is_older = os.fstat(file.fileno()).st_mtime_ns < os.stat(scan.path).st_mtime_ns  # noqa: PTH116
                content = b"" if is_older else file.read()
        except OSError:
            continue  # There is none.
        offsets = None if is_older else _parsed(content, scan.size)
        if offsets is not None and _agrees(offsets, sizes_at):
            return offsets
        import logging  # noqa: PLC0415  (takes long to import)

        reason = "is older than" if is_older else "is not the index of"
        logging.getLogger("millstream").info("millstream: %r %s %r, and is not used.", place, reason, scan.path)
    return None


def _parsed(content: bytes, size: int) -> NDArray[np.int64] | None:
    """Returns the offsets, with the end of the file, if they are pairs of numbers that fill it."""
    if content.translate(None, _DIGITS_AND_BLANKS) or not content.strip():
        return None
    numbers = np.fromstring(content, np.int64, sep=" ")
    if len(numbers) % 2:
        return None
    starts, sizes = numbers.reshape(-1, 2).T
    offsets = np.append(starts, size)
    fills_it = offsets[0] == 0 and (sizes > 0).all() and (offsets[:-1] + sizes == offsets[1:]).all()
    return offsets if fills_it else None


def _agrees(offsets: NDArray[np.int64], sizes_at: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> bool:
    """Returns whether some records begin where the index says so, and are as long."""
    some = np.unique(np.linspace(0, len(offsets) - 2, _LOOKED_AT, dtype=np.int64))
    return bool((sizes_at(offsets[some]) == offsets[some + 1] - offsets[some]).all())
