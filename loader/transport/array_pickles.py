"""Pickling of arrays by their memory, or by the file that they lie in.

NumPy passes the memory of an array out of band (pickle protocol 5) if the array is contiguous and Python's buffers know
its dtype. It copies other arrays into the pickle, and may swap their bytes. This module copies an array that is not
contiguous once, into its final memory, and passes other dtypes, such as bfloat16 and dates, as bytes. PyTorch tensors
are treated in the same way.

A worker maps the file of a memory-mapped array itself, and no byte is sent. On Linux, the system lists every map of
this process, whatever created it: `numpy.memmap`, `numpy.load(mmap_mode=…)`, `mmap.mmap`, Arrow. On other systems, only
the maps of NumPy are found.

Guarantees:
    * A worker sees the same bytes as the trainer. If that is uncertain, an array crosses as bytes: from private maps
      (`mode="c"`), whose pages may differ from the file, and from files that were deleted or replaced.
    * Replacing a file before a worker has mapped it raises an error there.
"""

import bisect
import functools
import mmap
import os
import re
import stat
import sys
import weakref
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate

Reduced: TypeAlias = str | tuple[Any, ...]
"""The reduction of a value: instructions to pickle it, as `__reduce_ex__` returns them."""

SMALLEST_BYTES = 1 << 16
"""Smaller arrays cross as bytes, because a map costs each worker a descriptor."""

_MAP = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) \S+ (\d+) +(/.*)")


def reduce_array(array: NDArray[Any], allocate: Allocate) -> Reduced:
    """Returns the reduction of an array without Python objects. `allocate` is for a copy that is contiguous."""
    if not array.flags.forc:
        copy = allocate(array.shape, array.dtype)
        copy[...] = array
        array = copy
    # An array whose elements have no bytes (a structure without fields) has no memory to pass.
    if array.dtype.itemsize == 0 or (array.dtype.isbuiltin == 1 and array.dtype.kind not in "mM"):
        return array.__reduce_ex__(5)
    order = "C" if array.flags.c_contiguous else "F"
    return rebuild_array, (array.reshape(-1, order="A").view(np.uint8), array.dtype, array.shape, order)


def rebuild_array(memory: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> NDArray[Any]:
    return memory.view(dtype).reshape(shape, order=order)


def reduce_tensor(tensor: Any) -> Reduced | None:
    """Returns the reduction of a `torch.Tensor`, not of a subclass, as an array; None if only PyTorch can pickle it."""
    torch = sys.modules["torch"]
    is_plain = (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not vars(tensor)
        and tensor.numel() > 0
    )
    if not is_plain:
        return None
    # As bytes: NumPy does not know all of PyTorch's dtypes.
    memory = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return rebuild_tensor, (memory, tensor.dtype, tuple(tensor.shape))


def rebuild_tensor(memory: NDArray[np.uint8], dtype: Any, shape: tuple[int, ...]) -> Any:
    # Unpickling the dtype has imported PyTorch.
    torch = sys.modules["torch"]
    # `from_numpy` warns of bytes that are not writable.
    writable = memory if memory.flags.writeable else memory.copy()
    return torch.from_numpy(writable).view(dtype).reshape(shape)


def as_memmap(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(np.memmap)


class MappedFile(NamedTuple):
    """A mapped section of a file."""

    path: str  # Absolute.
    device: int
    inode: int
    start: int  # In bytes, a multiple of the page size.
    stop: int  # The end of the section, or of the file if that is earlier.
    is_writable: bool  # True if the section is to be mapped for writing.


class _Map(NamedTuple):
    """A range of this process's addresses that shows a file."""

    start: int
    stop: int
    permissions: bytes
    offset: int
    inode: int
    path: str


class MappedFiles:
    """A snapshot of the files mapped into this process, taken when it is first used."""

    def reduce(self, array: NDArray[Any]) -> Reduced | None:
        """Returns the reduction of an array without its bytes. Returns None if it is small, or not in a file."""
        if array.nbytes < SMALLEST_BYTES or array.dtype.hasobject:
            return None
        low, high = _bounds(array)
        found = self._find(array, low, high)
        if found is None:
            return None
        file, address = found
        offset = int(array.__array_interface__["data"][0]) - address
        flags = array.flags.writeable, isinstance(array, np.memmap)
        return map_array, (tuple(file), offset, array.dtype, array.shape, array.strides, *flags)

    def _find(self, array: NDArray[Any], low: int, high: int) -> tuple[MappedFile, int] | None:
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
        with open("/proc/self/maps", "rb") as lines:  # noqa: PTH123  (pathlib would read it in several chunks)
            return [_Map(*_parsed(line)) for line in map(_MAP.match, lines.read().splitlines()) if line]

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [found.start for found in self._maps]


def _parsed(line: re.Match[bytes]) -> tuple[int, int, bytes, int, int, str]:
    start, stop, permissions, offset, inode, path = line.groups()
    # The system escapes line breaks in names in this way, and nothing else.
    name = os.fsdecode(path.replace(rb"\012", b"\n"))
    return int(start, 16), int(stop, 16), permissions, int(offset, 16), int(inode), name


def _file_of(path: str, start: int, num_bytes: int, *, is_writable: bool) -> MappedFile | None:
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
    """Returns the section that NumPy has mapped for an array that ends at `high`, and the address of its first byte."""
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
    # The map knows only the size of its file. If it differs, another file has this path.
    is_same = file is not None and os.stat(file.path).st_size == root.base.size()  # noqa: PTH116
    return (file, address) if file is not None and is_same and high - address <= file.stop - file.start else None


def _bounds(array: NDArray[Any]) -> tuple[int, int]:
    low = high = int(array.__array_interface__["data"][0])
    for length, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (length - 1) * stride)
        high += max(0, (length - 1) * stride)
    return low, high + array.itemsize


# ---------------------------------------------------------------------------------------------------------------------

_open_maps: "weakref.WeakValueDictionary[MappedFile, mmap.mmap]" = weakref.WeakValueDictionary()
"""The maps of this process that arrays use. The columns of one file share a map."""


def map_array(
    file: Any, offset: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], *flags: bool
) -> NDArray[Any]:
    """Maps an array from a file.

    `file` has the fields of the `MappedFile`. `offset` is that of the first element in the section, in bytes. The flags
    are True if the array is writable, and if it is a `numpy.memmap`.

    Raises:
        OSError: the file cannot be opened, was replaced, or is shorter.
    """
    section = MappedFile(*file)
    is_writable, is_memmap = flags
    mapped = _open_maps.get(section)
    if mapped is None:
        mapped = _open_maps[section] = _map(section)
    kind: Any = np.memmap if is_memmap else np.ndarray
    array: Any = np.ndarray.__new__(kind, shape, dtype, buffer=mapped, offset=offset, strides=strides)
    if is_memmap:
        # As NumPy's constructor does.
        array._mmap, array.filename, array.offset = mapped, section.path, section.start + offset  # noqa: SLF001
        array.mode = "r+" if is_writable else "r"
    return array  # type: ignore[no-any-return]


def _map(section: MappedFile) -> mmap.mmap:
    descriptor = os.open(section.path, (os.O_RDWR if section.is_writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (section.device, section.inode) or status.st_size < section.stop:
            raise OSError(
                f"Cannot map {section.path} in a worker: the trainer has it memory-mapped, and it was replaced or "
                "truncated since. Write a new version under another name."
            )
        access = mmap.ACCESS_WRITE if section.is_writable else mmap.ACCESS_READ
        return mmap.mmap(descriptor, section.stop - section.start, access=access, offset=section.start)
    finally:
        os.close(descriptor)
