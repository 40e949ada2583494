"""Regions of memory, and several of them as parts of one array.

Guarantees:
    - Positions are checked against the end of their own region: what lies between regions is never read.
    - The regions must outlive their arrays, which do not own the memory.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

BYTES = np.dtype(np.uint8)

REGION_BITS = 40
"""An address is the number of a region, shifted by this many bits, plus the offset of a byte in the region."""

REGION_ALIGNMENT = 8
"""The alignment of regions of numbers, in bytes."""


class RegionNumbers(NamedTuple):
    """The numbers of one dtype in several regions.

    Attributes:
        array: one array of all of them.
        ends: the position after the last number of each region, shape (regions,).
        shifts: the index of a number in the array minus its position, for each region, shape (regions,).
    """

    array: NDArray[Any]
    ends: Integers
    shifts: Integers


@final
class JoinedRegions:
    """Several regions as parts of one array, so that NumPy gathers rows of all of them in one call.

    The array begins at the first region and ends with the last one. What lies between them is never read.
    """

    def __init__(self, regions: Sequence[NDArray[np.uint8]]) -> None:
        self.size = len(regions)
        addresses = np.array([region.ctypes.data for region in regions], np.int64)
        self._sizes = np.array([len(region) for region in regions], np.int64)
        # Regions of numbers are aligned, those of bytes need not be.
        first = int(addresses[self._sizes > 0].min()) // REGION_ALIGNMENT * REGION_ALIGNMENT
        # A region without bytes has no address.
        self._starts = np.where(self._sizes > 0, addresses - first, 0)
        num_bytes = int((self._starts + self._sizes).max())
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(first))
        self._numbers: dict[np.dtype[Any], RegionNumbers] = {}

    def numbers(self, dtype: np.dtype[Any]) -> RegionNumbers:
        numbers = self._numbers.get(dtype)
        if numbers is None:
            firsts = np.arange(self.size) << region_shift(dtype)
            starts, counts = self._starts // dtype.itemsize, self._sizes // dtype.itemsize
            numbers = RegionNumbers(values_of(self._bytes, dtype), firsts + counts, starts - firsts)
            self._numbers[dtype] = numbers
        return numbers


def values_of(region: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[Any]:
    return region[: len(region) // dtype.itemsize * dtype.itemsize].view(dtype)


def region_shift(dtype: np.dtype[Any]) -> int:
    """Returns the number of bits of a position below the number of its region."""
    return REGION_BITS - dtype.itemsize.bit_length() + 1
