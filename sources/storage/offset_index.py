"""Where the records of a file begin: an array of int64 that is made once, and mapped by everyone who reads the file.

The index of `data/a.txt` is `data/.a.txt.lines-index.npy`, whose name no pattern such as `data/*` matches. Where
nothing can be written beside the data, it is in `$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else
`~/.cache/millstream`; where that cannot be written to either, it is in memory. The index of an object in a store is in
the cache, too: its name there says which version of the object it is of, so that those of two versions do not meet.

An index file is a `.npy` of int64: `_HEAD` numbers that say what it is the index of, then the places where the records
begin, in order, and at last the place where the last one ends.

Guarantees:
    - An index is used only with the file that it was made of: same size, same time of the last change.
    - It appears under its name whole. Of several processes that make it at once, the first one's stays, and all use
      that: to take a file away that another host has mapped kills the process there, on network storage.
    - What lies at its name and is not an index of the file is made anew.
"""

import contextlib
import functools
import os
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.storage.new_files import new_file
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.urls import is_url, without_query

_LAYOUT = 1
"""The version of what is written here."""

_HEAD = 8
"""How many numbers come before the offsets: layout, version of the format's scan, size, time, number of records."""

_NPY_HEADER_BYTES = 128
"""What NumPy writes before a one-dimensional array of int64, of whatever length."""

_MAX_NAME = 60
"""How much of a file's name is in the name of its index in the cache, so that this is not too long."""

Offsets = NDArray[np.int64]
"""Where the records begin, and where the last one ends: shape (records + 1,), never falling."""


def find_offsets(path: str, kind: str, version: int, identity: FileIdentity) -> Offsets | None:
    """Returns the index of a file, mapped, or None if there is none that fits.

    Args:
        path: the file.
        kind: the name of what is indexed, such as `lines`.
        version: the version of how records are looked for.
        identity: which file the index must be of.
    """
    for place in _places(path, kind, identity.version):
        numbers = _numbers_at(place)
        if numbers is None:
            continue
        expected = _head(version, identity, len(numbers) - _HEAD - 1)
        if numbers[:_HEAD].tolist() != expected or not 0 <= numbers[_HEAD] <= numbers[-1] <= identity.size:
            continue
        return numbers[_HEAD:]
    return None


def indexed_size(url: str, kind: str, version: bytes) -> int | None:
    """Returns how many bytes a version of an object has, if its index is there to say so."""
    (place,) = _places(url, kind, version)
    numbers = _numbers_at(place)
    if numbers is None or numbers[0] != _LAYOUT or numbers[3] != FileIdentity.of_object(0, version).modified:
        return None
    return int(numbers[2])


def _numbers_at(place: str) -> Offsets | None:
    """Returns what an index file holds, mapped, or None if there is none, or something else."""
    try:
        numbers = np.load(place, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None  # Absent, not to be read, or not whole.
    if numbers.dtype != np.int64 or numbers.ndim != 1 or len(numbers) <= _HEAD:
        return None
    # Plain: each look at a subclass of arrays, as `np.load` gives it, takes a microsecond longer.
    return np.asarray(numbers)


def store_offsets(path: str, kind: str, version: int, identity: FileIdentity, chunks: Iterable[Any]) -> Offsets:
    """Writes the index of a file where it can, and returns it: mapped, or in memory of its own where it cannot.

    Args:
        path: the file.
        kind: the name of what is indexed.
        version: the version of how records are looked for.
        identity: which file it is the index of.
        chunks: the offsets, in order, in arrays. They are never in memory all at once.
    """
    with contextlib.ExitStack() as stack:
        place, file = _opened(stack, path, kind, version, identity)
        count = _write(file, chunks) - 1
        _write_head(file, _head(version, identity, count))
        if place is None:
            file.seek(_NPY_HEADER_BYTES + 8 * _HEAD)
            return np.fromfile(file, np.int64)
    if (offsets := find_offsets(path, kind, version, identity)) is not None:
        return offsets
    raise DataSourceError(f"The index of {path!r} was written to {place!r} and cannot be found there.")


def _opened(
    stack: contextlib.ExitStack, path: str, kind: str, version: int, identity: FileIdentity
) -> tuple[str | None, BinaryIO]:
    """Returns the first place whose folder takes a new file, with that file; None with one that has no name."""
    for place in _places(path, kind, identity.version):
        folder = os.path.dirname(place)  # noqa: PTH120
        with contextlib.suppress(OSError):
            if folder == cache_folder():
                os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103
            fits = functools.partial(_fits, path, kind, version, identity)
            return place, stack.enter_context(new_file(place, fits))
    import tempfile  # noqa: PLC0415  (takes its time)

    return None, stack.enter_context(tempfile.TemporaryFile())


def _fits(path: str, kind: str, version: int, identity: FileIdentity) -> bool:
    return find_offsets(path, kind, version, identity) is not None


def _places(path: str, kind: str, version: bytes) -> list[str]:
    """Returns where the index of a file may lie, the best place first."""
    suffix = f"{kind}-index.npy"
    if is_url(path):
        return [os.path.join(cache_folder(), f"{object_name(path, version)}.{suffix}")]  # noqa: PTH118
    folder, name = os.path.split(path)
    return [
        os.path.join(folder, f".{name}.{suffix}"),  # noqa: PTH118
        os.path.join(cache_folder(), f"{_cached_name(name, os.path.realpath(path))}.{suffix}"),  # noqa: PTH118
    ]


def object_name(url: str, version: bytes) -> str:
    """Returns the name in the cache of what is kept of one version of an object."""
    plain = without_query(url)
    return _cached_name(plain.rpartition("/")[2], plain, version)


def _cached_name(name: str, whole: str, version: bytes = b"") -> str:
    """Returns the beginning of a name, and a digest of what else tells files apart."""
    import hashlib  # noqa: PLC0415  (OpenSSL takes its time)

    return f"{name[:_MAX_NAME]}.{hashlib.blake2b(os.fsencode(whole) + version, digest_size=8).hexdigest()}"


def cache_folder() -> str:
    """Returns where what is made of files is kept, if not beside them."""
    if own := os.environ.get("MILLSTREAM_CACHE"):
        return os.path.abspath(own)  # noqa: PTH100
    # A relative one is to be ignored, says the XDG Base Directory Specification.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # noqa: PTH117
        base = os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118
    return os.path.join(base, "millstream")  # noqa: PTH118


def _write(file: BinaryIO, chunks: Iterable[Any]) -> int:
    """Writes the offsets to where they belong, and returns how many there are."""
    file.write(bytes(_NPY_HEADER_BYTES + 8 * _HEAD))
    count = 0
    for chunk in chunks:
        offsets = np.ascontiguousarray(chunk, np.int64)
        file.write(offsets.data)
        count += len(offsets)
    return count


def _write_head(file: BinaryIO, head: list[int]) -> None:
    file.seek(0)
    shape = (_HEAD + head[4] + 1,)
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": shape})
    if file.tell() != _NPY_HEADER_BYTES:
        raise AssertionError(f"NumPy's header has {file.tell()} bytes.")
    file.write(np.array(head, np.int64).data)
    file.flush()


def _head(version: int, identity: FileIdentity, count: int) -> list[int]:
    return [_LAYOUT, version, identity.size, identity.modified, count, 0, 0, 0]
