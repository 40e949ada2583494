"""Arrays that lie in files mapped into memory: a worker maps the file itself, and not a byte is sent.

Where an array lies is asked of the system, which knows every map of this process, whoever made it: `numpy.memmap`,
`numpy.load(mmap_mode=…)`, `mmap.mmap`, Arrow. Elsewhere than on Linux, NumPy is asked, which knows its own.

Guarantees:
    * A worker sees the bytes that the trainer sees. Where that is not certain, an array crosses as bytes: private
      maps (`mode="c"`), of which pages may differ from the file, and files that were deleted or replaced.
    * A file that is replaced later, before a worker maps it, is an error there.
"""

import bisect
import functools
import mmap
import os
import re
import stat
import sys
import weakref
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.loader.transport.array_pickles import Reduced

SMALLEST_BYTES = 1 << 16
"""Smaller arrays cross as bytes: a map costs each worker a descriptor."""

_MAP = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) \S+ (\d+) +(/.*)")


class MappedFile(NamedTuple):
    """A part of a file that is mapped.

    Attributes:
        path: the file's name, absolute.
        device: of the file, as `os.stat` says.
        inode: of the file.
        start: where the part begins, a multiple of the page size.
        stop: where it ends, or the file does.
        is_writable: whether to map it for writing.
    """

    path: str
    device: int
    inode: int
    start: int
    stop: int
    is_writable: bool


class _Map(NamedTuple):
    """Addresses of this process that show a file."""

    start: int
    stop: int
    permissions: bytes
    offset: int
    inode: int
    path: str


class MappedFiles:
    """The files that are mapped into this process, as they are when first asked for."""

    def reduce(self, array: NDArray[Any]) -> Reduced | None:
        """Returns how to pickle an array without its bytes, None where it does not lie in a file, or is small."""
        if array.nbytes < SMALLEST_BYTES or array.dtype.hasobject:
            return None
        low, high = _bounds(array)
        found = self._find(array, low, high)
        if found is None:
            return None
        file, address = found
        place = int(array.__array_interface__["data"][0]) - address
        flags = array.flags.writeable, isinstance(array, np.memmap)
        return map_array, (tuple(file), place, array.dtype, array.shape, array.strides, *flags)

    def _find(self, array: NDArray[Any], low: int, high: int) -> tuple[MappedFile, int] | None:
        """Returns the file that addresses show, and the address of its part's first byte."""
        if sys.platform != "linux":
            return _numpys_file(array, high)
        number = bisect.bisect_right(self._starts, low) - 1
        found = self._maps[number] if number >= 0 else None
        if found is None or high > found.stop or found.permissions[3:] != b"s":
            return None
        file = _file_of(found.path, found.offset, found.stop - found.start, is_writable=array.flags.writeable)
        if file is None or file.inode != found.inode or high - found.start > file.stop - file.start:
            return None
        return file, found.start

    @functools.cached_property
    def _maps(self) -> list[_Map]:
        with open("/proc/self/maps", "rb") as lines:  # noqa: PTH123  (pathlib would read it in pieces of its own)
            return _merged([_Map(*_parsed(line)) for line in map(_MAP.match, lines.read().splitlines()) if line])

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [found.start for found in self._maps]


def _parsed(line: re.Match[bytes]) -> tuple[int, int, bytes, int, int, str]:
    start, stop, permissions, offset, inode, path = line.groups()
    # The system writes a line's end in a name in this way, and nothing else.
    name = os.fsdecode(path.replace(rb"\012", b"\n"))
    return int(start, 16), int(stop, 16), permissions, int(offset, 16), int(inode), name


def _merged(maps: list[_Map]) -> list[_Map]:
    """Returns maps of which those that continue one another are one: advice for a part of a map splits it."""
    merged: list[_Map] = []
    for following in maps:
        last = merged[-1] if merged else None
        if last is not None and following == last._replace(
            start=last.stop, stop=following.stop, offset=last.offset + last.stop - last.start
        ):
            merged[-1] = last._replace(stop=following.stop)
        else:
            merged.append(following)
    return merged


def _file_of(path: str, start: int, num_bytes: int, *, is_writable: bool) -> MappedFile | None:
    """Returns a part of a file, None where there is no such file."""
    try:
        status = os.stat(path)  # noqa: PTH116  (pathlib takes long to import)
    except OSError:
        return None
    stop = min(start + num_bytes, status.st_size)
    is_file = stat.S_ISREG(status.st_mode)
    return (
        MappedFile(path, status.st_dev, status.st_ino, start, stop, is_writable) if is_file and stop > start else None
    )


def _numpys_file(array: NDArray[Any], high: int) -> tuple[MappedFile, int] | None:
    """Returns the file that NumPy has mapped for an array, and the address of its part's first byte."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or not isinstance(root.base, mmap.mmap) or root.mode == "c":
        return None
    extra = root.offset % mmap.ALLOCATIONGRANULARITY
    address = int(root.__array_interface__["data"][0]) - extra
    file = _file_of(
        os.fspath(root.filename or ""), root.offset - extra, len(root.base), is_writable=array.flags.writeable
    )
    # The map knows the size of the file that it shows, and no more of it.
    is_same = file is not None and os.stat(file.path).st_size == root.base.size()  # noqa: PTH116
    return (file, address) if file is not None and is_same and high - address <= file.stop - file.start else None


def _bounds(array: NDArray[Any]) -> tuple[int, int]:
    """Returns the addresses of an array's first byte and of the one past its last."""
    low = high = int(array.__array_interface__["data"][0])
    for length, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (length - 1) * stride)
        high += max(0, (length - 1) * stride)
    return low, high + array.itemsize


# ---------------------------------------------------------------------------------------------------------------------

_open_maps: "weakref.WeakValueDictionary[MappedFile, mmap.mmap]" = weakref.WeakValueDictionary()
"""The maps of this process that arrays lie in: the columns of one file share one."""


def map_array(
    file: Any, place: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], *flags: bool
) -> NDArray[Any]:
    """Returns an array that lies in a file.

    Args:
        file: the fields of the `MappedFile`.
        place: where in the mapped part the array's first element is.
        dtype: the array's.
        shape: the array's.
        strides: the array's.
        flags: whether it can be written to, and whether it is a `numpy.memmap`.

    Raises:
        OSError: the file cannot be opened, is another one by now, or is shorter.
    """
    part = MappedFile(*file)
    is_writable, is_memmap = flags
    mapped = _open_maps.get(part)
    if mapped is None:
        mapped = _open_maps[part] = _map(part)
    kind: Any = np.memmap if is_memmap else np.ndarray
    array: Any = np.ndarray.__new__(kind, shape, dtype, buffer=mapped, offset=place, strides=strides)
    if is_memmap:
        # As NumPy's constructor does.
        array._mmap, array.filename, array.offset = mapped, part.path, part.start + place  # noqa: SLF001
        array.mode = "r+" if is_writable else "r"
    return array  # type: ignore[no-any-return]


def _map(part: MappedFile) -> mmap.mmap:
    descriptor = os.open(part.path, (os.O_RDWR if part.is_writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (part.device, part.inode) or status.st_size < part.stop:
            raise OSError(
                f"{part.path} is memory-mapped by the trainer and must stay as it is, but it was replaced or cut "
                "before a worker could map it. Write a new version under another name."
            )
        access = mmap.ACCESS_WRITE if part.is_writable else mmap.ACCESS_READ
        return mmap.mmap(descriptor, part.stop - part.start, access=access, offset=part.start)
    finally:
        os.close(descriptor)
