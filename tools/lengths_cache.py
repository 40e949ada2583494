"""Lengths of records, kept between runs: an array of int64 in a `.npy` file that nothing can be mistaken for.

A mark, 32 hexadecimal digits, says what the lengths are of. It is part of the file's name, so what has another mark
lies elsewhere, and is never in the way. The lengths of `data/a.txt` and those that follow it are in
`data/.a.txt.lengths-MARK.npy`. Where nothing can be written beside the data, or they lie in no file, the lengths are in
the cache folder: `$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else `~/.cache/millstream`.

Guarantees:
    - A file appears under its name whole. Nobody maps it, so a later one may take its place at any time.
    - Any other thing at its name is as good as absent: an array of another length, a link, a pipe, and a file that
      neither this user nor root nor the owner of the data made.
"""

import contextlib
import io
import os

import numpy as np
from numpy.typing import NDArray

from millstream.sources.storage.new_files import new_file
from millstream.sources.storage.offset_index import cache_folder, open_trusted

_MAX_NAME = 60
"""How much of a file's name is in the name of its lengths, so that this is not too long."""


def find_lengths(path: str | None, mark: str, count: int) -> NDArray[np.int64] | None:
    """Returns the lengths that are kept, or None if there are none.

    Args:
        path: the first file of the records; None if there is none.
        mark: what the lengths are of.
        count: how many there must be.
    """
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (count,)})
    start = header.getvalue()
    owner = 0
    with contextlib.suppress(OSError):
        owner = os.stat(path or "").st_uid  # noqa: PTH116  (paths are strings throughout)
    for place in _places(path, mark):
        try:
            with open(open_trusted(place, owner), "rb") as file:  # noqa: PTH123  (a descriptor)
                # Compared, not parsed: what has that name may be anything.
                content = file.read(len(start) + 8 * count + 1)
        except OSError:
            continue  # Absent, or not to be read.
        if len(content) == len(start) + 8 * count and content.startswith(start):
            lengths = np.frombuffer(content, "<i8", offset=len(start)).astype(np.int64)
            if lengths.min(initial=0) >= 0:
                return lengths
    return None


def store_lengths(path: str | None, mark: str, lengths: NDArray[np.int64]) -> str | None:
    """Keeps lengths where that is possible, and returns the file's path, or None if no folder takes it."""
    for place in _places(path, mark):
        with contextlib.suppress(OSError):
            if place.startswith(cache_folder()):
                os.makedirs(cache_folder(), mode=0o700, exist_ok=True)  # noqa: PTH103
            with new_file(place) as file:
                np.save(file, lengths)
            return place
    return None


def forget_lengths(path: str, mark: str) -> None:
    """Removes the lengths that are kept under a mark."""
    for place in _places(path, mark):
        with contextlib.suppress(OSError):
            os.unlink(place)  # noqa: PTH108


def _places(path: str | None, mark: str) -> list[str]:
    """Returns where the lengths may lie, the best place first."""
    folder, name = os.path.split(path or "")
    beside = [os.path.join(folder, f".{name}.lengths-{mark}.npy")] if path else []  # noqa: PTH118
    # The mark says it all: in the cache, the name is for people.
    return [*beside, os.path.join(cache_folder(), f"{name[:_MAX_NAME] or 'records'}.lengths-{mark}.npy")]  # noqa: PTH118
