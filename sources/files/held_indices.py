"""The indices of a source's files that stay in memory, and the log of the indices that were built."""

import itertools
import os
from typing import Any, final

import numpy as np

from millstream.sources.storage.offsets import HeldOffsets, Offsets, StoredOffsets

HELD_BYTES = 32 << 20
"""The memory that the indices of a source may take per process. Further indices are read from their files."""

CARRIED_BYTES = 4 << 20
"""The size of the indices that a pickled source carries to worker processes, which need not open them again."""

_HELD_OVERHEAD_BYTES = 256
"""The overhead of an index in memory, besides its offsets."""


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
        """Returns the index of a file, or None if it is not in memory."""
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
        """Removes the index of a file, if there is one."""
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
