"""The offsets of a file's records, in memory or read from an index file, and those of a source's files.

Guarantees:
    - Any number of threads may read an index.
    - No offset of an index file is used before the checksum of its block was verified. The file is read by `pread`,
      never mapped.
"""

import itertools
import os
import weakref
import zlib
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 64
"""Bytes of an index file before its offsets."""

BLOCK = 4096
"""Offsets per checksum. Verifying a block takes 10 µs, so a shuffled read whose every block is new stays fast."""

HELD_BYTES = 32 << 20
"""The memory that the indices of a source may take per process. Further indices are read from their files."""

CARRIED_BYTES = 4 << 20
"""The size of the indices that a pickled source carries to worker processes, which need not open them again."""

_HELD_OVERHEAD_BYTES = 256
"""The overhead of an index in memory, besides its offsets."""


class DamagedIndexError(Exception):
    """An index file does not match its checksums."""


@final
class HeldOffsets:
    """An index in memory: offsets of shape (records + 1,)."""

    def __init__(self, offsets: NDArray[np.int64]) -> None:
        self._offsets = offsets

    @property
    def num_records(self) -> int:
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
    """An index in a file, which it owns, read by `pread`. A block is verified when it is first used."""

    def __init__(self, descriptor: int, count: int) -> None:
        self._descriptor = descriptor
        self._count = count
        self._is_checked = bytearray(num_blocks(count))
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        self._finalizer.atexit = False

    @property
    def num_records(self) -> int:
        return self._count - 1

    def spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
        """Loads the index into memory; raises DamagedIndexError."""
        return HeldOffsets(self.between(0, self._count))

    def close(self) -> None:
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
    return -(-count // BLOCK)


Offsets: TypeAlias = HeldOffsets | StoredOffsets
"""The index of a file. Any number of threads may read it."""


@final
class HeldIndices:
    """Indices by the path of their file. A copy in another process has the first CARRIED_BYTES of them."""

    def __init__(self) -> None:
        self._by_path: dict[str, HeldOffsets] = {}
        self._num_bytes = 0
        self._built: list[str | None] = []
        self._failures: list[tuple[str, str, OSError]] = []

    def __getstate__(self) -> dict[str, Any]:
        room, carried = CARRIED_BYTES, {}
        for path, held in list(self._by_path.items()):
            if (room := room - 8 * (held.num_records + 1)) < 0:
                break
            carried[path] = held.between(0, held.num_records + 1)
        # One array for all, because a source may have a file for each record.
        offsets = np.concatenate(list(carried.values())) if carried else np.zeros(0, np.int64)
        return {"paths": list(carried), "counts": list(map(len, carried.values())), "offsets": offsets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        HeldIndices.__init__(self)
        stops = itertools.accumulate(state["counts"])
        for path, count, stop in zip(state["paths"], state["counts"], stops, strict=True):
            self.held(path, HeldOffsets(state["offsets"][stop - count : stop]))

    def get(self, path: str) -> HeldOffsets | None:
        return self._by_path.get(path)

    def held(self, path: str, offsets: Offsets) -> Offsets:
        """Returns the index, loaded into memory if there is room; raises DamagedIndexError."""
        num_bytes = 8 * (offsets.num_records + 1) + _HELD_OVERHEAD_BYTES
        if self._num_bytes + num_bytes > HELD_BYTES:
            return offsets
        if isinstance(offsets, StoredOffsets):
            stored, offsets = offsets, offsets.held()
            stored.close()
        if isinstance(offsets, HeldOffsets) and path not in self._by_path:
            self._num_bytes += num_bytes
            self._by_path[path] = offsets
        return offsets

    def remove(self, path: str) -> None:
        if (held := self._by_path.pop(path, None)) is not None:
            self._num_bytes -= 8 * (held.num_records + 1) + _HELD_OVERHEAD_BYTES

    def record_built(self, path: str, saved_at: str | None, failures: list[tuple[str, OSError]]) -> None:
        """Records for `report` that an index was built: its location, and the error of each location that failed."""
        self._built.append(saved_at)
        self._failures += [(path, location, error) for location, error in failures]

    def report(self) -> None:
        """Logs the indices that were built since the last report, and the first failure to save one."""
        if not self._built:
            return
        import logging  # noqa: PLC0415  (lazy: takes long to import)

        log = logging.getLogger("millstream")
        folders = {os.path.dirname(location) for location in self._built if location is not None}  # noqa: PTH120
        where = " and ".join(map(repr, sorted(folders)[:2])) or "memory"
        if folders:
            log.info("Indexed %d file%s; the index is in %s.", len(self._built), "s"[: len(self._built) > 1], where)
        if self._failures:
            path, location, error = self._failures[0]
            log.warning(
                "Cannot save the index of %r%s in %r: %s. It is in %s instead. Set MILLSTREAM_CACHE to a "
                "writable folder.",
                path,
                f" and of {len(self._failures) - 1} others" if len(self._failures) > 1 else "",
                os.path.dirname(location),  # noqa: PTH120
                error.strerror or error,
                where,
            )
        self._built, self._failures = [], []
