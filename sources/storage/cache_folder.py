"""The user's cache folder: `$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else `~/.cache/millstream`.

It holds index files, and by default the copies of a `FileCache` in the subfolder `files`. Index files that were
not used for 90 days are removed when a process writes its first index there.
"""

import contextlib
import functools
import os
import re
import stat
import time

from millstream.sources.digests import digest
from millstream.sources.remote.urls import is_url, without_query

_INDEX_FILE = re.compile(r".+\.[0-9a-f]{16}\.[a-z-]+-index|\..+-index\.[0-9a-f]{12}\.part", re.DOTALL)
"""The names of index files in the cache, and those of incomplete ones, which killed processes leave."""

UNUSED_DAYS = 90
_DAY_SECONDS = 86_400.0
_MAX_NAME = 60
"""Limit of the part of a cached file's name that is taken from the original name."""


def cache_folder() -> str:
    if own := os.environ.get("MILLSTREAM_CACHE"):
        return os.path.abspath(own)  # noqa: PTH100  (paths are strings throughout)
    # The XDG Base Directory Specification says to ignore a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # noqa: PTH117
        base = os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118
    return os.path.join(base, "millstream")  # noqa: PTH118


def cached_name(path: str, version: bytes = b"") -> str:
    """Returns the name in the cache for a file, or for one version of an object: readable, and unique by a digest."""
    plain = without_query(path) if is_url(path) else path
    return f"{plain.rpartition('/')[2][:_MAX_NAME] or 'records'}.{digest(8, os.fsencode(plain), version).hex()}"


def mark_used(descriptor: int) -> None:
    """Sets the modification time of an open index file, its time of last use, unless that is less than a day ago."""
    with contextlib.suppress(OSError):  # It may belong to another user.
        if time.time() - os.fstat(descriptor).st_mtime > _DAY_SECONDS:
            os.utime(descriptor)


def prepare_cache_folder() -> None:
    """Creates the cache folder, and once per process removes index files that were not used for `UNUSED_DAYS`."""
    folder = cache_folder()
    os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103
    _remove_unused(folder)


@functools.cache
def _remove_unused(folder: str) -> None:
    limit = time.time() - UNUSED_DAYS * _DAY_SECONDS
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _INDEX_FILE.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_mtime < limit:
                        os.unlink(entry.path)  # noqa: PTH108
