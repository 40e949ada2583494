"""The offsets of a file's records, in memory or read from an index file.

Guarantees:
    - Any number of threads may read an index.
    - No offset of an index file is used before the checksum of its block was verified. The file is read by `pread`,
      never mapped.
"""

import os
import weakref
import zlib
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 64
"""Bytes of an index file before its offsets."""

BLOCK = 4096
"""Offsets per checksum. Verifying a block takes 10 µs, so a shuffled read whose every block is new stays fast."""


class DamagedIndexError(Exception):
    """An index file does not match its checksums."""


@final
class HeldOffsets:
    """An index in memory.

    Args:
        offsets: shape (records + 1,).
    """

    def __init__(self, offsets: NDArray[np.int64]) -> None:
        self._offsets = offsets

    @property
    def num_records(self) -> int:
        """The number of records in the file."""
        return len(self._offsets) - 1

    def spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the start and end offsets of the given records, in bytes."""
        try:
            return self._offsets[rows], self._offsets[rows + 1]
        except IndexError:  # It is the index of another state of the file.
            raise DamagedIndexError("it has too few records") from None

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the offsets `start` … `stop - 1`."""
        return self._offsets[start:stop]


@final
class StoredOffsets:
    """An index in a file, read by `pread`. A block is verified when it is first used.

    Args:
        descriptor: the open file, whose ownership this object takes.
        count: the number of offsets.
    """

    def __init__(self, descriptor: int, count: int) -> None:
        self._descriptor = descriptor
        self._count = count
        self._is_checked = bytearray(num_blocks(count))
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        self._finalizer.atexit = False

    @property
    def num_records(self) -> int:
        """The number of records in the file."""
        return self._count - 1

    def spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the start and end offsets of the given records, in bytes; raises DamagedIndexError."""
        if rows.max(initial=-1) >= self.num_records:
            raise DamagedIndexError("it has too few records")
        for block in np.union1d(rows // BLOCK, (rows + 1) // BLOCK).tolist():
            if not self._is_checked[block]:
                self._read_block(block)
        positions = (rows * 8 + HEADER_BYTES).tolist()
        pairs = np.frombuffer(b"".join([self._read(position, 16) for position in positions]), "<i8").reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the offsets `start` … `stop - 1`; raises DamagedIndexError."""
        first = start // BLOCK
        blocks = [self._read_block(block) for block in range(first, -(-stop // BLOCK))]
        offsets = np.frombuffer(b"".join(blocks), "<i8")[start - first * BLOCK : stop - first * BLOCK]
        return offsets.astype(np.int64, copy=False)

    def held(self) -> HeldOffsets:
        """Returns the index in memory; raises DamagedIndexError."""
        return HeldOffsets(self.between(0, self._count))

    def close(self) -> None:
        """Closes the file."""
        self._finalizer()

    def _read_block(self, block: int) -> bytes:
        """Returns a block of offsets, and verifies its checksum."""
        start = HEADER_BYTES + 8 * BLOCK * block
        content = self._read(start, 8 * min(BLOCK, self._count - BLOCK * block))
        stored = self._read(HEADER_BYTES + 8 * self._count + 4 * block, 4)
        if zlib.crc32(content) != int.from_bytes(stored, "little"):
            raise DamagedIndexError(f"the checksum of its block {block} is wrong")
        self._is_checked[block] = 1
        return content

    def _read(self, position: int, length: int) -> bytes:
        try:
            content = os.pread(self._descriptor, length, position)
        except OSError as error:
            raise DamagedIndexError(f"it cannot be read: {error.strerror}") from error
        if len(content) != length:
            raise DamagedIndexError("it was truncated")
        return content


def num_blocks(count: int) -> int:
    """Returns the number of blocks, and of checksums, of n offsets."""
    return -(-count // BLOCK)


Offsets: TypeAlias = HeldOffsets | StoredOffsets
"""The index of a file. Any number of threads may read it."""
