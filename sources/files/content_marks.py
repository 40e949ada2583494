"""Digests of the content of files: a file of the same name and size may have other records."""

import contextlib
import zlib
from collections.abc import Mapping

import numpy as np

from millstream.sources.remote.urls import is_url
from millstream.sources.storage.byte_files import LocalFile
from millstream.sources.storage.paths import FileIdentity

MARKED_FILES = 64
"""The maximum number of files in a digest; of more files, evenly spread ones."""

_END_BYTES = 4096


def marks_of_files(files: Mapping[str, FileIdentity]) -> dict[str, str]:
    """Returns a digest of the first and last 4 KB of files, and one of the versions of objects in stores."""
    paths = list(files)
    rows = np.unique(np.linspace(0, len(paths) - 1, MARKED_FILES, dtype=np.int64)).tolist()
    ends = versions = 0
    for path in (paths[row] for row in rows):
        if is_url(path):
            versions = zlib.crc32(files[path].version, versions + 1)
        else:
            ends = _crc_of_ends(path, files[path].size, ends + 1)
    marks = {"first_and_last_bytes": ends, "versions": versions}
    return {name: f"#{mark:08x}" for name, mark in marks.items() if mark}


def _crc_of_ends(path: str, size: int, crc: int) -> int:
    """Returns the CRC continued over the first and last bytes of a file. Errors are raised when the file is read."""
    with contextlib.suppress(OSError), contextlib.closing(LocalFile(path)) as file:
        for start in (0, max(0, size - _END_BYTES)):
            crc = zlib.crc32(file.read(start, _END_BYTES), crc)
    return crc
